"""Every configuration key: its section, type, default, legal values and meaning. The one place where a key is defined.

The sections and names are TorchTitan v0.2.2's. `--help`, the checks of a file and of the command line, and the
resolved configuration are all made from these dataclasses. Imports no torch.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Set
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

PathBase = Literal["data", "output", "run"]

EMBEDDED_DATASET = "python_stdlib"

# What a step computes from these stays within float32; beyond it torch fails with an error of its own.
_LARGEST, _LARGEST_DECAY = 1e30, 1e6


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    or_value: int | None = None,
    infinite: bool = False,
    path: PathBase | None = None,
    only_for: str = "",
    aliases: tuple[str, ...] = (),
) -> Any:
    """One configuration key.

    Args:
        default: the value where none is given.
        doc: the meaning, in one sentence or two, printed by `--help`.
        choices: legal strings; for a tuple, legal elements.
        at_least, above, at_most, below: the range of a number; `or_value` is legal beside it.
        infinite: whether inf is legal.
        path: what a relative path counts from: "data" the file it is written in, "output" the working directory,
            "run" the run's `job.dump_folder`.
        only_for: the `optimizer.name` under which this key has an effect.
        aliases: names under which people look for it; used in suggestions alone.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Job:
    """What this run is called and where its files go."""

    dump_folder: str = key(
        "./outputs",
        "Folder of everything the run writes: checkpoints, metrics.jsonl, config.toml, traces.",
        path="output",
        aliases=("output_dir", "out_dir", "save_dir"),
    )
    description: str = key("default job", "What this run is, in words; printed at the start.")


@dataclass(frozen=True)
class Profiling:
    """torch.profiler traces and GPU memory snapshots."""

    enable_profiling: bool = key(False, "Write a profiler trace and its summary every `profile_freq` steps.")
    save_traces_folder: str = key("profile_traces", "Folder of the traces.", path="run")
    profile_freq: int = key(10, "Steps from one trace to the next.", at_least=1)
    profiler_active: int = key(1, "Steps that one trace records.", at_least=1)
    profiler_warmup: int = key(3, "Steps that the profiler warms up before it records.", at_least=0)
    enable_memory_snapshot: bool = key(False, "Write a snapshot of GPU memory every `profile_freq` steps.")
    save_memory_snapshot_folder: str = key("memory_snapshot", "Folder of the memory snapshots.", path="run")


@dataclass(frozen=True)
class Metrics:
    """What is logged, how often and where. metrics.jsonl is always written."""

    log_freq: int = key(10, "Steps from one logged step to the next.", at_least=1)
    enable_tensorboard: bool = key(False, "Write TensorBoard files.")
    disable_color_printing: bool = key(False, "Print without colours.")
    save_tb_folder: str = key("tb", "Folder of the TensorBoard files.", path="run")
    log_all_ranks: bool = key(False, "Print the log lines of all ranks, each with its rank in front.")


@dataclass(frozen=True)
class Model:
    """Which model is trained."""

    name: str = key("llama3", "Model family: llama3 or llama2.", aliases=("model_type",))
    flavor: str = key("debugmodel", "Size of the model, a name from the family's table.", aliases=("size",))
    tokenizer_path: str | None = key(
        None,
        "Tokenizer file that the data must have been prepared with; compared with the data's own. None: not compared.",
        path="data",
    )
    hf_assets_path: str | None = key(
        None,
        "Folder of Hugging Face files, known for TorchTitan's sake: the tokenizer comes with the prepared data.",
        path="data",
    )


