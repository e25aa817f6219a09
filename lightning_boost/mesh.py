"""The device mesh: names of its axes, sizes checked against the world, and its construction.

"Axis" always means an axis of the mesh; tensors have dims.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

PIPELINE_AXIS = "pipeline_parallel"
DATA_AXIS = "data_parallel"
TENSOR_AXIS = "tensor_parallel"

REPLICATE_AXIS = "data_replicate"
"""The outer part of a hybrid data axis, across nodes."""

SHARD_AXIS = "data_shard"
"""The inner part of a hybrid data axis, inside a node."""

AutoSize = int | Literal["auto"]
"""A number of processes, or ``"auto"`` for one that the strategy finds."""


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Number of processes along each axis of the mesh, the tensor axis innermost.

    Raises:
        ValueError: If a size is below 1.
    """

    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_replicate_size: int = 1
    """Of a hybrid data axis: how many groups of the data-parallel processes replicate one another; a part of
    ``data_parallel_size``, not a factor beside it."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} ({size!r}) must be a whole number of at least 1.")
        if self.data_parallel_size % self.data_replicate_size:
            raise ValueError(
                f"data_parallel_size ({self.data_parallel_size}) must be a multiple of the number of nodes"
                f" ({self.data_replicate_size}) that a hybrid data axis replicates over."
            )

    @property
    def world_size(self) -> int:
        """Processes of the whole mesh."""
        return self.pipeline_parallel_size * self.data_parallel_size * self.tensor_parallel_size

    def check_world(self, world_size: int) -> None:
        """Check that the mesh takes every process exactly once.

        Raises:
            ValueError: If the sizes do not multiply to ``world_size``.
        """
        if self.world_size != world_size:
            factors = {name: size for name, size in vars(self).items() if name != "data_replicate_size"}
            given = {name: size for name, size in factors.items() if size > 1} or {"tensor_parallel_size": 1}
            product = " × ".join(f"{name} ({size})" for name, size in given.items())
            raise ValueError(
                f"{product} = {self.world_size} must equal the number of processes ({world_size}, devices × num_nodes);"
                f" set devices to {self.world_size}, or the sizes so that they multiply to {world_size}."
            )

    def __str__(self) -> str:
        axes = {
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "data": self.data_parallel_size,
        }
        used = [f"{name} {size}" for name, size in axes.items() if size > 1]
        return " × ".join(used) if used else "one process"


def build_mesh(sizes: ParallelSizes, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Build the mesh of all processes; the process group must exist.

    With a hybrid data axis there are two axes in its place, and ``mesh[DATA_AXIS]`` is both.

    Args:
        sizes: Processes along each axis.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: Of collectives on an axis; ``None``: torch's own, whatever that of the process group is.
    """
    pipeline, data, tensor = sizes.pipeline_parallel_size, sizes.data_parallel_size, sizes.tensor_parallel_size
    shape: tuple[int, ...] = (pipeline, data, tensor)
    names: tuple[str, ...] = (PIPELINE_AXIS, DATA_AXIS, TENSOR_AXIS)
    if sizes.data_replicate_size > 1:
        shape = (pipeline, sizes.data_replicate_size, data // sizes.data_replicate_size, tensor)
        names = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if sizes.data_replicate_size > 1:
        mesh[REPLICATE_AXIS, SHARD_AXIS]._flatten(DATA_AXIS)
    if timeout is not None:
        for name in {*names, DATA_AXIS}:
            # new groups do not take over the timeout of the first
            _set_pg_timeout(timeout, mesh[name].get_group())
    return mesh


def legal_tensor_sizes(*must_divide: int) -> list[int]:
    """Return the tensor sizes that divide every one of the given counts (heads, hidden features)."""
    smallest = min(must_divide)
    return [size for size in range(1, smallest + 1) if all(count % size == 0 for count in must_divide)]


def shard_bounds(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return where shard ``index`` of a dim of ``size`` starts and ends.

    The rule is that of ``torch.chunk`` and DTensor: every shard takes ``ceil(size / num_shards)``, the last ones less,
    even nothing.
    """
    width = -(-size // num_shards)
    start = min(index * width, size)
    return start, min(start + width, size)
