"""Checks and times every kernel on a GPU: ``python tests/gpu/run.py [--repetitions 20]``; takes some minutes.

torch and Triton alone are needed: where Lightning is missing, the package's parts are imported without its own
beginning, which imports that.
"""

import sys
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("lightning", "datasets", "jsonargparse", "torchmetrics", "rich", "safetensors", "jinja2")


def main() -> int:
    """Return 1 if a kernel has failed."""
    # not as a part of `tests`: an environment may have a package of that name
    sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
    if not all(map(find_spec, NEEDED)):
        package = types.ModuleType("lightning_boost")
        package.__path__ = [str(ROOT / "lightning_boost")]
        sys.modules["lightning_boost"] = package
    return import_module("kernels_on_gpu").main()


if __name__ == "__main__":
    sys.exit(main())
