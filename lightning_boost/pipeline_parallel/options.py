"""What a user chooses of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b"]
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")

_AUTO_MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Schedule of a pipeline, micro-batches and layers.

    Raises:
        ValueError: If a value is out of range, or the schedule is unknown or one that would run backwards twice.
    """

    schedule: Schedule = "1f1b"
    num_microbatches: int | None = None
    """Parts of a batch that follow one another; ``None``: the most, up to four for each process of the axis, that
    divide it."""

    virtual_stages: int = 1
    """Stages on each process, above 1 with ``interleaved_1f1b``."""

    layers_per_stage: Sequence[int] | None = None
    """Number of layers of each stage, in order; ``None``: balanced by their cost."""

    def __post_init__(self) -> None:
        _check_whole("num_microbatches", self.num_microbatches)
        _check_whole("virtual_stages", self.virtual_stages)
        if self.layers_per_stage is not None:
            if isinstance(self.layers_per_stage, str) or not isinstance(self.layers_per_stage, Sequence):
                raise ValueError(
                    f"layers_per_stage ({self.layers_per_stage!r}) must be a list of whole numbers, one for each stage."
                )
            for count in self.layers_per_stage:
                _check_whole("each of layers_per_stage", count)
            # equal however it was written
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        if self.schedule not in SCHEDULES:
            zero_bubble = any(word in str(self.schedule).lower() for word in ("zero", "zb", "dual"))
            raise ValueError(
                f"pipeline_schedule ({self.schedule!r}) must be one of {', '.join(map(repr, SCHEDULES))}"
                + (": zero-bubble schedules would run each fused backward twice." if zero_bubble else ".")
            )
        if (self.virtual_stages > 1) != (self.schedule == "interleaved_1f1b"):
            raise ValueError(
                f"virtual_stages ({self.virtual_stages}) must be at least 2 with pipeline_schedule 'interleaved_1f1b',"
                f" and 1 with the others ({self.schedule!r} is given)."
            )

    def check(self, pipeline_parallel_size: int) -> None:
        """Check the number of micro-batches against the pipeline.

        Raises:
            ValueError: If there are fewer micro-batches than processes on the axis, or interleaving does not go up.
        """
        given, size = self.num_microbatches, pipeline_parallel_size
        if given is None:
            return
        if given < size:
            raise ValueError(
                f"num_microbatches ({given}) must be at least pipeline_parallel_size ({size}), so that every stage has"
                f" something to do; set it to {size} or more."
            )
        if self.schedule == "interleaved_1f1b" and given % size:
            raise ValueError(
                f"num_microbatches ({given}) must be a multiple of pipeline_parallel_size ({size}) with"
                f" 'interleaved_1f1b'; the nearest is {max(1, round(given / size)) * size}."
            )

    def count_for(self, num_samples: int, size: int) -> int:
        """Return into how many micro-batches a batch is cut on a pipeline of ``size`` processes.

        A batch that is smaller than the number asked for is cut into single samples, or filled up where even the
        processes are more.
        """
        step = size if self.schedule == "interleaved_1f1b" else 1
        if self.num_microbatches is not None:
            most = min(self.num_microbatches, max(num_samples, size))
            return most - most % step
        most = _AUTO_MICROBATCHES_PER_STAGE * size
        dividing = [count for count in range(size, most + 1, step) if num_samples % count == 0]
        return max(dividing, default=size)

    def bubble_share(self, num_microbatches: int, size: int) -> float:
        """Return the share of a step in which a process has nothing to do, by the formula of the schedule.

        It is ``(p - 1) / (m + p - 1)`` for ``m`` micro-batches and stages that all take the same time, and with ``v``
        stages on each of the ``p`` processes ``(p - 1) / v`` in the place of ``p - 1``. Transfers take none.
        """
        idle = (size - 1) / self.virtual_stages
        return idle / (num_microbatches + idle)


def _check_whole(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1.")
