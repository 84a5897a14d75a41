"""Orthogonalise matrices that tensor parallelism has cut: on every tp rank of an owner, its slices in, its slices out.

plan = plan_orthogonalization([Layout((4096, 14336), sharded_dim=1), ...], tp_degree=2, strategy="auto")
slices = TensorParallelOrthogonalizer(plan, Axis(mesh["tp"]))(updates)
"""

from dmuon.tensor_parallel.layout import Layout
from dmuon.tensor_parallel.orthogonalizer import TensorParallelOrthogonalizer
from dmuon.tensor_parallel.plan import EXCHANGE, GRAM, LOCAL, OrthogonalizationPlan, Rates
from dmuon.tensor_parallel.strategy import STRATEGIES, plan_orthogonalization

__all__ = [
    "EXCHANGE",
    "GRAM",
    "LOCAL",
    "STRATEGIES",
    "Layout",
    "OrthogonalizationPlan",
    "Rates",
    "TensorParallelOrthogonalizer",
    "plan_orthogonalization",
]
