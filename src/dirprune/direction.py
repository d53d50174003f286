"""Directional pruning: which weights the flat directions of the loss allow to shrink, and how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from dirprune.curvature.basis import inner, length, unit_of
from dirprune.curvature.lanczos import Eigenpairs
from dirprune.curvature.operators import SymmetricOperator, dense
from dirprune.weights import Weights, check_alike, check_named, flatten, unflatten

Point = TypeVar("Point", Tensor, Weights)


def nonflat_basis(op: SymmetricOperator | Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """Return orthonormal eigenvectors, as columns, of all eigenvalues ``|λ| > tolerance · max|λ|``, by a dense
    decomposition.

    >>> nonflat_basis(torch.diag(torch.tensor([0.0, 3.0]))).abs()
    tensor([[0.],
            [1.]])
    """
    matrix = dense(op)
    values, vectors = torch.linalg.eigh(matrix.double())
    basis: Tensor = vectors[:, values.abs() > tolerance * values.abs().max()]
    return basis.to(matrix.dtype)


def null_projection(op: SymmetricOperator | Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """Return Π₀ = I − QQᵀ [d, d], the projection onto the kernel of an operator small enough to be decomposed.

    Args:
        op: a `HessianOperator`, a symmetric matrix, or anything with size, dtype, device and @.
        tolerance: an eigenvalue ``|λ| ≤ tolerance · max|λ|`` counts as zero.

    >>> null_projection(torch.diag(torch.tensor([0.0, 3.0])))
    tensor([[1., 0.],
            [0., 0.]])
    """
    basis = nonflat_basis(op, tolerance=tolerance)
    return torch.eye(len(basis), dtype=basis.dtype, device=basis.device) - basis @ basis.T


def directional_score(w: Point, eigenvectors: Tensor | Eigenpairs) -> Point:
    """Return the score s of every weight: positive where it can be pruned along the flat directions of the loss::

        s_j = sign(w_j) · (Π₀ sign(w))_j,    Π₀ = I − QQᵀ

    Growing the weights with s_j < 0 makes up for what shrinking those with s_j > 0 does to the loss.

    Args:
        w: trained weights, flat [d] or by name; the score comes back in the same form.
        eigenvectors: Q [d, k], orthonormal eigenvectors of the space that is *not* flat, as columns: all of them, from
            `nonflat_basis`, or the first k, from `top_eigenpairs`. No column means that every direction is flat. The
            result of `top_eigenpairs` for a `HessianOperator` holds parameter names, and is matched with w by name. The
            rows of a plain tensor are taken in the order of w, which must be that of ``op.names``.

    >>> directional_score(torch.tensor([2.0, -1.0]), torch.tensor([[0.6], [0.8]]))
    tensor([1.1200, 0.8400])

    Reference: Chao, Wang, Xing and Cheng, Directional Pruning of Deep Neural Networks (2020), Definition 1.
    """
    if not isinstance(w, Tensor):
        ordered = _in_order(w, eigenvectors, "w")
        score = unflatten(directional_score(flatten(ordered), eigenvectors), ordered)
        return {name: score[name] for name in w}
    q = _orthonormal(eigenvectors, w, "w")
    sign = _flat(w, "w").detach().sign()
    return sign * (sign - q @ inner(q.T, sign).to(w))


def directional_prune(w: Point, score: Point, lam: float) -> Point:
    """Return the pruned weights û, those with score s_j > 0 shrunk and the others grown::

        û = argmin_u ½‖w − u‖² + λ Σ_j s_j |u_j|,    û_j = sign(w_j) · max(|w_j| − λ s_j, 0)

    Args:
        w, score: both flat, or both by name.
        lam: λ ≥ 0; `lam_for_sparsity` finds the one for a wanted sparsity. λ = 0 returns w.

    >>> directional_prune(torch.tensor([2.0, -1.0]), torch.tensor([0.5, -0.5]), 1.0)
    tensor([ 1.5000, -1.5000])

    Reference: Definition 1 and Proposition A.1 of the paper.
    """
    if not (lam >= 0 and math.isfinite(lam)):
        raise ValueError(f"lam is {lam}; it must be finite and not negative")
    _check_paired(w, score)
    if not isinstance(w, Tensor):
        return {name: directional_prune(tensor, score[name], lam) for name, tensor in w.items()}
    w = w.detach()
    return w.sign() * (w.abs() - lam * score.detach()).clamp(min=0)


def lam_for_sparsity(w: Point, score: Point, sparsity: float) -> float:
    """Return the smallest λ at which `directional_prune` makes at least this fraction of the weights zero::

        û_j(λ) = 0   ⇔   w_j = 0,  or  s_j > 0 and λ ≥ |w_j| / s_j

    so λ is the n-th smallest of these ratios, n = ⌈sparsity · d⌉. Weights with s_j ≤ 0 are never pruned; a sparsity
    that would need them raises a ValueError. ``w`` and ``score`` are both flat, or both by name.

    >>> lam = lam_for_sparsity(torch.tensor([2.0, 1.0, 3.0]), torch.tensor([0.5, -0.5, 0.2]), 1 / 3)
    >>> round(lam, 5)
    4.0
    """
    _check_paired(w, score)
    if not isinstance(w, Tensor):
        return lam_for_sparsity(flatten(w), flatten({name: score[name] for name in w}), sparsity)
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is {sparsity}; it is a fraction of the weights, from 0 to 1")
    size, s = w.abs().double().reshape(-1), score.double().reshape(-1)
    ratios = torch.where(s > 0, size / s, torch.inf).where(size > 0, 0.0)
    wanted = math.ceil(sparsity * w.numel() - 1e-6)  # 0.07 · 100 is a little more than 7
    reachable = int(ratios.isfinite().sum())
    if wanted > reachable:
        raise ValueError(
            f"sparsity is {sparsity}, but only {reachable} of {w.numel()} weights ({reachable / w.numel():.4f}) "
            "are zero or have a positive score; ask for less, or compute the score with fewer eigenvectors"
        )
    if wanted == 0:
        return 0.0
    # λ s_j must reach |w_j| also after rounding to the weights' precision.
    return float(ratios.kthvalue(wanted).values) * (1 + 4 * torch.finfo(w.dtype).eps)


@dataclass(frozen=True)
class PathPoint(Generic[Point]):
    """One λ of the path: the pruned weights, the fraction of them that is zero, and what was measured there."""

    lam: float
    weights: Point
    sparsity: float
    measures: Mapping[str, float]


def directional_path(
    w: Point, score: Point, lams: Iterable[float], evaluate: Callable[[Point], Mapping[str, float]]
) -> Iterator[PathPoint[Point]]:
    """Yield the pruned weights û(λ) for each λ of ``lams``, with what ``evaluate`` returns for them.

    >>> w, score = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0])
    >>> for point in directional_path(w, score, [0.0, 1.0], lambda u: {"norm": float(u.norm())}):
    ...     print(point.sparsity, round(point.measures["norm"], 3))
    0.0 2.236
    0.5 1.5
    """
    for lam in lams:
        pruned = directional_prune(w, score, lam)
        flat = pruned if isinstance(pruned, Tensor) else flatten(pruned)
        yield PathPoint(lam, pruned, float((flat == 0).double().mean()), evaluate(pruned))


class EigenspaceShare(NamedTuple):
    """The share of a difference that lies in an eigenspace, and the typical share of a random direction."""

    share: float
    random_level: float


def eigenspace_share(difference: Tensor | Weights, eigenvectors: Tensor | Eigenpairs) -> EigenspaceShare:
    """Return the share of a difference of weights that lies in the span of the eigenvectors::

        ‖QQᵀΔ‖ / ‖Δ‖,    beside √(k/d), its root mean square for a random direction Δ

    Args:
        difference: Δ, flat [d] or by name, for instance w_gRDA − w_SGD.
        eigenvectors: Q [d, k], orthonormal columns, as `directional_score` takes them.

    >>> eigenspace_share(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.eye(4)[:, :1])
    EigenspaceShare(share=0.6, random_level=0.5)

    Reference: §4.3 of the paper.
    """
    if not isinstance(difference, Tensor):
        difference = flatten(_in_order(difference, eigenvectors, "difference"))
    delta = _flat(difference, "difference").detach()
    q = _orthonormal(eigenvectors, delta, "difference")
    scaled = delta / unit_of(delta)  # whose squares neither underflow nor overflow
    whole = length(scaled)
    if not (whole > 0 and math.isfinite(whole)):
        raise ValueError(f"difference has length {whole}; its direction is not defined")
    inside = float(inner(q.T, scaled).norm())
    return EigenspaceShare(inside / whole, math.sqrt(q.shape[1] / delta.numel()))


def _flat(vector: Tensor, name: str) -> Tensor:
    if vector.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; give a flat vector, or weights by name")
    return vector


def _check_paired(w: Tensor | Weights, score: Tensor | Weights) -> None:
    """Raise unless there is one score per weight."""
    if isinstance(w, Tensor) and isinstance(score, Tensor):
        if w.shape != score.shape:
            raise ValueError(f"score has shape {tuple(score.shape)} and w {tuple(w.shape)}; give one score per weight")
    elif isinstance(w, Tensor) or isinstance(score, Tensor):
        forms = ("flat" if isinstance(point, Tensor) else "by name" for point in (w, score))
        raise ValueError("w is {} and score {}; give both flat, or both by name".format(*forms))
    else:
        check_named(w, "w")
        check_alike(w, score, "w", "score")


def _in_order(weights: Weights, eigenvectors: Tensor | Eigenpairs, what: str) -> Weights:
    """Return the weights in the order of the eigenvectors' rows, if that is known."""
    check_named(weights, what)
    names = eigenvectors.names if isinstance(eigenvectors, Eigenpairs) else None
    if names is None:
        return weights
    if others := set(names) ^ weights.keys():
        place = what if min(others) in weights else "the eigenvectors"
        raise ValueError(
            f"{min(others)!r} is in {place} alone; give the weights named in eigenvectors.names, and no others"
        )
    return {name: weights[name] for name in names}


def _orthonormal(eigenvectors: Tensor | Eigenpairs, vector: Tensor, what: str) -> Tensor:
    """Return Q, or raise unless it is an orthonormal basis for this vector: I − QQᵀ would not be a projection."""
    q, size = eigenvectors.vectors if isinstance(eigenvectors, Eigenpairs) else eigenvectors, vector.numel()
    if q.ndim != 2 or q.shape[0] != size:
        raise ValueError(f"eigenvectors has shape {tuple(q.shape)}; {size} weights need [{size}, k], as columns")
    if (q.dtype, q.device) != (vector.dtype, vector.device):
        raise ValueError(
            f"eigenvectors is {q.dtype} on {q.device} and {what} {vector.dtype} on {vector.device}; "
            f"bring one to the other with .to({vector.dtype})"
        )
    gram = inner(q.T, q)
    error = float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().sum())
    if not error <= 1e-2 * max(1, len(gram)):
        raise ValueError(f"eigenvectors are not orthonormal columns (QᵀQ is off by {error:.2g}); use torch.linalg.qr")
    return q
