"""What is written in a chart can be read."""

from itertools import combinations

import pytest

from lightning_boost.benchmark.blocks import SCHEMES
from lightning_boost.benchmark.charts import draw_bars
from lightning_boost.benchmark.memory import WAYS, Memory
from lightning_boost.benchmark.recompute import CANDIDATES
from lightning_boost.benchmark.report import Bars
from lightning_boost.benchmark.statistic import FORMS

TITLE = (
    "a training step: 2 layers of hidden 1024, MLP 2752, bottleneck 256, vocabulary 4096, sequences of 512, bfloat16"
)
PARTS = {name: float(index + 1) for index, name in enumerate(Memory.__dataclass_fields__)}
CHARTS = {
    "one group": Bars(TITLE, "MiB", {"": {", ".join(name): 12.34 for name in CANDIDATES}}),
    "two bars": Bars(TITLE, "ms", {"": {"peers": 123.0, "bottleneck": 45.6}}),
    "groups": Bars(TITLE, "values", {pass_: dict.fromkeys(SCHEMES, 46272.0) for pass_ in ("forward", "backward")}),
    "long names": Bars("errors", "error", {name: dict.fromkeys(FORMS, 0.00391) for name in ("Gaussian", "outliers")}),
    "stacked": Bars("memory", "GiB", dict.fromkeys(WAYS, PARTS), is_stacked=True),
}


def _draw(bars):
    figure = draw_bars(bars)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [axes.title, *axes.texts, *axes.get_xticklabels()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    return figure, axes, [text for text in texts if text.get_text()]


@pytest.mark.parametrize("chart", CHARTS)
def test_no_text_lies_on_another_or_outside(chart):
    figure, _, texts = _draw(CHARTS[chart])
    boxes = {text.get_text(): text.get_window_extent() for text in texts}
    places = [text.get_window_extent() for text in texts]
    for name, box in boxes.items():
        assert figure.bbox.x0 <= box.x0, name
        assert box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0, name
        assert box.y1 <= figure.bbox.y1, name
    for one, other in combinations(range(len(places)), 2):
        assert not places[one].overlaps(places[other]), (texts[one].get_text(), texts[other].get_text())


def test_every_candidate_has_its_name_below_its_bar():
    _, axes, _ = _draw(CHARTS["one group"])
    below = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    assert below == [", ".join(name) for name in CANDIDATES]
    bars = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert bars == pytest.approx(list(axes.get_xticks()))


def test_stacked_bars_stand_on_one_another_below_their_sum():
    _, axes, _ = _draw(CHARTS["stacked"])
    assert [text.get_text() for text in axes.texts] == [f"{sum(PARTS.values()):.3g}"] * len(WAYS)
    first = [bars[0] for bars in axes.containers]
    assert [bar.get_height() for bar in first] == list(PARTS.values())
    tops = [bar.get_y() + bar.get_height() for bar in first]
    assert [bar.get_y() for bar in first] == [0.0, *tops[:-1]]
