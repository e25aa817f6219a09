"""Which sizes a run's mesh has: what was given, what is left to find, and what the model allows."""

from dataclasses import dataclass

from lightning_boost.data_parallel import DataAxis
from lightning_boost.layout import Decoder
from lightning_boost.mesh import AutoSize, ParallelSizes
from lightning_boost.tensor_parallel.check import check_tensor_size, legal_sizes
from lightning_boost.tensor_parallel.scheme import scheme_for


@dataclass(frozen=True, kw_only=True)
class RequestedSizes:
    """The sizes as a user gave them, and the processes there are.

    Raises:
        ValueError: If a size is neither ``"auto"`` nor a whole number of at least 1, or the data axis is unknown.
    """

    tensor_parallel_size: AutoSize
    data_parallel_size: AutoSize
    data_axis: DataAxis

    def __post_init__(self) -> None:
        sizes = {"tensor_parallel_size": self.tensor_parallel_size, "data_parallel_size": self.data_parallel_size}
        ParallelSizes(**{name: size for name, size in sizes.items() if size != "auto"})
        if self.data_axis not in ("replicate", "shard", "hybrid"):
            raise ValueError(f"data_axis ({self.data_axis!r}) must be one of 'replicate', 'shard', 'hybrid'.")

    def check_world(self, world_size: int, num_nodes: int) -> None:
        """Check what can be checked before the model is known.

        Raises:
            ValueError: If the given sizes cannot multiply to ``world_size``, or the data axis needs more nodes.
        """
        if self.data_axis == "hybrid" and num_nodes == 1:
            raise ValueError(
                "data_axis ('hybrid') must be 'shard' or 'replicate' on one node: it shares out inside a node and"
                " replicates across nodes."
            )
        given = [size for size in (self.tensor_parallel_size, self.data_parallel_size) if size != "auto"]
        if len(given) == 2:
            self._sizes(*given, num_nodes=1).check_world(world_size)
        elif given and world_size % given[0]:
            name = "tensor_parallel_size" if self.tensor_parallel_size != "auto" else "data_parallel_size"
            raise ValueError(
                f"{name} ({given[0]}) must divide the number of processes ({world_size}, devices × num_nodes);"
                f" set devices to a multiple of {given[0]}, or the size to a divisor of {world_size}."
            )

    def check_same(self, sizes: ParallelSizes, data_axis: DataAxis) -> None:
        """Check that a model that an earlier Trainer has spread is wanted as it is.

        Args:
            sizes: Those of its mesh.
            data_axis: How its replicas keep parameters; means nothing to a single one.

        Raises:
            ValueError: If other sizes or another data axis are given now.
        """
        way_out = "Build the module anew for another layout; checkpoints load on any."
        for name in ("tensor_parallel_size", "data_parallel_size"):
            wanted, there = getattr(self, name), getattr(sizes, name)
            if wanted not in ("auto", there):
                raise ValueError(
                    f"{name} ({wanted}) must be {there}: an earlier Trainer has spread this module so. {way_out}"
                )
        if sizes.data_parallel_size > 1 and self.data_axis != data_axis:
            raise ValueError(
                f"data_axis ({self.data_axis!r}) must be {data_axis!r}: an earlier Trainer has spread this module so."
                f" {way_out}"
            )

    def resolve(self, decoder: Decoder, num_processes: int, num_nodes: int) -> ParallelSizes:
        """Return the mesh's sizes for a model.

        ``"auto"``: the tensor axis takes the largest legal size that divides the processes of a node, and those that
        the data axis leaves; the data axis takes the rest.

        Args:
            decoder: Tells the legal tensor sizes.
            num_processes: Of each node.
            num_nodes: Nodes.

        Raises:
            ValueError: If the model does not allow the sizes, or they do not multiply to all processes.
        """
        world_size = num_processes * num_nodes
        self.check_world(world_size, num_nodes)
        given_tensor, given_data = self.tensor_parallel_size, self.data_parallel_size
        if given_tensor == "auto":
            left = world_size if given_data == "auto" else world_size // given_data
            tensor = max(size for size in legal_sizes(decoder) if num_processes % size == 0 and left % size == 0)
        else:
            tensor = given_tensor
        data = world_size // tensor if given_data == "auto" else given_data
        sizes = self._sizes(tensor, data, num_nodes=num_nodes)
        sizes.check_world(world_size)
        if tensor > 1:
            check_tensor_size(decoder, tensor)
            scheme_for(decoder).check(decoder)
        return sizes

    def _sizes(self, tensor: int, data: int, *, num_nodes: int) -> ParallelSizes:
        replicas = num_nodes if self.data_axis == "hybrid" else 1
        return ParallelSizes(tensor_parallel_size=tensor, data_parallel_size=data, data_replicate_size=replicas)
