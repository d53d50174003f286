"""The commands that measure directional pruning in trained networks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dirprune.lab.cli.console import Interruption, clear_errors, say
from dirprune.lab.cli.drive import CONTINUE, OutOption, drive
from dirprune.lab.cli.options import DeviceOption, MinutesOption, RunDataOption, TrustOption, integers
from dirprune.lab.cli.output import JsonOption, Output

if TYPE_CHECKING:
    import torch

app = typer.Typer()

ExamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Training examples in the Hessian: a fixed subset.", show_default="all")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples per pass of a Hessian product.")]
PrecisionOption = Annotated[
    str, typer.Option(help="float32; on a GPU also tf32 (residuals near 1e-3) or bfloat16 (faster, near 2e-2).")
]


@app.command()
def project(
    sgd_run: Annotated[Path, typer.Argument(help="A run of SGD, with checkpoints kept (--keep).")],
    grda_run: Annotated[list[Path], typer.Argument(help="Runs of gRDA from the same weights and minibatches.")],
    trust: TrustOption = False,
    out: OutOption = Path("runs/project"),
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
    as_json: JsonOption = False,
) -> None:
    """Measure how much of gRDA's difference from SGD lies in the leading Hessian eigenspace, along training."""
    with clear_errors(CONTINUE):
        from dirprune.lab import plots
        from dirprune.lab.records.columns import cells
        from dirprune.lab.records.tables import read_rows
        from dirprune.lab.studies.direction.figures import projection_figure
        from dirprune.lab.studies.direction.projection import ProjectionRow
        from dirprune.lab.studies.direction.projection import project as projecting
        from dirprune.lab.studies.direction.published import shares
        from dirprune.lab.studies.direction.spectrum import Lanczos
        from dirprune.lab.training import runs

        sgd = runs.load(sgd_run, trusted=trust)
        steps = projecting(
            sgd,
            [runs.load(path, trusted=trust) for path in grda_run],
            out,
            k=k,
            epochs=integers("--epochs", epochs) if epochs else None,
            lanczos=Lanczos(examples, batch_size, precision, tolerance, max_iterations, seed),
            device=_device_for(precision, device),
            root=data or sgd.last_root(),
        )
        output = Output(as_json)
        rows = drive("project", steps, Interruption(minutes), output)
        measured = read_rows(out / "projection.csv", ProjectionRow)  # includes rows of earlier commands
        theirs = shares(sgd.recipe.task.data, sgd.recipe.model)
        figure = plots.save(projection_figure(measured, theirs), out / "projection.png")
        title = f"‖PΔ‖/‖Δ‖ on {rows[0].examples:,} training examples"
        output.rows(title, [cells(row) for row in rows], left=2)
        output.tell(f"Numbers: {out}; figure: {figure}")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A trained run, preferably with SGD.")],
    trust: TrustOption = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table and the figure; the same folder continues.", show_default="RUN/score"),
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Prune a trained network along its flat directions, by magnitude, and by optimal brain damage and surgeon."""
    with clear_errors(CONTINUE):
        from dirprune.lab import plots
        from dirprune.lab.studies.direction.figures import score_figure
        from dirprune.lab.studies.direction.scoring import measured
        from dirprune.lab.studies.direction.scoring import score as scoring
        from dirprune.lab.studies.direction.spectrum import Lanczos
        from dirprune.lab.training import runs

        found, out = runs.load(run, trusted=trust), out or run / "score"
        steps = scoring(
            found,
            out,
            ks=integers("--k", k),
            epoch=epoch,
            samples=samples,
            recalibrate=recalibrate,
            lanczos=Lanczos(examples, batch_size, precision, tolerance, max_iterations, seed),
            device=_device_for(precision, device),
            root=data or found.last_root(),
        )
        output = Output(as_json)
        drive("score", steps, Interruption(minutes), output)
        rows = measured(out)  # includes rows of earlier commands
        figure = plots.save(score_figure(rows), out / "score.png")
        output.rows("Pruned without retraining", [row.cells() for row in rows])
        of_others = "for the other methods, the largest |w|, saliency or rise of the loss that was pruned"
        output.tell(f"λ: path parameter for directional pruning; {of_others}.")
        output.tell(f"Numbers: {out}; figure: {figure}")


def _device_for(precision: str, device: str) -> torch.device:
    from dirprune.lab.cli.follow import device_of

    found = device_of(device)
    if precision == "tf32" and found.type != "cuda":
        say("tf32 needs a GPU; using float32 here.")
    return found