@dataclass(frozen=True)
class Optimizer:
    """Muon for the matrices inside the blocks with AdamW for all other parameters, or AdamW for everything."""

    name: str = key("Muon", "Muon (AdamW beside it), or AdamW alone.", choices=("Muon", "AdamW"))
    lr: float = key(8e-4, "Peak learning rate.", above=0, at_most=_LARGEST, aliases=("learning_rate", "max_lr"))
    adamw_lr: float | None = key(
        None,
        "Peak learning rate of AdamW beside Muon. None: `lr`.",
        above=0,
        at_most=_LARGEST,
        only_for="Muon",
    )
    weight_decay: float = key(0.1, "Decoupled weight decay.", at_least=0, at_most=_LARGEST_DECAY, aliases=("wd",))
    adamw_weight_decay: float | None = key(
        None,
        "Weight decay of AdamW beside Muon. None: `weight_decay`.",
        at_least=0,
        at_most=_LARGEST_DECAY,
        only_for="Muon",
    )
    beta1: float = key(0.9, "AdamW: decay of the first moment.", at_least=0, below=1, aliases=("betas",))
    beta2: float = key(0.95, "AdamW: decay of the second moment.", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW: added to the denominator.", above=0, at_most=_LARGEST, aliases=("epsilon",))
    momentum: float = key(
        0.95, "Muon: decay of the gradient average.", at_least=0, below=1, only_for="Muon", aliases=("mu",)
    )
    nesterov: bool = key(True, "Muon: Nesterov momentum.", only_for="Muon")
    adjust_lr_fn: str = key(
        "match_rms_adamw",
        "Muon: scale of an update; match_rms_adamw lets one learning rate serve Muon and AdamW.",
        choices=("match_rms_adamw", "original"),
        only_for="Muon",
    )
    ns_steps: int = key(5, "Muon: Newton-Schulz steps.", at_least=1, at_most=99, only_for="Muon")
    ns_backend: str = key(
        "gram",
        "Muon: iterate on Gram matrices where that is cheaper, or directly.",
        choices=("gram", "direct"),
        only_for="Muon",
    )
    ns_coefficients: str = key(
        "polar_express",
        "Muon: polynomials of the iteration.",
        choices=("polar_express", "keller_jordan", "you"),
        only_for="Muon",
    )
    ns_dtype: str = key(
        "auto",
        "Muon: number format of the iteration; auto is float32 on CPU and float16 on GPU.",
        choices=("auto", "float32", "float16", "bfloat16"),
        only_for="Muon",
    )
    ns_kernel: str = key(
        "auto",
        "Muon: kernels of the iteration; auto is Triton's on GPUs that they were measured on.",
        choices=("auto", "triton", "torch", "quack"),
        only_for="Muon",
    )
    tp_strategy: str = key(
        "auto",
        "Muon: how matrices cut by tensor parallelism are orthogonalised.",
        choices=("auto", "distributed_gram", "exchange"),
        only_for="Muon",
    )
    replicate_async: bool = key(
        True,
        "Muon: let updated weights travel along the replicate axis during the next forward.",
        only_for="Muon",
    )
    max_joint_owners: int = key(
        1,
        "Muon: ranks of a node, of which several may own one of the costliest matrices where that shortens the longest "
        "load of a rank. 1: one owner each.",
        at_least=1,
        only_for="Muon",
    )


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate over the steps: linear warm-up, stable, decay."""

    warmup_steps: int = key(200, "Steps of linear warm-up; the peak is reached at this step.", at_least=0)
    total_steps: int | None = key(None, "Length of the schedule. None: `training.steps`.", at_least=1)
    decay_ratio: float | None = key(
        None,
        "Share of the schedule spent decaying, at its end. None: decay starts after the warm-up.",
        at_least=0,
        at_most=1,
    )
    decay_type: str = key("linear", "Shape of the decay.", choices=("linear", "sqrt", "cosine"))
    min_lr_factor: float = key(0.0, "Lowest learning rate of the decay, as a share of the peak.", at_least=0, at_most=1)


@dataclass(frozen=True)
class DataLoader:
    """How batches are read."""

    num_workers: int = key(0, "Processes a rank reads batches with; 0 reads in the rank itself.", at_least=0)


@dataclass(frozen=True)
class Training:
    """Data, batch, length and number formats of the training."""

    dataset: str = key(
        EMBEDDED_DATASET,
        "Embedded corpus to train on: python_stdlib, made from the interpreter's own library without a network.",
    )
    dataset_path: str | None = key(
        None,
        "Folder made by `python -m dmuon_titan.tools.prepare`; replaces `dataset`.",
        path="data",
        aliases=("data_path", "data", "dataset_folder"),
    )
    local_batch_size: int = key(
        8, "Sequences in one micro-batch of one data-parallel rank.", at_least=1, aliases=("micro_batch_size",)
    )
    global_batch_size: int = key(
        -1,
        "Sequences in one step over all ranks; more than local batch x data-parallel ranks accumulates gradients. "
        "-1: exactly that product.",
        at_least=1,
        or_value=-1,
        aliases=("gradient_accumulation_steps", "train_batch_size"),
    )
    seq_len: int = key(
        2048, "Tokens in one sequence.", at_least=1, aliases=("sequence_length", "max_seq_len", "context_length")
    )
    max_norm: float = key(
        1.0,
        "Gradients are scaled down to this norm when theirs is larger. inf: never.",
        above=0,
        infinite=True,
        aliases=("grad_clip", "max_grad_norm", "clip_grad_norm", "gradient_clipping"),
    )
    steps: int = key(
        10_000, "Optimizer steps of the whole run.", at_least=1, aliases=("max_steps", "num_steps", "train_iters")
    )
    mixed_precision_param: str = key(
        "bfloat16",
        "Format of the weights in forward and backward; masters are float32.",
        choices=("bfloat16", "float32"),
        aliases=("precision",),
    )
    mixed_precision_reduce: str = key(
        "float32", "Format in which gradients are reduced.", choices=("float32", "bfloat16")
    )
    gc_freq: int = key(50, "Steps from one Python garbage collection to the next.", at_least=1)
    sample_tokens: int = key(
        0, "Tokens of the sample that the trained model generates at the end. 0: none.", at_least=0
    )
    sample_prompt: str = key("def ", "Text that the sample continues.")
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True)
class Parallelism:
    """The mesh (replicate, shard, tp): its degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: int = key(
        1,
        "Rows of the mesh; each holds all weights, sharded within the row.",
        aliases=("dp_replicate", "hsdp", "ddp"),
    )
    data_parallel_shard_degree: int = key(
        -1, "Ranks that the weights of one row are sharded over. -1: the rest.", aliases=("dp_shard", "fsdp")
    )
    fsdp_reshard_after_forward: str = key(
        "default",
        "Free gathered weights after the forward of a block and gather them again for its backward; default is always.",
        choices=("default", "always", "never"),
    )
    tensor_parallel_degree: int = key(
        1,
        "Ranks that each matrix is cut over; it must divide heads, kv heads, feed-forward width, vocabulary and "
        "sequence length.",
        aliases=("tp", "tp_degree", "tp_size"),
    )
    disable_loss_parallel: bool = key(
        False, "Under tensor parallelism, compute the loss on whole instead of vocabulary-parallel logits."
    )
    enable_async_tensor_parallel: bool = key(
        False,
        "Let the compiler split tensor-parallel products and move their parts while others are computed; needs GPUs, "
        "inductor, and the ranks that share a matrix in one node.",
        aliases=("async_tp",),
    )


@dataclass(frozen=True)
class Checkpoint:
    """Saving and continuing. The same command run again continues from the newest complete checkpoint."""

    enable: bool = key(False, "Save checkpoints and continue from them.")
    folder: str = key("checkpoint", "Folder of the checkpoints.", path="run")
    interval: int = key(500, "Steps from one checkpoint to the next; the last step is always saved.", at_least=1)
    interval_minutes: float | None = key(
        None, "Save as well when so many minutes have passed since the last save. None: steps alone count.", above=0
    )
    enable_first_step_checkpoint: bool = key(False, "Save the first step too, to see early that saving works.")
    save_on_signal: bool = key(
        True, "Save when SIGTERM, SIGINT or SIGUSR1 stops the job. false: it continues from the last regular save."
    )
    load_only: bool = key(False, "Continue from checkpoints, but save none.")
    keep_latest_k: int = key(10, "How many of the newest checkpoints are kept. 0: all.", at_least=0)
    load_step: int = key(-1, "Step to continue from. -1: the newest complete checkpoint.", at_least=0, or_value=-1)
    async_mode: str = key(
        "disabled",
        "Save while training goes on, from a copy of the state on the CPU; with pinned memory the copy is faster, and "
        "kept.",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    exclude_from_loading: tuple[str, ...] = key(
        (),
        "Parts of the state that are not loaded from a checkpoint that was saved without this setting.",
        choices=("model", "optimizer", "lr_scheduler", "dataloader", "train_state"),
    )
    initial_load_path: str | None = key(
        None, "Checkpoint to start from while the run has none of its own.", path="data", aliases=("init_from",)
    )
    initial_load_model_only: bool = key(True, "Of `initial_load_path`, load the weights alone.")
    initial_load_in_hf: bool = key(False, "`initial_load_path` is a Hugging Face folder of safetensors.")
    last_save_model_only: bool = key(
        False, "Save the weights alone at the last step, in `export_dtype`: the run can't be continued from there."
    )
    last_save_in_hf: bool = key(
        False, "Save the last weights as Hugging Face's safetensors; needs `last_save_model_only`."
    )
    export_dtype: str = key(
        "float32", "Format of weights that are saved alone.", choices=("float32", "bfloat16", "float16")
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recomputing activations in backward instead of keeping them."""

    mode: str = key(
        "selective", "Recompute whole blocks, a selection, or nothing.", choices=("selective", "full", "none")
    )
    selective_ac_option: str = key(
        "2",
        'What "selective" recomputes: "op" the cheap operations of each block and half of its matrix products, '
        '"op_all" the cheap operations alone, "2" every second block whole.',
    )


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool = key(False, "Compile the components below.", aliases=("compile",))
    components: tuple[str, ...] = key(
        ("model", "loss"), "What is compiled: each block of the model, the loss.", choices=("model", "loss")
    )
    backend: str = key("inductor", "Backend of torch.compile.", choices=("inductor", "aot_eager", "eager"))


@dataclass(frozen=True)
class Comm:
    """Communication between the ranks."""

    init_timeout_seconds: int = key(300, "Limit of a collective during start-up and the first step.", at_least=1)
    train_timeout_seconds: int = key(100, "Limit of a collective after the first step.", at_least=1)
    trace_buf_size: int = key(20_000, "Collectives that NCCL's flight recorder remembers. 0: it is off.", at_least=0)


@dataclass(frozen=True)
class Validation:
    """Loss on held-out text, at an interval."""

    enable: bool = key(False, "Validate every `freq` steps and at the last one.")
    dataset: str | None = key(
        None,
        "Embedded corpus whose validation split is used. None: that of the training data.",
    )
    dataset_path: str | None = key(
        None, "Prepared folder whose validation split is used; replaces `dataset`.", path="data"
    )
    local_batch_size: int | None = key(
        None, "Sequences in one batch of a rank. None: `training.local_batch_size`.", at_least=1
    )
    seq_len: int | None = key(None, "Tokens in one sequence. None: `training.seq_len`.", at_least=1)
    freq: int = key(10, "Steps from one validation to the next.", at_least=1)
    steps: int = key(-1, "Batches a rank validates on. -1: the whole validation split.", at_least=1, or_value=-1)


@dataclass(frozen=True)
class Debug:
    """Reproducing and looking closely."""

    seed: int = key(0, "Weights, data order and everything random follow from it.", at_least=0, at_most=2**63 - 1)
    deterministic: bool = key(
        False,
        "Deterministic algorithms, and sums over ranks by one tree: the same bits on any mesh of as many. Slower.",
    )
    trace_batches: bool = key(False, "Append what each rank consumes to <dump_folder>/trace/rank-N.jsonl.")


@dataclass(frozen=True)
class JobConfig:
    """The whole configuration, one attribute for each section of a TOML file."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)


@dataclass(frozen=True)
class Key:
    """One key as the rest of the package sees it; the fields after `default` are the arguments of `key`."""

    name: str
    type: type
    optional: bool
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_value: int | None = None
    infinite: bool = False
    path: PathBase | None = None
    only_for: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def _walk(section_type: type, prefix: str) -> typing.Iterator[tuple[str, type | Key]]:
    """The sections, and their keys after them, in the order of definition."""
    hints = typing.get_type_hints(section_type)
    for item in fields(section_type):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(hint):
            yield name, typing.cast(type, hint)
            yield from _walk(typing.cast(type, hint), f"{name}.")
            continue
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kind = next(member for member in members if member is not type(None))
        kind = typing.get_origin(kind) or kind
        yield name, Key(name, kind, type(None) in members, item.default, **item.metadata)


_ITEMS = dict(_walk(JobConfig, ""))
SECTIONS: dict[str, type] = {name: item for name, item in _ITEMS.items() if not isinstance(item, Key)}
KEYS: dict[str, Key] = {name: item for name, item in _ITEMS.items() if isinstance(item, Key)}


def get(config: JobConfig, name: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


class UnreadValue(Exception):
    """A check asked for a value that is written wrongly: it can't tell whether anything else is wrong."""


def build(values: dict[str, Any], unread: Set[str] = frozenset()) -> JobConfig:
    """A configuration from dotted keys; absent keys have their defaults, unread ones raise UnreadValue."""

    def section(section_type: type, prefix: str) -> Any:
        given = {}
        for item in fields(section_type):
            name = f"{prefix}{item.name}"
            if name in SECTIONS:
                given[item.name] = section(SECTIONS[name], f"{name}.")
            elif name in values:
                given[item.name] = values[name]
        withheld = {item.name for item in fields(section_type) if f"{prefix}{item.name}" in unread}
        return (_withholding(section_type, withheld) if withheld else section_type)(**given)

    config: JobConfig = section(JobConfig, "")
    return config


def _withholding(section_type: type, leaves: Set[str]) -> type:
    """A section like this one, of which some values can't be read."""

    def read(self: object, name: str) -> Any:
        if name in leaves:
            raise UnreadValue(name)
        return object.__getattribute__(self, name)

    return type(section_type.__name__, (section_type,), {"__getattribute__": read})
