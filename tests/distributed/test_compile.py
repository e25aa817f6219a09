"""Compiled layers beside layers as they are: one graph, the same gradients bit for bit, the same collectives."""

import contextlib
import io
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils._pytree import tree_flatten, tree_map

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, compilation
from lightning_boost.callbacks.communication_profiler import CommunicationProfiler
from lightning_boost.callbacks.online_rms_norm_verifier import OnlineRMSNormVerifier
from lightning_boost.callbacks.run_summary import RunSummary
from lightning_boost.collectives import count_collectives, register_group
from lightning_boost.compilation import compile_layers
from lightning_boost.kernels.library import NAMESPACE
from lightning_boost.layout import LLAMA, Decoder
from lightning_boost.mesh import TENSOR_AXIS, ParallelSizes, build_mesh
from lightning_boost.model.rotary import rotary_tables
from lightning_boost.parity import check_parity
from lightning_boost.recompute import RecomputeOptions
from tests.models import relative_error, small_config, whole
from tests.processes import run_processes
from tests.recomputed import BLOCK, LOW_RANK, SHAPES, WITH_ATTENTION, recomputed_model
from tests.users_module import UsersModule, _Layer, loader, trainer_for

NONE = RecomputeOptions()
ROWS, TOKENS = 2, 12
KERNELS = {
    "norm_input",
    "norm_input_backward",
    "norm_latent",
    "norm_latent_backward",
    "activate",
    "gated_activation",
    "gated_activation_backward",
    "rotary",
    "rotary_backward",
    "cross_entropy_parts",
    "cross_entropy_gradient",
}
"""Operators that do not belong to the tensor axis."""


def _arguments(group, dtype):
    """Return arguments for every operator of the tensor axis, for each several."""

    def new(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    generator = torch.Generator().manual_seed(0)
    x, factors_a, z, factors_b = new(6, 8), [new(3, 8), new(2, 8)], new(6, 5), [new(4, 3), new(7, 2)]
    norm = x, new(8), factors_a, 1e-6, 16, group, "qkv"
    grads_y, rho = [new(6, 4), new(6, 7)], torch.rand(6, 1, generator=generator)
    targets, divisor = torch.arange(6), torch.tensor(6)
    loss = new(6, 8), new(5, 8), targets, divisor, 10, 0.1
    return {
        "norm_project_reduce": [norm],
        "norm_project_reduce_activate": [(*norm, "silu")],
        "project_back": [(z, [new(3, 8), new(2, 8)])],
        "project_reduce": [(x, new(3, 8), group, "o")],
        "expand": [(z, factors_b), (new(6, 9)[:, :5], factors_b)],
        "expand_backward": [
            (grads_y, z, factors_b, needed, group, "o") for needed in ([True, True, True], [False, True, False])
        ],
        "sum_over_group": [(x, group, "o", "backward"), (x.t(), group, "o", "backward")],
        "gather_features": [(new(2, 3, 4), group, "o", "forward"), (new(3, 4), group, "o", "forward")],
        "scatter_features": [(new(2, 3, 4), group, "o", "forward"), (new(8, 6).t(), group, "o", "forward")],
        "norm_gather": [(x, new(8), 1e-6, group, "head")],
        "norm_gather_backward": [(new(6, 16), x, new(8), new(6, 16), rho, group, "head")],
        "project_whole": [(x, factors_a)],
        "project_whole_backward": [
            (z, x, factors_a, needed, group, "qkv") for needed in ([True, True], [False, True], [True, False])
        ],
        "gather_bottleneck": [(new(6, 3), 5, group, "o", "forward")],
        "average_over_group": [(x, group, "o"), (x.t(), group, "o")],
        "project_columns": [(x, factors_a)],
        "project_columns_backward": [
            ([new(6, 3), new(6, 2)], x, factors_a, needed, group, "o")
            for needed in ([True, True, True], [False, True, False])
        ],
        "expand_scatter": [([new(6, 3), new(6, 2)], [new(4, 3), new(7, 2)], [2, 1], group, "qkv")],
        "expand_scatter_backward": [
            (new(6, 9), [new(6, 3), new(6, 2)], [new(4, 3), new(7, 2)], [2, 1], [True, False], group, "qkv")
        ],
        "gather_parts": [(x, group, "o")],
        "project_parts": [(new(2, 6, 4), new(3, 7))],
        "project_parts_backward": [
            (new(6, 3), new(2, 6, 4), new(3, 7), needed, group, "o")
            for needed in ([True, True], [False, True], [True, False])
        ],
        "gather_logits": [(new(2, 3, 4), 8, group), (new(6, 4), 7, group)],
        "vocabulary_loss": [(*loss, needed, group) for needed in ([True, True], [False, True], [True, False])],
    }


def _faked(mode, each):
    return mode.from_tensor(each) if isinstance(each, torch.Tensor) else each


def _fakes_beside_results(dtype):
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=2), "cpu")
    arguments = _arguments(register_group(mesh[TENSOR_AXIS].get_group()), dtype)
    named = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}
    unlike = []
    for name, calls in arguments.items():
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        for call in calls:
            results = operator(*call)
            mode = FakeTensorMode()
            with mode:
                fakes = operator(*tree_map(partial(_faked, mode), call))
            real, fake = ([(t.shape, t.dtype, t.stride()) for t in tree_flatten(each)[0]] for each in (results, fakes))
            if real != fake:
                unlike.append((name, real, fake))
    return named - KERNELS - set(arguments), unlike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_say_what_they_give(dtype):
    assert run_processes(_fakes_beside_results, 2, dtype) == [(set(), [])] * 2


