"""Checks across sections, made before any process is started. Pure but for looking at files, and without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dmuon_titan.config.derived import num_microbatches, resolved_degrees, schedule_notes
from dmuon_titan.config.loading import load_config
from dmuon_titan.config.paths import TRAIN_CONFIGS
from dmuon_titan.config.schema import EMBEDDED_DATASET, Checkpoint, JobConfig, UnreadValue, get
from dmuon_titan.config.suggestions import nearest
from dmuon_titan.config.values import to_toml
from dmuon_titan.data.manifest import PREPARE_COMMAND, Manifest, num_windows, read_manifest, sha256_of_file
from dmuon_titan.errors import ConfigError
from dmuon_titan.memory import GIB, MemoryNeed, memory_need
from models.llama.sizes import FLAVORS, LlamaSize

# A suggested command must not be refused by the next check, the allocator's: room above the lower bound.
_ROOM = 1.3


@dataclass(frozen=True)
class World:
    """Where a job is to run.

    num_ranks: processes over all nodes.
    device_memory_bytes: what one rank may use; None if that is not known.
    """

    num_ranks: int
    device_type: Literal["cuda", "cpu"]
    device_memory_bytes: int | None = None


def validate(config: JobConfig, world: World | None) -> list[str]:
    """Every mistake of a configuration that its single values don't show, one line each.

    Args:
        config: with values that can't be read, if need be: what hangs on them is left out.
        world: None if it isn't known; what hangs on it is left out.

    Raises:
        DataError: there is no mistake, but a prepared folder has no readable manifest, or less than one sequence.
    """
    mistakes: list[str] = []

    def collect(found: Iterator[str]) -> None:
        with suppress(UnreadValue):
            for mistake in found:
                mistakes.append(mistake)  # not extend(): what was found before an unread value counts

    size = _find_size(config)
    collect(_flavor_mistakes(config))
    if world is not None:
        collect(_mesh_mistakes(config, world.num_ranks))
        collect(_async_tensor_parallel_mistakes(config, world))
    collect(_joint_owner_mistakes(config))
    collect(_activation_checkpoint_mistakes(config))
    collect(_profiling_mistakes(config))
    collect(_checkpoint_mistakes(config))
    collect(_dataset_mistakes(config))
    if size is not None:
        collect(_size_mistakes(config, size))
        collect(_tensor_parallel_mistakes(config, size))
        if not mistakes:
            collect(_manifest_mistakes(config, size))
        if world is not None:
            collect(_memory_mistakes(config, size, world))
    if not mistakes:
        with suppress(UnreadValue):
            _check_lengths(config)
    return mistakes


def notes(config: JobConfig) -> list[str]:
    """What a valid configuration's job does otherwise than asked, or what may surprise; one line each."""
    lines = schedule_notes(config.lr_scheduler, config.training.steps)
    lines += _checkpoint_notes(config.checkpoint)
    size = _find_size(config)
    for prefix, folder in _prepared_folders(config):
        dataset = get(config, f"{prefix}.dataset")
        if dataset not in (EMBEDDED_DATASET, None):
            lines.append(f'{prefix}.dataset = "{dataset}": no effect: {prefix}.dataset_path replaces it')
        vocab_size = read_manifest(folder).vocab_size
        if prefix == "training" and size is not None and vocab_size < size.vocab_size:
            lines.append(
                f"the tokenizer's vocabulary of {vocab_size} is smaller than the model's of {size.vocab_size}: "
                f"{size.vocab_size - vocab_size} rows of embedding and output head stay unused"
            )
    return lines


def _checkpoint_notes(options: Checkpoint) -> Iterator[str]:
    given = {
        "initial_load_path": options.initial_load_path is not None,
        "last_save_model_only": options.last_save_model_only,
        "load_step": options.load_step >= 0,
        "exclude_from_loading": bool(options.exclude_from_loading),
    }
    for name, is_given in given.items():
        if is_given and not options.enable:
            yield f"checkpoint.{name}: no effect, for checkpoint.enable = false"
    if options.enable and options.export_dtype != "float32" and not options.last_save_model_only:
        yield "checkpoint.export_dtype: no effect without checkpoint.last_save_model_only = true"


def _find_size(config: JobConfig) -> LlamaSize | None:
    with suppress(UnreadValue):
        return FLAVORS.get(config.model.name, {}).get(config.model.flavor)
    return None


def _flavor_mistakes(config: JobConfig) -> Iterator[str]:
    name, flavor = config.model.name, config.model.flavor
    if name not in FLAVORS:
        yield f'model.name = "{name}": unknown model; legal: {", ".join(FLAVORS)}'
    elif flavor not in FLAVORS[name]:
        known = FLAVORS[name]
        yield (
            f'model.flavor = "{flavor}": unknown flavor of {name}; nearest: "{nearest(flavor, known)}"; '
            f"legal: {', '.join(known)}"
        )


def _mesh_mistakes(config: JobConfig, num_ranks: int) -> Iterator[str]:
    try:
        num_microbatches(config, num_ranks)
    except ConfigError as mistake:
        yield str(mistake)


