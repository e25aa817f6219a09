"""What a model costs by formula: parameters, operations, what its tensor axis moves, and what recompute keeps."""

from lightning_boost.cost.flops import forward_flops, recompute_flops, training_flops
from lightning_boost.cost.parameters import count_parameters
from lightning_boost.cost.recompute import KeptValues, kept_values
from lightning_boost.cost.traffic import (
    CHUNKS,
    END_CHUNKS,
    Move,
    TensorAxis,
    Volume,
    add_up,
    border_moves,
    end_moves,
    layer_moves,
    layer_traffic,
)

__all__ = [
    "CHUNKS",
    "END_CHUNKS",
    "KeptValues",
    "Move",
    "TensorAxis",
    "Volume",
    "add_up",
    "border_moves",
    "count_parameters",
    "end_moves",
    "forward_flops",
    "kept_values",
    "layer_moves",
    "layer_traffic",
    "recompute_flops",
    "training_flops",
]
