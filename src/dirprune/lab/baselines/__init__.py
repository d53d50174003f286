"""gRDA and the methods that the paper compares it with, for one training loop; one file per method."""

from __future__ import annotations

from dirprune.lab.baselines.amc import Amc
from dirprune.lab.baselines.grda import Grda
from dirprune.lab.baselines.magnitude import Magnitude
from dirprune.lab.baselines.method import Method
from dirprune.lab.baselines.rda import Rda
from dirprune.lab.baselines.rigl import RigL
from dirprune.lab.baselines.sgd import Sgd
from dirprune.lab.baselines.soft_threshold import Str
from dirprune.lab.baselines.variational_dropout import VariationalDropout
from dirprune.lab.names import unknown

__all__ = [
    "METHODS",
    "Amc",
    "Grda",
    "Magnitude",
    "Method",
    "Rda",
    "RigL",
    "Sgd",
    "Str",
    "VariationalDropout",
    "get",
]

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Grda, Sgd, Rda, Magnitude, VariationalDropout, RigL, Amc, Str)
}


def get(name: str) -> type[Method]:
    """Return the method called ``name``; an unknown name raises an error that lists all methods.

    >>> get("rigl").knob
    'sparsity'
    """
    if name in METHODS:
        return METHODS[name]
    raise unknown("method", name, METHODS)
