"""The authors' measurements of the share of gRDA's difference to SGD in the leading eigenspace (Figure 6)."""

from __future__ import annotations

from dataclasses import dataclass

from dirprune.lab.published import rows


@dataclass(frozen=True)
class PublishedShares:
    """‖PΔ‖/‖Δ‖ over the epochs of one published gRDA run, without the √10 that Figure 6 divides by."""

    c: float
    mu: float
    epochs: tuple[int, ...]
    shares: tuple[float, ...]


def shares(data: str, model: str) -> list[PublishedShares]:
    """Return the published runs of a model on a data set, by increasing μ; an empty list if there are none.

    >>> [run.mu for run in shares("cifar10", "vgg16")]
    [0.51, 0.6, 0.7]
    """
    groups: dict[tuple[float, float], list[tuple[int, float]]] = {}
    for row in rows("projection.csv"):
        if row["experiment"] == f"{model}-{data}":
            point = (int(row["epoch"]), float(row["share"]))
            groups.setdefault((float(row["mu"]), float(row["c"])), []).append(point)
    return [
        PublishedShares(c, mu, tuple(epoch for epoch, _ in points), tuple(share for _, share in points))
        for (mu, c), points in sorted(groups.items())
    ]
