"""Models on a pipeline that call their layers, and return their loss, in the ways that users' models do."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import DecoderLayer, LlamaForCausalLM
from lightning_boost.model.rotary import rotary_tables
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel import places, stage
from lightning_boost.pipeline_parallel.options import PipelineOptions
from tests.models import CPU, SEED, gradient_errors, masked_batch, small_config
from tests.processes import run_processes


class _TupleLayer(DecoderLayer):
    """Returns what Hugging Face's layers returned for years: a tuple that begins with the hidden state."""

    def forward(self, hidden_states, rotary=None, mask=None, use_cache=False):
        hidden = super().forward(hidden_states, rotary, mask)
        return (hidden, "cache") if use_cache else (hidden,)


class _TensorLayer(DecoderLayer):
    def forward(self, hidden_states, rotary=None, mask=None, use_cache=False):
        return super().forward(hidden_states, rotary, mask)


class _UsersModel(LlamaForCausalLM):
    """Its layers have a kind, are called by keyword, and its loss comes among other outputs.

    Args:
        config: Sizes.
        layer_class: Tells what a layer returns.
        use_cache: Whether a layer returns something beside.
        form: In which the loss is returned.
    """

    def __init__(self, config, layer_class, use_cache, form):
        super().__init__(config)
        layers = [layer_class(config, index) for index in range(config.num_hidden_layers)]
        for index, layer in enumerate(layers):
            layer.kind = f"kind {index}"
        self.model.layers = nn.ModuleList(layers)
        self.returns_tuples, self.use_cache, self.form = layer_class is _TupleLayer, use_cache, form

    def forward(self, input_ids=None, labels=None):
        hidden = self.model.embed_tokens(input_ids)
        rotary = rotary_tables(torch.arange(input_ids.shape[-1]), input_ids.shape[-1], self.config, like=hidden)
        tables = {f"kind {index}": rotary for index in range(self.config.num_hidden_layers)}
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            output = layer(hidden_states=hidden, rotary=tables[layer.kind], use_cache=self.use_cache)
            hidden = output[0] if self.returns_tuples else output
            self.cache = output[1] if self.use_cache else None
        hidden = self.model.norm(hidden)
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss(hidden, self.lm_head.weight, labels)
        if self.form == "mapping":
            return {"loss": loss, "logits": logits}
        return SimpleNamespace(loss=loss, logits=logits) if self.form == "object" else (loss, logits)


class _NeedsLabels(_UsersModel):
    def forward(self, input_ids, labels, *, mask):
        return super().forward(input_ids, labels)


class _NeedsObject(_UsersModel):
    def forward(self, input_ids, labels=None, *, scales):
        return super().forward(input_ids.remainder(scales[0]), labels)


LOSSES = {
    "mapping": lambda output: output["loss"],
    "object": lambda output: output.loss,
    "tuple": lambda output: output[0],
}


def _trained(layer_class, use_cache, form, options, model_class=_UsersModel, others=None):
    config = small_config(num_hidden_layers=4)
    with torch.device("meta"):
        model, reference = (model_class(config, layer_class, use_cache, form) for _ in range(2))
    initialize(reference, seed=SEED)
    mesh = build_mesh(ParallelSizes(pipeline_parallel_size=2), "cpu")
    state = torch.get_rng_state()
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, pipeline=PipelineOptions(**options))
    assert torch.equal(torch.get_rng_state(), state)
    batch = masked_batch(config.vocab_size) | (others or {})
    losses = []
    for each in (model, reference):
        loss = LOSSES[form](each(**batch))
        loss.backward()
        with torch.no_grad():
            losses.append((loss.item(), LOSSES[form](each(**batch)).item()))
    return losses, gradient_errors(model, reference, is_stage=True)


@pytest.mark.parametrize(
    ("layer_class", "use_cache", "form", "options"),
    [
        (_TupleLayer, False, "object", {}),
        (_TupleLayer, True, "tuple", {}),
        (_TensorLayer, False, "mapping", {}),
        (_TupleLayer, False, "object", {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ],
)
def test_models_of_every_form_are_trained_exactly(layer_class, use_cache, form, options):
    for (found, expected), errors in run_processes(_trained, 2, layer_class, use_cache, form, options):
        assert found == pytest.approx(expected, rel=1e-6)
        assert max(errors.values()) < 1e-5


def test_arguments_without_a_default_are_given_to_find_the_form():
    for (found, expected), errors in run_processes(
        _trained, 2, _TupleLayer, False, "object", {}, _NeedsLabels, {"mask": None}
    ):
        assert found == pytest.approx(expected, rel=1e-6)
        assert max(errors.values()) < 1e-5


def test_layers_of_an_unknown_form_are_refused():
    with pytest.raises(RuntimeError, match="a layer returned a tuple, where layers on other pipeline stages are taken"):
        run_processes(_trained, 2, _TupleLayer, False, "object", {}, _NeedsObject, {"scales": [200]})


def _trained_with(plant):
    plant()
    return _trained(_TupleLayer, False, "object", {})


def form_unknown():
    """Take layers to return the hidden state alone."""
    stage.find_form = lambda *_: places.LayerForm("hidden_states")


def attributes_lost():
    """Let places be without the attributes of their layers."""
    places._OF_EVERY_MODULE = type("All", (), {"__contains__": lambda *_: True})()


@pytest.mark.parametrize(
    ("plant", "error"), [(form_unknown, "a layer returned a tuple"), (attributes_lost, "AttributeError")]
)
def test_a_planted_defect_is_seen(plant, error):
    with pytest.raises(RuntimeError, match=error):
        run_processes(_trained_with, 2, plant)


def _copied():
    config = small_config(num_hidden_layers=2)
    with torch.device("meta"):
        model = _UsersModel(config, _TensorLayer, False, "object")
    parallelize(find_decoder(model), build_mesh(ParallelSizes(pipeline_parallel_size=2), "cpu"), device=CPU, seed=SEED)
    with pytest.raises(TypeError, match="a model on a pipeline cannot be copied"):
        copy.deepcopy(model)


def test_a_copy_is_refused():
    run_processes(_copied, 2)
