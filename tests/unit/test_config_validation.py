"""Checks across sections: a job that can't run is refused before a process is spawned, and one that can is not."""

import json
from pathlib import Path

import pytest

from dmuon_titan.config import (
    JobConfig,
    World,
    global_batch_size,
    load_config,
    notes,
    num_microbatches,
    resolved_degrees,
    schedule_lengths,
    validate,
)
from dmuon_titan.config.paths import TRAIN_CONFIGS
from dmuon_titan.data.manifest import FileEntry, Manifest, Shard, Split, sha256_of_file, write_manifest
from dmuon_titan.errors import ConfigError, DataError
from models.llama.sizes import FLAVORS

CPU_2 = World(2, "cpu")
GIB = 2**30


def load(*flags: str, name: str = "debug_model") -> JobConfig:
    return load_config(["--config", name, *flags], environ={}).config


def degrees(replicate: int, shard: int, tp: int) -> list[str]:
    return [
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.tensor_parallel_degree={tp}",
    ]


@pytest.mark.parametrize(
    ("asked", "num_ranks", "resolved"),
    [
        ((1, -1, 1), 2, (1, 2, 1)),
        ((1, 1, 2), 2, (1, 1, 2)),
        ((1, -1, 2), 2, (1, 1, 2)),
        ((2, -1, 1), 2, (2, 1, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((1, -1, 1), 1, (1, 1, 1)),
    ],
)
def test_degrees(asked: tuple[int, int, int], num_ranks: int, resolved: tuple[int, int, int]) -> None:
    assert resolved_degrees(load(*degrees(*asked)), num_ranks) == resolved


@pytest.mark.parametrize(
    ("asked", "num_ranks", "product"),
    [
        ((1, 1, 1), 2, 1),
        ((2, 2, 1), 2, 4),
        ((-1, -1, 1), 2, 1),
        ((1, -2, 1), 2, -2),
        ((0, 2, 1), 2, 0),
        ((1, 3, 1), 2, 3),
        ((2, -1, 1), 3, 2),
        ((3, -1, 1), 2, 3),
        ((-1, -2, 1), 2, 2),
        ((1, 2, -1), 2, -2),
    ],
)
def test_degrees_that_do_not_make_the_world(asked: tuple[int, int, int], num_ranks: int, product: int) -> None:
    """FIELD_CASES B17: -2 was not caught, and people mix up which axes multiply."""
    config = load(*degrees(*asked))
    with pytest.raises(ConfigError) as caught:
        resolved_degrees(config, num_ranks)
    message = str(caught.value)
    assert f"replicate x shard x tp = {product} but world size = {num_ranks}" in message
    assert message in validate(config, World(num_ranks, "cpu"))


def test_batches() -> None:
    config = load("--training.local_batch_size=4")
    assert (global_batch_size(config, 2), num_microbatches(config, 2)) == (8, 1)
    config = load("--training.local_batch_size=4", "--training.global_batch_size=24")
    assert (global_batch_size(config, 2), num_microbatches(config, 2), num_microbatches(config, 3)) == (24, 3, 2)
    assert (
        num_microbatches(
            load("--training.local_batch_size=8", "--training.global_batch_size=24", *degrees(1, -1, 2)), 2
        )
        == 3
    )
    assert validate(config, CPU_2) == []
    [mistake] = validate(config, World(4, "cpu"))
    assert mistake.startswith("training.global_batch_size = 24")
    assert "nearest: 16 or 32" in mistake
    [mistake] = validate(load("--training.local_batch_size=8", "--training.global_batch_size=1"), CPU_2)
    assert "nearest: 16" in mistake


def test_what_tensor_parallelism_must_divide() -> None:
    """FIELD_CASES B18: with a vocabulary or sequence that tp does not divide, losses differed without a message."""
    size = FLAVORS["llama3"]["debugmodel"]
    config = load("--training.seq_len=31", *degrees(1, -1, 2))
    assert any("doesn't divide training.seq_len 31; largest legal below: 1" in line for line in validate(config, CPU_2))
    config = load(*degrees(1, -1, 3))
    [line] = [line for line in validate(config, World(3, "cpu")) if "doesn't divide" in line]
    assert f"vocabulary {size.vocab_size}" in line
    assert f"heads {size.num_heads}" in line
    for degree, named in ((4, "doesn't divide kv heads 2; largest legal below: 2"), (10**15, "legal below: 2")):
        [line] = validate(load(*degrees(1, -1, degree)), None)
        assert line.endswith(named)
    flags = ("--validation.seq_len=33", *degrees(1, -1, 2))
    [line] = validate(load("--validation.enable", *flags), CPU_2)
    assert "doesn't divide validation.seq_len 33;" in line
    assert validate(load(*flags), CPU_2) == []


def test_joint_owners_and_tensor_parallelism_exclude_each_other() -> None:
    joint = "--optimizer.max_joint_owners=8"
    assert validate(load(joint), CPU_2) == []
    [line] = validate(load(joint, *degrees(1, -1, 2)), CPU_2)
    assert line.startswith("optimizer.max_joint_owners = 8: must be 1 with tensor parallelism")


GPUS_2 = World(2, "cuda", 80 * GIB)
ASYNC_TP = (
    "--parallelism.enable_async_tensor_parallel",
    "--compile.enable",
    *degrees(1, -1, 2),
)


def test_asynchronous_tensor_parallelism_is_inductors_on_gpus() -> None:
    assert validate(load(*ASYNC_TP), GPUS_2) == []
    [line] = validate(load(*ASYNC_TP), CPU_2)
    assert line.startswith("parallelism.enable_async_tensor_parallel = true: needs GPUs")
    for flag, named in {
        "--compile.enable=false": "needs compile.enable = true",
        "--compile.components=loss": '"model" in compile.components',
        "--compile.backend=aot_eager": 'compile.backend = "inductor"',
        "--parallelism.tensor_parallel_degree=1": "tensor_parallel_degree above 1",
    }.items():
        [line] = validate(load(*ASYNC_TP, flag), GPUS_2)
        assert named in line


def test_sequences_longer_than_the_rotary_table_are_refused() -> None:
    longest = FLAVORS["llama3"]["debugmodel"].max_seq_len
    assert validate(load(f"--training.seq_len={longest}"), CPU_2) == []
    [mistake] = validate(load(f"--training.seq_len={longest + 1}"), CPU_2)
    assert mistake.startswith(f"training.seq_len = {longest + 1}")
    assert str(longest) in mistake
    [mistake] = validate(load("--validation.enable", f"--validation.seq_len={longest + 1}"), CPU_2)
    assert mistake.startswith("validation.seq_len")


def mistakes_of(*flags: str, world: World | None = CPU_2) -> list[str]:
    """The keys that the lines of a refusal begin with."""
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "debug_model", *flags], environ={}, check=lambda config: validate(config, world))
    return [line.split()[0] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--model.flavor=8b", "model.flavor"),
        ("--model.name=llama4", "model.name"),
        ("--training.dataset=c4", "training.dataset"),
        ("--training.dataset_path=/nowhere", "training.dataset_path"),
        ("--training.seq_len=999999", "training.seq_len"),
        ("--parallelism.data_parallel_shard_degree=3", "parallelism:"),
        ("--parallelism.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel"),
        ("--activation_checkpoint.selective_ac_option=x", "activation_checkpoint.selective_ac_option"),
    ],
)
def test_all_kinds_of_mistakes_are_told_together(flag: str, named: str) -> None:
    assert mistakes_of("--training.steps=0", flag) == ["training.steps", named]
    assert mistakes_of(flag, "--optimizer.lrr=1") == ["optimizer.lrr", named]


