"""An orthonormal basis of long vectors, held as the rows of a tensor; sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

STRIP = 2**16  # elements of a long vector that are summed or rotated at a time

Function = TypeVar("Function", bound=Callable[..., Any])


def unrounded(function: Function) -> Function:
    """Decorate a function of a tensor to run without the caller's autocast, which would round products."""

    @wraps(function)
    def called(tensor: Tensor, *others: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return function(tensor, *others)

    return called  # type: ignore[return-value]


@unrounded
def inner(rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows @ columns in float64, summed strip by strip.

    One sum over millions of products in single precision loses half its digits on a CPU.
    """
    strips = zip(torch.split(rows, STRIP, dim=1), torch.split(columns, STRIP), strict=True)
    return torch.stack([(a @ b).double() for a, b in strips]).sum(0)


def length(vector: Tensor) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(inner(vector.unsqueeze(0), vector))


def unit_of(vectors: Tensor) -> float:
    """Return the largest power of two up to max|element|: after division by it, squares do not underflow or overflow.

    Division by a power of two is exact.

    >>> unit_of(torch.tensor([3e-30, -5e-30])), unit_of(torch.zeros(2))
    (3.1554436208840472e-30, 1.0)
    """
    greatest = float(vectors.abs().max()) if vectors.numel() else 0.0
    return 2.0 ** (math.frexp(greatest)[1] - 1) if 0 < greatest < math.inf else 1.0


@unrounded
def orthogonalise(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vector without its components on the rows of the basis, and those components."""
    overlaps = inner(basis, vector)
    vector = vector - overlaps.to(vector) @ basis
    again = inner(basis, vector)  # what round-off left the first time; twice is enough
    return vector - again.to(vector) @ basis, overlaps + again


def fresh(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random unit vector orthogonal to the basis."""
    draw = torch.randn(basis.shape[1], generator=generator, dtype=basis.dtype, device=basis.device)
    vector, _ = orthogonalise(draw, basis)
    return vector / length(vector)


@unrounded
def rotate(basis: Tensor, coefficients: Tensor) -> None:
    """Replace the first rows of the basis by combinations of all rows, one per column of coefficients."""
    turn = coefficients.to(basis).T
    for strip in torch.split(basis, STRIP, dim=1):  # all at once would take as much memory again
        strip[: len(turn)] = turn @ strip
