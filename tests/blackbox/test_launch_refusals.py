"""Mistakes, seen from outside: one line each, all at once, status 2; neither torch nor a worker was ever started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., list[str]]


def write(folder: Path, text: str) -> str:
    path = folder / "my.toml"
    path.write_text(text)
    return str(path)


# B15: unknown and misplaced keys. What is written, the key or section as it is named, the nearest legal one.
MISPLACED = [
    ("[optimizer]\nlearning_rte = 1e-3", "optimizer.learning_rte", "optimizer.lr"),
    ("lr = 1e-3", "lr = ", "optimizer.lr"),
    ("[trainning]\nsteps = 3", "[trainning]", "training"),
    ("[optimizer]\nseq_len = 64", "optimizer.seq_len", "training.seq_len"),
    ("[training]\nstep = 3", "training.step ", "training.steps"),
    ("[checkpoint]\nintervall = 3", "checkpoint.intervall", "checkpoint.interval"),
    ("[paralelism]\ntensor_parallel_degree = 1", "[paralelism]", "parallelism"),
]


@pytest.mark.parametrize(("text", "named", "nearest"), MISPLACED)
def test_b15_unknown_key_of_a_file(text: str, named: str, nearest: str, tmp_path: Path, refused: Refused) -> None:
    config = write(tmp_path, text)
    (line,) = refused("--config", config)
    assert line.startswith(named)
    assert config in line
    assert nearest in line.partition(config)[2]


def test_b15_all_mistakes_of_file_and_command_line_at_once(tmp_path: Path, refused: Refused) -> None:
    config = write(tmp_path, "lr = 1e-3\n[optimizer]\nlearning_rte = 1e-3\nseq_len = 64\n[trainning]\nsteps = 3\n")
    lines = refused("--config", config, "--optimizer.lrr", "1", "--training.max_normm=2")
    assert [line.split()[0] for line in lines] == [
        "lr",
        "optimizer.learning_rte",
        "optimizer.seq_len",
        "[trainning]",
        "optimizer.lrr",
        "training.max_normm",
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--optimizer.lrr", "1"], "optimizer.lrr = 1 (on the command line): unknown key; nearest: optimizer.lr"),
        (["--optimizer.lrr=1"], "optimizer.lrr = 1 (on the command line): unknown key; nearest: optimizer.lr"),
        (["--lr", "1"], "lr = 1 (on the command line)"),
        (["--training.steps"], "training.steps (on the command line): needs a value"),
        (["training.steps=3"], "training.steps=3: unexpected argument"),
        (["--config", "debug_modell"], "--config debug_modell: no file"),
    ],
)
def test_b15_unknown_flag(flags: list[str], named: str, refused: Refused) -> None:
    (line,) = refused(*flags)
    assert line.startswith(named)


# B16: values of a wrong type or out of range, as TOML and on the command line. (section, assignment, flag text or None)
WRONG_VALUES = [
    ("optimizer", 'lr = "1e-3"', None),
    ("training", "steps = 10.5", "10.5"),
    ("training", "steps = true", "true"),
    ("training", "steps = -5", "-5"),
    ("training", 'seq_len = "64"', "sixty-four"),
    ("checkpoint", 'enable = "false"', "no"),
    ("optimizer", "beta1 = [0.9]", "[0.9]"),
    ("training", 'mixed_precision_param = "bf61"', "bf61"),
    ("optimizer", "lr = nan", "nan"),
    ("optimizer", "lr = 0", "0"),
    ("optimizer", "beta2 = 1.0", "1.0"),
    ("debug", "seed = 1.0", "1.0"),
    ("compile", 'components = "model"', None),
]


@pytest.mark.parametrize(("section", "assignment", "text"), WRONG_VALUES)
def test_b16_wrong_value(section: str, assignment: str, text: str | None, tmp_path: Path, refused: Refused) -> None:
    name = f"{section}.{assignment.partition(' ')[0]}"
    (line,) = refused("--config", write(tmp_path, f"[{section}]\n{assignment}\n"))
    assert line.startswith(f"{name} = ")
    if text is not None:
        (line,) = refused(f"--{name}", text)
        assert line.startswith(f"{name} = {text} (on the command line)")


def test_b16_integers_are_floats_and_toml_exponents_numbers(tmp_path: Path, refused: Refused) -> None:
    """Beside them one mistake, so that nothing starts: it is the only one."""
    config = write(tmp_path, "[optimizer]\nlr = 1\neps = 1e-8\n[training]\nmax_norm = 2\nsteps = -5\n")
    (line,) = refused("--config", config, "--optimizer.weight_decay", "0")
    assert line.startswith("training.steps = -5")


# B17 on 2 ranks: (replicate, shard, tp), and the product that the message shows.
def degrees(replicate: int, shard: int, tp: int) -> tuple[str, ...]:
    return (
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.tensor_parallel_degree={tp}",
    )


@pytest.mark.parametrize(
    ("mesh", "product"),
    [
        ((1, 1, 1), 1),
        ((2, 2, 1), 4),
        ((-1, -1, 1), None),
        ((1, -2, 1), None),
        ((0, 2, 1), None),
        ((1, 3, 1), 3),
        ((3, -1, 1), 3),
        ((2, 0, 1), None),
        ((4, 1, 1), 4),
        ((1, 2, 2), 4),
        ((2, -1, 2), 4),
        ((1, 2, 0), None),
        ((1, 2, -1), None),
    ],
)
def test_b17_degrees_that_do_not_multiply_to_the_ranks(
    mesh: tuple[int, int, int], product: int | None, refused: Refused
) -> None:
    (line,) = refused(*degrees(*mesh))
    if product is None:
        assert line.startswith("parallelism")
    else:
        assert f"replicate x shard x tp = {product} but world size = 2" in line


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, -1, 1), (2, 1, 1), (2, -1, 1), (1, 1, 2), (1, -1, 2)])
def test_b17_legal_degrees(mesh: tuple[int, int, int], refused: Refused) -> None:
    """Beside them one mistake of the same check, so that nothing starts: it is the only one."""
    (line,) = refused(*degrees(*mesh), "--model.flavor=9B")
    assert line.startswith('model.flavor = "9B"')


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--training.seq_len=31",), "doesn't divide training.seq_len 31; largest legal below: 1"),
        (("--model.flavor=405B", "--parallelism.tensor_parallel_degree=16"), "kv heads 8; largest legal below: 8"),
        (("--parallelism.enable_async_tensor_parallel",), "needs compile.enable = true"),
    ],
)
def test_b18_what_tensor_parallelism_cannot_do(flags: tuple[str, ...], named: str, refused: Refused) -> None:
    lines = refused(*degrees(1, -1, 2), *flags)
    assert any("tensor_parallel" in line and named in line for line in lines)


@pytest.mark.parametrize(("batch", "ranks"), [("5", "2"), ("9", "3"), ("2", "2")])
def test_b17_global_batch_that_does_not_divide(batch: str, ranks: str, refused: Refused) -> None:
    (line,) = refused("--training.global_batch_size", batch, "--training.local_batch_size=2", NPROC_PER_NODE=ranks)
    assert line.startswith(f"training.global_batch_size = {batch}: not a multiple")


# B19: what paths count from. The folder does not exist, so that the message shows where it was looked for.
def test_b19_relative_data_path_counts_from_its_file(tmp_path: Path, refused: Refused) -> None:
    config = write(tmp_path, '[training]\ndataset_path = "data/none"\n')
    (line,) = refused("--config", config, cwd=Path("/"))
    assert line == f'training.dataset_path = "{tmp_path}/data/none": no such folder'


def test_b19_relative_data_path_of_a_flag_counts_from_the_working_directory(tmp_path: Path, refused: Refused) -> None:
    (line,) = refused("--training.dataset_path", "../none", cwd=tmp_path)
    assert line == f'training.dataset_path = "{tmp_path.parent}/none": no such folder'


@pytest.mark.parametrize(
    ("written", "meant"),
    [("~/d", "/home/nobody/d"), ("${DATA_ROOT}/d", "/mnt/data/d"), ("$DATA_ROOT/${PART}", "/mnt/data/7")],
)
def test_b19_home_and_variables_are_replaced(written: str, meant: str, tmp_path: Path, refused: Refused) -> None:
    environ = {"HOME": "/home/nobody", "DATA_ROOT": "/mnt/data", "PART": "7"}
    config = write(tmp_path, f'[training]\ndataset_path = "{written}"\n')
    for arguments in (["--config", config], ["--training.dataset_path", written]):
        (line,) = refused(*arguments, cwd=Path("/"), **environ)
        assert line == f'training.dataset_path = "{meant}": no such folder'


@pytest.mark.parametrize("key", ["training.dataset_path", "job.dump_folder", "checkpoint.folder"])
def test_b19_undefined_variable(key: str, refused: Refused) -> None:
    (line,) = refused(f"--{key}", "${NOPE}/d")
    assert line.startswith(key)
    assert "NOPE is not set" in line


@pytest.mark.parametrize("key", ["job.dump_folder", "checkpoint.folder"])
def test_folders_that_cannot_be_written(key: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/none", str(tmp_path / "file")):
        (line,) = refused(f"--{key}", folder, "--checkpoint.enable", cwd=tmp_path)
        assert line.startswith(f'{key} = "{folder}": can\'t be written')


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"CONFIG_FILE": "nowhere.toml"}, "CONFIG_FILE nowhere.toml: no file"),
        ({"NGPU": "two"}, "NGPU = two: "),
        ({"NPROC_PER_NODE": "0", "NGPU": "2"}, "NPROC_PER_NODE = 0: "),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NODE_RANK": "1"}, "NODE_RANK = 1: "),
    ],
)
def test_mistakes_in_variables(environ: dict[str, str], named: str, tmp_path: Path, refused: Refused) -> None:
    (line,) = refused(cwd=tmp_path, **environ)
    assert line.startswith(named)


@pytest.mark.parametrize("variable", ["NGPU", "NPROC_PER_NODE", "NNODES"])
def test_mistakes_in_variables_hide_none_of_the_configuration(variable: str, refused: Refused) -> None:
    flags = ("--training.steps", "0", "--model.flavor", "8b", "--training.dataset", "c4")
    named = [line.split()[0] for line in refused(*flags, **{variable: "two"})]
    assert named == [variable, "training.steps", "model.flavor", "training.dataset"]


@pytest.mark.parametrize("flag", ["--config", "--job.config_file"])
def test_config_flags_win_over_the_variable(flag: str, tmp_path: Path, refused: Refused) -> None:
    config = write(tmp_path, "[training]\nsteps = 0\n")
    (line,) = refused(flag, config, CONFIG_FILE="/nowhere.toml")
    assert line.startswith("training.steps = 0")
    assert config in line


def test_a_model_too_large_for_this_machine_names_bytes_and_a_command_that_works(refused: Refused) -> None:
    """The 405B preset: no machine that runs this test has memory for it."""
    (line,) = refused("--config", "llama3_405b.toml", "--parallelism.tensor_parallel_degree=1")
    needed, found = (int(words.split()[-1]) for words in line.split(" bytes ")[:2])
    assert needed > found > 0
    assert line.endswith("./run_train.sh --config debug_model.toml")
