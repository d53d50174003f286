from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from PIL import Image
from test_runs import record

from dirprune import SparsityReport, sparsity
from dirprune.lab import models, plots
from dirprune.lab.training.loop import EpochRecord


def accuracy_and_sparsity(runs: plots.Runs) -> Figure:
    return plots.trajectories(runs, (plots.TEST_ACCURACY, plots.SPARSITY))


def drawn(epoch: int, accuracy: float, loss: float = 0.1, fraction: float = 0.0) -> EpochRecord:
    return record(epoch, test_accuracy=accuracy, train_loss=loss, test_loss=loss, sparsity=fraction)


def history(accuracies: Sequence[float]) -> list[EpochRecord]:
    return [drawn(i + 1, accuracy, 1 / (i + 1), 0.1 * i) for i, accuracy in enumerate(accuracies)]


def pruned(fraction: float, model: str = "small") -> SparsityReport:
    """Return the report of a network in which the first ``fraction`` of every tensor is zero."""
    network = models.build(model, classes=10)
    with torch.no_grad():
        for parameter in network.parameters():
            flat = parameter.view(-1)
            flat.fill_(1.0)
            flat[: round(fraction * len(flat))] = 0
    return sparsity(network)


def labelled(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    return {
        label: (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for label, line in lines.items()
        if not label.startswith("_")
    }


def test_mean_and_std_are_those_of_torch() -> None:
    values = torch.randn(4, 7, dtype=torch.float64)
    x, mean, std = plots.mean_and_std([(list(range(7)), row.tolist()) for row in values])
    assert std is not None
    assert x.tolist() == list(range(7))
    torch.testing.assert_close(torch.from_numpy(mean), values.mean(0))
    torch.testing.assert_close(torch.from_numpy(std), values.std(0, correction=1))


def test_mean_covers_what_all_curves_have() -> None:
    x, mean, std = plots.mean_and_std([([1, 2, 3], [1.0, 2.0, 9.0]), ([2, 1], [4.0, 3.0])])
    assert std is not None
    assert (x.tolist(), mean.tolist()) == ([1, 2], [2, 3])
    assert std == pytest.approx([2**0.5, 2**0.5])


def test_one_curve_has_no_band_and_several_have() -> None:
    _, [axes] = plots.panels(1)
    plots.draw_spread(axes, [([1, 2], [3.0, 4.0])], label="one")
    assert len(axes.get_lines()) == 1
    assert not axes.collections
    plots.draw_spread(axes, [([1, 2], [3.0, 4.0]), ([1, 2], [5.0, 8.0])], label="two", index=1)
    assert labelled(axes) == {"one": ([1, 2], [3, 4]), "two": ([1, 2], [4, 6])}
    assert len(axes.get_lines()) == 1 + 2 + 1
    [band] = axes.collections
    edges = band.get_paths()[0].get_extents()
    assert (edges.ymin, edges.ymax) == pytest.approx((4 - 2**0.5, 6 + 8**0.5))


def test_a_published_curve_is_dashed_in_the_colour_of_ours() -> None:
    _, [axes] = plots.panels(1)
    plots.draw_spread(axes, [([1, 2], [3.0, 4.0])], label="ours", index=2)
    plots.draw_published(axes, ([1, 2], [3.5, 4.5]), label="published", index=2)
    ours, published = axes.get_lines()
    assert same_color(ours.get_color(), published.get_color())
    assert ours.get_linestyle() == "-"
    assert published.is_dashed()


def test_settings_differ_in_colour_or_line_style_and_none_is_dashed_like_a_published_one() -> None:
    looks = {(plots.colour(i), plots.line_style(i)) for i in range(20)}
    assert len(looks) == 20
    assert "--" not in {style for _, style in looks}


def test_a_single_epoch_is_a_whole_number() -> None:
    axes = accuracy_and_sparsity({"SGD": [history([90])]}).axes[0]
    assert axes.get_xlim() == (0.5, 1.5)
    assert [tick for tick in axes.get_xticks() if 0.5 <= tick <= 1.5] == [1.0]


def test_training_curves_show_the_numbers() -> None:
    figure = plots.training_curves({"SGD": [history([50, 90]), history([60, 80])], "gRDA": [history([40, 70])]})
    accuracy, zeros, train_loss, test_loss = figure.axes
    several = "SGD, mean ± std of 2 runs"  # explains the band
    assert labelled(accuracy) == {several: ([1, 2], [55, 85]), "gRDA": ([1, 2], [40, 70])}
    assert labelled(zeros)["gRDA"] == ([1, 2], [0, 10])
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log", "log"]
    assert labelled(train_loss)["gRDA"] == labelled(test_loss)["gRDA"] == ([1, 2], [1, 0.5])
    assert all(axes.get_xlabel() == "epoch" for axes in figure.axes)
    assert [axes.get_ylabel().split(" (")[0] for axes in figure.axes] == [
        "test accuracy",
        "sparsity",
        "train loss",
        "test loss",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [several, "gRDA"]


def test_what_is_left_beside_the_errors() -> None:
    left = {"weights": 0.1, "time": 1.2}
    runs = {"dense": [history([90, 99])], "sparse": [history([50, 100])]}
    curves, bars = plots.beside_dense(runs, left).axes
    assert [list(line.get_ydata()) for line in curves.get_lines()] == [[10, 1], [50, plots.TEST_ERROR.floor]]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx([10, 120])
    assert [text.get_text() for text in bars.texts] == ["10%", "120%"]
    assert bars.get_xlim()[1] >= 120


def test_two_quantities_have_two_panels_and_a_seed_without_an_epoch_is_left_out() -> None:
    figure = accuracy_and_sparsity({"SGD": [history([90]), []], "gRDA": [[]]})
    assert [list(labelled(axes)) for axes in figure.axes] == [["SGD"], ["SGD"]]
    assert figure.axes[0].get_lines()[0].get_marker() == "o"  # a single point must be visible


def test_colours_stay_with_the_setting_when_another_has_no_epoch() -> None:
    figure = accuracy_and_sparsity({"SGD": [[]], "gRDA": [history([90, 91])]})
    assert same_color(figure.axes[0].get_lines()[0].get_color(), plots.PALETTE[1])


@pytest.mark.parametrize(
    "labels", [["SGD", "gRDA c=1"], ["gRDA c=1", "SGD"], ["gRDA c=1"], ["a: gRDA c=1", "b: SGD, lr=1"]]
)
def test_sgd_and_grda_have_their_colours_whatever_their_order(labels: list[str]) -> None:
    own = {label: plots.PALETTE["gRDA" in label] for label in labels}
    curves = accuracy_and_sparsity({label: [history([90, 91])] for label in labels}).axes[0].get_lines()
    assert {str(line.get_label()): line.get_color() for line in curves} == own
    bars = plots.layerwise_sparsity({label: [pruned(0.5)] for label in labels}).axes[0].containers
    for label, container in zip(labels, bars, strict=True):
        assert isinstance(container, BarContainer)
        assert same_color(container.patches[0].get_facecolor(), own[label])
        assert container.patches[0].get_y() == pytest.approx(-0.4 + 0.8 * labels.index(label) / len(labels))


def test_a_log_axis_has_labels_however_short_it_is() -> None:
    for low, high in ((0.008, 0.042), (0.0008, 0.03), (1e-4, 1.5)):
        _, [axes] = plots.panels(1)
        plots.Axis("loss", log=True).fit(axes, [low, high])
        labels = [text.get_text() for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high]
        assert len(labels) >= 3
        assert "×" not in "".join(labels)


def test_an_axis_shows_every_value_that_it_can_and_says_where_it_is_cut() -> None:
    """A line at 0 stands above the axis; what is not finite, or not positive on a logarithmic one, does not count."""
    for axis, values, label, (low, high) in (
        (plots.Axis("error", from_zero=True), [2.0, 4.0, math.nan], "error", (-0.2, 4.2)),
        (plots.Axis("error", from_zero=True), [0.0, 0.0], "error", (-1.0, 1.0)),
        (plots.Axis("error", floor=3.0), [2.0, 4.0], "error", (1.9, 4.1)),
        (plots.Axis("loss", log=True), [-1.0, 1.0, 1.0], "loss", (1 / 1.05, 1.05)),
        (plots.Axis("loss", log=True, floor=0.01), [0.0, 1.0], "loss (cut at 0.01)", (0.01 / 100**0.05, 100**0.05)),
        (plots.Axis("loss", log=True), [0.0, math.inf], "loss", (0.0, 1.0)),
    ):
        _, [axes] = plots.panels(1)
        axis.fit(axes, values)
        assert axes.get_ylim() == pytest.approx((low, high))
        assert axes.get_ylabel() == label
    assert plots.Axis("loss", log=True, floor=0.01).shown([0.0, 1.0]).tolist() == [0.01, 1.0]


def test_the_first_epochs_do_not_hide_the_others_nor_a_band_the_lines() -> None:
    accuracies = [10.0] + [90 + 0.1 * i for i in range(39)]
    figure = plots.trajectories({"SGD": [history(accuracies)]}, (plots.TEST_ACCURACY,))
    assert figure.axes[0].get_ylim()[0] > 80
    losses = [[drawn(1, 50, 1e-3)], [drawn(1, 50, 1e-3)], [drawn(1, 50, 1.0)]]  # mean − std is below zero
    low, high = plots.trajectories({"SGD": losses}, (plots.TEST_LOSS,)).axes[0].get_ylim()
    assert 1e-4 < low < 1e-3
    assert 1 < high < 10


def test_curves_that_are_zero_or_not_finite_can_be_drawn(tmp_path: Path) -> None:
    records = [drawn(1, 50, float("nan")), drawn(2, 50, 0.0)]
    figure = plots.training_curves({"SGD": [records]})
    assert plots.save(figure, tmp_path / "curves.png").stat().st_size > 0


def test_layers_stand_in_network_order_with_their_kinds() -> None:
    figure = plots.layerwise_sparsity({"gRDA": [pruned(0.25), pruned(0.75)], "SGD": [pruned(0.0)]})
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "conv1 · conv 3×3",
        "conv2 · conv 3×3",
        "conv3 · conv 3×3",
        "fc1 · linear",
        "fc2 · linear",
    ]
    low, high = axes.get_ylim()
    assert low > high  # the first layer at the top
    grda, sgd = (container for container in axes.containers if isinstance(container, BarContainer))
    assert [bar.get_width() for bar in grda.patches] == pytest.approx([50.0] * 5)
    assert (len(sgd.patches), sgd.get_label()) == (0, "SGD: no zeros")  # it takes no room
    assert [bar.get_y() + bar.get_height() / 2 for bar in grda.patches] == pytest.approx(range(5))  # beside their names
    assert grda.errorbar is not None
    assert sgd.errorbar is None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "gRDA: 50.0 % of all weights",
        "SGD: no zeros",
    ]


def test_names_of_a_deep_network_and_kinds_of_its_layers_do_not_overlap(tmp_path: Path) -> None:
    figure = plots.layerwise_sparsity({"gRDA": [pruned(0.5, "resnet50")]})
    plots.save(figure, tmp_path / "layers.png")  # drawing sets the positions of the labels
    [axes] = figure.axes
    labels = axes.get_yticklabels()
    assert len(labels) == 54
    pitch = axes.get_position().height * figure.get_figheight() / 54  # inches from name to name
    assert pitch > 1.2 * float(labels[0].get_fontsize()) / 72
    assert {label.get_text().split(" · ")[1] for label in labels} == {"conv 7×7", "conv 1×1", "conv 3×3", "linear"}


def test_an_axis_that_leaves_out_the_first_epochs_says_so() -> None:
    late = [drawn(epoch, 94 + epoch / 60) for epoch in range(2, 61)]
    for first, said in ((10.0, "test accuracy (%), first epochs cut"), (94.2, "test accuracy (%)")):
        [accuracy, _] = accuracy_and_sparsity({"SGD": [[drawn(1, first), *late]]}).axes
        assert accuracy.get_ylabel() == said


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="runs holds no epoch"):
        plots.training_curves({"SGD": [[]]})
    with pytest.raises(ValueError, match="curves is empty"):
        plots.mean_and_std([])
    with pytest.raises(ValueError, match="reports holds no weight"):
        plots.layerwise_sparsity({})
    with pytest.raises(ValueError, match="one figure for each network"):
        plots.layerwise_sparsity({"a": [pruned(0.5)], "b": [pruned(0.5, "wrn10x1")]})


def test_saving_makes_the_folder_and_leaves_the_callers_style_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure = accuracy_and_sparsity({"gRDA c=0.01 μ=0.7": [history([90, 91])]})
    path = plots.save(figure, tmp_path / "figures" / "demo.png")
    with Image.open(path) as image:
        assert image.size == (round(2 * plots.PANEL[0] * 200), round(plots.PANEL[1] * 200))
    assert plots.save(figure, tmp_path / "demo.pdf").read_bytes().startswith(b"%PDF")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", matplotlib.MatplotlibDeprecationWarning)
        assert dict(matplotlib.rcParams) == before
