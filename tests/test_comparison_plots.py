"""Figures of a comparison: the numbers on their axes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import same_color
from matplotlib.lines import Line2D
from PIL import Image
from torch import nn

from dirprune import sparsity
from dirprune.lab.plots import method_of, save
from dirprune.lab.studies.comparison.figures import layerwise, tradeoff
from dirprune.lab.studies.comparison.rows import layer_bars
from dirprune.lab.studies.comparison.tradeoff import Curve, LayerBar
from dirprune.lab.studies.comparison.trials import usual
from dirprune.lab.training import recipes

GRDA = Curve("gRDA", sparsity=[0.98, 0.9, 0.95], accuracy=[92.0, 93.5, 93.0], spread=[0.3, 0.1, 0.2])
DENSE = Curve("dense", sparsity=[0], accuracy=[93.7], spread=[0.2])
NETWORK = [("conv1", "stem conv"), ("conv2", "conv 3×3"), ("conv3", "conv 1×1"), ("conv4", "dilated"), ("fc", "linear")]


def lines(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.get_lines()}


def values(line: Line2D) -> tuple[list[float], list[float]]:
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def bars(*methods: str, base: float = 0.5) -> list[LayerBar]:
    return [LayerBar(m, layer, kind, base + 0.1 * i) for m in methods for i, (layer, kind) in enumerate(NETWORK)]


def test_a_curve_is_drawn_in_percent_and_by_sparsity() -> None:
    [axes] = tradeoff([GRDA]).axes
    x, y = values(lines(axes)["gRDA"])
    assert x == pytest.approx([90, 95, 98])
    assert y == [93.5, 93.0, 92.0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "sparsity of the weights (%)",
        "test accuracy (%), ± std over seeds",
    )


def test_error_bars_reach_one_spread_either_way_and_stay_in_view() -> None:
    [axes] = tradeoff([GRDA, Curve("rigl", [0.9], [90.0])]).axes
    [segments] = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    assert [(s[0, 1], s[1, 1]) for s in segments] == [
        pytest.approx(p) for p in [(93.4, 93.6), (92.8, 93.2), (91.7, 92.3)]
    ]
    low, high = axes.get_ylim()
    assert low < 90
    assert high > 93.6


def test_accuracies_are_marked_at_round_numbers() -> None:
    [axes] = tradeoff([Curve("gRDA", [0.9, 0.99], [99.0, 95.5], [0.4, 0.3])]).axes
    low, high = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if low < tick < high] == pytest.approx([95, 96, 97, 98, 99])


def test_a_spread_that_is_not_known_has_no_bar() -> None:
    [axes] = tradeoff([Curve("gRDA", [0.9, 0.95], [93.0, 92.0], spread=[math.nan, 0.5])]).axes
    [segments] = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    assert [segment[:, 1].tolist() for segment in segments] == [pytest.approx([91.5, 92.5])]
    assert np.isfinite(axes.get_ylim()).all()


def test_the_axis_is_logarithmic_in_what_is_left() -> None:
    [axes] = tradeoff([GRDA]).axes
    assert axes.get_xticks().tolist() == [90, 95, 98]
    place = axes.transData.transform([(x, 93.0) for x in (90.0, 95.0, 98.0)])[:, 0]
    # The distance is the logarithm of the ratio of the weights left: 10% → 5% is log 2, 5% → 2% is log 2.5.
    assert (place[2] - place[1]) / (place[1] - place[0]) == pytest.approx(math.log(2.5) / math.log(2))


@pytest.mark.parametrize("fractions", [[0.9], [0.81, 0.83], [0.5, 1.0], [0.0, 0.3]])
def test_the_axis_is_linear_where_a_logarithm_helps_nothing_or_does_not_exist(fractions: list[float]) -> None:
    [axes] = tradeoff([Curve("gRDA", fractions, [90.0] * len(fractions))]).axes
    assert axes.get_xscale() == "linear"
    low, high = axes.get_xlim()
    assert low < 100 * min(fractions)
    assert high > 100 * max(fractions)


def test_a_dense_network_is_a_horizontal_line_and_leaves_the_axis_alone() -> None:
    [axes] = tradeoff([DENSE, GRDA]).axes
    assert values(lines(axes)["dense"]) == ([0, 1], [93.7, 93.7])
    assert axes.get_xlim()[0] > 80
    [alone] = tradeoff([DENSE]).axes
    assert alone.get_xlim() == (-5, 105)


def test_a_single_point_shows() -> None:
    [axes] = tradeoff([Curve("amc", [0.9], [92.0])]).axes
    assert lines(axes)["amc"].get_marker() not in ("", "None", None)


def test_points_that_say_nothing_of_what_lies_between_are_not_joined() -> None:
    [axes] = tradeoff([Curve("STR", [0.8, 0.999, 0.9], [90.0, 80.0, 89.0])]).axes
    xs, ys = values(lines(axes)["STR"])
    assert xs[:2] == [80.0, 90.0]
    assert np.isnan(xs[2])
    assert np.isnan(ys[2])
    assert (xs[3], ys[3]) == (pytest.approx(99.9), 80.0)


def test_accuracies_far_apart_get_a_closer_panel() -> None:
    whole, close = tradeoff([GRDA, Curve("random", [0.5, 0.9, 0.985], [85.0, 60.0, 10.0])]).axes
    assert whole.get_ylim()[0] < 10
    assert close.get_title() == "within 10 points of the best"
    assert 83 < close.get_ylim()[0] < 85
    assert close.get_xlim()[1] < 98.4 < whole.get_xlim()[1]
    assert values(lines(whole)["random"]) == values(lines(close)["random"])


@pytest.mark.parametrize("recipe", ["digits", "gpt-python"])
def test_every_method_of_the_lab_has_a_colour_of_its_own_in_both_figures(recipe: str) -> None:
    names = usual(recipes.get(recipe))
    assert [method_of(name) for name in names] == [name.replace("-", " ") for name in names]
    [axes] = tradeoff([Curve(name, [0.9, 0.95], [90.0, 89.0]) for name in names]).axes
    colours = {name: lines(axes)[name].get_color() for name in names}
    assert len(set(colours.values())) == len(names)
    for strip, name in zip(layerwise(bars(*reversed(names))).axes, reversed(names), strict=True):
        assert same_color(lines(strip)["_" + name].get_color(), colours[name])


def test_settings_of_a_method_share_its_colour_and_differ_in_style() -> None:
    [axes] = tradeoff(
        [
            Curve("rigl", [0.9, 0.95], [90.0, 89.0]),
            Curve("gRDA c = 1", [0.9, 0.95], [90.0, 89.0]),
            Curve("gRDA c = 2", [0.9, 0.95], [90.0, 89.0]),
            Curve("gRDA, published", [0.9, 0.95], [90.0, 89.0], dashed=True),
        ]
    ).axes
    rigl, one, two, published = axes.get_lines()
    assert rigl.get_zorder() > one.get_zorder() > two.get_zorder()  # earlier curves lie on top
    assert one.get_color() == two.get_color() == published.get_color()
    assert (one.get_linestyle(), two.get_linestyle()) == ("-", ":")
    assert published.is_dashed()


def test_layers_stand_in_network_order_with_the_marks_of_their_kinds() -> None:
    first, second = layerwise(bars("gRDA", "rigl")).axes
    x, y = values(lines(first)["_gRDA"])
    assert x == [0, 1, 2, 3, 4]
    assert y == pytest.approx([50, 60, 70, 80, 90])
    marks = {label: line for label, line in lines(first).items() if not label.startswith("_")}
    assert list(marks) == [kind for _, kind in NETWORK]
    assert values(marks["conv 1×1"]) == ([x[2]], [y[2]])
    assert len({str(line.get_marker()) for line in marks.values()}) == 5
    assert [first.get_title(loc="left"), second.get_title(loc="left")] == ["gRDA", "rigl"]
    assert [label.get_text() for label in second.get_xticklabels()] == [layer for layer, _ in NETWORK]
    assert first.get_ylim() == (50, 100)
    assert layerwise(bars("gRDA", base=0.3)).axes[0].get_ylim() == (0, 100)


def test_layers_that_are_nearly_empty_stand_apart() -> None:
    """0, 90, 99 and 99.9% are at equal distances; sparser layers lie on the edge, as 100% would be infinitely far."""
    given = [LayerBar("gRDA", str(i), "linear", s) for i, s in enumerate((0.2, 0.9, 0.99, 0.999, 0.9999, 1.0))]
    [axes] = layerwise(given).axes
    assert axes.get_ylim() == pytest.approx((0, 99.9))
    assert axes.get_yticks().tolist() == pytest.approx([0, 90, 99, 99.9])
    _, y = values(lines(axes)["_gRDA"])
    assert y == pytest.approx([20, 90, 99, 99.9, 99.9, 99.9])
    heights = axes.transData.transform([(0, value) for value in (0.0, 90.0, 99.0, 99.9)])[:, 1]
    assert np.diff(heights) == pytest.approx([heights[1] - heights[0]] * 3)


def test_error_bars_at_one_sparsity_stand_side_by_side() -> None:
    """They stand around it in the order of the curves; a point without a bar, or without a neighbour, is not moved."""
    names = ("magnitude", "rigl", "amc")
    curves = [Curve(name, [0.9, 0.95], [93.0, 92.0], spread=[0.5, math.nan]) for name in names]
    [axes] = tradeoff([*curves, Curve("gRDA", [0.8], [93.0], spread=[0.5])]).axes
    drawn = {label: values(line)[0] for label, line in lines(axes).items()}
    left, middle, right = (drawn[name][0] for name in names)
    assert left < middle < right
    assert middle == pytest.approx(90)
    assert (100 - left) * (100 - right) == pytest.approx(100)
    assert right - left < 1
    assert [drawn[name][1] for name in names] == pytest.approx([95] * 3)
    assert drawn["gRDA"] == pytest.approx([80])


def test_the_label_of_all_strips_belongs_to_none_of_them() -> None:
    figure = layerwise(bars("gRDA", "rigl"))
    assert figure.get_supylabel() == "sparsity (%)"
    assert [axes.get_ylabel() for axes in figure.axes] == ["", ""]


def test_legend_and_title_are_there_once() -> None:
    figure = layerwise(bars("gRDA", "rigl"), title="a network")
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [kind for _, kind in NETWORK]
    assert legend.get_title().get_text() == "a network"
    [legend] = tradeoff([GRDA, DENSE], title="a trade").legends
    assert [text.get_text() for text in legend.get_texts()] == ["gRDA", "dense"]
    assert legend.get_title().get_text() == "a trade"


def test_bars_of_a_network_are_its_weights_with_their_zeros() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.body = nn.Conv2d(4, 4, 3)
            self.shortcut = nn.Conv2d(4, 4, 1)
            self.norm = nn.BatchNorm2d(4)
            self.fc = nn.Linear(4, 2)

    net = Net()
    with torch.no_grad():
        net.fc.weight.fill_(1.0)[0, :2] = 0
    found = layer_bars("gRDA", sparsity(net))
    assert [(bar.layer, bar.kind) for bar in found] == [
        ("conv", "stem conv"),
        ("body", "conv 3×3"),
        ("shortcut", "shortcut"),
        ("fc", "linear"),
    ]
    assert [bar.sparsity for bar in found] == [0, 0, 0, 0.25]
    assert layer_bars("gRDA", sparsity(nn.Linear(2, 2)))[0].kind == "linear"


def test_figures_are_written_in_the_format_of_the_path(tmp_path: Path) -> None:
    with Image.open(save(tradeoff([GRDA, DENSE]), tmp_path / "new" / "tradeoff.png")) as image:
        assert image.format == "PNG"
    assert save(layerwise(bars("gRDA")), tmp_path / "layers.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accuracy": [90.0]}, "have 3, 1 and 3 values"),
        ({"spread": [0.1]}, "have 3, 3 and 1 values"),
        ({"sparsity": [0.9, 0.95, 98]}, r"sparsity=98 of 'gRDA' is not a fraction"),
        ({"accuracy": [0.9, math.nan, 0.9]}, r"accuracy=nan of 'gRDA'"),
        ({"spread": [0.1, -0.2, 0.1]}, r"spread=-0.2 of 'gRDA'"),
    ],
)
def test_a_curve_says_what_is_wrong_with_it(change: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(**{**vars(GRDA), **change})


def test_figures_say_what_is_wrong_with_their_input() -> None:
    with pytest.raises(ValueError, match="curves holds no point"):
        tradeoff([Curve("gRDA", [], [])])
    with pytest.raises(ValueError, match="the label 'gRDA' twice"):
        tradeoff([GRDA, GRDA])
    with pytest.raises(ValueError, match="layers is empty"):
        layerwise([])
    with pytest.raises(ValueError, match="layers of 'rigl' and 'gRDA' differ"):
        layerwise(bars("gRDA", "rigl")[:-1])
    with pytest.raises(ValueError, match="a layer of 'gRDA' twice"):
        layerwise(bars("gRDA", "gRDA"))
    with pytest.raises(ValueError, match="sparsity=90 of 'fc' is not a fraction"):
        LayerBar("gRDA", "fc", "linear", 90)


def test_a_curve_is_dense_if_nothing_else_and_its_sparsities_are_fractions() -> None:
    assert Curve("a", [0], [93.0]).is_dense
    assert not Curve("a", [0, 0.9], [93.0, 90.0]).is_dense
    with pytest.raises(ValueError, match=r"sparsity=-0\.1"):
        Curve("a", [-0.1], [90.0])


def test_error_bars_of_hardly_pruned_networks_stay_on_the_axis() -> None:
    few = Curve("gRDA", [0.0, 0.001, 0.002, 0.5], [93.7, 93.8, 93.6, 93.0], [0.1] * 4)
    others = [Curve(name, [0.003], [93.0], [0.1]) for name in ("rigl", "magnitude")]
    [axes] = tradeoff([few, *others]).axes
    drawn = lines(axes)
    every = [x for label in ("gRDA", "rigl", "magnitude") for x in values(drawn[label])[0]]
    assert all(0 <= x <= 100 for x in every)
    assert len({round(x, 6) for x in every}) == len(every)


def test_points_of_one_curve_stay_where_they_are() -> None:
    [axes] = tradeoff([Curve("gRDA", [0.9, 0.9001], [93.5, 93.4], [0.1, 0.1]), Curve("rigl", [0.8], [93.0])]).axes
    assert values(lines(axes)["gRDA"])[0] == pytest.approx([90.0, 90.01])
