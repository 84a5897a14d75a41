"""Every name in a checkpoint, and what is behind it.

`torch.distributed.checkpoint` joins nested names with dots: `model.<parameter>`, `optimizer.state.<parameter>.<slot>`,
`train_state.step`. Tensors are logical, under the model's own parameter names, and no name says which rank, mesh or
owner had a value. The first part of a name is what `checkpoint.exclude_from_loading` knows it by.
"""

from __future__ import annotations

from dmuon.adamw import EXP_AVG, EXP_AVG_SQ, STEP
from dmuon.muon import MOMENTUM
from dmuon.state_dict import MODEL, OPTIMIZER, PARAM_GROUPS, STATE

TRAIN_STATE, SCHEDULE, DATA, RANDOM = "train_state", "lr_scheduler", "dataloader", "random_state"

# The fields of TrainState, by the part of a checkpoint that they are in.
FIELDS = {
    TRAIN_STATE: ("step", "tokens_seen"),
    SCHEDULE: ("schedule_start",),
    DATA: ("consumed_samples", "seed", "seq_len", "data", "tokenizer"),
}

MEANING = {
    f"{MODEL}.<parameter>": "weights, float32, in their logical shape; a tied head is there once, as the embedding",
    f"{OPTIMIZER}.{STATE}.<parameter>.{MOMENTUM}": "Muon's average of gradients, in the shape of the weights",
    f"{OPTIMIZER}.{STATE}.<parameter>.{EXP_AVG}": "AdamW's first moment, in the shape of the weights",
    f"{OPTIMIZER}.{STATE}.<parameter>.{EXP_AVG_SQ}": "AdamW's second moment, in the shape of the weights",
    f"{OPTIMIZER}.{STATE}.<parameter>.{STEP}": "AdamW's number of updates, float32, one element",
    f"{OPTIMIZER}.{PARAM_GROUPS}.<index>.<option>": "options of a group when it was saved; the configuration wins",
    f"{TRAIN_STATE}.step": "optimizer steps made",
    f"{TRAIN_STATE}.tokens_seen": "tokens trained on",
    f"{SCHEDULE}.schedule_start": "the step that the learning-rate schedule counts from; 0 unless it was begun anew",
    f"{DATA}.consumed_samples": "sequences consumed: the one cursor of the data order, the same for any ranks",
    f"{DATA}.seed": "debug.seed: with the cursor it determines all samples to come",
    f"{DATA}.seq_len": "tokens in a sequence",
    f"{DATA}.data": "hash of the prepared data's manifest",
    f"{DATA}.tokenizer": "hash of the tokenizer that the data were prepared with, or none",
    f"{RANDOM}.torch": "torch's CPU generator, uint8, one row for each process that took part in the save",
    f"{RANDOM}.python": "Python's generator, int64, one row for each process",
    f"{RANDOM}.python_gauss": "the normal number that Python keeps in reserve, if it does, float64, one row each",
    f"{RANDOM}.cuda": "the GPU's generator, uint8, one row for each process; absent on the CPU",
}
"""Name -> what is stored under it. <parameter> is a name of the model, <option> one of a group's options."""
