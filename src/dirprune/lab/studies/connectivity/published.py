"""The curves between gRDA and SGD solutions that the authors published; README.md says where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from dirprune.connect import CurveProfile
from dirprune.connect.landscape import Measurement
from dirprune.lab.published import rows

Corner = tuple[str, float, float]
"""The name of a corner of a plane ("start", "bend" or "end"), and its coordinates."""


@dataclass(frozen=True)
class PublishedPlane:
    """The plane through the solutions and the bend: x, y, train loss and test error of a full grid, and its corners."""

    rows: tuple[dict[str, float], ...]
    corners: tuple[Corner, ...]

    def mirrored(self, width: float) -> PublishedPlane:
        """Return the same plane seen from the other solution, at this distance."""
        other = {"start": "end", "bend": "bend", "end": "start"}
        rows = tuple({**row, "x": width - row["x"]} for row in self.rows)
        return PublishedPlane(rows, tuple((other[name], width - x, y) for name, x, y in self.corners))


@dataclass(frozen=True)
class PublishedCurve:
    """A published curve from a gRDA solution (t = 0) to the SGD solution (t = 1), and how it was fitted.

    Its training loss was measured on augmented images. ``length`` is the length of the curve in the ℓ₂ norm.
    """

    data: str
    model: str
    c: float
    mu: float
    epochs: int
    lr: float
    momentum: float
    length: float
    profile: CurveProfile
    plane: PublishedPlane

    def reversed(self) -> PublishedCurve:
        """Return the same curve from SGD to gRDA."""
        points = tuple(
            Measurement((1 - p.place[0],), p.train_loss, p.train_error, p.test_loss, p.test_error)
            for p in reversed(self.profile.points)
        )
        width = next(x for name, x, _ in self.plane.corners if name == "end")
        return PublishedCurve(**{**vars(self), "profile": CurveProfile(points), "plane": self.plane.mirrored(width)})


def find(*, data: str, model: str, c: float, mu: float) -> PublishedCurve | None:
    """Return the published curve for a gRDA solution with these settings, or None.

    >>> curve = find(data="cifar10", model="vgg16", c=5e-4, mu=0.6)
    >>> round(curve.profile.barrier, 4), curve.profile.highest.place, curve.epochs
    (0.0021, (0.1,), 300)
    """
    for row in rows("connect_barriers.csv"):
        if (row["data"], row["model"], float(row["c"]), float(row["mu"])) == (data, model, c, mu):
            fit = int(row["epochs"]), float(row["lr"]), float(row["momentum"])
            return PublishedCurve(data, model, c, mu, *fit, float(row["length"]), *_measured(data, model, mu))
    return None


def _measured(data: str, model: str, mu: float) -> tuple[CurveProfile, PublishedPlane]:
    def own(name: str) -> list[dict[str, str]]:
        return [r for r in rows(name) if (r["data"], r["model"], float(r["mu"])) == (data, model, mu)]

    scores = ("train_loss", "train_error", "test_loss", "test_error")
    curve = tuple(Measurement((float(r["t"]),), *(float(r[s]) for s in scores)) for r in own("connect_curves.csv"))
    mapped = ("x", "y", "train_loss", "test_error")
    grid = tuple({column: float(row[column]) for column in mapped} for row in own("connect_planes.csv"))
    corners = tuple((row["name"], float(row["x"]), float(row["y"])) for row in own("connect_points.csv"))
    return CurveProfile(curve), PublishedPlane(grid, corners)
