"""The commands for researchers, on the theorem, curvature and connectivity; one function per verb."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dirprune.lab.console import (
    INTERRUPTED,
    NOTHING,
    DeviceOption,
    Interruption,
    MinutesOption,
    RunDataOption,
    bar,
    clear_errors,
    emit,
    integers,
    is_terminal,
    say,
    show,
)

app = typer.Typer()
CONTINUE = "Stopped; run the same command to continue."

OutOption = Annotated[
    Path, typer.Option(help="Folder for tables and figures; run again with the same folder to continue.")
]
ExamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Training examples in the Hessian: a fixed subset.", show_default="all")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples per pass of a Hessian product.")]
PrecisionOption = Annotated[
    str, typer.Option(help="float32; on a GPU also tf32 (residuals near 1e-3) or bfloat16 (faster, near 2e-2).")
]


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="Folder for the table and the figures.")] = Path("theory"),
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.", show_default="--out")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Random problems to average over.")] = 20,
    runs: Annotated[int, typer.Option(min=2, help="Simulated runs for the limit law.")] = 4000,
    seed: Annotated[int, typer.Option(help="Random seed for the problems and the noise.")] = 0,
) -> None:
    """Demonstrate the theorem: gRDA approaches directional pruning as the learning rate falls. Under a minute."""
    with clear_errors():
        from dataclasses import asdict

        from dirprune.lab import theory_report

        found: dict[str, list[dict[str, Any]]] = {}
        with bar("theory", total=theory_report.FINDINGS) as advance:
            for finding in theory_report.report(out, figures=figures, problems=problems, runs=runs, seed=seed):
                row = asdict(finding.row)
                found.setdefault(finding.part, []).append(row)
                advance(1, note=f"{finding.part}, γ={row['gamma']:g}")
                if not is_terminal():
                    emit({"part": finding.part, **row})
        if is_terminal():
            for part, rows in found.items():
                cells = [[NOTHING if value is None else f"{value:.4g}" for value in row.values()] for row in rows]
                show(part, [theory_report.HEADERS[name] for name in rows[0]], cells, left=0, spare=theory_report.SPARE)
        folders = f"{out}, {figures}" if figures else str(out)
        say(f"Numbers and figures: {folders}. They are explained in docs/theory.md of the repository.")


@app.command()
def project(
    sgd_run: Annotated[Path, typer.Argument(help="A run of SGD, with checkpoints kept (--keep).")],
    grda_run: Annotated[list[Path], typer.Argument(help="Runs of gRDA from the same weights and minibatches.")],
    out: OutOption = Path("projection"),
    k: Annotated[int, typer.Option(min=1, help="Number of leading eigenvectors, with positive eigenvalues.")] = 10,
    epochs: Annotated[
        str | None, typer.Option(help="Epochs to measure, e.g. 10,300,600.", show_default="all that the runs share")
    ] = None,
    examples: ExamplesOption = None,
    batch_size: BatchOption = 500,
    precision: PrecisionOption = "float32",
    tolerance: Annotated[float, typer.Option(help="Residual to accept, relative to the largest eigenvalue.")] = 1e-3,
    max_iterations: Annotated[int, typer.Option(min=1, help="Maximum number of Hessian products per epoch.")] = 300,
    seed: Annotated[int, typer.Option(help="Random seed for the first Lanczos vector.")] = 0,
    minutes: MinutesOption = None,
    data: RunDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure how much of gRDA's difference from SGD lies in the leading Hessian eigenspace, along training."""
    with clear_errors(CONTINUE):
        from dirprune.lab import plots, runs
        from dirprune.lab.direction_plots import projection_figure
        from dirprune.lab.follow import device_of
        from dirprune.lab.projection import COLUMNS, ProjectionRow
        from dirprune.lab.projection import project as projecting
        from dirprune.lab.published.projection import shares
        from dirprune.lab.spectrum import Lanczos
        from dirprune.lab.tables import read_rows

        sgd = runs.load(sgd_run)
        where = device_of(device)
        _tell_precision(precision, where.type)
        steps = projecting(
            sgd,
            [runs.load(path) for path in grda_run],
            out,
            k=k,
            epochs=integers("--epochs", epochs) if epochs else None,
            lanczos=Lanczos(examples, batch_size, precision, tolerance, max_iterations, seed),
            device=where,
            root=data or sgd.last_root(),
        )
        rows = _drive("project", steps, Interruption(minutes))
        measured = read_rows(out / "projection.csv", ProjectionRow)  # includes rows of earlier commands
        theirs = shares(sgd.recipe.data, sgd.recipe.model)
        figure = plots.save(projection_figure(measured, theirs), out / "projection.png")
        if is_terminal():
            title = f"‖PΔ‖/‖Δ‖ on {rows[0].examples:,} training examples"
            show(title, COLUMNS, [row.cells() for row in rows])
        say(f"Numbers: {out}; figure: {figure}")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A trained run, preferably with SGD.")],
    out: OutOption = Path("score"),
    k: Annotated[
        str, typer.Option(help="How many leading eigenvectors to treat as curved; comma-separated.")
    ] = "0,10,30,100",
    epoch: Annotated[int | None, typer.Option(help="Checkpoint to prune.", show_default="the newest")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Hessian products used to estimate its diagonal.")] = 100,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Re-estimate BatchNorm statistics.")] = False,
    examples: ExamplesOption = None,
    batch_size: BatchOption = 500,
    precision: PrecisionOption = "float32",
    tolerance: Annotated[float, typer.Option(help="Residual to accept, relative to the largest eigenvalue.")] = 1e-5,
    max_iterations: Annotated[int, typer.Option(min=1, help="Maximum number of Hessian products.")] = 2000,
    seed: Annotated[int, typer.Option(help="Random seed for the first Lanczos vector and the diagonal.")] = 0,
    minutes: MinutesOption = None,
    data: RunDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Prune a trained network along its flat directions, and by magnitude and optimal brain damage to compare."""
    with clear_errors(CONTINUE):
        from dirprune.lab import plots, runs
        from dirprune.lab.direction_plots import score_figure
        from dirprune.lab.follow import device_of
        from dirprune.lab.scoring import COLUMNS, measured
        from dirprune.lab.scoring import score as scoring
        from dirprune.lab.spectrum import Lanczos

        found = runs.load(run)
        where = device_of(device)
        _tell_precision(precision, where.type)
        steps = scoring(
            found,
            out,
            ks=integers("--k", k),
            epoch=epoch,
            samples=samples,
            recalibrate=recalibrate,
            lanczos=Lanczos(examples, batch_size, precision, tolerance, max_iterations, seed),
            device=where,
            root=data or found.last_root(),
        )
        _drive("score", steps, Interruption(minutes))
        rows = measured(out)  # includes rows of earlier commands
        figure = plots.save(score_figure(rows), out / "score.png")
        if is_terminal():
            show("Pruned without retraining", COLUMNS, [row.cells() for row in rows])
            of_others = "for the other methods, the largest |w| or saliency pruned"
            say(f"λ: path parameter for directional pruning; {of_others}.")
        say(f"Numbers: {out}; figure: {figure}")


@app.command()
def connect(
    run_a: Annotated[Path, typer.Argument(help="The end at t = 0; the published curves have gRDA here.")],
    run_b: Annotated[Path, typer.Argument(help="The end at t = 1.")],
    out: OutOption = Path("connection"),
    epochs: Annotated[int, typer.Option(help="Epochs of the fit.")] = 300,
    points: Annotated[int, typer.Option(help="Points of the profile.")] = 61,
    grid: Annotated[int, typer.Option(help="Points per side of the plane.")] = 21,
    margin: Annotated[float, typer.Option(help="Margin of the plane, as a fraction of its width.")] = 0.2,
    lr: Annotated[float, typer.Option(help="Learning rate of the fit.")] = 0.1,
    momentum: Annotated[float, typer.Option(help="Momentum of the fit.")] = 0.9,
    schedule: Annotated[str, typer.Option(help="Learning-rate schedule of the fit.")] = "constant-linear-constant",
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.", show_default="that of run A")] = None,
    plane_examples: Annotated[
        int | None, typer.Option(help="Training examples for the plane.", show_default="all")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="With --no-fit, only the straight line.")] = True,
    epoch_a: Annotated[int | None, typer.Option(help="Checkpoint of run A.", show_default="the newest")] = None,
    epoch_b: Annotated[int | None, typer.Option(help="Checkpoint of run B.", show_default="the newest")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the fit.")] = 0,
    minutes: MinutesOption = None,
    data: RunDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Join two networks by a curve of low loss; profile it, and draw the plane it lies in."""
    with clear_errors(CONTINUE):
        import json

        from dirprune.lab import runs
        from dirprune.lab.connectivity import Options
        from dirprune.lab.connectivity import connect as connecting
        from dirprune.lab.connectivity_files import notes, table
        from dirprune.lab.follow import device_of

        options = Options(
            epochs,
            points,
            grid,
            margin,
            lr,
            momentum,
            schedule,
            batch_size,
            seed,
            fit=fit,
            plane_examples=plane_examples,
        )
        root = data or runs.load(run_a).last_root()
        where = device_of(device)
        job = connecting(run_a, run_b, out, options, epoch_a=epoch_a, epoch_b=epoch_b, device=where, root=root)
        _drive("connect", job, Interruption(minutes), after="epoch or point")
        if is_terminal():
            show(*table(out))
            for note in notes(out):
                say(note)
        else:
            emit(json.loads((out / "summary.json").read_text()))
        say(f"Numbers, {'weights of the bend ' if fit else ''}and figures: {out}")