def _run(layers, hidden, rotary):
    """Return gradients and output, what is kept for backward beside parameters, and collectives."""
    kept, shares = Counter(), [getattr(weight, "_local_tensor", weight) for weight in layers.parameters()]
    addresses = {share.untyped_storage().data_ptr() for share in shares}

    def keep(tensor):
        kept[tuple(tensor.shape)] += tensor.untyped_storage().data_ptr() not in addresses
        return tensor

    torch.manual_seed(1)
    with count_collectives() as log:
        output, latents = hidden, {}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            for layer in layers:
                given = {"latents": latents} if hasattr(layer, "crossings") else {}
                output = layer(output, rotary, **given)
                output, latents = output if given else (output, {})
        output.square().sum().backward()
    exact = {name: getattr(weight.grad, "_local_tensor", weight.grad) for name, weight in layers.named_parameters()}
    exact |= {"output": output.detach(), "input": hidden.grad, "drawn": torch.rand(1)}
    layers.zero_grad()
    hidden.grad = None
    return exact, +kept, {tuple(key): (traffic.launches, traffic.bytes) for key, traffic in log.traffic.items()}


def _compared(config, size, kinds, scheme="auto"):
    """Return for each kind of recompute what is unequal, graphs, what is kept, and counts without and with compile."""
    found = []
    for kind in kinds:
        torch._dynamo.reset()
        model, _ = recomputed_model(config, kind, tensor=size, scheme=scheme)
        width = config.hidden_size if scheme.startswith("vanilla") else config.hidden_size // size
        hidden = torch.randn(ROWS, TOKENS, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
        rotary = rotary_tables(torch.arange(TOKENS), TOKENS, config, like=hidden)
        exact, _, counts = _run(model.model.layers, hidden, rotary)
        compilation.BACKEND = CompileCounterWithBackend("aot_eager")
        compile_layers(Decoder(model, LLAMA))
        compiled, kept, compiled_counts = _run(model.model.layers, hidden, rotary)
        # vanilla's norm goes backward by operations that a compiler takes apart, and rounds in other places
        allowed = 1e-6 if scheme == "vanilla" else 0.0
        unequal = [name for name, tensor in exact.items() if not relative_error(compiled[name], tensor) <= allowed]
        found.append((unequal, compilation.BACKEND.frame_count, kept, counts, compiled_counts))
    return found


LATENTS = {(24, 45): 1, (24, 30): 1, (24, 15): 2, (24, 1): 2}
"""Of a layer on two processes: two groups' with their norms' scales, and those of o and down."""

INPUT = {(ROWS, TOKENS, 32): 1}

BESIDE = {(TOKENS, 8): 2, tuple(torch.get_rng_state().shape): 1}
"""The rotary tables, and the random state in front of attention, which may draw."""


def test_layers_are_one_graph_that_keeps_what_it_is_told():
    for none, low_rank, block in run_processes(_compared, 2, small_config(), 2, [NONE, LOW_RANK, BLOCK]):
        assert (none[0], low_rank[0], block[0]) == ([], [], [])
        assert (none[1], low_rank[1], block[1]) == (1, 1, 1)
        assert low_rank[2] == {shape: 2 * number for shape, number in (LATENTS | INPUT | BESIDE).items()}
        assert block[2] == {shape: 2 * number for shape, number in INPUT.items()}
        assert none[3] == none[4] == low_rank[3] == low_rank[4]
        assert block[3] == block[4] != none[3]


@pytest.mark.parametrize(
    ("shape", "size", "kind", "scheme"),
    [
        ("one key/value head, dropout", 2, LOW_RANK, "auto"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *((shape, 2, LOW_RANK, "auto") for shape in ("dropout", "svd", "dense among low-rank")),
                ("biases and grouped queries", 2, WITH_ATTENTION, "auto"),
                ("full rank", 1, LOW_RANK, "auto"),
                ("dropout", 1, LOW_RANK, "auto"),
                ("lax", 2, LOW_RANK, "auto"),
                ("lax", 1, LOW_RANK, "auto"),
                ("lax", 2, NONE, "vanilla"),
                ("cola", 2, LOW_RANK, "vanilla"),
                ("cola", 2, LOW_RANK, "bottleneck_ungrouped"),
            ]
        ),
    ],
)
def test_shapes_and_schemes_give_equal_gradients(shape, size, kind, scheme):
    shapes = SHAPES | {"lax": {"low_rank": {"kind": "lax"}}}
    for ((unequal, graphs, _, counts, compiled_counts),) in run_processes(
        _compared, size, small_config(**shapes[shape]), size, [kind], scheme, timeout=400.0
    ):
        assert unequal == []
        assert graphs > 0
        assert counts == compiled_counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"tensor_parallel_size": 2}),
        (2, {"data_parallel_size": 2, "data_axis": "shard", "recompute": "low_rank"}),
        (4, {"tensor_parallel_size": 2, "data_parallel_size": 2, "recompute": "low_rank"}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": "low_rank"}),
    ],
)
def test_layouts_are_as_near_to_one_process(processes, options):
    for found, expected, counts, plain_counts in run_processes(_parity, processes, options, timeout=300.0):
        assert found == expected <= 1.0
        assert counts == plain_counts