def test_data_that_cannot_be_read_are_told_with_the_mistakes(tmp_path: Path) -> None:
    lines = mistakes_of("--training.steps=0", f"--training.dataset_path={tmp_path}")
    assert lines[0] == "training.steps"
    assert len(lines) == 2
    with pytest.raises(DataError):
        mistakes_of(f"--training.dataset_path={tmp_path}")


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.flavour=8B", "--training.seq_len=8192"),
        ("--model.name", "--model.flavor=7B"),
        ("--config=llama3_8", "--training.seq_len=8192"),
        ("--training.local_batch_size=x", "--training.global_batch_size=3"),
        ("--parallelism.data_parallel_shard_degree=x", "--parallelism.data_parallel_replicate_degree=3"),
    ],
)
def test_no_mistake_is_made_up_from_a_value_that_is_wrong(flags: tuple[str, ...]) -> None:
    assert len(mistakes_of(*flags)) == 1


def test_without_a_known_world_the_rest_is_checked() -> None:
    several = ("--parallelism.data_parallel_shard_degree=3", "--model.flavor=8b", "--training.dataset=c4")
    assert mistakes_of(*several, world=None) == ["model.flavor", "training.dataset"]


def test_unknown_models() -> None:
    [mistake] = validate(load("--model.flavor=8b"), CPU_2)
    assert 'nearest: "8B"' in mistake
    [mistake] = validate(load("--model.name=llama4"), CPU_2)
    assert "llama3" in mistake


