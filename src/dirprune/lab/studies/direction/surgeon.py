"""Optimal brain surgeon: prune a trained network one weight at a time, moving all others to make up for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from dirprune.curvature.operators import SymmetricOperator
from dirprune.lab.progress import Progress

FITS = 4000
"""The largest number of weights whose Hessian is computed in full: 128 MB in float64, and minutes on one core."""
DAMPING = 1e-4
"""α relative to the largest eigenvalue. From a tenth to ten times as much made little difference to the loss."""
BLOCK = 50


def surgeon_steps(w: Tensor, inverse: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yield the greatest rise in loss so far and the weights, after each further weight is made zero.

        q = argmin_j w_j² / 2(H⁻¹)_jj,    w ← w − w_q/(H⁻¹)_qq · H⁻¹e_q,    H⁻¹ ← H⁻¹ − H⁻¹e_q e_qᵀH⁻¹/(H⁻¹)_qq

    For a quadratic loss at its minimum this is the least rise that zeroing one more weight can have.

    Args:
        w: trained weights, [d].
        inverse: H⁻¹, [d, d], positive definite.

    >>> next(surgeon_steps(torch.tensor([1.0, 1.0]), torch.linalg.inv(torch.tensor([[2.0, 1.0], [1.0, 1.0]]))))
    (0.25, tensor([1.5000, 0.0000]))

    Reference: Hassibi and Stork, Second order derivatives for network pruning: Optimal brain surgeon (1993).
    """
    w, inverse, worst = w.clone(), inverse.clone(), 0.0
    kept = torch.ones_like(w, dtype=torch.bool)
    for _ in range(len(w)):
        rises = torch.where(kept, w.square() / (2 * inverse.diagonal()), math.inf)
        q = int(rises.argmin())
        worst = max(worst, float(rises[q]))
        column = inverse[:, q] / inverse[q, q].sqrt()
        w -= w[q] / column[q] * column
        inverse.addr_(column, column, alpha=-1)
        kept[q] = False
        inverse[q], inverse[:, q] = 0, 0  # rounding would let what is zero move again
        w[q] = 0
        yield worst, w.clone()


def surgeon_pruner(w: Tensor, hessian: Tensor) -> Callable[[float], tuple[float, Tensor]]:
    """Return the pruner, for sparsities in growing order. Negative curvature counts as none, and α is added to all."""
    values, vectors = torch.linalg.eigh(hessian.double())
    damped = values.clamp(min=0) + DAMPING * values.max().clamp(min=1e-12)  # a loss that is 0 has no curvature
    steps, done, last = surgeon_steps(w.double(), (vectors / damped) @ vectors.T), 0, (0.0, w)

    def prune(sparsity: float) -> tuple[float, Tensor]:
        nonlocal done, last
        while done < math.ceil(sparsity * len(w) - 1e-6):
            last, done = next(steps), done + 1
        return last[0], last[1].to(w)

    return prune


def whole(op: SymmetricOperator) -> Generator[Progress, None, Tensor]:
    """Yield progress; return the matrix [d, d] of an operator."""
    columns = []
    for start in range(0, op.size, BLOCK):
        count = min(BLOCK, op.size - start)
        units = torch.zeros(op.size, count, dtype=op.dtype, device=op.device)
        units[range(start, start + count), range(count)] = 1
        columns.append(op @ units)
        yield Progress("whole Hessian", start + count, op.size, unit="products")
    matrix = torch.cat(columns, dim=1)
    return (matrix + matrix.T) / 2
