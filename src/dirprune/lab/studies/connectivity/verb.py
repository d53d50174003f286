"""The command that joins two networks by a curve of low loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dirprune.lab.cli.console import Interruption, clear_errors
from dirprune.lab.cli.drive import CONTINUE, OutOption, drive
from dirprune.lab.cli.options import DeviceOption, MinutesOption, RunDataOption, TrustOption
from dirprune.lab.cli.output import JsonOption, Output

app = typer.Typer()


@app.command()
def connect(
    run_a: Annotated[Path, typer.Argument(help="The end at t = 0; the published curves have gRDA here.")],
    run_b: Annotated[Path, typer.Argument(help="The end at t = 1.")],
    trust: TrustOption = False,
    out: OutOption = Path("runs/connect"),
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
    as_json: JsonOption = False,
) -> None:
    """Join two networks by a curve of low loss; profile it, and draw the plane it lies in."""
    with clear_errors(CONTINUE):
        import json

        from dirprune.lab.cli.follow import device_of
        from dirprune.lab.studies.connectivity.figures import draw
        from dirprune.lab.studies.connectivity.folder import notes, table
        from dirprune.lab.studies.connectivity.work import Options
        from dirprune.lab.studies.connectivity.work import connect as connecting
        from dirprune.lab.training import runs

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
        first, _ = (runs.load(path, trusted=trust) for path in (run_a, run_b))
        root = data or first.last_root()
        where = device_of(device)
        job = connecting(run_a, run_b, out, options, epoch_a=epoch_a, epoch_b=epoch_b, device=where, root=root)
        output = Output(as_json)
        drive("connect", job, Interruption(minutes), output, after="epoch or point")
        draw(out)
        output.record(json.loads((out / "summary.json").read_text()))
        output.rows(*table(out))
        for note in notes(out):
            output.tell(note)
        output.tell(f"Numbers, {'weights of the bend ' if fit else ''}and figures: {out}")
