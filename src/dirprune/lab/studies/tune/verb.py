"""The command that chooses how much to prune."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dirprune.lab.cli.console import INTERRUPTED, Interruption, bar, clear_errors, say
from dirprune.lab.cli.options import (
    AtOnceOption,
    ClusterOption,
    DataOption,
    DeviceOption,
    MinutesOption,
    ModelOption,
    RecipeArgument,
    SeedOption,
    StepPrecisionOption,
    fractions,
)
from dirprune.lab.cli.output import JsonOption, Output

if TYPE_CHECKING:
    from dirprune.lab.studies.tune.target import Search, TriedTarget
    from dirprune.lab.training.recipe import Recipe
    from dirprune.lab.training.surroundings import Surroundings

app = typer.Typer()


class RuleName(str, Enum):
    """How to choose."""

    target = "target"
    paper = "paper"


@app.command()
def tune(
    recipe: RecipeArgument,
    rule: Annotated[
        RuleName, typer.Option(help="target: the largest --sparsity within the tolerance. paper: the largest c.")
    ] = RuleName.target,
    tolerance: Annotated[float, typer.Option(help="How many points of accuracy may be lost against dense.")] = 1.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Targets to try; each halves what is open.", show_default="5")
    ] = None,
    between: Annotated[
        str | None, typer.Option(help="The least and the largest target.", show_default="0.5,0.99")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of every target.", show_default="1")] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Fraction of the training set to judge on.", show_default="the recipe's, or 0.1"),
    ] = None,
    at_once: AtOnceOption = None,
    cluster: ClusterOption = None,
    minutes: MinutesOption = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Length of every run.", show_default="the recipe's; with paper, 3")
    ] = None,
    mu: Annotated[
        list[float] | None,
        typer.Option(help="With paper, search c for this μ; may be repeated.", show_default=".501 .51 .55"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate.", show_default="the recipe's")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch size.", show_default="the recipe's")] = None,
    seed: SeedOption = None,
    model: ModelOption = None,
    precision: StepPrecisionOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs; the same folder continues.", show_default="runs/tune-RECIPE"),
    ] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Choose how much to prune: the largest target within a tolerance of dense accuracy, on held-out training data."""
    with clear_errors():
        from dirprune.lab.cli.follow import surroundings
        from dirprune.lab.studies.tune.target import BETWEEN, Search
        from dirprune.lab.training import recipes
        from dirprune.lab.training.recipe import changed

        output, interruption = Output(as_json), Interruption(minutes)
        given = {"lr": lr, "batch_size": batch_size, "seed": seed, "model": model}
        given["precision"] = precision.value if precision else None
        chosen = changed(recipes.find(recipe), **given)
        folder = out or Path("runs") / f"tune-{chosen.name}"
        here = surroundings(device, data, interruption, at_once, cluster)
        if rule is RuleName.paper:
            others = {"trials": trials, "between": between, "seeds": seeds, "validation": validation}
            _refuse(others, "--rule target, the default")
            _tune_by_the_paper(chosen, recipe, given, epochs or 3, tolerance, mu, here, folder, output)
            return
        _refuse({"mu": mu}, "--rule paper")
        ends = fractions("--between", between) if between else list(BETWEEN)
        if len(ends) != 2:
            raise ValueError(f"--between {between} cannot be used; give two fractions, e.g. 0.5,0.99")
        chosen, given = changed(chosen, epochs=epochs), given | {"epochs": epochs}
        search = Search(chosen, folder, tolerance, seeds or 1, trials or 5, (ends[0], ends[1]), validation)
        judged = _search(search, here, interruption, output)
        _conclude_search(search, judged, recipe, given, data, output)


