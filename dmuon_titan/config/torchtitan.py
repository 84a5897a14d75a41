"""Keys of TorchTitan v0.2.2 and older that have no effect here: renamed, accepted at a value, or refused with a reason.

With the schema these tables know every key of v0.2.2. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inert:
    """A key without an effect here.

    accepted: the values that mean what happens here anyway, TorchTitan's default first; empty: every value of the
        first one's type. Values other than the first are noted with the reason.
    reason: why other values are refused.
    """

    accepted: tuple[Any, ...]
    reason: str
    any_value: bool = False


_PIPELINE = "pipeline parallelism is not supported: use data_parallel_shard_degree"
_CONTEXT = "context parallelism is not supported"
_EXPERT = "expert parallelism is not supported: the models here are dense"
_QUANTIZED = "quantized training is not supported"
_WORKERS = "worker processes live as long as the run"
_PINNED = "batches are pinned whenever the device is a GPU"
_PREFETCH = "a worker reads two batches ahead"
_TORCHFT = "TorchFT is not supported: the same command run again continues from the newest checkpoint"
_EXTENSION = "configurations are not extended by modules of code"
_RECOMPUTATION = "recomputation is exact and configured by mode and selective_ac_option"

INERT: dict[str, Inert] = {
    "job.print_config": Inert((False,), "the resolved configuration is always written to <dump_folder>/config.toml"),
    "job.custom_config_module": Inert(("",), _EXTENSION),
    "metrics.save_for_all_ranks": Inert(
        (False,), "rank 0 writes the metrics of all; metrics.log_all_ranks prints every rank's log"
    ),
    "metrics.enable_wandb": Inert((False,), "TensorBoard and metrics.jsonl are the outputs"),
    "model.converters": Inert(((),), _QUANTIZED),
    "model.print_after_conversion": Inert((False,), "no converters are applied"),
    "optimizer.implementation": Inert(("fused",), "AdamW is fused wherever the device has it"),
    "optimizer.early_step_in_backward": Inert((False,), "gradients are clipped before the step"),
    "training.enable_cpu_offload": Inert((False,), "weights and optimizer state stay on the device"),
    "training.dtype": Inert(
        ("float32",), "master weights are float32; training.mixed_precision_param sets the format of forward"
    ),
    "training.gc_debug": Inert((False,), "not supported"),
    "parallelism.pipeline_parallel_degree": Inert((1,), _PIPELINE),
    "parallelism.pipeline_parallel_first_stage_less_layers": Inert((1,), _PIPELINE),
    "parallelism.pipeline_parallel_last_stage_less_layers": Inert((1,), _PIPELINE),
    "parallelism.pipeline_parallel_schedule": Inert(("1F1B",), _PIPELINE),
    "parallelism.pipeline_parallel_schedule_csv": Inert(("",), _PIPELINE),
    "parallelism.pipeline_parallel_microbatch_size": Inert((1,), _PIPELINE),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Inert((True,), _PIPELINE),
    "parallelism.context_parallel_degree": Inert((1,), _CONTEXT),
    "parallelism.context_parallel_load_balancer": Inert(("headtail",), _CONTEXT),
    "parallelism.context_parallel_rotate_method": Inert(("allgather",), _CONTEXT),
    "parallelism.expert_parallel_degree": Inert((1,), _EXPERT),
    "parallelism.expert_tensor_parallel_degree": Inert((1,), _EXPERT),
    "parallelism.expert_parallel_comm_backend": Inert(("standard",), _EXPERT),
    "checkpoint.enable_ft_dataloader_checkpoints": Inert((True,), "the data position is always saved"),
    "checkpoint.initial_load_in_hf_quantized": Inert((False,), _QUANTIZED),
    "checkpoint.create_seed_checkpoint": Inert(
        (False,), "first weights follow from debug.seed alone, the same on every mesh"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Inert((("moe.router.gate",), ()), _EXPERT),
    "activation_checkpoint.early_stop": Inert((False,), _RECOMPUTATION),
    "activation_checkpoint.memory_budget": Inert((0.5,), _RECOMPUTATION),
    "activation_checkpoint.visualize_memory_budget_pareto": Inert((False,), _RECOMPUTATION),
    "activation_checkpoint.preserve_rng_state": Inert((True,), _RECOMPUTATION),
    "activation_checkpoint.determinism_check": Inert(("default",), _RECOMPUTATION),
    "activation_checkpoint.debug": Inert((False,), _RECOMPUTATION),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Inert((False,), _QUANTIZED),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Inert((False,), _QUANTIZED),
    "quantize.linear.float8.filter_fqns": Inert(((),), "no layer is quantized", any_value=True),
    "quantize.linear.float8.emulate": Inert((False,), _QUANTIZED),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Inert(("triton",), _QUANTIZED),
    "quantize.linear.mx.recipe_name": Inert(("mxfp8_cublas",), _QUANTIZED),
    "quantize.linear.mx.filter_fqns": Inert((("output",),), "no layer is quantized", any_value=True),
    "quantize.grouped_mm.float8.fqns": Inert(((),), _QUANTIZED),
    "quantize.grouped_mm.mx.recipe_name": Inert(("mxfp8",), _QUANTIZED),
    "quantize.grouped_mm.mx.fqns": Inert(((),), _QUANTIZED),
    "comm.save_traces_folder": Inert(("comm_traces",), "the folder is fixed"),
    "comm.save_traces_file_prefix": Inert(("rank_",), "the names are fixed"),
    "comm.mode": Inert(("default",), "ranks always communicate; a debug run needs no GPU"),
    "memory_estimation.enable": Inert((False,), "memory is estimated before every start"),
    "memory_estimation.disable_fake_mode": Inert((False,), "memory is estimated before every start"),
    "fault_tolerance.enable": Inert((False,), _TORCHFT),
    "fault_tolerance.process_group": Inert(("gloo",), _TORCHFT),
    "fault_tolerance.process_group_timeout_ms": Inert((10_000,), _TORCHFT),
    "fault_tolerance.replica_id": Inert((0,), _TORCHFT),
    "fault_tolerance.group_size": Inert((0,), _TORCHFT),
    "fault_tolerance.min_replica_size": Inert((1,), _TORCHFT),
    "experimental.custom_import": Inert(("",), _EXTENSION),
    "experimental.custom_args_module": Inert(("",), _EXTENSION),
    "validation.dataloader.num_workers": Inert((0,), "validation reads in the rank itself"),
    "debug.deterministic_warn_only": Inert((False,), "debug.deterministic raises where an operation has no such form"),
    "debug.moe_force_load_balance": Inert((False,), _EXPERT),
} | {
    f"{section}.dataloader.{name}": inert
    for section in ("training", "validation")
    for name, inert in {
        "persistent_workers": Inert((False, True), _WORKERS),
        "pin_memory": Inert((False, True), _PINNED),
        "prefetch_factor": Inert((2,), _PREFETCH),
    }.items()
}

RENAMED: dict[str, str] = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "memory_estimation.enabled": "memory_estimation.enable",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "validation.enabled": "validation.enable",
} | {
    f"{old}.{name}": f"quantize.linear.{old}.{name}"
    for old, names in {
        "float8": (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "recipe_name",
            "filter_fqns",
            "emulate",
        ),
        "mx": ("mxfp8_dim1_cast_kernel_choice", "recipe_name", "filter_fqns"),
    }.items()
    for name in names
}

REFUSED: dict[str, str] = {
    "job.config_file": "names the file itself: give it on the command line; a file inherits from another by "
    'base = "other.toml"',
    "job.save_config_file": "the resolved configuration is always written to <dump_folder>/config.toml",
    "job.use_for_integration_test": "has no meaning here; remove it",
    "metrics.enable_color_printing": "replaced by metrics.disable_color_printing, with the opposite meaning",
    "metrics.rank_0_only": "rank 0 writes the metrics of all; metrics.log_all_ranks prints every rank's log",
    "model.attn_mask_type": "attention is causal",
    "model.norm_type": "the norm is RMSNorm",
    "model.use_flex_attn": "attention is scaled_dot_product_attention",
    "optimizer.foreach": "AdamW is fused wherever the device has it",
    "optimizer.fused": "AdamW is fused wherever the device has it",
    "training.enable_loss_parallel": "replaced by parallelism.disable_loss_parallel, with the opposite meaning",
    "parallelism.enable_compiled_autograd": "compiled autograd is not supported",
    "experimental.enable_compiled_autograd": "compiled autograd is not supported",
    "parallelism.module_fqns_per_model_part": _PIPELINE,
    "parallelism.pipeline_parallel_layers_per_stage": _PIPELINE,
    "parallelism.pipeline_parallel_split_points": _PIPELINE,
    "experimental.pipeline_parallel_split_points": _PIPELINE,
    "checkpoint.interval_type": "checkpoint.interval counts steps",
    "float8.enable_float8_linear": _QUANTIZED,
    "quantize.linear.float8.recipe_name": _QUANTIZED,
    "fault_tolerance.semi_sync_method": _TORCHFT,
}

# Sections that exist in TorchTitan alone, so that what stands in them is looked up key by key.
SECTIONS: frozenset[str] = frozenset(
    name.rsplit(".", depth)[0]
    for table in (INERT, RENAMED, REFUSED)
    for name in table
    for depth in range(1, name.count(".") + 1)
)
