"""What a Lightning user has without this package: torch's tensor parallelism, planned on the factor pairs.

In ``ModelParallelStrategy`` such a plan is applied in the module's ``configure_model``, on ``device_mesh``.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from lightning_boost.model.low_rank import LowRankLinear


def plan_factor_pairs(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return torch's plan: each ``A`` split over the bottleneck, each ``B`` with it, and its output summed whole."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            plan[f"{name}.factor_a"] = ColwiseParallel()
            plan[f"{name}.factor_b"] = RowwiseParallel()
    return plan


def apply_plan(model: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Split a model's factor pairs over a mesh of one axis, in place, by torch's own means."""
    parallelize_module(model, tensor_mesh, plan_factor_pairs(model))
