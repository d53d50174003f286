"""The command that reruns the experiments of the paper's tables and compares the results."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dirprune.lab.cli.console import Interruption, clear_errors, say
from dirprune.lab.cli.options import (
    AtOnceOption,
    ClusterOption,
    DataOption,
    DeviceOption,
    KeepOption,
    MinutesOption,
    integers,
)
from dirprune.lab.cli.output import JsonOption, Output

if TYPE_CHECKING:
    from dirprune.lab.training.recipe import Recipe
    from dirprune.lab.training.surroundings import Surroundings

app = typer.Typer()


@app.command()
def reproduce(
    run: Annotated[list[Path] | None, typer.Argument(help="Run directories to add to the results first.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of trajectories.csv and ledger.csv.")] = Path("results"),
    docs: Annotated[Path, typer.Option(help="Folder of reproduction.md and its figures.")] = Path("docs"),
    page: Annotated[
        bool, typer.Option("--page", help="Also write docs/reproduction.md and results/cells.csv.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="First train the missing runs, most informative first.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Train for this table, e.g. vgg16-cifar10; repeatable.", show_default="all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs to have for every setting.")] = 1,
    runs: Annotated[Path, typer.Option(help="Folder for the runs it trains.")] = Path("runs/reproduce"),
    keep: KeepOption = None,
    at_once: AtOnceOption = None,
    cluster: ClusterOption = None,
    minutes: MinutesOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare our runs with the paper's CIFAR tables, cell by cell; with --train, first train what is missing."""
    with clear_errors():
        from dirprune.lab.studies.reproduction import cells as comparing
        from dirprune.lab.studies.reproduction import ledger
        from dirprune.lab.studies.reproduction import page as reproduction_page

        output = Output(as_json)
        if results.exists() and not results.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(results))
        if run:
            for line in ledger.collect(run, results):
                say(line)
        if train:
            from dirprune.lab.cli.follow import surroundings

            interruption = Interruption(minutes)
            here = surroundings(device, data, interruption, at_once, cluster)
            missing = comparing.wanted(results, experiments=only or comparing.BY_INFORMATION, seeds=seeds)
            kept = tuple(integers("--keep", keep)) if keep else ()
            _train_missing([recipe.but(keep=kept) for recipe in missing], runs, results, here, interruption)
        if not (results / "ledger.csv").exists():
            raise FileNotFoundError(
                f"{results} has no ledger.csv; give --results, or train: dirprune reproduce --train"
            )
        recorded = ledger.read(results)
        cells = comparing.compared(recorded)
        for title, rows in comparing.tables(cells).items():
            output.rows(title, rows, spare=comparing.SPARE)
            output.tell("")
        for cell in cells:
            if not cell.missing:
                off_by = {"deviation": cell.deviation, "comparable_deviation": cell.comparable_deviation}
                output.record({**asdict(cell), "mean": cell.mean, **off_by})
        for line in (*comparing.conclusion(cells), *(f"missing: {gap}" for gap in comparing.missing(cells))):
            output.tell(line)
        if page:
            output.tell(f"page: {reproduction_page.write_page(recorded, results, docs)}")


def _train_missing(
    missing: list[Recipe], folder: Path, results: Path, here: Surroundings, interruption: Interruption
) -> None:
    """Train published runs with a progress display. However this ends, their results so far go into the ledger."""
    from dirprune.lab.cli.follow import follow_series
    from dirprune.lab.studies.reproduction import ledger
    from dirprune.lab.training.at_once import trained
    from dirprune.lab.training.runs import default_name
    from dirprune.lab.training.series import Planned, RunStep

    if not missing:
        say("Every setting has its runs; raise --seeds for more.")
        return
    planned = [Planned(folder / default_name(recipe), recipe) for recipe in missing]
    steps = trained(planned, here)
    titles = [f"{recipe.name} {recipe.setting} seed {recipe.seed}" for recipe in missing]

    begun: dict[Path, None] = {}

    def noting(steps: Iterable[RunStep]) -> Iterator[RunStep]:
        for step in steps:
            begun[step.run.folder] = None
            yield step

    def ended(step: RunStep) -> None:
        ledger.collect([step.run.folder], results)
        outcome = step.run.outcome()
        if outcome and outcome.diverged:
            remedy = "a larger --seeds gives it another seed"
            say(f"{step.run.folder}: {outcome.diverged}. The other runs continue; {remedy}.")

    try:
        follow_series(
            noting(steps),
            titles,
            [recipe.epochs for recipe in missing],
            interruption,
            ended=ended,
            several=here.several,
        )
    finally:
        ledger.collect([folder for folder in begun if (folder / "metrics.jsonl").exists()], results)
