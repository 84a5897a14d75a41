"""Every name in a checkpoint, and what is behind it.

`torch.distributed.checkpoint` flattens nested state with dots, so the names in a file are `model.<parameter>`,
`optimizer.state.<parameter>.<slot>`, `train_state.<field>` and so on. None of them says which rank, mesh or owner had a
value: tensors are logical, under the model's own parameter names.
"""

from __future__ import annotations

from dmuon.muon import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP
from dmuon.state_dict import MODEL, OPTIMIZER, PARAM_GROUPS, STATE

__all__ = [
    "ADAMW_SLOTS",
    "MODEL",
    "MUON_SLOTS",
    "OPTIMIZER",
    "PARAM_GROUPS",
    "RANDOM",
    "RANDOM_STATE_OF_RANK",
    "SCHEDULE",
    "STATE",
    "TRAIN_STATE",
    "WARNED_RANKS",
]