def _activation_checkpoint_mistakes(config: JobConfig) -> Iterator[str]:
    option = config.activation_checkpoint.selective_ac_option
    if option not in ("op", "op_all") and not (option.isascii() and option.isdigit() and int(option) > 0):
        yield (
            f'activation_checkpoint.selective_ac_option = "{option}": legal: "op", "op_all", or "N" for every N-th '
            "block"
        )


def _profiling_mistakes(config: JobConfig) -> Iterator[str]:
    profiling = config.profiling
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq}: shorter than profiler_warmup + profiler_active "
            f"= {cycle}"
        )


def _checkpoint_mistakes(config: JobConfig) -> Iterator[str]:
    options = config.checkpoint
    if not options.enable:
        return
    needed = {
        "last_save_in_hf": ("last_save_model_only", options.last_save_model_only, "true"),
        "initial_load_in_hf": ("initial_load_path", options.initial_load_path is not None, "FOLDER"),
    }
    for name, (other, is_met, legal) in needed.items():
        if getattr(options, name) and not is_met:
            yield f"checkpoint.{name} = true: needs checkpoint.{other} = {legal}"
    if options.initial_load_in_hf and not options.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only = false: a Hugging Face folder holds weights alone; leave it true, or "
            "set checkpoint.initial_load_in_hf = false"
        )
    path = options.initial_load_path
    # A run that has checkpoints of its own doesn't need it any more.
    if path is not None and not Path(path).is_dir() and not any(Path(options.folder).glob("step-*/manifest.json")):
        yield f"checkpoint.initial_load_path = {to_toml(path)}: no such folder"


def _size_mistakes(config: JobConfig, size: LlamaSize) -> Iterator[str]:
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len:
        lengths["validation.seq_len"] = config.validation.seq_len
    for name, seq_len in lengths.items():
        if seq_len > size.max_seq_len:
            yield (
                f"{name} = {seq_len}: {config.model.name} {config.model.flavor} takes at most {size.max_seq_len} tokens"
            )


def _tensor_parallel_mistakes(config: JobConfig, size: LlamaSize) -> Iterator[str]:
    """Heads are cut whole, and equal parts of all else let every rank issue the same collectives."""
    tp = config.parallelism.tensor_parallel_degree
    divided = {
        "attention heads": size.num_heads,
        "kv heads": size.num_kv_heads,
        "vocabulary": size.vocab_size,
        "feed-forward width": size.ffn_hidden_dim,
        "training.seq_len": config.training.seq_len,
    }
    if config.validation.enable and config.validation.seq_len:
        divided["validation.seq_len"] = config.validation.seq_len
    strangers = ", ".join(f"{name} {count}" for name, count in divided.items() if tp > 0 and count % tp)
    if strangers:
        common = math.gcd(*divided.values())
        largest = max(degree for degree in range(1, min(tp, common) + 1) if common % degree == 0)
        yield f"parallelism.tensor_parallel_degree = {tp}: doesn't divide {strangers}; largest legal below: {largest}"


def _joint_owner_mistakes(config: JobConfig) -> Iterator[str]:
    if config.optimizer.max_joint_owners > 1 and config.parallelism.tensor_parallel_degree > 1:
        yield (
            f"optimizer.max_joint_owners = {config.optimizer.max_joint_owners}: must be 1 with tensor parallelism "
            f"(parallelism.tensor_parallel_degree = {config.parallelism.tensor_parallel_degree}), whose ranks share "
            "matrices already"
        )


def _async_tensor_parallel_mistakes(config: JobConfig, world: World) -> Iterator[str]:
    """Splitting products is the work of a pass of inductor, and the parts move through memory that GPUs share."""
    if not config.parallelism.enable_async_tensor_parallel:
        return
    needs = {
        "parallelism.tensor_parallel_degree above 1": config.parallelism.tensor_parallel_degree > 1,
        "compile.enable = true": config.compile.enable,
        '"model" in compile.components': "model" in config.compile.components,
        'compile.backend = "inductor"': config.compile.backend == "inductor",
        "GPUs, and this job runs on the CPU": world.device_type == "cuda",
    }
    missing = [need for need, is_met in needs.items() if not is_met]
    if missing:
        yield f"parallelism.enable_async_tensor_parallel = true: needs {'; '.join(missing)}"


def _prepared_folders(config: JobConfig) -> Iterator[tuple[str, Path]]:
    """The section and folder of each prepared data set that the job reads."""
    for prefix in ("training", "validation") if config.validation.enable else ("training",):
        folder = get(config, f"{prefix}.dataset_path")
        if folder is not None:
            yield prefix, Path(folder)


