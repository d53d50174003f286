"""Symmetric matrices given by their products with vectors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SymmetricOperator(Protocol):
    """The interface that `top_eigenpairs` needs of a symmetric matrix: its size and its products."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


class MatrixOperator:
    """A symmetric matrix, given as a tensor, as an operator.

    >>> MatrixOperator(torch.diag(torch.tensor([1.0, 2.0]))) @ torch.ones(2)
    tensor([1., 2.])
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; a symmetric operator needs a square one")
        if not matrix.is_floating_point():
            raise ValueError(f"matrix is of {matrix.dtype}; give real numbers, e.g. matrix.double()")
        self.matrix, self.size, self.dtype, self.device = matrix, matrix.shape[0], matrix.dtype, matrix.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return torch.matmul(self.matrix, vector)


def operator_of(op: SymmetricOperator | Tensor) -> SymmetricOperator:
    """Return the operator, or a symmetric matrix as one."""
    if not isinstance(op, Tensor):
        return op
    op = op.detach()
    found = MatrixOperator(op)
    apart = float((op - op.T).abs().max()) if op.numel() else 0.0
    if apart > torch.finfo(op.dtype).eps ** 0.5 * float(op.abs().max()):
        raise ValueError(f"the matrix is up to {apart:.2g} apart from its transpose; give a symmetric one: (A + Aᵀ)/2")
    return found


def dense(op: SymmetricOperator | Tensor) -> Tensor:
    """Return the full matrix [d, d] of a small operator, made exactly symmetric."""
    op = operator_of(op)
    matrix = op @ torch.eye(op.size, dtype=op.dtype, device=op.device)
    return matrix / 2 + matrix.T / 2  # a sum of two has no order, and halves do not overflow