def _stop(interruption: Interruption) -> NoReturn:
    """Exit before the work is finished; the progress so far has been saved."""
    say(CONTINUE)
    raise typer.Exit(INTERRUPTED if interruption.asked else 0)


def _drive(verb: str, steps: Any, interruption: Interruption, *, after: str = "product") -> list[Any]:
    """Run a generator of progress and rows with a progress bar, and return the rows.

    Closing the generator saves its progress. It can be interrupted after each step, which messages call ``after``.
    """
    from dataclasses import asdict

    from dirprune.lab.progress import Progress

    rows: list[Any] = []
    with interruption.listening(after), closing(steps), bar(verb, total=None) as advance:
        what, done = "", 0
        for step in steps:
            if not isinstance(step, Progress):
                rows.append(step)
                advance(0, note=f"{len(rows)} measured")
                if not is_terminal():
                    emit(asdict(step))
            else:
                if step.what != what:
                    what, done = step.what, 0
                    advance(0, restart=what, unit=step.unit, total=step.total)
                advance(step.done - done, note=step.note)
                done = step.done
            if interruption():
                _stop(interruption)
    return rows


def _tell_precision(precision: str, device: str) -> None:
    if precision == "tf32" and device != "cuda":
        say("tf32 needs a GPU; using float32 here.")
