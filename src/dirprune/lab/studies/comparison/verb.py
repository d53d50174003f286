"""The command that compares pruning methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dirprune.lab.cli.console import Interruption, clear_errors, say
from dirprune.lab.cli.options import (
    AtOnceOption,
    ClusterOption,
    DataOption,
    DeviceOption,
    MinutesOption,
    ModelOption,
    StepPrecisionOption,
    TrustOption,
    fractions,
)
from dirprune.lab.cli.output import HtmlOption, JsonOption, Output
from dirprune.lab.studies.comparison.tradeoff import MACS, Level

if TYPE_CHECKING:
    from dirprune.lab.studies.comparison.trials import Settings
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
    macs: Annotated[
        str | None,
        typer.Option(help="Shares of the multiplications left to compare at, too, e.g. 0.1,0.05.", show_default="none"),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="Values of a method's knob, e.g. grda:c=8e-5,2e-4; repeatable.", show_default="by recipe"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of every setting.")] = 1,
    tune: Annotated[
        int, typer.Option(min=0, help="Choose every method's options in this many trials each, on held-out data.")
    ] = 0,
    against: Annotated[
        str | None,
        typer.Option(help="Show the differences from this method, seed by seed.", show_default="gRDA at a target"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Length of every run.", show_default="the recipe's")] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate.", show_default="the recipe's")] = None,
    model: ModelOption = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Start from these weights: a run, a file, or a comparison's dense run of the same seed."
        ),
    ] = None,
    precision: StepPrecisionOption = None,
    at_once: AtOnceOption = None,
    cluster: ClusterOption = None,
    minutes: MinutesOption = None,
    train: Annotated[
        bool,
        typer.Option("--train/--no-train", help="With --no-train, only redraw table and figures from existing runs."),
    ] = True,
    published: Annotated[
        str | None, typer.Option(help="Draw published numbers instead: resnet50-imagenet.", show_default="none")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for runs, tables and figures; the same folder continues.", show_default="runs/compare-RECIPE"
        ),
    ] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    html: HtmlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train pruning methods under one recipe and one budget, and rank them at equal sparsity."""
    with clear_errors():
        output = Output(as_json)
        if published is not None:
            _draw_published(published, out or Path("runs") / f"compare-{published}", output)
            return
        from dirprune.lab.training import recipes

        chosen = None if recipe is None else recipes.find(recipe)
        folder = out or (Path("runs") / f"compare-{chosen.name}" if chosen else None)
        if folder is None or (train and chosen is None):
            raise ValueError(
                "RECIPE is missing; take one of `dirprune recipes`, or give --published, or --no-train with --out"
            )
        asked = fractions("--sparsity", sparsity)
        levels = [Level(share) for share in asked]
        levels += [Level(round(1 - left, 12), MACS) for left in (fractions("--macs", macs) if macs else ())]
        interruption = Interruption(minutes)
        if train and chosen:
            from dirprune.lab.cli.follow import surroundings
            from dirprune.lab.studies.comparison import trials
            from dirprune.lab.training.recipe import changed

            names = None if methods is None else methods.replace(",", " ").split()
            changes = {"epochs": epochs, "lr": lr, "model": model, "precision": precision and precision.value}
            base = changed(chosen, **changes)
            given = trials.read_sweeps(sweep or [])
            here = surroundings(device, data, interruption, at_once, cluster)
            study = Study(base, names, asked, seeds, given, start, folder, here, interruption, output)
            settings = _tuned(study, tune) if tune else {}
            if settings is None:  # stopped
                return
            _train(study, settings)
        _conclude(folder, levels, output, against, html=html)


