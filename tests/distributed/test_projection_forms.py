"""Models whose factors are kept in other forms than this package's: the same network, under the same names."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from lightning_boost.collectives import count_collectives
from lightning_boost.layout import SVD_LLM, find_decoder, projection_of
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.model.attention import Attention
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.model.norm import RMSNorm
from lightning_boost.parallelize import parallelize
from lightning_boost.tensor_parallel import heads
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.scheme import scheme_for
from tests.models import CPU, gradient_errors, masked_batch, one_process_model, relative_error, small_config
from tests.processes import run_processes


class Cola(nn.Module):
    """CoLA's layer: transposed factors, SiLU as a function."""

    def __init__(self, pair):
        super().__init__()
        self.cola_a = nn.Parameter(pair.factor_a.weight.detach().t().contiguous())
        self.cola_b = nn.Parameter(pair.factor_b.weight.detach().t().contiguous())
        self.bias = None if pair.factor_b.bias is None else nn.Parameter(pair.factor_b.bias.detach().clone())

    def forward(self, x):
        y = silu(x @ self.cola_a) @ self.cola_b
        return y if self.bias is None else y + self.bias


class Asvd(nn.Module):
    """ASVD's layer: its B is what is A elsewhere."""

    def __init__(self, pair):
        super().__init__()
        self.ALinear, self.BLinear = pair.factor_b, pair.factor_a

    def forward(self, x):
        return self.ALinear(silu(self.BLinear(x)))


def sequence(pair):
    return nn.Sequential(pair.factor_a, nn.SiLU(), pair.factor_b)


def in_two_modules(owner, name):
    """Keep a projection as SVD-LLM does."""
    stem, pair = name.removesuffix("_proj"), getattr(owner, name)
    delattr(owner, name)
    setattr(owner, f"{stem}_v_proj", pair.factor_a)
    setattr(owner, f"{stem}_u_proj", pair.factor_b)

    def project(self, x):
        return getattr(self, f"{stem}_u_proj")(getattr(self, f"{stem}_v_proj")(x))

    owner.__class__ = type(owner.__class__.__name__, (owner.__class__,), {name: project})


def in_form(form):
    return lambda owner, name: setattr(owner, name, form(getattr(owner, name)))


def mixed(owner, name):
    """Keep some pairs in one form and some in another, and one projection dense."""
    pair = getattr(owner, name)
    dense = nn.Linear(pair.in_features, pair.out_features)
    forms = {"q_proj": Cola, "up_proj": sequence, "down_proj": Cola, "gate_proj": Asvd, "v_proj": lambda _: dense}
    setattr(owner, name, forms.get(name, lambda pair: pair)(pair))


FORMS = {
    "cola": in_form(Cola),
    "asvd": in_form(Asvd),
    "sequence": in_form(sequence),
    "svd_llm": in_two_modules,
    "mixed": mixed,
}


def users_model(form, head_norm=False, **changes):
    kind = "svd" if form == "svd_llm" else "cola"
    config = small_config(low_rank={"kind": kind}, attention_bias=True, mlp_bias=True, **changes)
    model = one_process_model(config)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for owner, names in ((layer.self_attn, "q k v o"), (layer.mlp, "gate up down")):
            for name in names.split():
                FORMS[form](owner, f"{name}_proj")
        if head_norm:
            layer.self_attn.q_norm, layer.self_attn.k_norm = (RMSNorm(8, eps=1e-6) for _ in range(2))
            nn.init.normal_(layer.self_attn.q_norm.weight)
            nn.init.normal_(layer.self_attn.k_norm.weight)
            layer.self_attn.__class__ = _NormedHeads
    return model


class _NormedHeads(Attention):
    """Norms the features of each head of q and k, as Qwen3 does."""

    def _split_heads(self, features):
        heads = super()._split_heads(features)
        norms = [self.q_norm, self.k_norm, nn.Identity()]
        self.turn = (getattr(self, "turn", -1) + 1) % 3
        return norms[self.turn](heads)


def _errors(form, tensor, data, options, plant=None):
    if plant is not None:
        plant()
    scheme, options = options.get("scheme", "auto"), {key: value for key, value in options.items() if key != "scheme"}
    reference, model = users_model(form, **options), users_model(form, **options)
    sizes = ParallelSizes(tensor_parallel_size=tensor, data_parallel_size=data)
    mesh = build_mesh(sizes, "cpu")
    decoder = find_decoder(model)
    scheme_for(decoder, scheme).check(decoder)
    parallelize(decoder, mesh, device=CPU, seed=0, scheme=scheme)
    batch = masked_batch(131)
    replica = mesh[DATA_AXIS].get_local_rank()
    with count_collectives() as log:
        loss = model(**{name: value[replica::data] for name, value in batch.items()})
        loss.backward()
    reference(**batch).backward()
    errors = gradient_errors(model, reference)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    expected = reference.state_dict()
    for name, parameter in model.state_dict().items():
        whole = parameter.full_tensor()
        assert whole.shape == expected[name].shape
        errors[f"weight {name}"] = relative_error(whole, expected[name])
    chunks = {
        chunk: log.total(operation="all_reduce", chunk=chunk).launches for chunk in ("qkv", "o", "gate_up", "down")
    }
    return errors, chunks


