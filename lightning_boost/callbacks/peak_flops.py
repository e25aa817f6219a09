"""How many operations a second a device can do, by its name."""

import re

PEAK_FLOPS = (
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("GH200",), 989e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("H800", "PCIe"), 756e12),
    (("H800",), 989e12),
    (("B200",), 2250e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("A40",), 149.7e12),
    (("A30",), 165e12),
    (("L40S",), 362e12),
    (("L4",), 121e12),
)
"""Words of a card's name, and its dense bf16 products of matrices per second by its maker's data sheet."""

_PARTS_OF_CARDS = {"MIG", "GRID"}
"""Words of the name of what has less than the card that it is also named after."""


def peak_flops_of(device_name: str) -> float | None:
    """Return a card's peak by the name that CUDA gives it; ``None`` if it is not in the table, or a part of a card."""
    words = set(re.split(r"[\s-]+", device_name))
    if words & _PARTS_OF_CARDS:
        return None
    return next((peak for needed, peak in PEAK_FLOPS if words.issuperset(needed)), None)
