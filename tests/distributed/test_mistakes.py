"""Every mistake in setting up a model is one error that says what to do, and is made before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dmuon
from tests.distributed import models
from tests.distributed.pool import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as mistake:
        return str(mistake)
    return ""


def attempts() -> dict[str, str]:
    hsdp = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    mesh = hsdp["shard"]
    tokens = models.batch(0)[0]

    def attempt(call: Callable[[models.SmallModel], Any], model: models.SmallModel | None = None) -> str:
        return error_of(lambda: call(model or models.SmallModel()))

    def dedicate(*args: Any, **kwargs: Any) -> str:
        return attempt(lambda model: dmuon.dedicate_params(model, *args, **kwargs))

    def after_fully_shard(model: models.SmallModel) -> None:
        fully_shard(model, mesh=mesh)
        dmuon.dedicate_params(model, mesh)

    def twice(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model.layers, mesh, hook_boundary_predicate=lambda m: isinstance(m, models.Block))
        dmuon.dedicate_params(model, mesh)

    def muon_on_meta(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model.to("meta"), mesh)
        dmuon.Muon(model)

    def muon_before_fully_shard(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model, mesh)
        optimizer = dmuon.Muon(model)
        fully_shard(model, mesh=mesh)
        model(tokens).sum().backward()
        optimizer.step()

    def tensor_parallel(model: models.SmallModel) -> None:
        parallelize_module(model.layers[0], mesh, {"up": ColwiseParallel()})
        dmuon.dedicate_params(model, mesh)

    def forward_on_meta(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model.to("meta"), mesh)
        model(tokens)

    def replaced(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model, mesh)
        model.layers[1].mix.weight = nn.Parameter(torch.zeros(24, 24))
        model(tokens)

    def integers(model: models.SmallModel) -> None:
        model.layers[0].table = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        dmuon.dedicate_params(model, mesh, lambda *_: True)

    def precision(param_dtype: torch.dtype | None, policies: list[MixedPrecisionPolicy]) -> str:
        def forward(model: models.SmallModel) -> None:
            dmuon.dedicate_params(model, mesh, param_dtype=param_dtype)
            fully_shard(model.layers[0].mix, mesh=mesh, mp_policy=policies[-1])
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policies[0])
            fully_shard(model, mesh=mesh, mp_policy=policies[0])
            model(tokens)

        return attempt(forward)

    def never_reduced(model: models.SmallModel) -> None:
        dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh)
        model.layers.requires_grad_(False)  # so that FSDP2 alone has gradients
        optimizer = dmuon.Muon(model)
        with dmuon.no_sync(model):
            model(tokens).sum().backward()
        optimizer.step()

    def rows_never_summed(model: models.SmallModel) -> None:
        rows = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, rows)
        fully_shard(model, mesh=rows["shard"])
        model(tokens)

    def tied_across_blocks(model: models.SmallModel) -> None:
        model.output.weight = model.layers[1].widen.weight = nn.Parameter(torch.zeros(24, 3))
        dmuon.dedicate_params(model, mesh, lambda name, _: "widen" in name)

    return {
        "after fully_shard": attempt(after_fully_shard),
        "twice": attempt(twice),
        "no names": dedicate(init_device_mesh("cpu", (2,))),
        "other axes": dedicate(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))),
        "two axes": dedicate(hsdp, replicate_mesh=hsdp["replicate"]),
        "nothing": dedicate(mesh, lambda *_: False),
        "nothing by default": error_of(lambda: dmuon.dedicate_params(nn.Linear(3, 4), mesh)),
        "no boundary": dedicate(mesh, lambda name, _: name == "output.weight"),
        "tied, one place without": attempt(tied_across_blocks),
        "integers": attempt(integers),
        "muon before": error_of(lambda: dmuon.Muon(models.SmallModel())),
        "muon on meta": attempt(muon_on_meta),
        "muon before fully_shard": attempt(muon_before_fully_shard),
        "never reduced": attempt(never_reduced),
        "tensor parallel": attempt(tensor_parallel),
        "forward on meta": attempt(forward_on_meta),
        "replaced": attempt(replaced),
        "split sum": dedicate(mesh, split={"*.up.weight": (60, 3)}),
        "split of nothing": dedicate(mesh, split={"*.fused.weight": (8, 8)}),
        "split of a stack": dedicate(mesh, lambda name, _: "experts" in name, split={"*experts": (1, 2)}),
        "rows never summed": attempt(rows_never_summed),
        "policy contradicts": precision(FP16, [MixedPrecisionPolicy(param_dtype=BF16)]),
        "policies contradict": precision(None, [MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16, BF16)]),
    }


def test_every_mistake_has_its_message(ranks: Callable[[int], RankPool]) -> None:
    expected = {
        "after fully_shard": "call dedicate_params before fully_shard",
        "twice": "its module layers before: call it once",
        "no names": "mesh_dim_names=",
        "other axes": "('dp', 'tp')",
        "two axes": "replicate_mesh=mesh['replicate']",
        "nothing": "the predicate must hold",
        "nothing by default": "pass predicate= and hook_boundary_predicate=",
        "no boundary": "no hook boundary for output.weight",
        "tied, one place without": "no hook boundary for layers.1.widen.weight",
        "integers": "layers.0.table has dtype torch.int8",
        "muon before": "call dmuon.dedicate_params(model, mesh) first",
        "muon on meta": "call dmuon.materialize",
        "muon before fully_shard": "call fully_shard and dmuon.materialize before dmuon.Muon",
        "never reduced": "accumulated under dmuon.no_sync were never reduced",
        "tensor parallel": "layers.0.up.weight is a DTensor",
        "forward on meta": "call dmuon.materialize",
        "replaced": "layers.1.mix.weight was replaced",
        "split sum": "split (60, 3) of layers.0.up.weight, shape (64, 24)",
        "split of nothing": "'*.fused.weight' matches no dedicated parameter",
        "split of a stack": "dim 0, of a 2-D parameter",
        "rows never summed": "fully_shard of the root module was given the shard axis alone",
        "policy contradicts": "param_dtype = torch.float16 was passed to dedicate_params, but fully_shard of layers.0",
        "policies contradict": "layers.0.mix.weight would compute in torch.bfloat16 and reduce in torch.bfloat16",
    }
    for messages in ranks(2).run(attempts):
        assert messages.keys() == expected.keys()
        for case, words in expected.items():
            assert words in messages[case], f"{case}: {messages[case]!r}"
            assert "\n" not in messages[case], case