@pytest.mark.parametrize(
    ("form", "tensor", "data", "options"),
    [
        ("cola", 2, 1, {}),
        ("cola", 2, 2, {"num_key_value_heads": 4}),
        ("cola", 4, 1, {"num_key_value_heads": 2}),
        ("asvd", 2, 1, {}),
        ("sequence", 2, 1, {}),
        ("svd_llm", 2, 1, {}),
        ("svd_llm", 4, 1, {"num_key_value_heads": 2}),
        ("svd_llm", 2, 2, {}),
        ("mixed", 2, 1, {}),
        ("cola", 2, 1, {"head_norm": True}),
        ("sequence", 4, 1, {"head_norm": True, "num_key_value_heads": 2}),
        ("cola", 2, 1, {"head_norm": True, "scheme": "vanilla"}),
        ("svd_llm", 2, 1, {"scheme": "vanilla"}),
        ("cola", 2, 1, {"head_norm": True, "scheme": "vanilla_sharded"}),
        ("asvd", 4, 1, {"num_key_value_heads": 2, "scheme": "vanilla_sharded"}),
        ("sequence", 2, 1, {"head_norm": True, "scheme": "bottleneck_ungrouped"}),
    ],
)
def test_gradients_and_a_step_are_those_of_one_process(form, tensor, data, options):
    for errors, chunks in run_processes(_errors, tensor * data, form, tensor, data, options):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        if form != "mixed" and not options.keys() & {"num_key_value_heads", "scheme"}:
            assert chunks == dict.fromkeys(("qkv", "o", "gate_up", "down"), 2 * 2)


def _with_activation_between():
    model = users_model("svd_llm")
    attention = type(model.model.layers[0].self_attn)
    attention.o_proj = lambda self, x: self.o_u_proj(silu(self.o_v_proj(x)))
    parallelize(find_decoder(model), build_mesh(ParallelSizes(tensor_parallel_size=2), "cpu"), device=CPU, seed=0)
    model(**masked_batch(131))


def test_something_between_two_modules_is_refused():
    """The first module's place does what both do: it would come behind."""
    with pytest.raises(RuntimeError, match="a factor out of a bottleneck must read what its factor into it gives"):
        run_processes(_with_activation_between, 2)


def partial_norm_gradients():
    """Leave the gradient of a head's norm with the heads of one process."""
    heads.own_rows = lambda weight, *_: local(weight)


def test_a_planted_defect_is_seen():
    """Rows A24 and A26 of known failures, for norms inside attention."""
    (errors, _), _ = run_processes(_errors, 2, "cola", 2, 1, {"head_norm": True}, partial_norm_gradients)
    assert errors["model.layers.0.self_attn.q_norm.weight"] > 0.1


class _Subclass(LowRankLinear):
    def forward(self, x):
        return 2 * super().forward(x)


class _Scaled(Cola):
    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda pair: _Subclass(64, 64, 5), r"q_proj is a _Subclass and must compute B σ\(A x\) \+ bias"),
        (_Scaled, r"q_proj is a _Scaled and must compute B σ\(A x\) \+ bias"),
        (lambda pair: nn.Sequential(pair.factor_a, nn.Softmax(-1), pair.factor_b), "Sequential and must compute B σ"),
        (lambda pair: nn.Sequential(pair.factor_a, nn.ReLU6(), pair.factor_b), "Sequential and must compute B σ"),
        (lambda pair: nn.Sequential(pair.factor_a, nn.Dropout(0.1), pair.factor_b).eval(), "Sequential and must comp"),
        (lambda pair: nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 64)), "Sequential and must be a torch.nn.Linear"),
        (lambda pair: nn.Bilinear(64, 3, 64), "Bilinear and must be a torch.nn.Linear, not a subclass, or hold two"),
    ],
)
def test_what_is_no_pair_of_factors_is_refused(form, message):
    model = one_process_model(small_config())
    attention = model.model.layers[1].self_attn
    attention.q_proj = form(attention.q_proj)
    decoder = find_decoder(model)
    is_training = attention.q_proj.training
    with pytest.raises(ValueError, match=message):
        scheme_for(decoder).check(decoder)
    assert {module.training for module in attention.q_proj.modules()} == {is_training}


def test_numbers_of_heads_are_those_of_a_process():
    attention = nn.Module()
    attention.head_dim, attention.num_heads, attention.num_key_value_heads, attention.hidden_size = 8, 8, 2, 64
    attention.num_key_value_groups = 4
    heads.count_own_heads(attention, (8, 2), 4)
    assert (attention.num_heads, attention.num_key_value_heads, attention.num_key_value_groups) == (2, 1, 2)
    assert attention.hidden_size == 16


def test_a_norm_over_all_heads_is_refused():
    model = users_model("cola", head_norm=True)
    model.model.layers[1].self_attn.k_norm = RMSNorm(64, eps=1e-6)
    decoder = find_decoder(model)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm is a norm over 64 features and must be .* 8"):
        scheme_for(decoder).check(decoder)


def test_factors_in_two_modules_are_found_by_their_names():
    decoder = find_decoder(users_model("svd_llm"))
    assert decoder.layout is SVD_LLM
    layer = next(iter(decoder.layers.values()))
    assert projection_of(layer, "mlp.down_v_proj + mlp.down_u_proj")(torch.zeros(1, 173)).shape == (1, 64)