def _parity(options, backend="aot_eager"):
    compilation.BACKEND = backend
    distances, counts = [], []
    for compiles in (True, False):
        with count_collectives() as log:
            sizes = {"tensor_parallel_size": 1, **options}
            report = check_parity(
                small_config(), num_processes=dist.get_world_size(), steps=2, compile=compiles, **sizes
            )
        distances.append(report.worst_of_tolerance)
        counts.append({tuple(key): (traffic.launches, traffic.bytes) for key, traffic in log.traffic.items()})
    return *distances, *counts


@pytest.mark.slow
def test_torchs_own_compiler_is_within_tolerance():
    options = {"tensor_parallel_size": 2, "recompute": "low_rank"}
    for found, _, counts, plain_counts in run_processes(_parity, 2, options, "inductor", timeout=900.0):
        assert found <= 1.0
        assert counts == plain_counts


def _fit(compiles, folder, after=None, *, epochs=1, callbacks=()):
    """Train, evaluate and save; return the weights, and the number of graphs."""
    compilation.BACKEND = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(5)
    module = LowRankLanguageModel(small_config(num_hidden_layers=2, vocab_size=37, hidden_dropout=0.2))
    strategy = BoostParallelStrategy(2, recompute="low_rank", compile=compiles)
    trainer = trainer_for(
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
    trainer.fit(module, loader(), loader(1), ckpt_path=after)
    trainer.save_checkpoint(folder / f"{compiles}-{epochs}")
    # moves parameters
    trainer.validate(module, loader(1), verbose=False)
    return {name: whole(weight) for name, weight in module.named_parameters()}, compilation.BACKEND.frame_count


def _resumed(folder):
    """Compare the weights after two epochs with those where one of the two is compiled, the second with callbacks."""
    plain, _ = _fit(False, folder)
    _, first_graphs = _fit(True, folder)
    watching = [OnlineRMSNormVerifier(every_n_steps=2), RunSummary(sample_tokens=0), CommunicationProfiler()]
    found = [
        _fit(False, folder, folder / "False-1", epochs=2),
        _fit(True, folder, folder / "False-1", epochs=2, callbacks=watching),
        _fit(False, folder, folder / "True-1", epochs=2),
    ]
    expected, *others = (weights for weights, _ in found)
    assert list(plain) == list(expected)
    unequal = [[name for name, weight in expected.items() if not torch.equal(weight, other[name])] for other in others]
    return unequal, first_graphs, [graphs for _, graphs in found]


def test_runs_go_on_from_one_another_compiled_or_not(tmp_path):
    for unequal, first_graphs, graphs in run_processes(_resumed, 2, tmp_path):
        assert unequal == [[], []]
        assert min(first_graphs, graphs[1]) > graphs[0] == graphs[2] == 0


def _told(compiles, is_hooked):
    """Return what a summary and warnings say of compiled layers, and the number of graphs."""
    compilation.BACKEND = CompileCounterWithBackend("aot_eager")
    module = LowRankLanguageModel(small_config(num_hidden_layers=2, vocab_size=37))
    if is_hooked:
        module.model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    strategy = BoostParallelStrategy(compile=compiles)
    trainer = trainer_for(strategy=strategy, callbacks=[RunSummary(sample_tokens=0)], max_steps=1)
    with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    said = {str(each.message) for each in given if "compile (True)" in str(each.message)}
    return "compiled, each as one graph" in output.getvalue(), said, compilation.BACKEND.frame_count


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_run_says_that_layers_are_compiled_and_which_are_not(is_hooked):
    ((is_said, warned, graphs),) = run_processes(_told, 1, True, is_hooked)
    assert is_said
    assert graphs == 1
    assert [("(model.layers.1.mlp)" in each) for each in warned] == [True] * is_hooked


def test_a_run_that_is_not_compiled_says_nothing_of_it():
    assert run_processes(_told, 1, False, True) == [(False, set(), 0)]


class _DroppedInPlace(_Layer):
    def forward(self, hidden):
        normed = self.input_layernorm(hidden)
        dropout(normed, 0.5, self.training, inplace=True)
        return hidden + self.self_attn(normed)


class _ScaledInPlace(_Layer):
    def forward(self, hidden):
        mlp, normed = self.mlp, self.post_attention_layernorm(hidden)
        return hidden + mlp.down_proj(mlp.gate_proj(normed).mul_(0.5) * mlp.up_proj(normed))


def _changed_in_place():
    """Return what is said of layers that change a norm's output, and a projection's, in a graph."""
    compilation.BACKEND = "aot_eager"
    said = []
    for layer in (_DroppedInPlace, _ScaledInPlace):
        module = UsersModule()
        for each in module.net.model.layers:
            each.__class__ = layer
        try:
            trainer_for(strategy=BoostParallelStrategy(2, compile=True), max_steps=1).fit(module, loader())
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_norms_output_must_not_be_changed_in_place():
    for dropped, scaled in run_processes(_changed_in_place, 2):
        assert "a projection must read its norm's output as it is" in dropped
        assert scaled == ""
