import pytest

from lightning_boost.config import PROJECTIONS, LlamaConfig, LowRankConfig
from lightning_boost.cost import count_parameters
from lightning_boost.mesh import ParallelSizes, legal_tensor_sizes, shard_bounds
from tests.models import meta_model, small_config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 7}, r"num_attention_heads \(7\) must divide hidden_size \(64\); nearby .* 8"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(8\)"),
        ({"vocab_size": 0}, r"vocab_size \(0\) must be at least 1"),
        ({"num_attention_heads": 64}, r"\(1\) must be even"),
        ({"low_rank": {"bottleneck_size": 0}}, r"bottleneck_size \(0\) must be at least 1"),
        ({"low_rank": {"bottleneck_size": 65}}, r"bottleneck_size \(65\) of layers.0.q_proj must not be above .*64 in"),
        ({"low_rank": {"attention_bottleneck_size": 0}}, r"attention_bottleneck_size \(0\) must be at least 1"),
        ({"low_rank": {"other_bottleneck_sizes": {"q": 3}}}, r"names 'q'; a place is a projection \(q_proj"),
        ({"low_rank": {"other_bottleneck_sizes": {"layers.2": 3}}}, r"'layers.2', and the last layer is layers.1"),
        ({"label_smoothing": 1.0}, r"label_smoothing \(1.0\) must be at least 0 and below 1"),
        ({"attention_dropout": 1.0}, r"attention_dropout \(1.0\) must be at least 0 and below 1"),
        ({"hidden_dropout": -0.1}, r"hidden_dropout \(-0.1\) must be at least 0 and below 1"),
        ({"head_dim": 5}, r"head size \(5\) must be even"),
        ({"low_rank": {"kind": "lora"}}, r"kind \('lora'\) must be one of"),
    ],
)
def test_bad_sizes_are_refused_with_the_rule(sizes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**sizes)


def test_bottleneck_size_is_a_quarter_of_the_hidden_size_unless_given():
    assert LlamaConfig(hidden_size=512).bottleneck_size_of(0, "q_proj") == 128
    given = LlamaConfig(hidden_size=512, low_rank=LowRankConfig(bottleneck_size=100))
    assert given.bottleneck_size_of(0, "q_proj") == 100


def test_the_most_precise_word_about_a_bottleneck_wins():
    config = small_config(
        low_rank={
            "attention_bottleneck_size": 11,
            "other_bottleneck_sizes": {"k_proj": 7, "layers.1": 9, "layers.1.up_proj": "dense"},
        }
    )
    sizes = {(layer, name): config.bottleneck_size_of(layer, name) for layer in (0, 1) for name in PROJECTIONS}
    assert sizes[0, "q_proj"] == 11
    assert sizes[0, "k_proj"] == 7
    assert sizes[0, "up_proj"] == 15
    assert sizes[1, "k_proj"] == sizes[1, "q_proj"] == sizes[1, "down_proj"] == 9
    assert sizes[1, "up_proj"] is None


def test_the_default_is_cut_to_narrower_projections_with_one_note(caplog):
    config = small_config(num_key_value_heads=1, low_rank={"bottleneck_size": None})
    assert config.bottleneck_size_of(0, "k_proj") == 8
    assert config.bottleneck_size_of(0, "q_proj") == 16
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["k_proj 8, v_proj 8"]


def test_outer_activation_follows_the_kind_unless_given():
    assert LowRankConfig(kind="svd").has_outer_activation
    assert not LowRankConfig(kind="cola").has_outer_activation
    assert LowRankConfig(kind="cola", keep_outer_activation=True).has_outer_activation


@pytest.mark.parametrize("kind", ["full_rank", "svd", "cola"])
@pytest.mark.parametrize("biased", [False, True])
def test_parameters_are_counted_as_the_model_has_them(biased, kind):
    config = small_config(
        num_key_value_heads=4,
        head_dim=12,
        attention_bias=biased,
        mlp_bias=biased,
        tie_word_embeddings=biased,
        low_rank={"kind": kind, "other_bottleneck_sizes": {"layers.1.q_proj": "dense", "up_proj": 9}},
    )
    counted = sum(parameter.numel() for parameter in meta_model(config).parameters())
    assert count_parameters(config) == counted


def test_parameters_of_published_models():
    """Totals of CoLA's 60M and 7B models, untied, as its configuration files give them."""
    cola_60m = LlamaConfig(low_rank=LowRankConfig(bottleneck_size=128, keep_outer_activation=True))
    assert round(count_parameters(cola_60m) / 1e6, 1) == 42.8
    assert round(count_parameters(cola_60m, full_rank=True) / 1e6, 1) == 58.1
    cola_7b = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    assert round(count_parameters(cola_7b) / 1e6) == 2821
    assert round(count_parameters(cola_7b, full_rank=True) / 1e6) == 6738


def test_sizes_must_multiply_to_the_world():
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(2\) = 2 must equal the number of processes \(3"):
        ParallelSizes(tensor_parallel_size=2).check_world(3)
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(0\) must be a whole number"):
        ParallelSizes(tensor_parallel_size=0)


def test_legal_sizes_divide_everything():
    assert legal_tensor_sizes(8, 4, 96) == [1, 2, 4]


@pytest.mark.parametrize("size", [0, 1, 5, 131])
def test_shards_are_those_of_chunk(size):
    shards = [shard_bounds(size, 4, index) for index in range(4)]
    assert shards[0][0] == 0
    assert shards[-1][1] == size
    widest = -(-size // 4)
    assert [stop - start for start, stop in shards] == [
        min(widest, max(0, size - widest * index)) for index in range(4)
    ]
