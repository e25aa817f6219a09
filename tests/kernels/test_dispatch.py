"""Which implementation of a kernel runs, and what is said of it."""

import contextlib

import pytest
import torch

from lightning_boost.commands import parity
from lightning_boost.kernels import dispatch, functions, operators, reference
from lightning_boost.kernels.dispatch import KERNELS, choose_kernels, describe_kernels, implementation, why_not
from tests.kernels.closeness import random

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def chosen_as_before():
    yield
    choose_kernels("auto")


def test_on_a_cpu_torch_runs_by_default():
    x = random(2, 8)
    assert why_not("norm_input", x) == "on cpu"
    assert implementation("norm_input", "norm_input", x) is reference.norm_input
    assert describe_kernels(CPU, torch.float32) == "torch's own operations (on cpu)"


def test_triton_runs_where_it_is_told_to(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choose_kernels("triton")
    x = random(2, 8)
    assert describe_kernels(CPU, torch.float32) == f"Triton runs {', '.join(KERNELS)}"
    assert implementation("rotary", "rotary", x).__module__ == "lightning_boost.kernels.rotary"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_left_to_torch(dtype):
    choose_kernels("triton")
    assert why_not("rotary", random(2, 8).to(dtype)) == f"in {str(dtype).removeprefix('torch.')}"


def test_tensors_of_a_cpu_beside_a_gpu_are_left_to_torch(monkeypatch):
    """Only the interpreter reads them."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choose_kernels("triton")
    assert why_not("rotary", random(2, 8)) == "on cpu"


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current one."""
    happened = []

    @contextlib.contextmanager
    def device_of(tensor):
        happened.append(tensor)
        yield
        happened.append("left")

    def run(z, _):
        happened.append("run")
        return torch.empty_like(z)

    monkeypatch.setattr(operators, "device_of", device_of)
    monkeypatch.setattr(operators, "implementation", lambda *_: run)
    z = random(2, 8)
    operators.activate(z, "silu")
    assert happened[0] is z
    assert happened[1:] == ["run", "left"]


def test_kernels_are_chosen_one_by_one():
    choose_kernels(["rotary"])
    gpu = torch.device("cuda")
    others = "norm_input, norm_latent, gated_activation, cross_entropy"
    expected = f"Triton runs rotary; torch runs {others} (switched off by the option kernels)"
    assert describe_kernels(gpu, torch.bfloat16) == expected
    assert why_not("norm_input", random(2, 8)) == "switched off by the option kernels"
    assert why_not("rotary", random(2, 8)) == "on cpu"


def test_all_are_switched_off_by_one_word():
    choose_kernels("reference")
    assert {why_not(name, random(2, 8)) for name in KERNELS} == {"switched off by the option kernels"}


@pytest.mark.parametrize("kernels", ["fast", ["rotary", "rope"]])
def test_unknown_names_are_refused(kernels):
    with pytest.raises(ValueError, match=r"kernels \('(fast|rope)'.*cross_entropy"):
        choose_kernels(kernels)


def test_triton_without_a_gpu_or_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose_kernels("triton")


def test_triton_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr(dispatch, "_HAS_TRITON", False)
    with pytest.raises(ValueError, match="not installed"):
        choose_kernels("triton")


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_what_a_model_calls_has_the_same_gradients_either_way(activation):
    gate, up = (random(2, 3, 40, seed=seed).requires_grad_() for seed in range(2))
    heads, tables = random(2, 4, 3, 8).requires_grad_(), (random(3, 8, seed=1), random(3, 8, seed=2))
    gradients = []
    for kernels in ("auto", "triton"):
        choose_kernels(kernels)
        product = functions.gated_activation(gate, up, activation)
        turned = functions.rotate(heads, *tables)
        assert (type(product.grad_fn).__name__ == "_GatedActivationBackward") == (kernels == "triton")
        loss = product.square().sum() + turned.pow(3).sum()
        gradients.append(torch.autograd.grad(loss, [gate, up, heads]))
    for plain, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_operators_tell_shapes_without_values():
    """What a compiler asks them: the same shapes, dtypes and strides as they give."""
    from lightning_boost.kernels.cases import Sizes, cases

    sizes = Sizes(rows=8, tokens=4, hidden=16, latents=24, gated=12, heads=2, head_size=8, vocabulary=20, loss_rows=8)
    for case, other in zip(
        *(cases(sizes, torch.float32, torch.device(where)) for where in ("cpu", "meta")), strict=True
    ):
        run = getattr(torch.ops.lightning_boost, case.function)
        found, expected = run(*other.args), run(*case.args)
        pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True)
        for fake, real in pairs:
            if real is not None:
                assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride()), case.name


def test_the_choice_of_a_kernel_is_no_break_of_a_compilers_graph(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choose_kernels("triton")
    gate, up = random(2, 40).requires_grad_(), random(2, 40, seed=1)
    compiled = torch.compile(functions.gated_activation, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gate, up, "silu"), functions.gated_activation(gate, up, "silu"))


def test_every_cell_of_paritys_matrix_takes_the_kernels_that_are_asked_for(monkeypatch):
    passed = {"passed": True, "worst_gradient_relative_error": 1e-7, "worst_weight_relative_error": 1e-7}
    asked = []
    monkeypatch.setattr(parity, "_run_cell", lambda options, *_: asked.append(options["kernels"]) or passed)
    assert parity.parity(matrix=True, kernels="reference") == 0
    assert set(asked) == {"reference"}
