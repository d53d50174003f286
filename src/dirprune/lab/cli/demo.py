"""The command that shows in a minute what gRDA does: one network dense and sparse, from training to the runtime."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dirprune.lab.cli.console import clear_errors, say
from dirprune.lab.cli.options import SeedOption
from dirprune.lab.cli.output import JsonOption, Output
from dirprune.lab.text import NOTHING, duration

if TYPE_CHECKING:
    from dirprune.deploy import Runtime
    from dirprune.lab.training.runs import Run

app = typer.Typer()

TARGET = 0.9
COLUMNS = ("", "accuracy (%)", "weights left (%)", "MACs left (%)", "file (kB)", "µs per image", "training")


@dataclass(frozen=True)
class Shown:
    """A network of the demo; ``microseconds`` is None where there is no compiler for the runtime."""

    name: str
    test_accuracy: float
    weights_left: float
    macs_left: float
    file_bytes: int
    microseconds: float | None
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table with `COLUMNS`."""
        return (
            self.name,
            f"{self.test_accuracy:.2f}",
            f"{self.weights_left:.1%}".rstrip("%"),
            f"{self.macs_left:.1%}".rstrip("%"),
            f"{self.file_bytes / 1e3:.1f}",
            NOTHING if self.microseconds is None else f"{self.microseconds:.1f}",
            duration(self.seconds),
        )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the two runs, their files and the figure.")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each run.", show_default="60")] = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small network on digits, dense and with 90% zeros, and compare: no data, no GPU, about a minute."""
    with clear_errors():
        from dirprune.lab import plots
        from dirprune.lab.cli.follow import follow
        from dirprune.lab.studies.report.report import layerwise
        from dirprune.lab.training import recipes, runs
        from dirprune.lab.training.recipe import changed

        folder = runs.unused(out)
        recipe = changed(recipes.get("digits"), epochs=epochs, seed=seed)
        trained = {
            "dense (SGD)": runs.create(folder / "dense", recipe.but(optimizer="sgd")),
            f"{TARGET:.0%} zeros (gRDA)": runs.create(
                folder / "sparse", recipe.but(optimizer="grda-target", sparsity=TARGET)
            ),
        }
        try:
            for name, run in trained.items():
                follow(run, device="cpu", title=name)
        except typer.Exit:
            say("This resumes only the interrupted run; run `dirprune demo` again to repeat both.")
            raise
        found = _measured(trained)
        figure = plots.beside_dense({name: [run.records()] for name, run in trained.items()}, _left(found))
        path = plots.save(figure, folder / "demo.png")
        output = Output(as_json)
        output.record({"rows": [asdict(each) for each in found], "figure": str(path)})
        output.table("The same network, weights and minibatches", COLUMNS, [each.cells() for each in found])
        output.tell("Accuracy on 359 test images, one run each: a difference of less than a point may be chance.")
        output.tell(f"\nWhat gRDA left of each layer:\n\n{layerwise(run.read())[1]}")
        output.tell(
            f"\nFigure: {path}\n\nNext, with pictures of your own, a folder of them per class (docs/images.md):"
        )
        if which("dirprune") is None:  # make demo installs into an environment that nobody has activated
            output.tell(f"    . {Path(sys.executable).parent / 'activate'}")
        output.tell(f"    dirprune train pictures --data FOLDER --sparsity {TARGET:g} --out runs/mine")
        output.tell("    dirprune export runs/mine --to net.safetensors")
        output.tell("    dirprune speed runs/mine")
        output.tell("In your own script:")
        output.tell(
            "    optimizer = dirprune.GRDA(dirprune.prunable_groups(model), "
            f"lr={recipe.optimizer.lr:g}, target={TARGET:g}, steps=N)"
        )


def _measured(trained: dict[str, Run]) -> list[Shown]:
    """Return what was reached, and how large and fast the networks are."""
    from dirprune.lab.studies.deployment.export import export
    from dirprune.lab.studies.report.report import layerwise

    times = _microseconds(list(trained.values()))
    shown = []
    for (name, run), microseconds in zip(trained.items(), times, strict=True):
        records, zeros = run.records(), layerwise(run.read())[1]
        exported = export(run, run.folder.with_suffix(".safetensors"))
        shown.append(
            Shown(
                name,
                records[-1].test_accuracy,
                1 - zeros.weight_fraction,
                zeros.cost_left_fraction or 0.0,
                exported.file_bytes,
                microseconds,
                sum(record.train_seconds + record.test_seconds for record in records),
            )
        )
    return shown


def _microseconds(trained: Sequence[Run]) -> Sequence[float | None]:
    """Return the time of an image in the compiled runtime of each network: the median of 50 turns."""
    import numpy as np

    from dirprune import deploy
    from dirprune.lab.studies.deployment.speed import saved

    try:
        files = [saved(run.folder, run.folder / "runtime.safetensors", trusted=False) for run in trained]
        runtimes = [deploy.load(file) for file in files]
    except deploy.NoKernels as error:
        say(f"No time is measured: {error}")
        return [None] * len(trained)
    image = np.random.default_rng(0).standard_normal((1, 1, 8, 8), np.float32)
    turns = [[_once(runtime, image) for runtime in runtimes] for _ in range(50)]
    return [1e6 * median(each) for each in zip(*turns, strict=True)]


def _once(runtime: Runtime, image: Any, repeats: int = 100) -> float:
    before = time.perf_counter()
    for _ in range(repeats):
        runtime(image)
    return (time.perf_counter() - before) / repeats


def _left(found: Sequence[Shown]) -> dict[str, float]:
    """Return what the sparse network has left of the dense one, as fractions."""
    dense, sparse = found
    left = {
        "weights": sparse.weights_left,
        "multiplications": sparse.macs_left,
        "file": sparse.file_bytes / dense.file_bytes,
    }
    if dense.microseconds and sparse.microseconds:
        left["time per image"] = sparse.microseconds / dense.microseconds
    return left
