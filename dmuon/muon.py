"""The optimizer: Muon for dedicated parameters on their owners, AdamW for FSDP2's shards of all others.

Shape legend: B matrices of M x N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmuon.accumulate import discard_accumulated, has_unreduced_gradients
from dmuon.adamw import adamw_step, init_adamw_state, is_due
from dmuon.annotation import annotated
from dmuon.aside import Aside
from dmuon.hooks import find_runtime, reshard
from dmuon.newton_schulz import Coefficients, resolve_dtype
from dmuon.newton_schulz.planning import BatchPlan, batches, choose_kernel, stack_sizes
from dmuon.newton_schulz.updates import FusedUpdates, Piece, update_by_torch
from dmuon.param_groups import ADAMW, MUON, build_groups, check_momentum_dtype, check_option, named_parameters
from dmuon.parameter import DedicatedParameter
from dmuon.publication import Publication
from dmuon.slices import slice_updates

MOMENTUM = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon on dedicated parameters, AdamW on the rest. Arithmetic around Newton-Schulz is `torch.optim.Muon`'s.

    `param_groups` are the same on every rank: `param_groups[0]` holds the dedicated parameters, `param_groups[1]` the
    symmetric ones, and the groups that were asked for follow, each of one kind, told by its key "kind". State tensors
    exist from construction on, and for dedicated parameters on their owners alone.

    As with torch's fused optimizers, the attribute `found_inf`, a float32 tensor of one element that is the same on all
    ranks, keeps the next `step` from changing anything if it is not zero. Where all that runs are kernels which read it
    themselves, the host does not wait for its value.

    As in torch, a parameter whose `.grad` is None is left alone, weight decay and momentum too, and `step` leaves
    `.grad` as it was. Symmetric parameters that are frozen at construction are in no group.

    Args:
        model: after `dmuon.dedicate_params` and `fully_shard`, and after `dmuon.materialize` if it was on meta.
        lr: learning rate of Muon, and of AdamW unless `adamw_lr` is given.
        momentum, nesterov: exponential moving average of gradients, and whether to look ahead by it.
        weight_decay: decoupled; AdamW's unless `adamw_weight_decay` is given.
        adjust_lr_fn: "match_rms_adamw" scales an m x n update by 0.2 sqrt(max(m, n)), so that one learning rate
            serves both kinds; "original" by sqrt(max(1, m / n)).
        ns_steps, ns_backend, ns_coefficients, ns_dtype: see `dmuon.newton_schulz`.
        ns_kernel: "auto" takes the Triton kernels on GPUs that they were measured on, and plain torch elsewhere;
            "triton", "torch" and "quack" (an extra) by name. For all groups.
        tp_strategy: how matrices that tensor parallelism has cut are orthogonalised: "exchange", "distributed_gram" or
            the cheaper one for each, "auto"; see `dmuon.tensor_parallel`.
        momentum_dtype: what momentum is kept in, None for float32. With bfloat16 it is computed in float32 still.
        adamw_betas, adamw_eps: AdamW's.
        param_groups: options by name, [{"params": "*.experts.*", "lr": 1e-4}, ...]. "params" is an fnmatch pattern
            over the model's parameter names, or a list of them; the first entry that matches a parameter takes it.
            Muon's options are lr, momentum, nesterov, weight_decay, adjust_lr_fn and ns_*, but not ns_kernel; AdamW's
            are lr, betas, eps and weight_decay. An entry that matches parameters of both kinds makes two groups.
        replicate_async: under HSDP, let updated weights travel to the other rows while the next forward runs.

    Raises:
        ValueError: `dedicate_params` or `materialize` was not called on the model, or an argument is out of range.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_backend: str = "gram",
        ns_coefficients: Coefficients = "polar_express",
        ns_dtype: str = "auto",
        ns_kernel: str = "auto",
        tp_strategy: str = "auto",
        momentum_dtype: torch.dtype | None = None,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        replicate_async: bool = True,
    ) -> None:
        runtime = find_runtime(model)
        if runtime is None:
            raise ValueError("this model has no dedicated parameters: call dmuon.dedicate_params(model, mesh) first")
        muon_options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_steps": ns_steps,
            "ns_backend": ns_backend,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
        }
        adamw_options: dict[str, Any] = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        for key, value in muon_options.items():
            check_option(key, value, key)
        for key, value in adamw_options.items():
            check_option(key, value, f"adamw_{key}")
        check_momentum_dtype(momentum_dtype)

        self._model, self._runtime = model, runtime
        self._slice_updates = slice_updates(runtime.axes, tp_strategy, ns_kernel)
        self._fused = FusedUpdates(ns_kernel)
        self._replicate_async = replicate_async
        self._dedicated = {param.master: param for unit in runtime.units for param in unit.params}
        named = named_parameters(model, self._dedicated)
        if not runtime.is_filled or any(
            member.kind == ADAMW and member.param.device.type == "meta" for member in named
        ):
            raise ValueError("the model is still on the meta device: call dmuon.materialize before dmuon.Muon")
        groups = build_groups(named, {MUON: muon_options, ADAMW: adamw_options}, param_groups)
        self._groups_are_final = self._is_checked = False
        super().__init__(groups, {})
        self._groups_are_final = True
        # So that a kernel that can't run is reported before training, and by rank 0 even if it owns no matrix.
        device = next((param.device for param in model.parameters() if param.device.type != "meta"), None)
        self._aside = Aside(device.type if device is not None else "cpu")
        for group in self.param_groups:
            if group["kind"] == MUON and device is not None:
                choose_kernel(ns_kernel, device, resolve_dtype(group["ns_dtype"], device))
        # Not through super: torch adds its defaults to every group. Schedules look here for what they can change.
        self.defaults = muon_options
        for member in named:
            if member.kind == ADAMW:
                self.state[member.param] = init_adamw_state(member.param)
            elif member.param.device.type != "meta":
                self.state[member.param][MOMENTUM] = torch.zeros_like(
                    member.param, dtype=momentum_dtype or torch.float32
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates owned matrices and local shards, then starts publishing the new weights.

        Args:
            closure: computes gradients and returns the loss; called first, on all ranks together.

        Raises:
            RuntimeError: a backward inside `dmuon.no_sync` was the last one, or the optimizer was made before
                `fully_shard`. Nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if has_unreduced_gradients(self._model):
            raise RuntimeError(
                "gradients accumulated under dmuon.no_sync were never reduced: run the last micro-batch's backward "
                "outside of it"
            )
        self._runtime.wait_publish()
        if not self._is_checked:
            self._check_parameters()
        work, cut = self._batches(_gradient_if_due), [(group, self._cut(group)) for group in self.param_groups]
        found_inf = self.found_inf
        if found_inf is not None and not (found_inf.is_cuda and self._heeds_found_inf(work, cut)):
            if found_inf.item():
                self._runtime.publish()  # the same transfers as on ranks whose devices decide
                return loss
            found_inf = None
        with self._aside():
            for group in self.param_groups:
                if group["kind"] == ADAMW:
                    adamw_step(group, self.state, found_inf)
        self._muon_step(work, cut, found_inf)
        self._aside.join()
        if not self._replicate_async:
            self._runtime.wait_publish()
        return loss

    def _heeds_found_inf(self, work: list[Batch], cut: list[Cut]) -> bool:
        """Whether all that runs reads `found_inf` itself."""
        return not any(params for _, params in cut) and all(
            self._fused.can_take(batch.plan, batch.pieces) for batch in work
        )

    def _muon_step(self, work: list[Batch], cut: list[Cut], found_inf: Tensor | None) -> None:
        parts = [batch.params for batch in work] + [params for _, params in cut]
        publication = Publication(self._runtime, chain.from_iterable(parts))
        for batch in work:
            copied = self._update(batch, found_inf)
            for param in batch.params:
                publication.updated(param, copied=copied)
            publication.advance()
        for update_slices in self._slice_updates:
            for group, params in cut:
                held = [(p, self.state[p.master][MOMENTUM]) for p in params if p.axis is update_slices.axis]
                update_slices(held, group, lr_scale)
        publication.finish()

    def _check_parameters(self) -> None:
        """At the first step: what this optimizer was given is what the model trains."""
        reshard(self._model)
        trained = set(self._model.parameters())
        if any(param not in trained for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                "parameters of the model were replaced after dmuon.Muon was made: call fully_shard and "
                "dmuon.materialize before dmuon.Muon"
            )
        self._is_checked = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; drops what `dmuon.no_sync` has accumulated as well."""
        super().zero_grad(set_to_none)
        discard_accumulated(self._model)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported once constructed: which parameters there are, and who updates them, the model says.

        Raises:
            RuntimeError: always.
        """
        if self._groups_are_final:
            raise RuntimeError(
                "dmuon.Muon has all trainable parameters of its model from the start: give some of them options of "
                'their own with dmuon.Muon(..., param_groups=[{"params": name pattern, "lr": ...}])'
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, from what `state_dict` returned on this rank, but every state tensor keeps its dtype.

        `dmuon.get_state_dict` with torch.distributed.checkpoint has no such limit: it loads on any mesh.

        Raises:
            ValueError: its groups are others, or it lacks state of a parameter that this rank holds.
        """
        held, groups = self.state, self.param_groups
        super().load_state_dict(state_dict)
        loaded, self.state = self.state, held
        lacking = [p for p, slots in held.items() if slots.keys() - loaded.get(p, {}).keys()]
        if lacking:
            self.param_groups = groups
            raise ValueError(
                f"the state dict lacks state of {len(lacking)} parameters that this rank holds: optimizer.state_dict() "
                "has what its own rank holds. dmuon.get_state_dict with torch.distributed.checkpoint loads on any mesh"
            )
        # Copied, for torch casts what it loads to the parameter's dtype, and shares what it need not cast.
        for param, slots in held.items():
            for slot, tensor in slots.items():
                tensor.copy_(loaded[param][slot])

    def _batches(self, grad_of: Callable[[nn.Parameter], Tensor | None]) -> list[Batch]:
        """Of the uncut matrices that this rank updates, those first whose units forward needs first."""
        found = []
        for group in self.param_groups:
            if group["kind"] == MUON:
                due = [self._dedicated[param] for param in group["params"] if grad_of(param) is not None]
                pieces = [(param, piece) for param in due for piece in self._pieces(param, grad_of(param.master))]
                for indices in batches([piece.master.shape for _, piece in pieces]):
                    params, parts = zip(*(pieces[index] for index in indices), strict=True)
                    plan = self._fused.plan([piece.master.shape for piece in parts], parts[0].master.device, group)
                    found.append(Batch(group, plan, params, parts))
        order = {param: place for place, param in enumerate(self._dedicated.values())}
        return sorted(found, key=lambda batch: order[batch.params[0]])

    def _cut(self, group: dict[str, Any]) -> list[DedicatedParameter]:
        params = (self._dedicated[param] for param in group["params"] if group["kind"] == MUON and is_due(param))
        return [param for param in params if param.is_cut]

    def newton_schulz_plan(self) -> list[str]:
        """A line about each batch of matrices that this rank updates, if all have gradients; cut ones are not in it."""
        return [str(batch.plan) for batch in self._batches(_if_held)]

    def _pieces(self, param: DedicatedParameter, grad: Tensor | None) -> Iterator[Piece]:
        """A parameter's matrices, or stacks of them of which none is larger than a batch may be; none of a cut one."""
        if param.is_cut:
            return
        tensors = [param.master, grad, self.state[param.master][MOMENTUM]]
        if self._runtime.has_copies and param.compute.dtype != torch.float32:  # else the master is its own copy
            tensors.append(param.compute.detach())
        for views in zip(*(param.matrices(tensor) for tensor in tensors), strict=True):
            sizes = stack_sizes(views[0].shape)
            yield from (Piece(*parts) for parts in zip(*(view.split(sizes) for view in views), strict=True))

    @annotated(lambda _self, batch, _found_inf: "dmuon::newton_schulz " + "x".join(map(str, batch.plan.shape)))
    def _update(self, batch: Batch, found_inf: Tensor | None) -> bool:
        """Returns whether compute copies were renewed with the masters."""
        plan, pieces = batch.plan, batch.pieces
        scale = lr_scale(batch.group["adjust_lr_fn"], pieces[0].master.shape)
        if self._fused.can_take(plan, pieces):
            self._fused(plan, pieces, batch.group, scale, found_inf)
            return pieces[0].compute is not None
        update_by_torch(pieces, batch.group, scale, dtype=plan.dtype, kernel=self._fused.kernel)
        return False


Cut = tuple[dict[str, Any], list[DedicatedParameter]]
"""A group, and those of its parameters of which other ranks have parts too."""


class Batch(NamedTuple):
    """Matrices of one shape that are updated together: pieces, and the parameter of each."""

    group: dict[str, Any]
    plan: BatchPlan
    params: Sequence[DedicatedParameter]
    pieces: Sequence[Piece]


def _if_held(param: nn.Parameter) -> nn.Parameter | None:
    return None if param.device.type == "meta" else param


def _gradient_if_due(param: nn.Parameter) -> Tensor | None:
    return param.grad if is_due(param) else None


def lr_scale(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """Factor on the learning rate of a matrix of this logical shape; of each matrix where it is a stack."""
    rows, cols = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))
