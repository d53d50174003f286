"""The command that compares pruning methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dirprune.lab.cli.console import (
    AtOnceOption,
    DataOption,
    DeviceOption,
    Interruption,
    MinutesOption,
    ModelOption,
    StepPrecisionOption,
    clear_errors,
    fractions,
    say,
)
from dirprune.lab.cli.output import HtmlOption, JsonOption, Output

if TYPE_CHECKING:
    from dirprune.lab.training.recipe import Recipe
    from dirprune.lab.training.surroundings import Surroundings

app = typer.Typer()


@app.command()
def compare(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="One of `dirprune recipes`; not needed with --no-train or --published."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to compare, e.g. grda,rigl,str.", show_default="all, without variants"),
    ] = None,
    sparsity: Annotated[
        str, typer.Option(help="Sparsities to compare at; also the targets of methods that take one.")
    ] = "0.8,0.9,0.95",
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="Values of a method's knob, e.g. grda:c=8e-5,2e-4; repeatable.", show_default="by recipe"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of every setting.")] = 1,
    epochs: Annotated[int | None, typer.Option(help="Length of every run.", show_default="the recipe's")] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate.", show_default="the recipe's")] = None,
    model: ModelOption = None,
    precision: StepPrecisionOption = None,
    at_once: AtOnceOption = 1,
    minutes: MinutesOption = None,
    train: Annotated[
        bool,
        typer.Option("--train/--no-train", help="With --no-train, only redraw table and figures from existing runs."),
    ] = True,
    published: Annotated[
        str | None, typer.Option(help="Draw published numbers instead: resnet50-imagenet.", show_default="none")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for runs, tables and figures; run again with the same folder to continue.")
    ] = Path("comparison"),
    data: DataOption = None,
    device: DeviceOption = "auto",
    html: HtmlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train pruning methods under one recipe and one budget, and rank them at equal sparsity."""
    with clear_errors():
        output = Output(as_json)
        if published is not None:
            _draw_published(published, out, output)
            return
        asked = fractions("--sparsity", sparsity)
        interruption = Interruption(minutes)
        if train:
            from dirprune.lab.cli.follow import device_of
            from dirprune.lab.studies.comparison import trials
            from dirprune.lab.training.surroundings import Surroundings

            if recipe is None:
                raise ValueError("RECIPE is missing; take one of `dirprune recipes`, or give --no-train or --published")
            names = None if methods is None else methods.replace(",", " ").split()
            changes = {"epochs": epochs, "lr": lr, "model": model, "precision": precision and precision.value}
            given = trials.read_sweeps(sweep or [])
            plan = _plan(recipe, changes, data, methods=names, sparsities=asked, seeds=seeds)
            here = Surroundings(device_of(device), data, stopping=interruption, at_once=at_once)
            _train(plan, given, asked, out, here, interruption, output)
        _conclude(out, asked, output, html=html)


Sweeps = dict[str, list[float]]


def _plan(recipe: str, changes: dict[str, Any], root: Path | None, **options: Any) -> Callable[[Sweeps], list[Recipe]]:
    """Return a function from sweeps to runs. Loads the data to count batches, on which default sweeps depend."""
    import torch

    from dirprune.lab.studies.comparison import trials
    from dirprune.lab.training import recipes
    from dirprune.lab.training.experiment import load_data
    from dirprune.lab.training.recipe import changed

    chosen = changed(recipes.find(recipe), **changes)
    batches = len(load_data(chosen, device=torch.device("cpu"), root=root).train)
    return lambda sweeps: trials.plan(chosen, sweeps=sweeps, batches=batches, **options)


def _train(
    plan: Callable[[Sweeps], list[Recipe]],
    given: Sweeps,
    sparsities: Sequence[float],
    out: Path,
    here: Surroundings,
    interruption: Interruption,
    output: Output,
) -> None:
    """Train the runs with a progress display, until they end, Ctrl-C is pressed or the time is up.

    Sweeps that were not given are widened, one value at a time, until their runs enclose the sparsities.
    """
    from dirprune.lab.cli.follow import follow_series
    from dirprune.lab.studies.comparison import tables as comparison
    from dirprune.lab.studies.comparison import trials
    from dirprune.lab.studies.comparison.work import Progress, compare, wider

    told: set[str] = set()

    def ended(step: Progress) -> None:
        if step.row is not None and step.row.run not in told:
            told.add(step.row.run)
            output.record(asdict(step.row))

    sweeps = given
    while True:
        planned = plan(sweeps)
        steps = compare(planned, out, here)
        titles = [trials.title(recipe) for recipe in planned]
        follow_series(
            steps, titles, [recipe.epochs for recipe in planned], interruption, ended=ended, at_once=here.at_once
        )
        ours = [recipe for recipe in planned if recipe.pruner.name not in given]
        found = comparison.read(out)
        stopped = not {trials.run_name(recipe) for recipe in planned} <= {each.row.run for each in found}
        more = {} if stopped else wider(ours, found, sparsities)
        if not more:
            return
        say(f"Not every sparsity lies between two runs of {', '.join(more)}; trying {_latest(more)}.")
        sweeps = {**sweeps, **more}


def _latest(sweeps: Sweeps) -> str:
    from dirprune.lab.studies.comparison.trials import contestant, setting

    return ", ".join(setting(contestant(name).knob, values[-1]) for name, values in sweeps.items())


def _conclude(out: Path, sparsities: Sequence[float], output: Output, *, html: bool) -> None:
    """Show the ranking of the runs that have ended so far, and write tables and figures."""
    from dirprune.lab.studies.comparison import tables as comparison

    found = comparison.read(out)
    if not found:
        if not (out / "runs").is_dir():
            raise ValueError(f"{out} holds no comparison; give the --out of one, or train one: dirprune compare RECIPE")
        say(f"No run in {out / 'runs'} has ended yet.")
        return
    rows = comparison.ranking(found, sparsities)
    for row in rows:
        output.record(asdict(row))
    for sparsity in sparsities:
        cells = [row.cells() for row in rows if row.asked_sparsity in (0.0, sparsity)]
        title = f"\nAt {100 * sparsity:g}% of the weights zero"
        output.rows(title, cells, left=3, spare=comparison.SPARE)
    for line in comparison.notes(found):
        output.tell(line)
    paths = comparison.write(found, out, sparsities)
    if html:
        from dirprune.lab.cli.page_of_comparison import page_of_comparison
        from dirprune.lab.pages.page import write

        paths.append(write(page_of_comparison(found, out, sparsities), out / "comparison.html"))
    for path in paths:
        output.tell(f"written: {path}")


def _draw_published(name: str, out: Path, output: Output) -> None:
    from dirprune.lab import plots
    from dirprune.lab.studies.comparison import figures as comparison_plots
    from dirprune.lab.studies.comparison import published as comparison

    if name != "resnet50-imagenet":
        raise ValueError(f"--published {name!r} is not known; give resnet50-imagenet")
    title, counted = "ResNet50 on ImageNet, published", "sparsity as published"
    figures = {
        "tradeoff.png": comparison_plots.tradeoff(comparison.tradeoff_curves(), title=title, counted=counted),
        "layers.png": comparison_plots.layerwise(comparison.layerwise(), title=title),
    }
    for name, figure in figures.items():
        output.tell(f"written: {plots.save(figure, out / name)}")
