"""A sentence for those who use the Trainer of the other package.

``pytorch_lightning`` holds the same classes as ``lightning.pytorch`` under another name; a strategy of one is none to
the other. Its Trainer would say that no strategy "boost" exists; it is given one that says what is wrong instead.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from typing_extensions import override

_STRATEGIES = "pytorch_lightning.strategies"


def refuse_other_namespace() -> None:
    """Have ``pytorch_lightning.Trainer(strategy="boost")`` explain itself, imported already or later."""
    if _STRATEGIES in sys.modules:
        _register_refusal(sys.modules[_STRATEGIES])
    else:
        sys.meta_path.insert(0, _Watcher())


def _register_refusal(strategies: ModuleType) -> None:
    def refuse(**_: object) -> None:
        raise ValueError(
            "strategy 'boost' needs the Trainer of lightning.pytorch; this is the one of pytorch_lightning, whose"
            " classes are not the same. Replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl`."
        )

    strategies.StrategyRegistry.register("boost", refuse, description="refused", override=True)


class _Watcher(MetaPathFinder):
    """Waits for the other package's strategies to be imported, adds the refusal, and is gone."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_refusal(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
