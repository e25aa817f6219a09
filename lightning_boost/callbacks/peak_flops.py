"""How many operations a second a GPU can do, by its name."""

import re
from typing import NamedTuple


class Card(NamedTuple):
    """A kind of GPU."""

    words: tuple[str, ...]
    """Of the name that CUDA gives it, all of them."""

    peak_flops: float
    """Operations per second of matrix products in bf16, dense: half of what a data sheet gives "with sparsity"."""

    data_sheet: str
    """Of NVIDIA, and what it says in TFLOPS."""


CARDS = (
    Card(("B200",), 2250e12, "HGX B200, a GPU: FP16/BF16 Tensor Core 4,500 with sparsity"),
    Card(("GH200",), 990e12, "GH200 Grace Hopper Superchip: BFLOAT16 Tensor Core 990, 1,979 with sparsity"),
    Card(("H200", "NVL"), 835e12, "H200 Tensor Core GPU, H200 NVL: BFLOAT16 Tensor Core 1,671 with sparsity"),
    Card(("H200",), 989e12, "H200 Tensor Core GPU, H200 SXM: BFLOAT16 Tensor Core 1,979 with sparsity"),
    Card(("H100", "NVL"), 835e12, "H100 Tensor Core GPU, H100 NVL: BFLOAT16 Tensor Core 1,671 with sparsity"),
    Card(("H100", "PCIe"), 756e12, "H100 Tensor Core GPU, H100 PCIe: BFLOAT16 Tensor Core 1,513 with sparsity"),
    Card(("H100",), 989e12, "H100 Tensor Core GPU, H100 SXM: BFLOAT16 Tensor Core 1,979 with sparsity"),
    Card(("A100",), 312e12, "A100 Tensor Core GPU, PCIe and SXM: BFLOAT16 Tensor Core 312, 624 with sparsity"),
    Card(("A40",), 149.7e12, "A40: BF16 Tensor with FP32 accumulate 149.7, 299.4 with sparsity"),
    Card(("A30",), 165e12, "A30 Tensor Core GPU: BFLOAT16 Tensor Core 165, 330 with sparsity"),
    Card(("L40S",), 362e12, "L40S: BFLOAT16 Tensor Core 362.05, 733 with sparsity"),
    Card(("L4",), 121e12, "L4 Tensor Core GPU: BFLOAT16 Tensor Core 242 with sparsity"),
)
"""The first that fits is taken. Lightning's own table has figures with sparsity among those without."""

_PARTS_OF_CARDS = {"MIG", "GRID"}
"""Words of the name of what has less than the card that it is also named after."""


def peak_flops_of(device_name: str) -> float | None:
    """Return a card's peak by the name that CUDA gives it; ``None`` if it is not in the table, or a part of a card."""
    words = set(re.split(r"[\s-]+", device_name))
    if words & _PARTS_OF_CARDS:
        return None
    return next((card.peak_flops for card in CARDS if words.issuperset(card.words)), None)
