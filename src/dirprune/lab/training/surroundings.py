"""What a run needs from its surroundings, and what its results do not depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dirprune.lab.data.loader import Loader
from dirprune.lab.training.processes import Process

ALONE = Process()


def as_it_is(loader: Loader) -> Loader:
    return loader


def never() -> bool:
    return False


@dataclass(frozen=True)
class Surroundings:
    """Where and how a run is trained.

    Args:
        device: where to train.
        root: where the data are; by default their usual folder.
        process: which of several processes this is.
        save_every: epochs between checkpoints; by default one checkpoint per minute.
        watch: wraps the training loader, e.g. to draw a progress bar.
        stopping: called after each epoch; if it returns True, the run is saved and training stops.
        keep_going: train on even if every weight is zero and nothing can recover; otherwise `Hopeless` is raised.
        at_once: how many runs of a series to train at the same time, each in a process of its own; by default one, and
            on a cluster as many as it has room for.
        cluster: the address of the cluster on which to train them; "" trains on this machine.
    """

    device: torch.device
    root: Path | None = None
    process: Process = ALONE
    save_every: int | None = None
    watch: Callable[[Loader], Loader] = as_it_is
    stopping: Callable[[], bool] = never
    keep_going: bool = True
    at_once: int | None = None
    cluster: str = ""

    @property
    def several(self) -> bool:
        """Whether several runs are trained at the same time."""
        return bool(self.cluster) or (self.at_once or 1) > 1

    def of_worker(self) -> Surroundings:
        """Return what another process needs of this, which can be pickled."""
        return replace(self, watch=as_it_is, stopping=never, at_once=None, cluster="")
