"""From a checked configuration to a trained model: process group, data, mesh, checkpoint, training, sample."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from dmuon.plan import Plan
from dmuon_titan.checkpoint import Start, TrainState, checkpoint_group, find_start
from dmuon_titan.config import (
    JobConfig,
    LoadedConfig,
    global_batch_size,
    notes,
    resolved_degrees,
    write_resolved,
)
from dmuon_titan.console import StatusLine, logger
from dmuon_titan.data.cache import cache_dirs
from dmuon_titan.data.corpus import ensure_default_corpus
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.tokenizer import Tokenizer
from dmuon_titan.environment import WorkerEnvironment, nccl_settings
from dmuon_titan.errors import ConfigError, DataError
from dmuon_titan.evaluation import Evaluation
from dmuon_titan.failures import FailureReporter
from dmuon_titan.hugging_face import HuggingFaceWeights
from dmuon_titan.mesh import AXES, build_mesh, init_process_group, local_device, rendezvous_store
from dmuon_titan.phases import Phases
from dmuon_titan.records import forget_after
from dmuon_titan.run_folder import lock_folders, make_folders, put_records_aside, recording_in, records_beside
from dmuon_titan.seeding import seed_everything, use_deterministic_algorithms
from dmuon_titan.signals import StopWatcher
from dmuon_titan.tools.generate import generate
from dmuon_titan.trainer import Trainer
from models.llama.sizes import FLAVORS, LlamaSize

_SAMPLE_TEMPERATURE = 0.8


def run(
    loaded: LoadedConfig,
    environment: WorkerEnvironment,
    reporter: FailureReporter,
    watcher: StopWatcher,
    status_line: StatusLine,
) -> None:
    """Trains to the last step, from the newest checkpoint if there is one.

    Raises:
        TitanError: one of those of `dmuon_titan.errors`.
    """
    config = loaded.config
    phases = Phases("start of processes", environment.started_s)
    phases.begin("rendezvous")
    if config.debug.deterministic:
        use_deterministic_algorithms()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    reporter.connect(store)
    watcher.peer_left = reporter.peer_left
    logger.info(f"{config.job.description}: {loaded.config_path}, everything goes to {config.job.dump_folder}")
    for note in (*loaded.notes, *notes(config)):
        logger.info(note)
    with _owned_folders(config, environment, store):
        phases.begin("data")
        corpus = embedded_corpus(config, environment, store)
        init_process_group(config.comm, config.job.dump_folder, environment, store, device)
        _train(loaded, corpus, device, watcher, status_line, phases)


def _train(
    loaded: LoadedConfig,
    corpus: Path | None,
    device: torch.device,
    watcher: StopWatcher,
    status_line: StatusLine,
    phases: Phases,
) -> None:
    config = loaded.config
    size = FLAVORS[config.model.name][config.model.flavor]
    dataset = _dataset(config.training.dataset_path or corpus, config.training.seq_len, "train", size)
    mesh = build_mesh(device, resolved_degrees(config, dist.get_world_size()))
    seed_everything(config.debug.seed)
    state = new_train_state(config, dataset)
    phases.begin("checking the checkpoint")
    start = (
        find_start(config.checkpoint, config.training.steps, checkpoint_group()) if config.checkpoint.enable else None
    )
    if start is not None and start.own and start.saved.step >= config.training.steps:
        logger.info(_finished(start, config))
        return
    weights = None
    if start is None and config.checkpoint.enable and config.checkpoint.initial_load_in_hf:
        weights = HuggingFaceWeights(Path(config.checkpoint.initial_load_path or ""), size)
    phases.begin("model")
    records = _records_folder(config, start)
    trainer = Trainer(recording_in(records, config), mesh, size, state, watcher, weights)
    _describe(trainer, dataset)
    if start is not None:
        assert trainer.checkpointer is not None
        phases.begin("loading")
        trainer.checkpointer.load(start)
        if state.step >= config.training.steps:
            raise ConfigError(
                f"training.steps = {config.training.steps}: {start.path} is step {state.step} already; raise "
                "training.steps, or load the weights alone by checkpoint.initial_load_model_only = true"
            )
        logger.info(f"continuing after step {state.step}, from {start.path}")
    elif weights is not None:
        logger.info(f"starting with the weights of {config.checkpoint.initial_load_path}")
    phases.begin("opening data and metrics")
    evaluation = None
    if config.validation.enable:
        evaluation = Evaluation(_validation_dataset(config, corpus, size), config, mesh, trainer.loss, watcher)
    if dist.get_rank() == 0:
        _begin_records(loaded, records, state.step)
    dist.barrier()
    trainer.start(dataset, evaluation, status_line)
    phases.begin("step")
    trainer.train(phases)
    trainer.metrics.log_summary()
    if config.training.sample_tokens:
        _print_sample(trainer, dataset)


def _finished(start: Start, config: JobConfig) -> str:
    kept = "" if start.saved.full else " and holds weights only: the run goes on from an older checkpoint"
    return (
        f"this run is finished: {start.path} is step {start.saved.step} of training.steps = {config.training.steps}"
        f"{kept}; to go on, raise --training.steps; to start over, choose another --job.dump_folder"
    )


@contextmanager
def _owned_folders(config: JobConfig, environment: WorkerEnvironment, store: dist.Store) -> Iterator[None]:
    """Has the run's folders for this job alone: rank 0 holds the lock, all ranks hear what it found.

    Raises:
        ConfigError: a folder can't be written, or another job is running there; the same on all ranks.
    """
    key = "dmuon_titan/folders"
    if environment.rank:
        mistake = _told(store, key)
        if mistake:
            raise ConfigError(mistake)
        yield
        return
    try:
        make_folders(config)
        locks = lock_folders(config)
    except ConfigError as mistake:
        store.set(key, str(mistake))
        raise
    store.set(key, "")
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def _records_folder(config: JobConfig, start: Start | None) -> Path:
    """Where this start records its steps, the same on all ranks."""
    folder = [config.job.dump_folder]
    if start is not None and config.checkpoint.load_only:
        if dist.get_rank() == 0:
            folder = [str(records_beside(config))]
        dist.broadcast_object_list(folder)
    return Path(folder[0])


def _begin_records(loaded: LoadedConfig, folder: Path, start_step: int) -> None:
    """Touches what an earlier start left in the folder: to be called once nothing stands against going on."""
    if folder != Path(loaded.config.job.dump_folder):
        folder.mkdir()
    elif start_step:
        forget_after(folder, start_step)
    else:
        put_records_aside(loaded.config)
    write_resolved(loaded, folder / "config.toml")


def embedded_corpus(config: JobConfig, environment: WorkerEnvironment, store: dist.Store) -> Path | None:
    """The folder of the embedded corpus if the job reads it, prepared by one rank of each node.

    The others wait at the store, not in a collective, whose time-out the preparation may exceed.
    """
    options = [config.training] + ([config.validation] if config.validation.enable else [])
    if all(option.dataset_path or option.dataset is None for option in options):
        return None
    folders = cache_dirs(os.environ, Path(config.job.dump_folder))
    prepared = f"dmuon_titan/corpus/{environment.node}"
    if environment.local_rank == 0:
        folder = ensure_default_corpus(*folders)
        store.set(prepared, str(folder))
    else:
        folder = Path(_told(store, prepared))
    return folder


def _told(store: dist.Store, key: str) -> str:
    """What another rank sets. Polled, so that a signal is heard meanwhile."""
    while not store.check([key]):
        time.sleep(0.1)
    return store.get(key).decode()


def _dataset(folder: str | Path | None, seq_len: int, split: str, size: LlamaSize) -> TokenDataset:
    assert folder is not None
    dataset = TokenDataset(Path(folder), seq_len, split)
    if dataset.vocab_size > size.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer has a vocabulary of {dataset.vocab_size}, the model one of {size.vocab_size}: "
            "choose another model.flavor, or prepare the data with a smaller tokenizer"
        )
    hashes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hashes, dataset.manifest_hash)
    strangers = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if strangers:
        raise DataError(
            f"{folder}: rank {strangers[0]} has other data there than rank 0 (hash of the manifest "
            f"{hashes[strangers[0]][:12]}, {hashes[0][:12]}): all nodes must read the same prepared folder"
        )
    return dataset


def _validation_dataset(config: JobConfig, corpus: Path | None, size: LlamaSize) -> TokenDataset:
    options = config.validation
    folder = options.dataset_path or (corpus if options.dataset else config.training.dataset_path or corpus)
    return _dataset(folder, options.seq_len or config.training.seq_len, "validation", size)


def new_train_state(config: JobConfig, dataset: TokenDataset) -> TrainState:
    tokenizer = dataset.manifest.tokenizer
    return TrainState(
        seed=config.debug.seed,
        seq_len=config.training.seq_len,
        data=dataset.manifest_hash[:16],
        tokenizer=tokenizer.sha256[:16] if tokenizer else "none",
        global_batch_size=global_batch_size(config, dist.get_world_size()),
        num_ranks=dist.get_world_size(),
        num_threads=torch.get_num_threads(),
        nccl=nccl_settings(),
    )


def _joint(plan: Plan) -> str:
    num_joint = len(plan.assignment.num_owners)
    return f" ({num_joint} with joint owners)" if num_joint else ""


def _describe(trainer: Trainer, dataset: TokenDataset) -> None:
    """What is about to be trained, on what, by how many; each line once a job."""
    config, mesh, size = trainer.config, trainer.mesh, trainer.size
    seq_len = config.training.seq_len
    if trainer.plan is None:
        split = "all by AdamW"
    else:
        num_dedicated = sum(math.prod(entry.shape) for entry in trainer.plan.entries)
        num_symmetric = sum(math.prod(shape) for shape in trainer.plan.symmetric.values())
        split = (
            f"{num_dedicated:,} in {len(trainer.plan.entries)} matrices by Muon{_joint(trainer.plan)}, "
            f"{num_symmetric:,} in {len(trainer.plan.symmetric)} others by AdamW"
        )
    degrees = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES)
    logger.info(
        f"{config.model.name} {config.model.flavor}: {size.num_parameters():,} parameters, {split}; "
        f"{size.flops_per_token(seq_len):,} FLOPs a token"
    )
    logger.info(
        f"mesh: {degrees} on {mesh.device.type}; global batch: {trainer.global_batch_size} sequences of {seq_len} "
        f"tokens = {config.training.local_batch_size} x {mesh.dp_world} data-parallel ranks x "
        f"{trainer.num_micro_batches} micro-batches"
    )
    logger.info(
        f"data: {dataset.folder}, {dataset.num_tokens:,} tokens, {dataset.num_windows:,} sequences, vocabulary "
        f"{dataset.vocab_size:,} of the model's {size.vocab_size:,}"
    )


def _print_sample(trainer: Trainer, dataset: TokenDataset) -> None:
    """Lets the trained model write; all ranks take part, for each holds a part of it."""
    options, model, tp_degree = trainer.config.training, trainer.model, trainer.mesh.degree("tp")
    if dataset.tokenizer_path is None:
        logger.info("training.sample_tokens: no sample, for the data came without a tokenizer")
        return
    model.eval()
    text = generate(
        model,
        Tokenizer(dataset.tokenizer_path),
        options.sample_prompt,
        options.sample_tokens,
        seed=trainer.config.debug.seed,
        max_context=model.max_seq_len // tp_degree * tp_degree,
        device=trainer.mesh.device,
        temperature=_SAMPLE_TEMPERATURE,
        multiple_of=tp_degree,
    )
    logger.info(f"a sample, after {options.sample_prompt!r}:\n{text}")
