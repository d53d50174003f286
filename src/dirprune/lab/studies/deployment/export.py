"""The network of a run as a small file; the weights come from its checkpoint, and none of its code is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dirprune import sparsity
from dirprune.deploy import save_sparse
from dirprune.lab.training import runs
from dirprune.lab.training.runs import Run


@dataclass(frozen=True)
class Exported:
    """A file that was written; ``dense_bytes`` is what its tensors take in memory.

    ``accuracy`` is that of the recorded epoch in percent, before any rounding, measured on the data ``tested_on``; None
    if it was not recorded.
    """

    file: str
    recipe: str
    network: str
    epoch: int
    dtype: str
    sparsity: float
    weight_sparsity: float
    accuracy: float | None
    tested_on: str
    dense_bytes: int
    file_bytes: int


def export(
    run: Run, to: Path, *, dtype: torch.dtype | None = None, epoch: int | None = None, force: bool = False
) -> Exported:
    """Write the network of a run's newest checkpoint, or of ``epoch``, to a file without its zeros.

    Args:
        run: the run; nothing that it names is executed.
        to: the file; one that exists is replaced only with ``force``.
        dtype: as for `save_sparse`.
        epoch: the checkpoint to take.
    """
    if to.is_dir() or (to.exists() and not force):
        kind = (
            "is a folder; name a file in it" if to.is_dir() else "exists; give --force to replace it, or another --to"
        )
        raise FileExistsError(f"{to} {kind}")
    epoch, state = runs.state_of(run, epoch)
    tensors: dict[str, Tensor] = state["model"]
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.add_(0)  # masked methods leave −0.0, which computes like 0 but would be kept as a value
    zeros = sparsity(runs.parameters_in(state))
    accuracies = {record.epoch: record.test_accuracy for record in run.records()}
    recipe = run.recipe
    to.parent.mkdir(parents=True, exist_ok=True)
    notes = {"recipe": recipe.name, "network": recipe.model, "seed": str(recipe.seed), "epoch": str(epoch)}
    save_sparse(tensors, to, dtype, metadata=notes)
    return Exported(
        file=str(to),
        recipe=recipe.name,
        network=recipe.model,
        epoch=epoch,
        dtype=str(dtype or torch.float32).removeprefix("torch."),
        sparsity=zeros.fraction,
        weight_sparsity=zeros.weight_fraction,
        accuracy=accuracies.get(epoch),
        tested_on="validation" if recipe.task.validation else "test",
        dense_bytes=sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values()),
        file_bytes=to.stat().st_size,
    )
