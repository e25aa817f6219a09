"""What the tensors of a model tell of its configuration: bottleneck sizes, dense projections, biases."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_boost.config import DENSE, PROJECTIONS, LlamaConfig, LowRankConfig
from lightning_boost.interchange.keys import FactorKeys, Tensors, owner

Sizes = Mapping[tuple[int, str], int | str]
"""Bottleneck size, or ``dense``, of each projection of each layer."""

_PARTS = {"attention": PROJECTIONS[:4], "mlp": PROJECTIONS[4:]}


def read_sizes(options: dict[str, Any], tensors: Tensors, factors: FactorKeys | None) -> Sizes:
    """Return the size of each projection for which there is a tensor.

    Args:
        options: The model's other sizes.
        tensors: By the keys of their format.
        factors: Those keys.

    Raises:
        ValueError: If a factor does not have the features that the other sizes ask for.
    """
    full_rank = LlamaConfig(**options, low_rank=LowRankConfig(kind="full_rank"))
    shapes = full_rank.projection_shapes()
    sizes: dict[tuple[int, str], int | str] = {}
    for layer, projection in _places(options):
        names = factors and factors(layer, full_rank.num_hidden_layers, owner(projection))
        if f"model.layers.{layer}.{owner(projection)}.weight" in tensors:
            sizes[layer, projection] = DENSE
        if names and names.factor_a in tensors:
            shape = tensors[names.factor_a].shape
            sizes[layer, projection] = _size(names.factor_a, shape, names.in_dim, shapes[projection][0])
    return sizes


def _places(options: dict[str, Any]) -> Iterator[tuple[int, str]]:
    yield from ((layer, name) for layer in range(options["num_hidden_layers"]) for name in PROJECTIONS)


def _size(key: str, shape: tuple[int, ...], in_dim: int, in_features: int) -> int:
    if len(shape) == 2 and shape[in_dim] == in_features:
        return shape[1 - in_dim]
    wanted = ["R", "R"]
    wanted[in_dim] = str(in_features)
    is_transposed = len(shape) == 2 and shape[1 - in_dim] == in_features
    raise ValueError(
        f"tensor {key} is {list(shape)} and must be [{', '.join(wanted)}], R the bottleneck size"
        f"{': it is transposed' if is_transposed else '; or the sizes in config.json are wrong'}."
    )


def read_biases(options: dict[str, Any], tensors: Tensors, factors: FactorKeys | None) -> dict[str, bool]:
    """Return ``attention_bias`` and ``mlp_bias``, which not every ``config.json`` states.

    Raises:
        ValueError: If some projections of attention, or of the MLP, have biases and others none.
    """
    having = set()
    for layer, projection in _places(options):
        names = factors and factors(layer, options["num_hidden_layers"], owner(projection))
        keys = {f"model.layers.{layer}.{owner(projection)}.bias", names.bias if names else ""}
        having |= {projection} if keys & tensors.keys() else set()
    for part, projections in _PARTS.items():
        with_bias = [projection for projection in projections if projection in having]
        if 0 < len(with_bias) < len(projections):
            raise ValueError(
                f"{', '.join(with_bias)} have biases and the other projections of {part} none, which this package's"
                f" model cannot express: {part}_bias puts one on each of {', '.join(projections)}."
            )
    return {f"{part}_bias": options.get(f"{part}_bias", False) or names[0] in having for part, names in _PARTS.items()}


def size_options(sizes: Sizes) -> dict[str, Any]:
    """Return the options of ``LowRankConfig`` that say these sizes: the commonest ones, then those that differ."""
    common = _commonest(sizes, PROJECTIONS)
    if common is None:
        return {}
    base = {part: _commonest(sizes, names) or common for part, names in _PARTS.items()}
    others: dict[str, int | str] = {}
    for projection in PROJECTIONS:
        expected = base["attention" if projection in _PARTS["attention"] else "mlp"]
        found = {layer: size for (layer, name), size in sizes.items() if name == projection}
        if len(set(found.values())) == 1:
            found_everywhere = next(iter(found.values()))
            others |= {projection: found_everywhere} if found_everywhere != expected else {}
        else:
            others |= {f"layers.{layer}.{projection}": size for layer, size in found.items() if size != expected}
    if base["attention"] == base["mlp"]:
        return {"bottleneck_size": base["mlp"], "other_bottleneck_sizes": others}
    return {**{f"{part}_bottleneck_size": size for part, size in base.items()}, "other_bottleneck_sizes": others}


def _commonest(sizes: Sizes, projections: tuple[str, ...]) -> int | None:
    numbers = Counter(size for (_, name), size in sizes.items() if name in projections and isinstance(size, int))
    return numbers.most_common(1)[0][0] if numbers else None