@pytest.mark.parametrize(
    ("warmup", "ratio", "total", "lengths"),
    [
        (0, 0.0, 10, (0, 10, 0)),
        (4, 0.4, 10, (4, 2, 4)),
        (10, 0.0, 10, (10, 0, 0)),
        (0, 1.0, 10, (0, 0, 10)),
        (20, 0.0, 10, (10, 0, 0)),
        (1, 0.9, 10, (1, 0, 9)),
        (4, None, 10, (4, 0, 6)),
        (8, 0.5, 10, (8, 0, 2)),
    ],
)
def test_schedule(warmup: int, ratio: float | None, total: int, lengths: tuple[int, int, int]) -> None:
    """FIELD_CASES B22: warm-up equal to or above the total divided by zero."""
    config = load(
        f"--lr_scheduler.warmup_steps={warmup}",
        f"--lr_scheduler.decay_ratio={'none' if ratio is None else ratio}",
        f"--training.steps={total}",
    )
    found = schedule_lengths(config.lr_scheduler, total)
    assert (found.warmup, found.stable, found.decay) == lengths
    assert found.total == total
    asked = 0 if ratio is None else round(total * ratio)
    assert len(notes(config)) == (warmup > lengths[0]) + (asked > lengths[2])
    assert validate(config, CPU_2) == []
    config = load("--training.steps=5", "--lr_scheduler.total_steps=20", "--lr_scheduler.warmup_steps=2")
    assert schedule_lengths(config.lr_scheduler, 5).total == 20


