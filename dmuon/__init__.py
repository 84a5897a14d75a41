"""Dedicated ownership and the Muon optimizer for FSDP2 models. Importing it has no side effect.

plan = dmuon.dedicate_params(model, mesh["shard"])   # before fully_shard
fully_shard(model, mesh=mesh["shard"])
optimizer = dmuon.Muon(model, lr=3e-4)
"""

from dmuon.accumulate import no_sync
from dmuon.clip import clip_grad_norm_
from dmuon.dedicate import dedicate_params, dedicated_params, process_groups
from dmuon.determinism import is_deterministic, set_deterministic
from dmuon.inspection import Inspection, inspect
from dmuon.materialize import materialize
from dmuon.muon import Muon
from dmuon.plan import Plan, PlanEntry
from dmuon.state_dict import get_state_dict, set_state_dict

__all__ = [
    "Inspection",
    "Muon",
    "Plan",
    "PlanEntry",
    "clip_grad_norm_",
    "dedicate_params",
    "dedicated_params",
    "get_state_dict",
    "inspect",
    "is_deterministic",
    "materialize",
    "no_sync",
    "process_groups",
    "set_deterministic",
    "set_state_dict",
]
