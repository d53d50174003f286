"""Prune a trained network in one shot: by direction, by magnitude, by optimal brain damage and surgeon."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from dirprune.curvature import hessian_diagonal
from dirprune.curvature.basis import inner
from dirprune.direction import directional_prune, directional_score, lam_for_sparsity
from dirprune.lab.progress import Progress
from dirprune.lab.records.columns import Column, Fraction, Percent, cells
from dirprune.lab.records.tables import merge_rows, read_rows, write_rows
from dirprune.lab.studies.direction.spectrum import (
    Curvature,
    Lanczos,
    conv_precision,
    curvature_of,
    measuring_runs,
)
from dirprune.lab.studies.direction.surgeon import FITS, surgeon_pruner, whole
from dirprune.lab.text import NOTHING
from dirprune.lab.training.loop import evaluate, recalibrate_batchnorm
from dirprune.lab.training.runs import Run, weights_of
from dirprune.weights import flatten, put, take, unflatten

SPARSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KS = (0, 10, 30, 100)
DEFAULT = Lanczos(tolerance=1e-5, max_iterations=2000)
"""Tighter than the defaults of `Lanczos`, because the hundredth eigenvalue is at most about 1% of the first."""
METHODS = ("magnitude", "brain-damage", "brain-surgeon", "directional")
PRODUCTS = "products"
DIAGONAL_BLOCK = 10

Pruner = Callable[[float], tuple[float, Tensor]]
"""Maps a requested sparsity to (lam, pruned weights); see `ScoreRow` for lam."""


@dataclass(frozen=True)
class ScoreRow:
    """The network after one kind of pruning.

    Attributes:
        method: "magnitude", "brain-damage", "brain-surgeon" or "directional".
        k: number of eigenvectors that span the curved subspace (directional; with 0 everything is flat); otherwise 0.
        wanted: the requested sparsity.
        lam: λ of the path (directional), or the largest |w|, saliency or rise of the loss at which a weight was pruned.
            Infinite if the requested sparsity cannot be reached because the other scores are not positive; the
            measurements are then NaN.
        sparsity: the fraction of all parameters that is zero, or the largest that can be reached.
        train_loss, train_accuracy: on the training data without augmentation; accuracies in percent.
    """

    method: Annotated[str, Column("method")]
    k: Annotated[int, Column("k", valid=(0, math.inf))]
    wanted: Fraction
    lam: Annotated[float, Column("λ", ".3g")]
    sparsity: Annotated[float, Column("sparsity (%)", ".1f", scale=100, valid=(0, 1))]
    train_loss: Annotated[float, Column("train loss", ".4g")]
    train_accuracy: Percent
    test_loss: float
    test_accuracy: Annotated[float, Column("test accuracy (%)", ".2f", valid=(0, 100))]

    def cells(self) -> dict[str, str]:
        """Return the row as text by column; only directional pruning has a k."""
        return cells(self) | ({} if self.method == "directional" else {"k": NOTHING})


@dataclass(frozen=True)
class SpectrumRow:
    """One eigenvalue of the training Hessian, with its eigenvector q.

    Attributes:
        residual: the true residual ‖Hq − λq‖; ``converged`` says whether it is within the tolerance.
        sign_share: (qᵀ sign(w))²/d, the amount by which q lowers the mean score, which is 1 without eigenvectors.
    """

    index: int
    eigenvalue: float
    residual: float
    converged: bool
    sign_share: float


def score(
    run: Run,
    out: Path,
    *,
    ks: Iterable[int] = KS,
    sparsities: Iterable[float] = SPARSITIES,
    epoch: int | None = None,
    samples: int = 100,
    recalibrate: bool = False,
    lanczos: Lanczos | None = None,
    device: torch.device,
    root: Path | None = None,
) -> Iterator[Progress | ScoreRow]:
    """Yield progress, and the losses of a trained network pruned in four ways, without retraining.

    Every parameter may be pruned, including biases. Directional pruning (Definition 1) and optimal brain surgeon also
    change the weights that they keep; the other two do not. The surgeon needs the whole Hessian, and is left out where
    that is larger than `FITS`. Rows are saved in score.csv in ``out``, eigenvalues in eigenvalues.csv. Rows that exist
    are not measured again. The Hessian products are saved until all is done, 4 bytes per weight and product.

    Args:
        run: a finished run, usually with SGD.
        ks: numbers of leading eigenvectors that span the curved subspace; 0 is soft thresholding. Eigenvectors with
            λ ≤ 0 are left out: there are no more positive ones, or ``lanczos`` stopped too early.
        epoch: epoch of the checkpoint; by default the newest.
        samples: Hessian products in the estimate of the diagonal, for optimal brain damage.
        recalibrate: re-estimate the BatchNorm statistics for each pruned network.
        lanczos: how the eigenpairs are computed.
        device, root: where to compute, and where the data are.

    Reference: Definition 1 of the paper; LeCun, Denker and Solla, Optimal brain damage (1990); `surgeon_steps`.
    """
    lanczos, ks, grid = lanczos or DEFAULT, sorted(set(ks)), sorted(set(sparsities))
    _check(ks, grid, samples)
    given, (epoch, state) = epoch, weights_of(run, epoch)
    if epoch == 0 and given is None:
        raise ValueError(f"{run.folder} has only its initial weights; train it, or give --epoch 0 to prune those")
    settings = {"run": run.folder.name, "epoch": epoch, "samples": samples, "recalibrate": recalibrate}
    curvature = curvature_of(run.recipe, lanczos, device=device, root=root)
    with measuring_runs(out, "score.csv", settings, lanczos, device, [(run, epoch)]):
        curvature.load(state, str(run.folder))
        yield from _prune_all(curvature, state, out, ks, grid, samples, recalibrate)
        shutil.rmtree(out / PRODUCTS, ignore_errors=True)


def measured(out: Path) -> list[ScoreRow]:
    """Return all rows of score.csv, including those of earlier commands, in the order of the table."""
    rows = read_rows(out / "score.csv", ScoreRow)
    return sorted(rows, key=lambda row: (METHODS.index(row.method), row.k, row.wanted))


def _prune_all(
    curvature: Curvature,
    state: Mapping[str, Any],
    out: Path,
    ks: Sequence[int],
    sparsities: Sequence[float],
    samples: int,
    recalibrate: bool,
) -> Iterator[Progress | ScoreRow]:
    """Prune the network by every method to every sparsity that is not in score.csv yet; yield all rows."""
    rows = {(row.method, row.k, row.wanted): row for row in read_rows(out / "score.csv", ScoreRow)}
    *others, directional = METHODS if curvature.hessian.size <= FITS else [m for m in METHODS if m != "brain-surgeon"]
    methods = [*((other, 0) for other in others), *((directional, k) for k in ks)]
    missing = [each for each in methods if any((*each, wanted) not in rows for wanted in sparsities)]
    w = flatten(take(curvature.model))
    vectors = yield from _eigenvectors(curvature, w, max((k for _, k in missing), default=0), out)
    done = 0
    for method, k in methods:
        if (method, k) in missing:
            prune = yield from _pruner(method, curvature, w, vectors[:, :k], samples)
        for wanted in sparsities:
            if (method, k, wanted) not in rows:
                lam, pruned = prune(wanted)
                measured = _measure(curvature, pruned, lam, recalibrate)
                rows[method, k, wanted] = ScoreRow(method, k, wanted, lam, *measured)
                curvature.load(state)
                write_rows(out / "score.csv", ScoreRow, rows.values())
            yield rows[method, k, wanted]
            done += 1
            yield Progress("pruned networks", done, len(methods) * len(sparsities), unit="networks")


def _pruner(
    method: str, curvature: Curvature, w: Tensor, vectors: Tensor, samples: int
) -> Generator[Progress, None, Pruner]:
    if method == "directional":
        return directional_pruner(w, directional_score(w, vectors))
    if method == "magnitude":
        return smallest_pruner(w, w.abs())
    if method == "brain-surgeon":
        return surgeon_pruner(w, (yield from whole(curvature.hessian)))
    return smallest_pruner(w, (yield from _saliency(curvature, w, samples)))


def directional_pruner(w: Tensor, score: Tensor) -> Pruner:
    """Return the pruner of Definition 1 with λ chosen for the sparsity; λ is infinite if that cannot be reached."""
    reachable = float(((score > 0) | (w == 0)).double().mean())

    def prune(sparsity: float) -> tuple[float, Tensor]:
        if sparsity > reachable:
            return math.inf, torch.where(score > 0, 0.0, w)
        lam = lam_for_sparsity(w, score, sparsity)
        return lam, directional_prune(w, score, lam)

    return prune


def smallest_pruner(w: Tensor, saliency: Tensor) -> Pruner:
    """Return the pruner that zeroes the weights of smallest saliency and does not change the others.

    >>> smallest_pruner(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([5.0, 4.0, 6.0]))(1 / 3)
    (4.0, tensor([1., 0., 3.]))
    """

    def prune(sparsity: float) -> tuple[float, Tensor]:
        count = math.ceil(sparsity * len(w) - 1e-6)
        if not count:
            return 0.0, w
        threshold = saliency.kthvalue(count).values
        return float(threshold), torch.where(saliency <= threshold, 0.0, w)

    return prune


def _check(ks: Sequence[int], sparsities: Sequence[float], samples: int) -> None:
    if not ks or ks[0] < 0:
        raise ValueError(f"ks={ks}: give numbers of eigenvectors, 0 or more")
    if not sparsities or not 0 <= sparsities[0] <= sparsities[-1] < 1:
        raise ValueError(f"sparsities={sparsities}: give fractions of the weights, from 0 to below 1")
    if samples < 1:
        raise ValueError(f"samples={samples}: the estimate of the diagonal needs at least one product")


def _eigenvectors(curvature: Curvature, w: Tensor, k: int, out: Path) -> Generator[Progress, None, Tensor]:
    """Yield progress; write the eigenvalues, and return the eigenvectors of positive eigenvalues."""
    if not k:
        return w.new_empty(len(w), 0)
    pairs, goal = yield from curvature.eigenpairs(k, out / PRODUCTS, what="eigenpairs")
    shares = (inner(pairs.vectors.T, w.sign()) ** 2 / len(w)).tolist()
    found = zip(pairs.values.tolist(), pairs.residuals.tolist(), shares, strict=True)
    rows = [SpectrumRow(i, value, r, r <= goal, share) for i, (value, r, share) in enumerate(found, start=1)]
    merge_rows(out / "eigenvalues.csv", SpectrumRow, rows, key=("index",), in_order=True)  # it may hold more
    return pairs.vectors[:, pairs.values > 0]


def _saliency(curvature: Curvature, w: Tensor, samples: int) -> Generator[Progress, None, Tensor]:
    """Yield progress; return the saliency of each weight in optimal brain damage, ½ |H_jj| w_j².

    At a minimum no H_jj is negative. The error of a negative estimate is at least its magnitude, so its magnitude is
    used.
    """
    total = torch.zeros_like(w)
    for start in range(0, samples, DIAGONAL_BLOCK):
        count = min(DIAGONAL_BLOCK, samples - start)
        total += count * hessian_diagonal(curvature.hessian, samples=count, seed=curvature.lanczos.seed + start)
        yield Progress("diagonal", start + count, samples, unit="products")
    return (total / samples).abs() * w.square() / 2


def _measure(
    curvature: Curvature, pruned: Tensor, lam: float, recalibrate: bool
) -> tuple[float, float, float, float, float]:
    """Return the last five values of a `ScoreRow`; the pruned weights stay in the model."""
    sparsity = float((pruned == 0).double().mean())
    if math.isinf(lam):
        return sparsity, math.nan, math.nan, math.nan, math.nan
    put(curvature.model, unflatten(pruned, take(curvature.model)))
    with conv_precision(tf32=False):
        if recalibrate:
            recalibrate_batchnorm(curvature.model, curvature.train)
        train, test = evaluate(curvature.model, curvature.train), evaluate(curvature.model, curvature.test)
    return sparsity, train.loss, train.accuracy, test.loss, test.accuracy