@app.command()
def rerun(
    folder: Annotated[Path, typer.Argument(help="Folder of a comparison; its comparison.csv is enough.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run to repeat, as its row names it.")],
    trust: TrustOption = False,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="a new one under runs/")] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a run of a comparison again from its row, and show both results."""
    with clear_errors():
        from dirprune.lab.cli.follow import follow
        from dirprune.lab.names import unknown
        from dirprune.lab.studies.comparison import rows
        from dirprune.lab.training import runs
        from dirprune.lab.trust import vouch

        known = {each.row.run: each.row for each in rows.read(folder)}
        if run not in known:
            raise unknown("run", run, known)
        recipe = rows.recipe_of(known[run])
        vouch(recipe.code, trusted=trust)
        where = out or runs.unused(Path("runs") / Path(run).name)
        follow(lambda: runs.create(where, recipe), device=device, root=data, minutes=minutes, title=run)
        again = runs.load(where).read()
        if again.outcome is None:
            say(f"Stopped; dirprune resume {where} continues.")
            return
        output, both = Output(as_json), [known[run], rows.Row.of(again, rows.free(folder))]
        for row in both:
            output.record(asdict(row))
        output.rows(
            run,
            [
                {
                    "": name,
                    row.measure.title: f"{row.score:.4f}",
                    "zeros (%)": f"{100 * row.sparsity:.2f}",
                    "commit": row.commit or "unknown",
                    "device": row.device,
                }
                for name, row in zip(("in the table", "again"), both, strict=True)
            ],
            left=1,
        )


@dataclass(frozen=True)
class Study:
    """What a comparison was asked for."""

    recipe: Recipe
    methods: Sequence[str] | None
    sparsities: Sequence[float]
    seeds: int
    sweeps: Mapping[str, Sequence[float]]
    source: Path | None
    out: Path
    here: Surroundings
    interruption: Interruption
    output: Output


def _tuned(study: Study, count: int) -> Mapping[str, Settings] | None:
    """Return the options that every method has in its best trial; train the missing trials. None if it was stopped."""
    from dirprune.lab.records.files import check_own
    from dirprune.lab.records.tables import merge_rows, read_rows
    from dirprune.lab.studies.comparison import trials, tuning
    from dirprune.lab.studies.comparison.work import judged

    names = list(dict.fromkeys(trials.usual(study.recipe) if study.methods is None else study.methods))
    at = sorted(study.sparsities)[len(study.sparsities) // 2]
    seed = study.recipe.seed + tuning.FIRST_SEED
    held = study.recipe.but(validation=study.recipe.task.validation or tuning.HELD_OUT, seed=seed)
    trials.plan(held, methods=names, sparsities=[at], batches=1)  # raises for a name that is not known
    table = study.out / tuning.TABLE
    for folder in (study.out, study.out / "tuning"):
        check_own(folder)

    def known() -> list[tuning.Trial]:
        rows = read_rows(table, tuning.Trial)
        return [row for row in rows if row.asked_sparsity == at and row.number < count and row.method in names]

    for number in range(count):
        missing = [name for name in names if (name, number) not in {(row.method, row.number) for row in known()}]
        if not missing:
            continue
        say(f"Trial {number + 1} of {count}: the options of {', '.join(missing)}, on held-out data.")
        settings = {name: tuning.drawn(held, name, number) for name in missing}
        folder = study.out / "tuning" / str(number)
        if not _train(replace(study, recipe=held, methods=missing, sparsities=[at], seeds=1, out=folder), settings):
            return None
        found = judged(folder, number, settings, at)
        merge_rows(table, tuning.Trial, found, key=("method", "number", "asked_sparsity"))
    best = tuning.chosen(known(), held.task.measure)
    for name, options in best.items():
        told = ", ".join(
            f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
            for option, value in options.items()
        )
        study.output.tell(f"{name}: {told or 'the options of the recipe'}")
    return best


def _train(study: Study, settings: Mapping[str, Settings]) -> bool:
    """Train the runs with a progress display, until they end, Ctrl-C is pressed or the time is up; return if all ended.

    Sweeps that were not given are widened, one value at a time, until their runs enclose the sparsities.
    """
    import torch

    from dirprune.lab.cli.follow import follow_series
    from dirprune.lab.studies.comparison import rows, trials
    from dirprune.lab.studies.comparison.work import ComparisonStep, compare, layers_left, wider
    from dirprune.lab.training.experiment import load_data

    told: set[str] = set()

    def ended(step: ComparisonStep) -> None:
        if step.row is not None and step.row.run not in told:
            told.add(step.row.run)
            study.output.record(asdict(step.row))

    batches = len(load_data(study.recipe, device=torch.device("cpu"), root=study.here.root).train)
    sweeps = {name: values for name, values in study.sweeps.items() if name in (study.methods or [name])}
    layers: dict[tuple[int, float], str] = {}
    while True:
        planned = trials.plan(
            study.recipe,
            methods=study.methods,
            sparsities=study.sparsities,
            seeds=study.seeds,
            sweeps=sweeps,
            settings=settings,
            layers=layers,
            source=study.source,
            batches=batches,
        )
        steps = compare(planned, study.out, study.here)
        titles = [trials.title(recipe) for recipe in planned]
        lengths = [recipe.epochs for recipe in planned]
        follow_series(steps, titles, lengths, study.interruption, ended=ended, several=study.here.several)
        ours = [recipe for recipe in planned if recipe.pruner.name not in study.sweeps]
        found = rows.read(study.out)
        if not {trials.run_name(recipe) for recipe in planned} <= {each.row.run for each in found}:
            return False
        before, layers = layers, layers_left(found) if trials.SHUFFLED in (study.methods or ()) else {}
        more = wider(ours, found, study.sparsities)
        if not more and layers == before:
            return True
        if more:
            say(f"Not every sparsity lies between two runs of {', '.join(more)}; trying {_latest(more)}.")
            sweeps = {**sweeps, **more}


def _latest(sweeps: Mapping[str, Sequence[float]]) -> str:
    from dirprune.lab.studies.comparison.trials import contestant, setting

    return ", ".join(setting(contestant(name).knob, values[-1]) for name, values in sweeps.items())


def _conclude(out: Path, levels: Sequence[Level], output: Output, against: str | None, *, html: bool) -> None:
    """Show the ranking of the runs that have ended so far, and write tables and figures."""
    from dirprune.lab.studies.comparison import rows as runs
    from dirprune.lab.studies.comparison import tables as comparison
    from dirprune.lab.studies.comparison.trials import TARGETED

    found = runs.read(out)
    if not found:
        if not (out / "runs").is_dir():
            raise ValueError(f"{out} holds no comparison; give the --out of one, or train one: dirprune compare RECIPE")
        say(f"No run in {out / 'runs'} has ended yet.")
        return
    rows = comparison.ranking(found, levels)
    for row in rows:
        output.record(asdict(row))
    for level in levels:
        cells = [row.cells() for row in rows if row.is_at(level)]
        output.rows(f"\nAt {level.title}", cells, left=3, spare=comparison.SPARE)
    other = against or next((row.method for row in rows if row.method in TARGETED), None)
    if differences := [row for row in comparison.pairs(found, levels) if row.other == other]:
        output.rows("\nSeed by seed", [row.cells() for row in differences], left=2)
    elif against:
        raise ValueError(f"--against {against}: no run of that name can be compared in {out}; name one of the table")
    for line in comparison.notes(found):
        output.tell(line)
    paths = comparison.write(found, out, levels)
    if html:
        from dirprune.lab.cli.page_of_comparison import page_of_comparison
        from dirprune.lab.cli.page_of_runs import write_with_progress

        paths.append(write_with_progress(page_of_comparison(found, out, levels, differences), out / "comparison.html"))
    for path in paths:
        output.tell(f"written: {path}")
    output.tell(f"dirprune rerun {out} RUN repeats a run of comparison.csv, for example {found[0].row.run}.")


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
