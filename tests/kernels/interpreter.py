"""Triton's interpreter, made to round as a GPU does."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_as_a_gpu():
    """Let bf16 be rounded to the nearest: the interpreter cuts, which pulls everything towards zero."""
    original = interpreter._convert_float
    if getattr(original, "rounds", False):
        return

    def convert(values, source, target, rounding_mode):
        if source != tl.float32 or target != tl.bfloat16:
            return original(values, source, target, rounding_mode)
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()

    convert.rounds = True
    interpreter._convert_float = convert
