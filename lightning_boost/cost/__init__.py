"""What a model costs by formula: parameters, floating-point operations, and what its tensor axis moves."""

from lightning_boost.cost.flops import forward_flops, recompute_flops, training_flops
from lightning_boost.cost.parameters import count_parameters
from lightning_boost.cost.traffic import (
    CHUNKS,
    END_CHUNKS,
    Move,
    TensorAxis,
    Volume,
    add_up,
    end_moves,
    layer_moves,
    layer_traffic,
)

__all__ = [
    "CHUNKS",
    "END_CHUNKS",
    "Move",
    "TensorAxis",
    "Volume",
    "add_up",
    "count_parameters",
    "end_moves",
    "forward_flops",
    "layer_moves",
    "layer_traffic",
    "recompute_flops",
    "training_flops",
]
