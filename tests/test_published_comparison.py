"""The published comparison on ResNet50/ImageNet, checked against the paper's text, other papers and our network."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from importlib import resources

import pytest

from dirprune import sparsity
from dirprune.lab import models
from dirprune.lab.studies.comparison.published import frontier, layerwise, tradeoff_curves
from dirprune.lab.studies.comparison.rows import layer_bars

# Sparsity and test accuracy as the table beside Figure 7 prints them, by schedule and increasing sparsity.
DROP_AT_140 = [
    (79.69, 72.75),
    (86.09, 73.13),
    (87.28, 73.14),
    (91.60, 73.24),
    (94.98, 72.16),
    (97.10, 70.04),
    (98.17, 65.51),
]
EVERY_30 = [
    (96.36, 68.06),
    (96.87, 67.28),
    (97.05, 66.46),
    (97.06, 67.23),
    (97.69, 65.17),
    (98.10, 63.76),
    (98.26, 62.60),
    (98.62, 60.12),
    (98.99, 56.15),
    (99.51, 43.47),
    (99.84, 22.69),
]
# Of ResNet50: all parameters, and the weights of its 53 convolutions and its linear layer.
PARAMETERS, WEIGHTS = 25_557_032, 25_502_912


def rows(name: str) -> list[dict[str, str]]:
    with resources.files("dirprune.lab.published").joinpath(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def points(label: str) -> list[tuple[float, float]]:
    [curve] = [curve for curve in tradeoff_curves() if curve.label == label]
    return list(zip(curve.sparsity, curve.accuracy, strict=True))


def totals() -> dict[str, float]:
    """Return the number of zeros in all 54 weight tensors, by method as the file names it."""
    zeros: dict[str, float] = defaultdict(float)
    for row in rows("resnet50_layerwise_sparsity.csv"):
        zeros[row["method"]] += float(row["sparsity"]) * int(row["n_params"])
    return zeros


def test_every_run_is_shipped() -> None:
    assert Counter(row["method"] for row in rows("resnet50_imagenet_pareto.csv")) == {
        "magnitude_pruning": 236,
        "random_pruning": 288,
        "variational_dropout": 161,
        "magnitude_pruning_v2": 4,
        "gRDA": 18,
    }
    assert set(Counter(row["method"] for row in rows("resnet50_layerwise_sparsity.csv")).values()) == {54}


@pytest.mark.parametrize(
    ("label", "printed"),
    [("gRDA, one drop of the rate at epoch 140", DROP_AT_140), ("gRDA, a drop every 30 epochs", EVERY_30)],
)
def test_grda_has_the_points_of_the_papers_table(label: str, printed: list[tuple[float, float]]) -> None:
    ours = points(label)
    assert len(ours) == len(printed)
    for (fraction, accuracy), (percent, printed_accuracy) in zip(ours, printed, strict=True):
        assert 100 * fraction == pytest.approx(percent, abs=0.0111)  # 91.589 is printed as 91.60
        assert accuracy == pytest.approx(printed_accuracy, abs=0.0051)


def test_magnitude_v2_has_the_numbers_that_gale_et_al_report() -> None:
    expected = [(0.8, 76.52), (0.9, 75.16), (0.95, 72.71), (0.965, 69.26)]
    assert points("magnitude v2 (Gale et al.)") == [pytest.approx(point) for point in expected]


@pytest.mark.parametrize("name", ["magnitude_pruning", "variational_dropout", "random_pruning"])
def test_a_sweep_is_left_with_what_no_other_run_beats(name: str) -> None:
    runs = [
        (float(row["global_sparsity"]), 100 * float(row["top1_accuracy"]))
        for row in rows("resnet50_imagenet_pareto.csv")
        if row["method"] == name
    ]
    undominated = {p for p in runs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in runs)}
    kept = points(f"{name.removesuffix('_pruning').replace('_', ' ')} (Gale et al.)")
    assert kept == sorted(undominated)
    assert max(accuracy for _, accuracy in runs) == kept[0][1]


def test_a_frontier_keeps_one_of_equal_points() -> None:
    assert frontier([(0.9, 70.0), (0.9, 70.0), (0.5, 70.0)]) == [(0.9, 70.0)]
    assert frontier([]) == []


def test_layers_and_their_kinds_are_those_of_our_resnet50() -> None:
    ours = [(bar.layer, bar.kind) for bar in layer_bars("ours", sparsity(models.build("resnet50", classes=1000)))]
    published: dict[str, list[tuple[str, str]]] = {}
    for bar in layerwise():
        published.setdefault(bar.method, []).append((bar.layer, bar.kind))
    assert len(published) == 6
    assert all(layers == ours for layers in published.values())
    assert Counter(kind for _, kind in ours) == {
        "stem conv": 1,
        "conv 1×1": 32,
        "conv 3×3": 16,
        "shortcut": 4,
        "linear": 1,
    }


def test_the_layers_add_up_to_the_points() -> None:
    zeros = totals()
    for method, fraction in {"80 % Sparse ERK": 0.8, "90 % Sparse ERK": 0.9, "AMC (RL)": 0.8}.items():
        assert zeros[method] / WEIGHTS == pytest.approx(fraction, abs=0.0011)
    runs = [row for row in rows("resnet50_imagenet_pareto.csv") if row["method"] == "variational_dropout"]
    [run] = [r for r in runs if abs(float(r["global_sparsity"]) - zeros["variational_dropout"] / WEIGHTS) < 1e-6]
    assert float(run["global_sparsity"]) == pytest.approx(0.9, abs=0.003)  # the paper: "the one with 90 % sparsity"
    # gRDA's sparsity counts all parameters: zeros beyond those of the weights are BatchNorm's and the bias's.
    curve = points("gRDA, one drop of the rate at epoch 140")
    for method, (fraction, _) in {"gRDA_c0.005_mu0.55": curve[3], "gRDA_c0.01_mu0.4": curve[0]}.items():
        assert 0 <= fraction * PARAMETERS - zeros[method] <= PARAMETERS - WEIGHTS


def test_known_cells_of_the_layers() -> None:
    known = {(bar.method, bar.layer): bar.sparsity for bar in layerwise()}
    assert known["gRDA c = 0.005, μ = 0.55", "conv1"] == 0.607036565
    assert known["RigL's ERK densities, 80 %", "conv1"] == 0.143
    assert known["AMC", "layer1.0.conv1"] == 0.62702
    # 3×3 convolutions are pruned more than the 1×1 before and after them, as the paper observes.
    for method in dict.fromkeys(bar.method for bar in layerwise()):
        assert known[method, "layer3.1.conv2"] > max(known[method, "layer3.1.conv1"], known[method, "layer3.1.conv3"])
