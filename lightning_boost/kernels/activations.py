"""Triton: σ and its derivative, by name, on fp32 values in registers."""

import triton
import triton.language as tl


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """``σ(z)``."""
    if ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    if ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0)
    if ACTIVATION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * z) - 1.0
    return z


@triton.jit
def derivative(z, ACTIVATION: tl.constexpr):
    """``σ'(z)``."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    if ACTIVATION == "gelu_tanh":
        # the tanh form is z · sigmoid(v)
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * z * z)
    if ACTIVATION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    if ACTIVATION == "tanh":
        s = tl.sigmoid(2.0 * z)
        return 4.0 * s * (1.0 - s)
    return tl.full(z.shape, 1.0, tl.float32)
