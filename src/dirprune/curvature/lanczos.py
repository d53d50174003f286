"""Eigenpairs of a symmetric operator by thick-restart Lanczos, product by product.

Reference: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems (2000).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from dirprune.curvature.basis import fresh, inner, length, orthogonalise, rotate, unit_of
from dirprune.curvature.operators import SymmetricOperator, operator_of

Which = Literal["largest", "magnitude"]


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues and eigenvectors of a symmetric operator.

    Args:
        values: [k], the best first.
        vectors: [d, k], as columns.
        residuals: [k], the true ones ‖Hv − λv‖.
        iterations: the number of products, without the k for the residuals.
        names: the parameters in the order of the vectors' rows, if the operator has names.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    iterations: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LanczosStep:
    """The state of Lanczos after one product: the wanted Ritz values, best first, and estimates of their residuals.

    ``basis`` is the solver's own memory: it holds these Ritz vectors only until the next step.
    """

    values: Tensor
    bounds: Tensor
    scale: float
    iterations: int
    converged: bool
    basis: Tensor
    coefficients: Tensor
    which: Which

    def pairs(self, op: SymmetricOperator | Tensor) -> Eigenpairs:
        """Return the best eigenpairs of ``op`` in the span of the wanted Ritz vectors, with true residuals.

        This takes k products.

        ``op`` may be the operator in a higher precision: a lower one does not show its own error.
        """
        with torch.autocast(self.basis.device.type, enabled=False):  # the caller may be in autocast
            vectors = (self.coefficients.to(self.basis).T @ self.basis).T
            products = operator_of(op) @ vectors
            unit = unit_of(products)
            products = products / unit
            overlaps = inner(vectors.T, products).cpu()
            values, turn = _ritz((overlaps + overlaps.T) / 2, self.which)
            values, turn = values.to(vectors), turn.to(vectors)
            vectors, products = vectors @ turn, products @ turn
            residuals = torch.linalg.vector_norm(products - vectors * values, dim=0)
        names = getattr(operator_of(op), "names", None)  # not of a matrix: torch.Tensor has another `names`
        return Eigenpairs(values * unit, vectors, residuals * unit, self.iterations, names and tuple(names))


def lanczos_steps(
    op: SymmetricOperator | Tensor,
    k: int,
    *,
    which: Which = "largest",
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    seed: int = 0,
    basis_size: int | None = None,
) -> Iterator[LanczosStep]:
    """Yield the state of `top_eigenpairs` after every product; before the k-th, there are fewer than k Ritz values.

    >>> matrix = torch.diag(torch.arange(50.0))
    >>> for step in lanczos_steps(matrix, 2):
    ...     pass                                   # show step.iterations, step.values, step.bounds.max()
    >>> step.pairs(matrix).values.round(decimals=2)
    tensor([49., 48.])
    """
    op, k = operator_of(op), _whole(k)
    size = min(op.size, 3 * k + 20 if basis_size is None else basis_size)
    _check_request(op, k, which, size, tolerance, max_iterations)
    complete = size == op.size <= max_iterations  # an operator that fits into the basis is decomposed in full
    generator = torch.Generator(op.device).manual_seed(seed)
    basis = torch.zeros(size, op.size, dtype=op.dtype, device=op.device)  # orthonormal rows
    projected = torch.zeros(size, size, dtype=torch.float64)  # the operator on the basis: small, and on the host
    basis[0] = fresh(basis[:0], generator)
    count, scale, unit = 0, 0.0, 0.0
    for iteration in range(1, max_iterations + 1):
        product = op @ basis[count]
        unit = unit or unit_of(product)  # from here on, the operator is divided by it
        count += 1
        new, overlaps = orthogonalise(product / unit, basis[:count])
        projected[count - 1, :count] = projected[:count, count - 1] = overlaps.cpu()
        rest = length(new)
        if not math.isfinite(rest):
            raise ValueError(f"product {iteration} of op is not finite; check the weights and the loss")
        values, vectors = _ritz(projected[:count, :count], which)
        scale = max(scale, float(values.abs().max()))
        # Below this the rest is round-off: the basis spans an invariant space, which only a new vector can leave.
        closed = rest <= 100 * torch.finfo(op.dtype).eps * scale or count == op.size
        bounds = (0.0 if closed else rest) * vectors[-1].abs()
        # Pair k + 1 must have converged too. With a loose tolerance a large eigenvalue may not have appeared yet, and
        # a smaller one would be returned instead.
        enough = count == op.size if complete else count >= k if closed else count > k
        done = enough and float(bounds[: k + 1].max()) <= tolerance * scale
        found = values[:k] * unit, bounds[:k] * unit, scale * unit
        yield LanczosStep(*found, iteration, done, basis[:count], vectors[:, :k], which)
        if done or iteration == max_iterations:  # before a restart, which would rotate what was yielded away
            return
        if count == size:
            count = k + (size - k) // 2
            rotate(basis, vectors[:, :count])
            projected = torch.diag(values).where(torch.arange(size) < count, 0.0)
        basis[count] = fresh(basis[:count], generator) if closed else new / rest


def _check_request(op: SymmetricOperator, k: int, which: str, size: int, tolerance: float, max_iterations: int) -> None:
    if which not in ("largest", "magnitude"):
        raise ValueError(f"which is {which!r}; choose 'largest' or 'magnitude'")
    if torch.finfo(op.dtype).bits < 32:
        raise ValueError(
            f"op is of {op.dtype}, too coarse for an orthonormal basis; give the model or matrix in float32, e.g. "
            "model.float(), and for speed HessianOperator(…, autocast=torch.bfloat16)"
        )
    if not 1 <= k <= op.size:
        raise ValueError(f"k is {k}; an operator of size {op.size} has 1 to {op.size} eigenpairs")
    if size < min(k + 2, op.size):
        raise ValueError(f"basis_size is {size}; {k} eigenpairs need at least {k + 2}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(
            f"tolerance is {tolerance}; give the greatest residual to accept, relative to max|λ|: e.g. 1e-4"
        )
    if max_iterations < k:
        raise ValueError(f"max_iterations is {max_iterations}; {k} eigenpairs need at least {k}")


def _whole(k: Any) -> int:
    """Return an integer of any kind, including numpy's, as an int."""
    try:
        return index(k)
    except TypeError:
        raise ValueError(f"k is {k}; give a whole number of eigenpairs") from None


def _ritz(projected: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Return the eigenpairs of the small matrix, best first."""
    values, vectors = torch.linalg.eigh(projected)
    order = _merit(values, which).argsort(descending=True)
    return values[order], vectors[:, order]


def _merit(values: Tensor, which: str) -> Tensor:
    return values if which == "largest" else values.abs()
