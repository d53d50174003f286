"""The curves between gRDA and SGD solutions that the authors published; README.md says where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from dirprune.connect import CurveProfile
from dirprune.connect.landscape import Measurement
from dirprune.lab.published import rows


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

    def reversed(self) -> PublishedCurve:
        """Return the same curve from SGD to gRDA."""
        points = tuple(
            Measurement((1 - p.place[0],), p.train_loss, p.train_error, p.test_loss, p.test_error)
            for p in reversed(self.profile.points)
        )
        return PublishedCurve(**{**vars(self), "profile": CurveProfile(points)})


def find(*, data: str, model: str, c: float, mu: float) -> PublishedCurve | None:
    """Return the published curve for a gRDA solution with these settings, or None.

    >>> curve = find(data="cifar10", model="vgg16", c=5e-4, mu=0.6)
    >>> round(curve.profile.barrier, 4), curve.profile.highest.place, curve.epochs
    (0.0021, (0.1,), 300)
    """
    for row in rows("connect_barriers.csv"):
        if (row["data"], row["model"], float(row["c"]), float(row["mu"])) == (data, model, c, mu):
            fit = int(row["epochs"]), float(row["lr"]), float(row["momentum"])
            return PublishedCurve(data, model, c, mu, *fit, float(row["length"]), _profile(data, model, mu))
    return None


def _profile(data: str, model: str, mu: float) -> CurveProfile:
    own = (r for r in rows("connect_curves.csv") if (r["data"], r["model"], float(r["mu"])) == (data, model, mu))
    columns = ("train_loss", "train_error", "test_loss", "test_error")
    return CurveProfile(tuple(Measurement((float(r["t"]),), *(float(r[name]) for name in columns)) for r in own))
