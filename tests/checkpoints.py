"""Models of other projects, in files, and what their own code gives for them."""

import json
import re
from pathlib import Path

from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"
CHECKPOINTS = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def expected(name):
    """Return a batch, the logits and the loss, and the norms of gradients under our names where they are known."""
    found = load_file(DATA / name / "expected.safetensors")
    file = DATA / name / "expected_grad_norms.json"
    norms = json.loads(file.read_text()) if file.exists() else {}
    return found, {re.sub(r"cola_([ab])", r"factor_\1.weight", key): norm for key, norm in norms.items()}
