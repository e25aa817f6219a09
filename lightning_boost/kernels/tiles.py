"""Sizes of the tiles that one program of a kernel holds at a time."""

TILE = 2048
"""Values: 16 to a thread, which four warps read with two loads of 16 bytes each in bf16."""

MOST_FEATURES = 1024


def tile(width: int) -> tuple[int, int]:
    """Return rows and features of a tile over rows of ``width`` features, both powers of two."""
    features = min(max(power_of_two(width), 16), MOST_FEATURES)
    return TILE // features, features


def cover(size: int, part: int) -> int:
    """Return how many parts cover ``size``."""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` up."""
    return 1 << max(size - 1, 0).bit_length()
