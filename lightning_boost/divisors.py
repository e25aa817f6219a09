"""Divisors, by which a vector becomes a matrix."""

from math import isqrt


def balanced_divisors(number: int) -> tuple[int, int]:
    """Return the two divisors nearest to one another whose product a number is, the smaller first."""
    smaller = next(divisor for divisor in range(isqrt(number), 0, -1) if number % divisor == 0)
    return smaller, number // smaller