def prepared(folder: Path, vocab_size: int, **num_tokens_of: int) -> Path:
    """A manifest of 16-bit tokens, by default of a training split that is long enough."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    tokenizer = FileEntry("tokenizer.model", 11, sha256_of_file(folder / "tokenizer.model"))
    splits = {
        name: Split(num_tokens, 0, (Shard(f"{name}.bin", 2 * num_tokens, "", num_tokens),))
        for name, num_tokens in (num_tokens_of or {"train": 1 << 20}).items()
    }
    write_manifest(folder, Manifest(vocab_size, 2, splits, tokenizer=tokenizer))
    return folder


def test_the_tokenizers_vocabulary_against_the_models(tmp_path: Path) -> None:
    vocab_size = FLAVORS["llama3"]["debugmodel"].vocab_size
    equal = load(f"--training.dataset_path={prepared(tmp_path / 'equal', vocab_size)}")
    assert (validate(equal, CPU_2), notes(equal)) == ([], [])
    smaller = load(f"--training.dataset_path={prepared(tmp_path / 'smaller', vocab_size - 3)}")
    assert validate(smaller, CPU_2) == []
    assert "3 rows" in notes(smaller)[0]
    larger = load(f"--training.dataset_path={prepared(tmp_path / 'larger', vocab_size + 1)}")
    [mistake] = validate(larger, CPU_2)
    assert str(vocab_size + 1) in mistake
    assert str(vocab_size) in mistake


def test_the_tokenizer_the_data_must_have(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "data", 100)
    data = f"--training.dataset_path={folder}"
    assert validate(load(data, f"--model.tokenizer_path={folder / 'tokenizer.model'}"), CPU_2) == []
    other = tmp_path / "other.model"
    other.write_bytes(b"another one")
    [mistake] = validate(load(data, f"--model.tokenizer_path={other}"), CPU_2)
    assert "another tokenizer" in mistake
    [mistake] = validate(load(data, f"--model.tokenizer_path={tmp_path / 'gone'}"), CPU_2)
    assert "no such file" in mistake
    [mistake] = validate(load(f"--model.tokenizer_path={other}"), CPU_2)
    assert "embedded corpus" in mistake


def test_data_that_is_not_there(tmp_path: Path) -> None:
    [mistake] = validate(load(f"--training.dataset_path={tmp_path / 'gone'}"), CPU_2)
    assert mistake.startswith("training.dataset_path")
    assert str(tmp_path / "gone") in mistake
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"manifest\.json"):
        validate(load(f"--training.dataset_path={empty}"), CPU_2)
    (empty / "manifest.json").write_text(json.dumps({"format_version": 99}))
    with pytest.raises(DataError, match="99"):
        validate(load(f"--training.dataset_path={empty}"), CPU_2)


def test_data_of_less_than_a_sequence(tmp_path: Path) -> None:
    """Each split against its own length, and only those that are read."""
    folder = prepared(tmp_path / "data", 100, train=33, validation=9)
    data = f"--training.dataset_path={folder}"
    with pytest.raises(DataError, match=r"'train' has 33 tokens, one window needs 35 "):
        validate(load(data, "--training.seq_len=34"), CPU_2)
    assert validate(load(data, "--training.seq_len=32"), CPU_2) == []
    with pytest.raises(DataError, match=r"'validation' has 9 tokens, one window needs 33 "):
        validate(load(data, "--training.seq_len=32", "--validation.enable"), CPU_2)
    short = ("--validation.enable", "--validation.seq_len=8")
    assert validate(load(data, "--training.seq_len=32", *short), CPU_2) == []
    assert validate(load(f"--validation.dataset_path={folder}", *short), CPU_2) == []


def test_data_of_validation(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "data", 100)
    assert validate(load("--validation.enable"), CPU_2) == []
    [mistake] = validate(load("--validation.enable", f"--training.dataset_path={folder}"), CPU_2)
    assert "no validation split" in mistake
    [mistake] = validate(load("--validation.enable", "--validation.dataset=c4_validation"), CPU_2)
    assert "validation.dataset_path" in mistake
    [mistake] = validate(load("--validation.enable", f"--validation.dataset_path={tmp_path / 'gone'}"), CPU_2)
    assert mistake.startswith("validation.dataset_path")
    assert validate(load(f"--validation.dataset_path={tmp_path / 'gone'}"), CPU_2) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["last_save_in_hf"], "last_save_in_hf = true: needs checkpoint.last_save_model_only = true"),
        (["initial_load_in_hf"], "initial_load_in_hf = true: needs checkpoint.initial_load_path = FOLDER"),
        (
            ["initial_load_in_hf", "initial_load_model_only=false", "initial_load_path=/"],
            "initial_load_model_only = false: a Hugging Face folder holds weights alone",
        ),
        (["initial_load_path=/none"], 'initial_load_path = "/none": no such folder'),
    ],
)
def test_checkpoint_keys_that_need_one_another(flags: list[str], said: str) -> None:
    asked = [f"--checkpoint.{flag}" for flag in flags]
    [mistake] = validate(load("--checkpoint.enable", *asked), CPU_2)
    assert mistake.startswith(f"checkpoint.{said}")
    assert validate(load("--checkpoint.enable=false", *asked), CPU_2) == []


def test_what_a_run_started_from_may_be_gone_once_it_has_a_checkpoint(tmp_path: Path) -> None:
    asked = ["--checkpoint.enable", "--checkpoint.initial_load_path=/none", f"--checkpoint.folder={tmp_path}"]
    assert len(validate(load(*asked), CPU_2)) == 1
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "manifest.json").touch()
    assert validate(load(*asked), CPU_2) == []


def test_checkpoint_keys_without_effect_are_noted() -> None:
    asked = ["--checkpoint.load_step=3", '--checkpoint.exclude_from_loading=["optimizer"]']
    assert [note for note in notes(load("--checkpoint.enable=false", *asked)) if "checkpoint" in note] == [
        "checkpoint.load_step: no effect, for checkpoint.enable = false",
        "checkpoint.exclude_from_loading: no effect, for checkpoint.enable = false",
    ]
    [note] = [
        note for note in notes(load("--checkpoint.enable", "--checkpoint.export_dtype=float16")) if "export" in note
    ]
    assert note == "checkpoint.export_dtype: no effect without checkpoint.last_save_model_only = true"


@pytest.mark.parametrize("option", ["0", "-1", "ops", "", "1.5"])
def test_selective_checkpointing_takes_op_or_a_count(option: str) -> None:
    [mistake] = validate(load(f"--activation_checkpoint.selective_ac_option={option}"), CPU_2)
    assert mistake.startswith("activation_checkpoint.selective_ac_option")
    assert validate(load("--activation_checkpoint.selective_ac_option=3"), CPU_2) == []


def test_a_profiling_cycle_fits_its_interval() -> None:
    [mistake] = validate(load("--profiling.enable_profiling", "--profiling.profile_freq=3"), CPU_2)
    assert mistake.startswith("profiling.profile_freq = 3")


def test_a_machine_too_small_gets_bytes_and_a_command_that_fits() -> None:
    config = load(name="llama3_8b")
    assert validate(config, World(2, "cuda", 140 * GIB)) == []
    [mistake] = validate(config, World(2, "cpu", 12 * GIB))
    assert f"{12 * GIB} bytes (12.0 GiB) are there" in mistake
    assert mistake.endswith("./run_train.sh --config debug_model.toml")
    assert validate(load(), World(2, "cpu", 12 * GIB)) == []
    [mistake] = validate(config, World(1, "cuda", 80 * GIB))
    suggested = mistake.split()[-1]
    assert suggested == "llama3_1b.toml"
    assert validate(load(name=suggested), World(1, "cuda", 80 * GIB)) == []
    [mistake] = validate(config, World(1, "cuda", 1000))
    assert "./run_train.sh" not in mistake


def test_memory_shrinks_with_the_mesh_and_with_recomputation() -> None:
    def bytes_needed(*flags: str, num_ranks: int = 2) -> int:
        # Long sequences, so that activations decide and not what comes after backward.
        [mistake] = validate(load("--training.seq_len=32768", *flags, name="llama3_8b"), World(num_ranks, "cuda", 1))
        return int(mistake.partition("at least ")[2].split()[0])

    selective = bytes_needed()
    by_block = bytes_needed("--activation_checkpoint.selective_ac_option=2")
    assert bytes_needed("--activation_checkpoint.mode=full") < min(selective, by_block)
    assert max(selective, by_block) < bytes_needed("--activation_checkpoint.mode=none")
    assert bytes_needed(num_ranks=8) < selective < bytes_needed("--parallelism.fsdp_reshard_after_forward=never")
    assert selective < bytes_needed("--optimizer.name=AdamW")


@pytest.mark.parametrize(
    ("name", "flavor", "lr", "warmup", "local_batch", "steps", "mode", "num_ranks"),
    [
        ("llama3_1b", "1B", 3e-4, 200, 4, 1000, "selective", 1),
        ("llama3_8b", "8B", 3e-4, 200, 1, 1000, "selective", 8),
        ("llama3_70b", "70B", 1.5e-4, 200, 8, 1000, "full", 64),
        ("llama3_405b", "405B", 8e-5, 600, 2, 3000, "full", 512),
    ],
)
def test_presets(
    name: str, flavor: str, lr: float, warmup: int, local_batch: int, steps: int, mode: str, num_ranks: int
) -> None:
    config = load(name=name)
    assert (config.model.flavor, config.optimizer.lr, config.lr_scheduler.warmup_steps) == (flavor, lr, warmup)
    assert (config.training.local_batch_size, config.training.seq_len, config.training.steps) == (
        local_batch,
        8192,
        steps,
    )
    assert config.activation_checkpoint.mode == mode
    assert config.compile.enable
    assert config.checkpoint.enable
    for optimizer in ("Muon", "AdamW"):
        assert validate(load(f"--optimizer.name={optimizer}", name=name), World(num_ranks, "cuda", 80 * GIB)) == []


def test_each_shipped_configuration_has_a_folder_of_its_own() -> None:
    names = [path.stem for path in TRAIN_CONFIGS.glob("*.toml")]
    assert sorted(names) == ["debug_model", "llama3_1b", "llama3_405b", "llama3_70b", "llama3_8b"]
    assert [Path(load(name=name).job.dump_folder).name for name in names] == names
