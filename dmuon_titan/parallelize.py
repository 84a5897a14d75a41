"""From a model's size to a model on the mesh, with its weights.

Tensor parallelism -> activation checkpointing -> compile -> dedicated matrices -> FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.materialize import RowInit
from dmuon.torch_internals import overlap_tensor_parallel_products
from dmuon_titan.activation_checkpoint import checkpoint_activations
from dmuon_titan.config.schema import JobConfig
from dmuon_titan.mesh import ParallelMesh
from models.llama import tp_plan
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize


def build_model(
    config: JobConfig, size: LlamaSize, mesh: ParallelMesh, weights: RowInit | None = None
) -> tuple[Llama, dmuon.Plan | None]:
    """Builds the model with its weights, each rank holding only its part. `weights`: None for fresh ones.

    Returns:
        The model and who owns which matrix; None where AdamW updates everything.
    """
    with torch.device("meta"):
        model = Llama(size, max(config.training.seq_len, config.validation.seq_len or 0))
    plan = parallelize(model, config, mesh)
    dmuon.materialize(model, weights or Initializer(size, config.debug.seed), mesh.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))
    return model, plan


def parallelize(model: Llama, config: JobConfig, mesh: ParallelMesh) -> dmuon.Plan | None:
    """Wraps each block from the inside out. The order matters: what moves activations between tensor-parallel ranks
    lies inside recomputation, which lies inside the compiled region, which lies inside the hooks that gather and free
    weights."""
    if mesh.degree("tp") > 1:
        tp_plan.parallelize(model, mesh.tp, loss_parallel=not config.parallelism.disable_loss_parallel)
        if config.parallelism.enable_async_tensor_parallel:
            overlap_tensor_parallel_products(mesh.tp.get_group())
    options = config.activation_checkpoint
    checkpoint_activations(model.layers, options.mode, options.selective_ac_option)
    if config.compile.enable and "model" in config.compile.components:
        for layer in model.layers:
            # Only forward, not the module: names stay clean, and hooks stay outside of the graph.
            layer.forward = torch.compile(layer.forward, backend=config.compile.backend, fullgraph=True)
    param_dtype = getattr(torch, config.training.mixed_precision_param)
    reduce_dtype = getattr(torch, config.training.mixed_precision_reduce)
    reshard = config.parallelism.fsdp_reshard_after_forward != "never"
    plan = None
    if config.optimizer.name == "Muon":
        plan = dmuon.dedicate_params(
            model,
            mesh.shard,
            replicate_mesh=mesh.replicate,
            reshard_after_forward=reshard,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            max_joint_owners=config.optimizer.max_joint_owners,
        )
    deterministic = config.debug.deterministic
    shard(
        model,
        # FSDP2 sums replicate rows in an order of its own; without that axis the fixed tree sums them.
        mesh.shard if deterministic else mesh.fully_shard,
        MixedPrecisionPolicy(param_dtype, reduce_dtype),
        config.parallelism.fsdp_reshard_after_forward,
    )
    if deterministic:
        dmuon.set_deterministic(True, model, replicate_mesh=mesh.replicate)
    elif mesh.dp_world == 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(NoReduction())  # type: ignore[arg-type]
    return plan


class NoReduction:
    """FSDP2's interface ReduceScatter for one rank, where the result is the input: one buffer in place of two.

    FSDP2 asks for the input's buffer, then for the result's, and copies the one to the other.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The first of two calls: a new buffer. The second: the same one."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        result, self._input = self._input, None
        assert (tuple(result.shape), result.dtype) == (tuple(size), dtype)
        return result

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        raise AssertionError("one rank reduces nothing")


def shard(model: Llama, device_mesh: DeviceMesh, precision: MixedPrecisionPolicy, reshard_after_forward: str) -> None:
    """FSDP2 over everything that has no owner: blocks, embedding, head with the last norm, then the rest."""
    owned = dmuon.dedicated_params(model)
    reshard = reshard_after_forward != "never"
    tied = model.output.weight is model.tok_embeddings.weight
    if not tied:
        fully_shard(model.tok_embeddings, mesh=device_mesh, mp_policy=precision, reshard_after_forward=reshard)
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh, mp_policy=precision, reshard_after_forward=reshard, ignored_params=owned)
    if not tied:
        # Backward needs these first: freeing them after forward would only fetch them twice.
        fully_shard(
            [model.norm, model.output],
            mesh=device_mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward == "always",
        )
    fully_shard(model, mesh=device_mesh, mp_policy=precision, ignored_params=owned)
