"""Train low-rank language models with PyTorch Lightning, exactly and faster: ``Trainer(strategy="boost")``.

Importing this package makes the strategy known to Lightning under that name.
"""

import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution

if sys.platform == "win32":
    raise ImportError("lightning_boost runs on Linux, and on macOS as far as it goes; Windows is not supported.")

from lightning.pytorch.strategies import StrategyRegistry

from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel, Perplexity
from lightning_boost.layout import DecoderLayout, LoneProjection, ProjectionGroup
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.loss import NextTokenLoss
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.strategy.boost import BoostParallelStrategy
from lightning_boost.strategy.other_namespace import refuse_other_namespace

__all__ = [
    "BoostParallelStrategy",
    "DecoderLayout",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LoneProjection",
    "LowRankConfig",
    "LowRankLanguageModel",
    "LowRankLinear",
    "NextTokenLoss",
    "Perplexity",
    "ProjectionGroup",
    "TextDataModule",
]


def _register_strategy() -> None:
    StrategyRegistry.register(
        BoostParallelStrategy.strategy_name,
        BoostParallelStrategy,
        description="Bottleneck-aware parallel training of low-rank language models",
        override=True,
    )


def _warn_of_namesake() -> None:
    """Say so where another project of nearly this name, which installs the same import package, is installed too."""
    try:
        namesake = distribution("lightning-boost")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"the distribution lightning-boost {namesake.version} is installed beside this one. It is another project and"
        " installs a package of the same name, lightning_boost, so files of the two may be mixed:"
        " pip uninstall lightning-boost, then install lightning-boost-parallel again.",
        stacklevel=2,
    )


_register_strategy()
_warn_of_namesake()
refuse_other_namespace()
