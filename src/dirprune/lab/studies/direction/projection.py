"""The share of gRDA's difference from SGD in the leading eigenspace of the training Hessian, over epochs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from dirprune.curvature.lanczos import Eigenpairs
from dirprune.direction import eigenspace_share
from dirprune.lab.progress import Progress
from dirprune.lab.records import checkpoint
from dirprune.lab.records.columns import Amount, Column, Count
from dirprune.lab.records.tables import merge_rows, read_rows
from dirprune.lab.studies.direction.spectrum import Curvature, Lanczos, curvature_of, measuring_runs
from dirprune.lab.training.optimizers import Grda
from dirprune.lab.training.runs import Run, parameters_of, weights_of
from dirprune.weights import flatten, take

_MINIBATCHES = ("data", "validation", "statistics", "augment", "batch_size", "seed")
_TRAINING = ("model", "epochs", "lr", "schedule", "momentum", "nesterov", "weight_decay")


@dataclass(frozen=True)
class ProjectionRow:
    """One gRDA run at one epoch.

    Attributes:
        share: ‖PΔ‖/‖Δ‖, Δ = w_gRDA − w_SGD, P the projection on the eigenvectors.
        random_level: √(eigenvectors/d), the root mean square of the share of a random direction.
        eigenvectors: number of eigenvectors used: the requested ones, without those whose eigenvalue is not positive.
        norm_delta, norm_sgd, norm_grda: ‖Δ‖, ‖w_SGD‖, ‖w_gRDA‖.
        products, residual: Hessian products used, and the largest true residual relative to the largest |eigenvalue|.
        converged: whether all residuals are within the tolerance.
        examples: number of training examples in the Hessian.
    """

    epoch: Annotated[int, Column("epoch")]
    run: Annotated[str, Column("run")]
    c: Amount
    mu: Amount
    share: Annotated[float, Column("share", ".4f", valid=(0, math.inf))]
    random_level: Annotated[float, Column("random", ".4f", valid=(0, math.inf))]
    eigenvectors: Count
    norm_delta: Amount
    norm_sgd: Amount
    norm_grda: Amount
    products: Count
    residual: Annotated[float, Column("residual", ".1e", valid=(0, math.inf))]
    converged: Annotated[bool, Column("converged")]
    examples: Count


@dataclass(frozen=True)
class EigenvalueRow:
    """One eigenvalue of the training Hessian at an SGD checkpoint, and its true residual ‖Hv − λv‖."""

    epoch: int
    index: int
    eigenvalue: float
    residual: float


def project(
    sgd: Run,
    grdas: Sequence[Run],
    out: Path,
    *,
    k: int = 10,
    epochs: Iterable[int] | None = None,
    lanczos: Lanczos | None = None,
    device: torch.device,
    root: Path | None = None,
) -> Iterator[Progress | ProjectionRow]:
    """Yield progress and one row per epoch and gRDA run: the share of Δ in the top eigenspace.

        ‖P(w_gRDA − w_SGD)‖ / ‖w_gRDA − w_SGD‖,    P = QQᵀ, Q the top k eigenvectors with λ > 0 of ∇²F(w_SGD)

    Rows are saved in projection.csv in ``out``, eigenvalues in eigenvalues.csv. Rows that exist are not measured again.
    The Hessian products of an unfinished epoch are saved too, 4 bytes per weight and product, until it is finished.

    Args:
        sgd, grdas: runs with the same initial weights and minibatches.
        out: the folder of the tables.
        epochs: epochs to measure; by default all for which every run has a checkpoint, except 0, where Δ = 0.
        lanczos: how the eigenpairs are computed.
        device, root: where to compute, and where the data are.

    Reference: §4.3 of the paper.
    """
    lanczos = lanczos or Lanczos()
    check_comparable(sgd, grdas)
    chosen = _choose_epochs([sgd, *grdas], epochs)
    settings, every = {"sgd": sgd.folder.name, "k": k}, product((sgd, *grdas), chosen)
    with measuring_runs(out, "projection.csv", settings, lanczos, device, every):
        curvature: Curvature | None = None
        known = {row.epoch for row in read_rows(out / "eigenvalues.csv", EigenvalueRow)}
        for epoch in chosen:
            rows = (row for row in read_rows(out / "projection.csv", ProjectionRow) if row.epoch == epoch)
            measured = {row.run: row for row in rows if epoch in known or not row.eigenvectors}
            if missing := [run for run in grdas if run.folder.name not in measured]:
                curvature = curvature or curvature_of(sgd.recipe, lanczos, device=device, root=root)
                curvature.load(weights_of(sgd, epoch)[1], str(sgd.folder))
                new = yield from _measure_epoch(curvature, missing, epoch, k, out)
                measured |= {row.run: row for row in new}
            shutil.rmtree(_products(out, epoch), ignore_errors=True)  # also removes those of an earlier session
            yield from (measured[run.folder.name] for run in grdas)


def _measure_epoch(
    curvature: Curvature, runs: Sequence[Run], epoch: int, k: int, out: Path
) -> Generator[Progress, None, list[ProjectionRow]]:
    """Yield progress; measure these runs at its weights, add the rows to the tables, and return them."""
    pairs, goal = yield from curvature.eigenpairs(k, _products(out, epoch), what=f"epoch {epoch}")
    rows = [_measure(run, epoch, curvature, pairs, goal) for run in runs]
    values = _eigenvalues(epoch, pairs)
    merge_rows(out / "eigenvalues.csv", EigenvalueRow, values, key=("epoch", "index"), in_order=True)
    merge_rows(out / "projection.csv", ProjectionRow, rows, key=("epoch", "run"), in_order=True)
    return rows


def _products(out: Path, epoch: int) -> Path:
    """Return the folder of the Hessian products of an unfinished epoch."""
    return out / f"products-{epoch:04d}"


def check_comparable(sgd: Run, grdas: Sequence[Run]) -> None:
    """Raise unless the runs have the same initial weights and minibatches, so that they differ by gRDA alone.

    The weights at epoch 0 are compared bit for bit if both checkpoints were kept; otherwise the seeds are trusted.
    """
    if not grdas:
        raise ValueError("grdas is empty; name at least one gRDA run beside the SGD run")
    names = [run.folder.name for run in grdas]
    if len(set(names)) < len(names):
        raise ValueError(f"grdas has two runs of one name ({', '.join(names)}): their rows could not be told apart")
    if sgd.recipe.pruner.knob is not None:
        raise ValueError(f"{sgd.folder} was trained with {sgd.recipe.pruner.name}; the first run must be the SGD run")
    for run in grdas:
        if not isinstance(run.recipe.pruner, Grda):
            raise ValueError(f"{run.folder} was trained with {run.recipe.pruner.name}; only the first run is SGD's")
        for name in (*_MINIBATCHES, *_TRAINING):
            ours, theirs = sgd.recipe.values()[name], run.recipe.values()[name]
            if ours != theirs:
                raise ValueError(
                    f"{name} is {ours} in {sgd.folder} and {theirs} in {run.folder}: they do not share initial weights "
                    "and minibatches; train both with the same values"
                )
        if all(0 in checkpoint.epochs(r.checkpoints) for r in (sgd, run)):
            _check_same_start(weights_of(sgd, 0)[1], weights_of(run, 0)[1], sgd, run)


def _check_same_start(a: Mapping[str, Tensor], b: Mapping[str, Tensor], sgd: Run, run: Run) -> None:
    differing = [name for name in a if name not in b or not torch.equal(a[name], b[name])]
    if differing or a.keys() != b.keys():
        raise ValueError(
            f"the initial weights of {sgd.folder} and {run.folder} differ ({', '.join(differing[:3]) or 'in names'}); "
            "train both from the same weights, on one kind of machine"
        )


def _choose_epochs(runs: Sequence[Run], wanted: Iterable[int] | None) -> list[int]:
    saved = [set(checkpoint.epochs(run.checkpoints)) for run in runs]
    common = sorted(set.intersection(*saved) - {0})
    if not common:
        raise ValueError(
            f"{', '.join(str(run.folder) for run in runs)} have no epoch in common among their checkpoints; "
            "train them with the same --keep"
        )
    if wanted is None:
        return common
    chosen = sorted(set(wanted))
    if 0 in chosen:
        raise ValueError(
            "epochs=0: the initial weights are the same, and there is no difference to look at; leave 0 out"
        )
    if lacking := [epoch for epoch in chosen if epoch not in common]:
        raise ValueError(f"epochs={lacking}: not all runs have these checkpoints; they share {common}")
    return chosen


def _measure(run: Run, epoch: int, curvature: Curvature, pairs: Eigenpairs, goal: float) -> ProjectionRow:
    positive = pairs.vectors[:, pairs.values > 0]
    w_sgd = flatten(take(curvature.model))
    w_grda = flatten(parameters_of(curvature.model, weights_of(run, epoch)[1])).to(w_sgd)
    delta = w_grda - w_sgd
    share, level = eigenspace_share(delta, positive)
    worst = float(pairs.residuals.max())
    return ProjectionRow(
        epoch=epoch,
        run=run.folder.name,
        c=run.recipe.values()["c"],
        mu=run.recipe.values()["mu"],
        share=share,
        random_level=level,
        eigenvectors=positive.shape[1],
        norm_delta=float(delta.double().norm()),
        norm_sgd=float(w_sgd.double().norm()),
        norm_grda=float(w_grda.double().norm()),
        products=pairs.iterations,
        residual=worst / float(pairs.values.abs().max()),
        converged=worst <= goal,
        examples=curvature.curved.examples,
    )


def _eigenvalues(epoch: int, pairs: Eigenpairs) -> list[EigenvalueRow]:
    found = zip(pairs.values.tolist(), pairs.residuals.tolist(), strict=True)
    return [EigenvalueRow(epoch, i, value, residual) for i, (value, residual) in enumerate(found, start=1)]
