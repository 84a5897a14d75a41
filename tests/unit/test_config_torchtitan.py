"""What a person brings from TorchTitan v0.2.2 works, or is refused with the reason; it is never dropped."""

import json
from pathlib import Path

import pytest

from dmuon_titan.config import JobConfig, World, load_config, validate
from dmuon_titan.config.schema import KEYS
from dmuon_titan.config.torchtitan import INERT, REFUSED, RENAMED
from dmuon_titan.config.values import to_toml
from dmuon_titan.errors import ConfigError

# Every key of TorchTitan v0.2.2's JobConfig with its default; null where that is None.
DEFAULTS = json.loads((Path(__file__).parent / "torchtitan_v0_2_2_defaults.json").read_text())

# TorchTitan's settings for the two models that it describes itself, sections and keys of v0.2.2.
COMMON = """
[job]
dump_folder = "./outputs"
description = "Llama 3 training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = -1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"
"""
LLAMA3_8B = f"""{COMMON}
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
LLAMA3_70B = f"""{COMMON}
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
[optimizer]
name = "AdamW"
lr = 1.5e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
GPUS_64 = World(64, "cuda", 80 * 2**30)


def load(tmp_path: Path, text: str, *flags: str) -> JobConfig:
    file = tmp_path / "x.toml"
    file.write_text(text)
    return load_config(["--config", str(file), *flags], environ={}).config


def test_every_key_of_v0_2_2_is_known() -> None:
    assert [name for name in DEFAULTS if not any(name in table for table in (KEYS, INERT, REFUSED))] == []
    assert [name for name in INERT if name not in DEFAULTS] == []


def test_no_key_is_described_twice() -> None:
    for table, others in ((KEYS, (INERT, RENAMED, REFUSED)), (INERT, (RENAMED, REFUSED)), (RENAMED, (REFUSED,))):
        assert [name for name in table for other in others if name in other] == []


def test_renamed_keys_lead_to_known_ones() -> None:
    assert [new for new in RENAMED.values() if not any(new in table for table in (KEYS, INERT, REFUSED))] == []


def test_a_file_with_every_default_of_v0_2_2_loads(tmp_path: Path) -> None:
    lines = [
        f"{name} = {to_toml(value)}" for name, value in DEFAULTS.items() if value is not None and name not in REFUSED
    ]
    config = load(tmp_path, "\n".join(lines))
    assert config.optimizer.name == "AdamW"
    # What validation has to say is about the data alone.
    [mistake] = validate(config, World(1, "cpu"))
    assert mistake.startswith("training.dataset")


def test_torchtitans_8b_settings_lack_the_data_alone(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA3_8B)
    [mistake] = validate(config, GPUS_64)
    for word in ('training.dataset = "c4"', "training.dataset_path", "python -m dmuon_titan.tools.prepare"):
        assert word in mistake
    assert validate(load(tmp_path, LLAMA3_8B, "--training.dataset=python_stdlib"), GPUS_64) == []


def test_torchtitans_70b_settings_lack_the_data_alone(tmp_path: Path) -> None:
    [dataset] = validate(load(tmp_path, LLAMA3_70B), GPUS_64)
    assert dataset.startswith('training.dataset = "c4"')
    assert validate(load(tmp_path, LLAMA3_70B, "--training.dataset=python_stdlib"), GPUS_64) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("training.batch_size = 1", ["renamed to training.local_batch_size"]),
        ("training.compile = true", ["renamed to compile.enable"]),
        ("checkpoint.enable_checkpoint = true", ["renamed to checkpoint.enable"]),
        ("float8.filter_fqns = []", ["renamed to quantize.linear.float8.filter_fqns"]),
        ("validation.enabled = false", ["renamed to validation.enable"]),
        ('model.converters = ["float8"]', ["[] only", "quantized training is not supported"]),
        ("parallelism.pipeline_parallel_degree = 2", ["1 only", "pipeline parallelism is not supported"]),
        ("parallelism.pipeline_parallel_degree = true", ["integer"]),
        ("parallelism.context_parallel_degree = 2", ["1 only", "context parallelism is not supported"]),
        ("fault_tolerance.enable = true", ["false only", "TorchFT"]),
        ("metrics.enable_wandb = true", ["false only", "TensorBoard"]),
        ('training.dtype = "bfloat16"', ['"float32" only', "master weights"]),
        ('job.config_file = "x.toml"', ["command line", "base"]),
        ("metrics.rank_0_only = true", ["metrics.log_all_ranks"]),
        ('activation_checkpoint.mode = "memory_budget"', ['"selective", "full", "none"']),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_the_reason(tmp_path: Path, line: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, line)
    [mistake] = str(caught.value).splitlines()
    assert mistake.startswith(line)
    assert all(word in mistake for word in words)


def test_the_same_keys_on_the_command_line(tmp_path: Path) -> None:
    load(
        tmp_path,
        "",
        "--parallelism.pipeline_parallel_degree",
        "1",
        "--model.converters=",
        "--training.dataloader.pin_memory",
    )
    with pytest.raises(ConfigError, match="pipeline parallelism is not supported"):
        load(tmp_path, "", "--parallelism.pipeline_parallel_degree", "2")
    with pytest.raises(ConfigError, match=r"renamed to training\.local_batch_size"):
        load(tmp_path, "", "--training.batch_size", "2")
