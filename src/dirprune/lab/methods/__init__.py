"""gRDA and the methods that the paper compares it with, for one training loop; one file per method."""

from __future__ import annotations

from dirprune.lab.methods.amc import Amc
from dirprune.lab.methods.grda import Grda
from dirprune.lab.methods.magnitude import Magnitude
from dirprune.lab.methods.method import Method
from dirprune.lab.methods.rda import Rda
from dirprune.lab.methods.rigl import RigL
from dirprune.lab.methods.sgd import Sgd
from dirprune.lab.methods.soft_threshold import Str
from dirprune.lab.methods.variational_dropout import VariationalDropout
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
