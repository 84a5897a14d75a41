"""Files, command line and sources: what is wrong in any of them must be named, and nothing may be dropped."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from dmuon_titan.config import JobConfig, help_text, load_config, wants_help, write_resolved
from dmuon_titan.config.paths import TRAIN_CONFIGS
from dmuon_titan.config.schema import KEYS, SECTIONS, get
from dmuon_titan.errors import ConfigError, ExitStatus


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path, *flags: str, **environ: str) -> JobConfig:
    return load_config(["--config", str(path), *flags], environ=environ).config


def mistakes_of(path: Path, *flags: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, *flags, **environ)
    assert caught.value.status == ExitStatus.CONFIG
    return str(caught.value).splitlines()


def test_command_line_wins_over_file_over_base_over_default(tmp_path: Path) -> None:
    base = write(tmp_path / "base.toml", "[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 1\n")
    child = write(tmp_path / "child.toml", 'base = "base.toml"\n[training]\nsteps = 2\nseq_len = 2\n')
    loaded = load_config(["--config", str(child), "--training.steps", "3"], environ={})
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.local_batch_size, training.gc_freq) == (3, 2, 1, 50)
    assert loaded.sources["training.steps"] == "command line"
    assert loaded.sources["training.seq_len"] == f"file {child}"
    assert loaded.sources["training.local_batch_size"] == f"file {base}"
    assert loaded.sources["training.gc_freq"] == "default"
    assert set(loaded.sources) == set(KEYS)


def test_a_base_is_found_by_name_and_has_no_base_itself(tmp_path: Path) -> None:
    child = write(tmp_path / "child.toml", 'base = "debug_model"\n[training]\nsteps = 7\n')
    assert load(child).training.steps == 7
    assert load(child).training.seq_len == load(TRAIN_CONFIGS / "debug_model.toml").training.seq_len
    grandchild = write(tmp_path / "grandchild.toml", 'base = "child.toml"\n')
    [mistake] = mistakes_of(grandchild)
    assert "one level" in mistake
    [mistake] = mistakes_of(write(tmp_path / "lost.toml", 'base = "nowhere.toml"'))
    assert "nowhere.toml" in mistake
    assert "debug_model" in mistake


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--training.steps", "20"], "training.steps", 20),
        (["--training.steps=20"], "training.steps", 20),
        (["--training.steps=20", "--training.steps=30"], "training.steps", 30),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.seq-len", "20"], "training.seq_len", 20),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr=1e-3"], "optimizer.lr", 1e-3),
        (["--training.max_norm", "inf"], "training.max_norm", float("inf")),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--training.steps=3"], "checkpoint.enable", True),
        (["--checkpoint.enable", "false"], "checkpoint.enable", False),
        (["--checkpoint.enable=True"], "checkpoint.enable", True),
        (["--job.description", "3"], "job.description", "3"),
        (["--job.description="], "job.description", ""),
        (["--training.sample_prompt", "a = 1"], "training.sample_prompt", "a = 1"),
        (["--compile.components", "model"], "compile.components", ("model",)),
        (["--compile.components", "model,loss"], "compile.components", ("model", "loss")),
        (["--compile.components", '["loss"]'], "compile.components", ("loss",)),
        (["--compile.components="], "compile.components", ()),
        (["--optimizer.adamw_lr", "none"], "optimizer.adamw_lr", None),
    ],
)
def test_flags(tmp_path: Path, flags: list[str], key: str, value: object) -> None:
    file = write(tmp_path / "x.toml", "[optimizer]\nadamw_lr = 1.0\n")
    loaded = load_config(["--config", str(file), *flags], environ={})
    assert get(loaded.config, key) == value
    assert type(get(loaded.config, key)) is type(value)
    assert loaded.sources[key] == "command line"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer.lrr", "1"], ["optimizer.lrr", "optimizer.lr"]),
        (["--training.steps"], ["training.steps", "needs a value"]),
        (["--training.steps", "--checkpoint.enable"], ["training.steps", "needs a value"]),
        (["--training.steps", "10.5"], ["training.steps", "integer"]),
        (["--training.steps", "ten"], ["training.steps", "integer"]),
        (["--training.steps", "none"], ["training.steps", "integer"]),
        (["--training.steps="], ["training.steps", "integer"]),
        (["--optimizer.lr", "nan"], ["optimizer.lr", "above 0"]),
        (["--optimizer.lr", "inf"], ["optimizer.lr", "above 0"]),
        (["--checkpoint.enable", "maybe"], ["checkpoint.enable", "true, false"]),
        (["--compile.components", "model,optimizer"], ["compile.components", "optimizer"]),
        (["training.steps=3"], ["training.steps=3", "--section.key"]),
        (["--config", "a.toml"], ["a.toml", "several"]),
        (["--config"], ["--config", "needs"]),
        (["--training", "3"], ["training"]),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    [mistake] = mistakes_of(write(tmp_path / "x.toml", ""), *flags)
    assert all(word in mistake for word in words)


def test_configurations_are_found_by_name_path_and_variable(tmp_path: Path) -> None:
    shipped = TRAIN_CONFIGS / "llama3_8b.toml"
    mine = write(tmp_path / "mine.toml", "")
    for argv, environ, path in (
        ([], {}, TRAIN_CONFIGS / "debug_model.toml"),
        (["--config", "llama3_8b"], {}, shipped),
        (["--config=llama3_8b.toml"], {}, shipped),
        (["--config", str(shipped)], {}, shipped),
        (["--config", "mine.toml"], {}, mine),
        (["--config", "~/mine.toml"], {"HOME": str(tmp_path)}, mine),
        (["--job.config_file", "./mine.toml"], {}, mine),
        (["--job.config-file=./mine.toml"], {}, mine),
        ([], {"CONFIG_FILE": "mine.toml"}, mine),
        (["--config", "llama3_8b"], {"CONFIG_FILE": "mine.toml"}, shipped),
    ):
        assert load_config(argv, cwd=tmp_path, environ=environ).config_path == path
    with pytest.raises(ConfigError, match=r"llama3_9b.*debug_model.*llama3_8b"):
        load_config(["--config", "llama3_9b"], cwd=tmp_path, environ={})
    with pytest.raises(ConfigError, match=r"CONFIG_FILE gone\.toml"):
        load_config([], cwd=tmp_path, environ={"CONFIG_FILE": "gone.toml"})


def test_every_misplaced_key_is_named_at_once(tmp_path: Path) -> None:
    """FIELD_CASES B15: misspelt or misplaced keys were dropped and the run started on defaults."""
    file = write(
        tmp_path / "x.toml",
        "lr = 1e-3\n[optimizer]\nlearning_rte = 1e-3\n[trainning]\nsteps = 3\nseq_len = 3\n"
        "[training]\nlr = 1e-3\n[model.rope]\ntheta = 1\n[checkpoint]\nenabel = true\n",
    )
    mistakes = mistakes_of(file, "--optimizer.lrr", "1")
    named = {
        "lr =": "optimizer.lr",
        "optimizer.learning_rte": "optimizer.lr",
        "[trainning]": "[training]",
        "training.lr": "optimizer.lr",
        "[model.rope]": "[model]",
        "checkpoint.enabel": "checkpoint.enable",
        "optimizer.lrr": "optimizer.lr",
    }
    assert len(mistakes) == len(named)
    for mistake, (key, meant) in zip(mistakes, named.items(), strict=True):
        assert mistake.startswith(key)
        assert meant in mistake.partition(":")[2]
        assert str(file) in mistake or "command line" in mistake


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('optimizer.lr = "1e-3"', "number"),
        ("optimizer.lr = true", "number"),
        ("optimizer.lr = 0", "above 0"),
        ("optimizer.lr = nan", "above 0"),
        ("optimizer.beta2 = 1.0", "below 1"),
        ("training.steps = 10.5", "integer"),
        ("training.steps = true", "integer"),
        ("training.steps = -5", "at least 1"),
        ("training.global_batch_size = -2", "at least 1, or -1"),
        ("training.global_batch_size = 0", "at least 1, or -1"),
        ('checkpoint.enable = "false"', "boolean"),
        ("checkpoint.enable = 1", "boolean"),
        ("optimizer.betas = [0.9]", "optimizer.beta1"),
        ('training.dims = "64"', "unknown key"),
        ('training.dtype = "bf61"', "float32"),
        ('training.mixed_precision_param = "bf61"', '"bfloat16", "float32"'),
        ("optimizer.name = 3", "string"),
        ('compile.components = "model"', "list"),
        ("compile.components = [1]", "list"),
        ('compile.components = ["optimizer"]', '"model", "loss"'),
        ("activation_checkpoint.selective_ac_option = 2", "string"),
        ("training.steps = {x = 1}", "integer"),
        ("training = 3", "[training]"),
        ("job.dump_folder = 2020-01-01", "string"),
        ('job.dump_folder = ""', "empty"),
        ("optimizer.lr = 1" + "0" * 400, "too large"),
    ],
)
def test_wrong_values_in_a_file(tmp_path: Path, line: str, wanted: str) -> None:
    """FIELD_CASES B16: a learning rate arrived as a string and failed deep inside the optimizer."""
    file = write(tmp_path / "x.toml", line)
    [mistake] = mistakes_of(file)
    assert mistake.startswith(line.split()[0])
    assert wanted in mistake.partition(":")[2]
    assert str(file) in mistake


def test_an_integer_serves_as_a_number(tmp_path: Path) -> None:
    config = load(write(tmp_path / "x.toml", "[optimizer]\nlr = 1\neps = 1e-8\n"))
    assert config.optimizer.lr == 1.0
    assert type(config.optimizer.lr) is float
    assert config.optimizer.eps == 1e-8


@pytest.mark.parametrize("content", [b"[training\n", b"a = 1\na = 2\n", b"\xff\xfe", b"a = 1" + b"0" * 5000])
def test_unreadable_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    [mistake] = mistakes_of(file)
    assert mistake.startswith(str(file))


def test_paths(tmp_path: Path) -> None:
    """FIELD_CASES B19: relative paths hung on the working directory, and ~ was taken literally."""
    cwd, home = tmp_path / "cwd", tmp_path / "home"
    file = tmp_path / "configs" / "x.toml"

    def dataset_path(written: str, *flags: str) -> str | None:
        write(file, f"[training]\ndataset_path = {written!r}\n")
        environ = {"HOME": str(home), "DATA_ROOT": "/data"}
        config = load_config(["--config", str(file), *flags], cwd=cwd, environ=environ).config
        return config.training.dataset_path

    assert dataset_path("d") == str(file.parent / "d")
    assert dataset_path("../d") == str(tmp_path / "d")
    assert dataset_path("~/d") == str(home / "d")
    assert dataset_path("${DATA_ROOT}/d") == "/data/d"
    assert dataset_path("$DATA_ROOT/d") == "/data/d"
    assert dataset_path("d", "--training.dataset_path", "e") == str(cwd / "e")
    [mistake] = mistakes_of(write(file, "[training]\ndataset_path = '${NOPE}/d'\n"))
    assert "NOPE is not set" in mistake
    [mistake] = mistakes_of(write(file, "[job]\ndump_folder = '~nobody-of-that-name/d'\n"))
    assert "nobody-of-that-name" in mistake


def test_output_paths_count_from_the_working_directory(tmp_path: Path) -> None:
    file = write(tmp_path / "configs" / "x.toml", '[job]\ndump_folder = "runs/a"\n[metrics]\nsave_tb_folder = "/tb"\n')
    config = load_config(["--config", str(file)], cwd=tmp_path, environ={}).config
    assert config.job.dump_folder == str(tmp_path / "runs/a")
    assert config.checkpoint.folder == str(tmp_path / "runs/a/checkpoint")
    assert config.metrics.save_tb_folder == "/tb"
    default = load_config(["--config", str(write(file, ""))], cwd=tmp_path, environ={}).config
    assert default.job.dump_folder == str(tmp_path / "outputs")


def test_a_base_counts_its_paths_from_its_own_folder(tmp_path: Path) -> None:
    write(tmp_path / "shared" / "base.toml", '[training]\ndataset_path = "d"\n')
    child = write(tmp_path / "mine" / "x.toml", 'base = "../shared/base.toml"\n')
    assert load(child).training.dataset_path == str(tmp_path / "shared" / "d")


def test_keys_without_effect_are_noted(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.toml", '[optimizer]\nname = "AdamW"\nmomentum = 0.9\n[training.dataloader]\npin_memory = true\n'
    )
    loaded = load_config(["--config", str(file)], environ={})
    assert len(loaded.notes) == 2
    assert any("pin_memory" in note for note in loaded.notes)
    assert any("optimizer.momentum" in note for note in loaded.notes)
    assert not load_config(["--config", str(file), "--optimizer.name=Muon"], environ={}).notes[1:]


def test_the_resolved_configuration_loads_again(tmp_path: Path) -> None:
    description = 'a "quoted" \\ line\nand é \x7f \x01 🙂'
    flags = [
        f"--job.description={description}",
        "--optimizer.lr=1e-7",
        "--training.max_norm=inf",
        "--optimizer.adamw_lr=2",
    ]
    loaded = load_config(["--config", "debug_model", *flags], cwd=tmp_path, environ={})
    path = Path(loaded.config.job.dump_folder) / "config.toml"
    write_resolved(loaded, path)
    text = path.read_text(encoding="utf-8")
    assert load_config(["--config", str(path)], cwd=Path("/"), environ={}).config == loaded.config
    assert "adamw_lr = 2.0  # command line" in text
    assert f"# file {TRAIN_CONFIGS / 'debug_model.toml'}" in text
    assert "# decay_ratio" not in text
    assert "# total_steps = none  # default" in text
    for word in ("python ", "torch ", "torchdata ", "commit "):
        assert word in text.splitlines()[1]
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def test_a_resolved_configuration_with_another_dump_folder_stays_out_of_the_old_run(tmp_path: Path) -> None:
    loaded = load_config(["--config", "debug_model"], cwd=tmp_path, environ={})
    path = tmp_path / "config.toml"
    write_resolved(loaded, path)
    config = load_config(["--config", str(path), "--job.dump_folder", "other"], cwd=tmp_path, environ={}).config
    assert config.checkpoint.folder == str(tmp_path / "other" / "checkpoint")


def test_help_lists_every_key() -> None:
    text = help_text()
    for key in KEYS.values():
        assert f"--{key.name}\n" in text
        assert key.doc.endswith("."), key.name
    assert all(f"[{section}]" in text for section in SECTIONS)
    assert wants_help(["--training.steps", "3", "--help"])
    assert wants_help(["-h"])
    assert not wants_help(["--training.steps=3"])


def test_a_configuration_can_not_be_changed() -> None:
    config = load_config([], environ={}).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.steps = 3  # type: ignore[misc]


def test_nothing_imports_torch(tmp_path: Path) -> None:
    """A mistake costs under a second: torch alone takes longer to import."""
    program = (
        "import sys; from pathlib import Path; from dmuon_titan.config import *\n"
        "loaded = load_config(['--config', 'llama3_70b'], environ={})\n"
        "validate(loaded.config, World(2, 'cuda', 2**30)); notes(loaded.config); help_text()\n"
        "write_resolved(loaded, Path(sys.argv[1]))\n"
        "slow = [name for name in ('torch', 'numpy', 'sentencepiece', 'torchdata') if name in sys.modules]\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "config.toml")], cwd=root, check=True)
