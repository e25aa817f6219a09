"""Which sizes a run's mesh has: what was given, what is left to find, and what the model allows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_boost.compilation import check_to_compile, hooked_modules
from lightning_boost.data_parallel import DataAxis
from lightning_boost.layout import Decoder
from lightning_boost.mesh import AutoSize, ParallelSizes
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.split import check_pipeline
from lightning_boost.recompute import AsksForRecompute, RecomputeOptions, check_layers
from lightning_boost.tensor_parallel.check import check_tensor_size, legal_sizes
from lightning_boost.tensor_parallel.scheme import SCHEMES, SchemeName, scheme_for

_WAY_OUT = "Build the module anew for another layout; checkpoints load on any."


@dataclass(frozen=True, kw_only=True)
class RequestedSizes:
    """The sizes as a user gave them, and the processes there are.

    Raises:
        ValueError: If a size is neither ``"auto"`` nor a whole number of at least 1, or the data axis is unknown.
    """

    tensor_parallel_size: AutoSize
    data_parallel_size: AutoSize
    pipeline_parallel_size: int
    data_axis: DataAxis
    pipeline: PipelineOptions
    recompute: RecomputeOptions
    scheme: SchemeName = "auto"
    compiles: bool = False

    def __post_init__(self) -> None:
        ParallelSizes(**self._given())
        if self.data_axis not in ("replicate", "shard", "hybrid"):
            raise ValueError(f"data_axis ({self.data_axis!r}) must be one of 'replicate', 'shard', 'hybrid'.")
        if self.scheme not in ("auto", *SCHEMES):
            names = ", ".join(map(repr, ("auto", *SCHEMES)))
            raise ValueError(f"scheme ({self.scheme!r}) must be one of {names}.")
        if not isinstance(self.compiles, bool):
            raise ValueError(f"compile ({self.compiles!r}) must be True or False.")
        if self.compiles and self.recompute.store_latents == "sharded":
            raise ValueError(
                "store_latents ('sharded') must be 'whole' where compile is True: a graph's latents are gathered by"
                " nobody. Set compile to False to keep a share of them."
            )
        self.pipeline.check(self.pipeline_parallel_size)
        if self.pipeline_parallel_size == 1 and self.pipeline != PipelineOptions():
            rank_zero_warn(
                "pipeline_schedule, num_microbatches, virtual_stages and layers_per_stage mean nothing with"
                " pipeline_parallel_size 1, and are not used."
            )
        if self.recompute.kind == "none" and self.recompute != RecomputeOptions():
            rank_zero_warn(
                "recompute_every, keep_attention and store_latents mean nothing with recompute 'none', and are not"
                " used."
            )

    def _given(self) -> dict[str, int]:
        names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) != "auto"}

    def joined_by(self, callbacks: Sequence[object]) -> "RequestedSizes":
        """Return what the strategy and a Trainer's callbacks request together.

        Raises:
            ValueError: If recompute is chosen in two places.
        """
        asking = [callback for callback in callbacks if isinstance(callback, AsksForRecompute)]
        if not asking:
            return self
        name = type(asking[0]).__name__
        if len(asking) > 1:
            raise ValueError(
                f"callback {name} must be given once, and is given {len(asking)} times. Leave out all but one."
            )
        if self.recompute.kind != "none":
            raise ValueError(
                f"recompute ({self.recompute.kind!r}) of the strategy must be 'none' beside the callback {name}, which"
                " chooses it too. Leave out one of the two."
            )
        return replace(self, recompute=asking[0].recompute_options)

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
        given = self._given()
        if len(given) == 3:
            ParallelSizes(**given).check_world(world_size)
        elif world_size % prod(given.values()):
            used = {name: size for name, size in given.items() if size > 1}
            product = prod(used.values())
            raise ValueError(
                f"{' × '.join(f'{name} ({size})' for name, size in used.items())} must divide the number of processes"
                f" ({world_size}, devices × num_nodes); set devices to a multiple of {product}, or the sizes so that"
                f" they divide {world_size}."
            )

    def check_same(self, sizes: ParallelSizes, before: "RequestedSizes") -> None:
        """Check that a model that an earlier Trainer has spread is wanted as it is.

        Args:
            sizes: Those of its mesh.
            before: What was requested then; the data axis means nothing to a single replica, the pipeline's options
                nothing to a single stage.

        Raises:
            ValueError: If other sizes or options are given now.
        """
        there: dict[str, tuple[Any, Any]] = {
            name: (getattr(sizes, name), wanted) for name, wanted in self._given().items()
        }
        if sizes.tensor_parallel_size > 1:
            there["scheme"] = before.scheme, self.scheme
        if sizes.data_parallel_size > 1:
            there["data_axis"] = before.data_axis, self.data_axis
        if sizes.pipeline_parallel_size > 1:
            for name, value in vars(self.pipeline).items():
                option = "pipeline_schedule" if name == "schedule" else name
                there[option] = getattr(before.pipeline, name), value
        for name, value in vars(self.recompute).items():
            option = {"kind": "recompute", "every": "recompute_every"}.get(name, name)
            there[option] = getattr(before.recompute, name), value
        there["compile"] = before.compiles, self.compiles
        for name, (value, wanted) in there.items():
            if wanted != value:
                raise ValueError(
                    f"{name} ({wanted!r}) must be {value!r}: an earlier Trainer has spread this module so. {_WAY_OUT}"
                )

    def resolve(self, decoder: Decoder, num_processes: int, num_nodes: int) -> ParallelSizes:
        """Return the mesh's sizes for a model.

        ``"auto"``: the tensor axis takes the largest legal size that divides the processes of a node, and those that
        the other axes leave; the data axis takes the rest.

        Args:
            decoder: Tells the legal tensor sizes.
            num_processes: Of each node.
            num_nodes: Nodes.

        Raises:
            ValueError: If the model does not allow the sizes, or they do not multiply to all processes.
        """
        world_size, given = num_processes * num_nodes, self._given()
        self.check_world(world_size, num_nodes)
        left = world_size // prod(given.values())
        tensor = given.get("tensor_parallel_size")
        if tensor is None:
            tensor = max(size for size in legal_sizes(decoder) if num_processes % size == 0 and left % size == 0)
        pipeline = self.pipeline_parallel_size
        data = given.get("data_parallel_size", world_size // (tensor * pipeline))
        sizes = ParallelSizes(
            pipeline_parallel_size=pipeline,
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            data_replicate_size=_nodes_of_a_stage(data, tensor, num_processes) if self.data_axis == "hybrid" else 1,
        )
        sizes.check_world(world_size)
        if tensor > 1:
            check_tensor_size(decoder, tensor)
            scheme_for(decoder, self.scheme).check(decoder)
        if pipeline > 1:
            check_pipeline(decoder, pipeline, self.pipeline)
        if self.compiles:
            self._check_to_compile(decoder, tensor)
        if self.recompute.kind != "none":
            check_layers(decoder)
            if self.recompute.store_latents == "sharded" and tensor == 1:
                rank_zero_warn(
                    "store_latents ('sharded') means nothing with tensor_parallel_size 1, where nobody keeps the"
                    " others' shares: latents are kept whole."
                )
        return sizes

    def _check_to_compile(self, decoder: Decoder, tensor: int) -> None:
        check_to_compile(decoder)
        hooked = hooked_modules(decoder)
        if hooked:
            rank_zero_warn(
                f"compile (True) means nothing for layers with hooks on modules inside of them ({hooked[0]}), which run"
                " as they are for as long as the hooks are there."
            )
        begins, _ = scheme_for(decoder, self.scheme).split_region(decoder) if tensor > 1 else ([], [])
        if any(name.startswith(f"{layer}.") for name in begins for layer in decoder.layers):
            raise ValueError(
                f"compile (True) must be False with scheme {self.scheme!r} on a tensor axis, where random streams"
                " change inside a layer. Set compile to False, or take scheme 'bottleneck'."
            )


def _nodes_of_a_stage(data: int, tensor: int, num_processes: int) -> int:
    """Return how many nodes of ``num_processes`` replicate one another on a hybrid data axis."""
    of_a_stage = data * tensor
    if of_a_stage % num_processes and num_processes % of_a_stage:
        raise ValueError(
            f"data_axis ('hybrid') must be 'shard' or 'replicate' with data_parallel_size ({data}) ×"
            f" tensor_parallel_size ({tensor}) = {of_a_stage} processes of a pipeline stage on nodes of"
            f" {num_processes}: they neither fill whole nodes nor share one evenly with other stages."
        )
    return max(1, of_a_stage // num_processes)
