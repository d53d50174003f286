"""Signs of weights: how many still change in an epoch, and how many of gRDA's are those of SGD.

The theorem assumes that the signs settle, and that SGD has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from dirprune.lab.records import checkpoint
from dirprune.lab.records.columns import Column
from dirprune.lab.training import runs
from dirprune.lab.training.recipe import FREE_TO_CHANGE, differing
from dirprune.lab.training.runs import Run


@dataclass(frozen=True)
class SignRow:
    """gRDA beside SGD after an epoch: the fraction of its parameters that are zero, and of the others with SGD's sign.

    Both runs start from the same weights and see the same minibatches.
    """

    grda: Annotated[str, Column("gRDA")]
    sgd: Annotated[str, Column("SGD")]
    epoch: Annotated[int, Column("epoch")]
    zeros: Annotated[float, Column("zeros (%)", ".2f", scale=100)]
    alike: Annotated[float, Column("others with SGD's sign (%)", ".2f", scale=100)]


def beside_sgd(members: Sequence[Run]) -> Iterator[SignRow]:
    """Yield a row for every epoch after 0 of which a run of gRDA and its twin with SGD both have a checkpoint."""
    dense = [run for run in members if run.recipe.optimizer.knob is None and run.recipe.method is None]
    for grda in (run for run in members if run.recipe.optimizer.name == "grda"):
        twin = grda.recipe.but(optimizer="sgd")
        for sgd in (run for run in dense if not differing(run.recipe, twin, FREE_TO_CHANGE | {"name"})):
            shared = set(checkpoint.epochs(grda.checkpoints)) & set(checkpoint.epochs(sgd.checkpoints))
            for epoch in sorted(shared - {0}):
                yield _compared(grda, sgd, epoch)


def _compared(grda: Run, sgd: Run, epoch: int) -> SignRow:
    ours, theirs = (runs.parameters_in(runs.state_of(run, epoch)[1]) for run in (grda, sgd))
    every = sum(weight.numel() for weight in ours.values())
    left = sum(int(weight.count_nonzero()) for weight in ours.values())
    if {name: w.shape for name, w in ours.items()} != {name: w.shape for name, w in theirs.items()}:
        raise ValueError(f"{grda.folder} and {sgd.folder} hold other weights in epoch {epoch}; they are not twins")
    alike = sum(int((weight.sign() * theirs[name].sign() > 0).sum()) for name, weight in ours.items())
    return SignRow(grda.folder.name, sgd.folder.name, epoch, 1 - left / every, alike / max(left, 1))