def _refuse(options: Mapping[str, Any], rule: str) -> None:
    """Raise if an option is given that belongs to the other rule."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name} {value} belongs to {rule}; leave it out")


def _search(search: Search, here: Surroundings, interruption: Interruption, output: Output) -> list[TriedTarget]:
    """Train dense networks and one target after the other, and return what they showed."""
    from dirprune.lab.cli.follow import follow_series
    from dirprune.lab.records.files import check_own
    from dirprune.lab.studies.tune.target import loss_at
    from dirprune.lab.training.at_once import trained

    judged: list[TriedTarget] = []
    check_own(search.out)
    planned = search.planned(None)
    while (target := search.next(judged)) is not None:
        planned = [*planned, *search.planned(target)]
        titles = [plan.folder.name for plan in planned]
        epochs = [plan.recipe.epochs for plan in planned]
        follow_series(
            trained(planned, here), titles, epochs, interruption, ended=lambda step: None, several=here.several
        )
        if not all((plan.folder / "outcome.json").exists() for plan in planned):  # the time is up
            raise typer.Exit
        judged.append(loss_at(search, target, here))
        output.record(asdict(judged[-1]))
        say(f"--sparsity {target:g}: {judged[-1].lost:.2f} points lost (± {judged[-1].noise:.2f})")
        planned = []
    return judged


def _conclude_search(
    search: Search, judged: list[TriedTarget], recipe: str, given: Mapping[str, Any], data: Path | None, output: Output
) -> None:
    """Show the targets that were tried, the largest that passed, and how to train it."""
    from dirprune.lab.records.columns import cells
    from dirprune.lab.studies.tune.target import best, remarks

    title = f"Targets, judged on held-out data: at most {search.tolerance:g} points lost"
    output.rows(title, [cells(each) for each in sorted(judged, key=lambda each: each.sparsity)])
    found = best(judged)
    if found is None:
        say(f"No target passed; try a larger --tolerance, or --between with less than {search.between[0]:g}.")
        raise typer.Exit(1)
    command = _command(recipe, {"sparsity": found.sparsity, **given, "data": data})
    output.tell(f"Chosen: --sparsity {found.sparsity:g}, the largest target within the tolerance.")
    for line in remarks(search, judged):
        output.tell(line)
    output.tell(f"Train it on all training data, and test it, with:\n    {command}")
    output.record({"sparsity": found.sparsity, "command": command})


def _tune_by_the_paper(
    chosen: Recipe,
    recipe: str,
    given: Mapping[str, Any],
    epochs: int,
    tolerance: float,
    mu: list[float] | None,
    here: Surroundings,
    out: Path,
    output: Output,
) -> None:
    """Choose c and μ by the paper's rule."""
    from dirprune.lab.studies.tune import paper_rule

    trials, finished = [], False
    length = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    mus = mu or paper_rule.MUS
    search = paper_rule.tune(chosen, here, epochs=epochs, tolerance=tolerance, mus=mus, out=out)
    with bar("trials", total=None) as advance, suppress(KeyboardInterrupt):
        for trial in search:
            trials.append(trial)
            advance(1, note=" ".join(filter(None, trial.cells().values())))
            output.record(trial.to_dict())
        finished = True
    output.rows(f"Trials of {length}, on held-out data", [trial.cells() for trial in trials])
    best = paper_rule.choose(trials)
    if not finished:
        so_far = f" Best so far: c={best.c:g}, mu={best.mu:g} ({best.sparsity:.1%} zero)." if best else ""
        say(f"Stopped; the search is not finished.{so_far}")
        if trials:
            say(f"Its trials are in {out / paper_rule.TABLE}. Run the same command to continue.")
        raise typer.Exit(INTERRUPTED)
    if best is None:
        say("No c passed; try a larger --tolerance or longer trials (--epochs).")
        raise typer.Exit(1)
    command = _command(recipe, {"c": best.c, "mu": best.mu, **given, "data": here.root})
    output.tell(f"Chosen: c={best.c:g}, mu={best.mu:g} ({best.sparsity:.1%} zero after {length}). Train with:")
    output.tell(f"    {command}")
    output.record({"c": best.c, "mu": best.mu, "command": command})


def _command(recipe: str, options: Mapping[str, Any]) -> str:
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    return shlex.join(["dirprune", "train", recipe, *chain.from_iterable(words)])
