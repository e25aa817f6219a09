import pytest
import torch
from torch import nn

from lightning_boost.layout import LLAMA, DecoderLayout, LoneProjection, ProjectionGroup, find_decoder
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.model.norm import RMSNorm
from lightning_boost.tensor_parallel.check import check_tensor_size, legal_sizes, norm_eps
from lightning_boost.tensor_parallel.scheme import BottleneckScheme
from tests.models import meta_model, small_config


def test_a_decoder_is_found_inside_anything_by_its_names():
    model = meta_model(small_config())
    wrapped = nn.ModuleDict({"teacher": nn.Linear(2, 2), "student": nn.ModuleDict({"inner": model})})
    decoder = find_decoder(wrapped)
    assert decoder.root is model
    assert decoder.hidden_size == 64
    assert decoder.attention_heads == (8, 8)
    assert list(decoder.layers) == ["model.layers.0", "model.layers.1"]


def test_nothing_to_swap_tells_what_was_looked_for():
    with pytest.raises(ValueError, match=r"Linear holds no decoder .* model.embed_tokens, model.layers, .*self_attn"):
        find_decoder(nn.Linear(2, 2))


def test_a_missing_part_is_named_with_the_nearest_there_is():
    model = meta_model(small_config())
    layer = model.model.layers[1].mlp
    layer.gated_proj = layer.gate_proj
    del layer.gate_proj
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.gate_proj \(nearest: model.layers.1.mlp.gated_proj"):
        find_decoder(model)


def test_other_names_are_described_by_a_layout():
    block = nn.ModuleDict(
        {"norm": RMSNorm(8), "q": LowRankLinear(8, 8, 2), "k": LowRankLinear(8, 8, 2), "out": LowRankLinear(8, 8, 2)}
    )
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 8), "blocks": nn.ModuleList([block]), "last": RMSNorm(8), "head": nn.Linear(8, 5)}
    )
    layout = DecoderLayout(
        embedding="table",
        layers="blocks",
        groups=(ProjectionGroup(norm="norm", projections=("q", "k"), chunk="qk"),),
        lone_projections=(LoneProjection(projection="out", chunk="out"),),
        final_norm="last",
        head="head",
        num_attention_heads=4,
    )
    decoder = find_decoder(model, layout)
    assert legal_sizes(decoder) == [1, 2, 4]
    with pytest.raises(ValueError, match="holds no decoder"):
        find_decoder(model)


def test_heads_that_nobody_tells_are_asked_for():
    model = meta_model(small_config())
    del model.config
    del model.model.layers[0].self_attn.head_size
    with pytest.raises(ValueError, match=r"number of attention heads is not known.*num_attention_heads=…"):
        _ = find_decoder(model).attention_heads


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        ({}, 3, r"num_attention_heads \(8\) must be a multiple of tensor_parallel_size \(3\); legal sizes: 1, 2, 4, 8"),
        (
            {
                "hidden_size": 48,
                "num_attention_heads": 24,
                "num_key_value_heads": 3,
                "low_rank": {"bottleneck_size": 6},
            },
            2,
            r"num_key_value_heads \(3\) must be a multiple of .* \(2\) or divide it; legal sizes: 1, 3, 6, 12, 24",
        ),
    ],
)
def test_heads_must_divide(config, size, message):
    with pytest.raises(ValueError, match=message):
        check_tensor_size(find_decoder(meta_model(small_config(**config))), size)


@pytest.mark.parametrize("norm", [RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)])
def test_any_rms_norm_is_recognised_by_what_it_computes(norm):
    assert norm_eps(norm, "norm") == 1e-5


def test_an_eps_that_is_not_given_is_asked_for():
    with pytest.raises(ValueError, match=r"norm is an RMSNorm whose eps is None and must be given"):
        norm_eps(nn.RMSNorm(8), "norm")


class _OffsetNorm(RMSNorm):
    def forward(self, x):
        return x + super().forward(x) - x + super().forward(x) / self.weight


class _WrongEps(RMSNorm):
    def forward(self, x):
        return (
            RMSNorm.forward(self, x) * 1.0
            if x.abs().max() > 1e9
            else self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 10 * self.eps)
        )


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, eps=1e-5), _OffsetNorm(8), _WrongEps(8), nn.Identity()])
def test_any_other_norm_is_refused(norm):
    with pytest.raises(ValueError, match=rf"input_layernorm is a {type(norm).__name__} and must be an RMSNorm"):
        norm_eps(norm, "input_layernorm")


def _change(path, module):
    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, module)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _change("model.layers.1.mlp.down_proj", nn.Bilinear(173, 3, 64)),
            r"model.layers.1.mlp.down_proj is a Bilinear and must be a torch.nn.Linear, .* or hold two factors",
        ),
        (
            _change("model.layers.0.input_layernorm", nn.LayerNorm(64)),
            r"model.layers.0.input_layernorm is a LayerNorm and must be an RMSNorm",
        ),
        (_change("lm_head", nn.Linear(64, 131)), r"lm_head is a Linear and must be a torch.nn.Linear without a bias"),
        (_change("model.norm", nn.LayerNorm(64)), r"model.norm is a LayerNorm"),
    ],
)
def test_parts_that_the_scheme_cannot_swap_are_named(change, message):
    model = meta_model(small_config())
    BottleneckScheme().check(find_decoder(model))
    change(model)
    with pytest.raises(ValueError, match=message):
        BottleneckScheme().check(find_decoder(model, LLAMA))
