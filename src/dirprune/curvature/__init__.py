"""Curvature of the training loss: its Hessian as products with vectors, its leading eigenpairs, its diagonal."""

from dirprune.curvature.hessian import HessianOperator, hessian_diagonal, top_eigenpairs
from dirprune.curvature.lanczos import Eigenpairs
from dirprune.curvature.operators import MatrixOperator, SymmetricOperator

__all__ = [
    "Eigenpairs",
    "HessianOperator",
    "MatrixOperator",
    "SymmetricOperator",
    "hessian_diagonal",
    "top_eigenpairs",
]
