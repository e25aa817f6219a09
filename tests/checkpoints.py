"""Models of other projects, in files, and what their own code gives for them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lightning_boost.interchange.own import BOOST
from tests.models import one_process_model

DATA = Path(__file__).parent / "data"
CHECKPOINTS = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def expected(name):
    """Return a batch, the logits and the loss, and the norms of gradients under our names where they are known."""
    found = load_file(DATA / name / "expected.safetensors")
    file = DATA / name / "expected_grad_norms.json"
    norms = json.loads(file.read_text()) if file.exists() else {}
    return found, {re.sub(r"cola_([ab])", r"factor_\1.weight", key): norm for key, norm in norms.items()}


def write_model(folder, config, dtype=torch.float32):
    """Write a model of random weights in this package's own format."""
    model = one_process_model(config, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which start all alike
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder.mkdir()
    save_file(dict(model.named_parameters()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BOOST.write_config(config)))
    return folder


def tensors_of(folder):
    """Return all tensors of a directory, from one file or several."""
    files = [load_file(file) for file in folder.glob("model*.safetensors")]
    return {key: tensor for file in files for key, tensor in file.items()}


def same_tensors(first, second):
    """Whether two directories hold the same bits under the same keys."""
    mine, others = tensors_of(first), tensors_of(second)
    return mine.keys() == others.keys() and all(
        torch.equal(tensor.view(torch.uint8), others[key].view(torch.uint8)) for key, tensor in mine.items()
    )