def _dataset_mistakes(config: JobConfig) -> Iterator[str]:
    prepared = dict(_prepared_folders(config))
    for prefix in ("training", "validation") if config.validation.enable else ("training",):
        dataset = get(config, f"{prefix}.dataset")
        if prefix in prepared:
            if not prepared[prefix].is_dir():
                yield f"{prefix}.dataset_path = {to_toml(str(prepared[prefix]))}: no such folder"
        elif dataset not in (EMBEDDED_DATASET, None):
            yield (
                f'{prefix}.dataset = "{dataset}": only "{EMBEDDED_DATASET}" is embedded; prepare other text with '
                f"`{PREPARE_COMMAND} FILE_OR_FOLDER... --output FOLDER` and set {prefix}.dataset_path = FOLDER"
            )
    tokenizer = config.model.tokenizer_path
    if tokenizer is not None and "training" not in prepared:
        yield (
            f"model.tokenizer_path = {to_toml(tokenizer)}: the embedded corpus has its own tokenizer; prepare data "
            f"with yours by `{PREPARE_COMMAND}` and set training.dataset_path"
        )
    elif tokenizer is not None and not Path(tokenizer).is_file():
        yield f"model.tokenizer_path = {to_toml(tokenizer)}: no such file"


def _manifest_mistakes(config: JobConfig, size: LlamaSize) -> Iterator[str]:
    """What the prepared data says against the model. Raises DataError if it can't be asked."""
    manifests = {prefix: read_manifest(folder) for prefix, folder in _prepared_folders(config)}
    for prefix, manifest in manifests.items():
        if manifest.vocab_size > size.vocab_size:
            yield (
                f"{prefix}.dataset_path = {to_toml(get(config, f'{prefix}.dataset_path'))}: its vocabulary of "
                f"{manifest.vocab_size} is larger than the {size.vocab_size} of {config.model.name} "
                f"{config.model.flavor}; choose another model.flavor or prepare with a smaller --vocab-size"
            )
    if "training" in manifests:
        yield from _tokenizer_mistakes(config, manifests["training"])
    held_out = manifests.get("validation")
    if held_out is None and config.validation.dataset is None:
        held_out = manifests.get("training")
    if config.validation.enable and held_out is not None and "validation" not in held_out.splits:
        yield "validation.enable = true: the prepared data has no validation split"


def _check_lengths(config: JobConfig) -> None:
    """Raises DataError if a split of prepared data that the job reads holds less than one sequence."""
    validation, seq_len = config.validation, config.training.seq_len
    read = [(config.training.dataset_path, "train", seq_len)]
    if validation.enable:
        folder = validation.dataset_path or (None if validation.dataset else config.training.dataset_path)
        read.append((folder, "validation", validation.seq_len or seq_len))
    for path, split, length in read:
        if path is not None:
            num_windows(Path(path), read_manifest(Path(path)), split, length)


def _tokenizer_mistakes(config: JobConfig, manifest: Manifest) -> Iterator[str]:
    path = config.model.tokenizer_path
    if path is None:
        return
    prepared_with = manifest.tokenizer.sha256 if manifest.tokenizer else "none"
    found = sha256_of_file(Path(path))
    if found != prepared_with:
        yield (
            f"model.tokenizer_path = {to_toml(path)}: another tokenizer than the data was prepared with "
            f"(sha256 {found[:12]}, data {prepared_with[:12]})"
        )


def _memory_mistakes(config: JobConfig, size: LlamaSize, world: World) -> Iterator[str]:
    need = _need(config, size, world)
    found = world.device_memory_bytes
    if need is None or found is None or need.total_bytes <= found:
        return
    fitting = _fitting_preset(need, world)
    advice = f"; this fits here: ./run_train.sh --config {fitting}" if fitting else ""
    yield (
        f"model.flavor = {to_toml(config.model.flavor)}: each of {world.num_ranks} ranks needs at least "
        f"{need.total_bytes} bytes ({need.total_bytes / GIB:.1f} GiB: weights, gradients and optimizer state "
        f"{need.state_bytes / GIB:.1f}, activations {need.activation_bytes / GIB:.1f}), {found} bytes "
        f"({found / GIB:.1f} GiB) are there{advice}"
    )


def _need(config: JobConfig, size: LlamaSize, world: World) -> MemoryNeed | None:
    try:
        return memory_need(config, size, resolved_degrees(config, world.num_ranks), world.device_type)
    except (ConfigError, ValueError):
        return None  # a mistake that another check names


def _fitting_preset(need: MemoryNeed, world: World) -> str | None:
    """The largest shipped configuration that runs here; on a CPU the one made for it."""
    fitting: dict[str, int] = {}
    names = ["debug_model"] if world.device_type == "cpu" else [path.stem for path in TRAIN_CONFIGS.glob("*.toml")]
    for name in names:
        config = load_config(["--config", str(TRAIN_CONFIGS / f"{name}.toml")], environ={}).config
        size = _find_size(config)
        smaller = _need(config, size, world) if size else None
        if size is None or smaller is None:
            continue
        if any(_mesh_mistakes(config, world.num_ranks)) or any(_tensor_parallel_mistakes(config, size)):
            continue
        if smaller.total_bytes * _ROOM <= min(need.total_bytes, world.device_memory_bytes or 0):
            fitting[f"{name}.toml"] = smaller.total_bytes
    return max(fitting, key=lambda name: fitting[name]) if fitting else None
