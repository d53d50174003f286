"""The two panels of Figure 4: pruning methods on ResNet50/ImageNet; README.md says where the numbers come from."""

from __future__ import annotations

from dirprune.lab.published import rows
from dirprune.lab.studies.comparison.tradeoff import SHORTCUT, STEM, Curve, LayerBar

Point = tuple[float, float]
"""A sparsity (a fraction) and an accuracy (in percent)."""

_SWEEPS = {
    "magnitude_pruning": "magnitude (Gale et al.)",
    "magnitude_pruning_v2": "magnitude v2 (Gale et al.)",
    "variational_dropout": "variational dropout (Gale et al.)",
    "random_pruning": "random (Gale et al.)",
}
_SCHEDULES = {
    "lr_schedule=0.1_ep140_0.01": "gRDA, one drop of the rate at epoch 140",
    "lr_schedule=official": "gRDA, a drop every 30 epochs",
}
_LAYERWISE = {
    "gRDA_c0.005_mu0.55": "gRDA c = 0.005, μ = 0.55",
    "gRDA_c0.01_mu0.4": "gRDA c = 0.01, μ = 0.4",
    "variational_dropout": "variational dropout",
    "AMC (RL)": "AMC",
    "80 % Sparse ERK": "RigL's ERK densities, 80 %",
    "90 % Sparse ERK": "RigL's ERK densities, 90 %",
}


def tradeoff_curves() -> list[Curve]:
    """Return accuracy against sparsity of gRDA, magnitude pruning, variational dropout and random pruning.

    gRDA has all of its points, in one curve per schedule. Gale et al. ran hundreds of settings of the other methods; of
    these only the `frontier` is kept.

    >>> curve = tradeoff_curves()[0]
    >>> curve.label, round(curve.sparsity[3], 3), round(curve.accuracy[3], 2)
    ('gRDA, one drop of the rate at epoch 140', 0.916, 73.24)

    Reference: Gale, Elsen & Hooker, "The state of sparsity in deep neural networks", 2019.
    """
    points: dict[str, list[Point]] = {label: [] for label in (*_SCHEDULES.values(), *_SWEEPS.values())}
    for row in rows("resnet50_imagenet_pareto.csv"):
        label = _SCHEDULES[row["settings"].split(";")[0]] if row["method"] == "gRDA" else _SWEEPS[row["method"]]
        points[label].append((float(row["global_sparsity"]), 100 * float(row["top1_accuracy"])))
    kept = {label: sorted(p) if label in _SCHEDULES.values() else frontier(p) for label, p in points.items()}
    return [Curve(label, [x for x, _ in p], [y for _, y in p]) for label, p in kept.items()]


def frontier(points: list[Point]) -> list[Point]:
    """Return the points that no other point beats in both sparsity and accuracy, by increasing sparsity.

    >>> frontier([(0.5, 76.0), (0.9, 73.0), (0.8, 72.0), (0.9, 70.0)])
    [(0.5, 76.0), (0.9, 73.0)]
    """
    kept: list[Point] = []
    for point in sorted(points, reverse=True):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def layerwise() -> list[LayerBar]:
    """Return the sparsity of ResNet50's 54 weights under six settings of four methods, in network order.

    >>> bar = layerwise()[2]
    >>> bar.method, bar.layer, bar.kind, round(bar.sparsity, 3)
    ('gRDA c = 0.005, μ = 0.55', 'layer1.0.conv2', 'conv 3×3', 0.824)
    """
    bars = [
        LayerBar(_LAYERWISE[row["method"]], layer, _kind(layer), float(row["sparsity"]))
        for row in rows("resnet50_layerwise_sparsity.csv")
        for layer in [row["layer"].removesuffix(".weight")]
    ]
    order = list(_LAYERWISE.values())
    return sorted(bars, key=lambda bar: order.index(bar.method))  # stable: the layers keep their order


def _kind(layer: str) -> str:
    """Return the kind of a layer of torchvision's ResNet50 by its name: the table does not give shapes."""
    if layer in ("conv1", "fc"):
        return STEM if layer == "conv1" else "linear"
    if "downsample" in layer:
        return SHORTCUT
    return "conv 3×3" if layer.endswith("conv2") else "conv 1×1"
