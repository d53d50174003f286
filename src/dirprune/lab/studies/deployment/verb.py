"""The commands that turn a run into a file to ship, and measure how fast it runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dirprune.lab.cli.console import clear_errors, say
from dirprune.lab.cli.options import TrustOption, integers
from dirprune.lab.cli.output import JsonOption, Output
from dirprune.lab.text import NOTHING

if TYPE_CHECKING:
    from dirprune.lab.studies.deployment.export import Exported

app = typer.Typer()


class HalfName(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[Path, typer.Option(help="The file to write, e.g. net.safetensors.")],
    dtype: Annotated[
        HalfName | None, typer.Option(help="Round the weights to float16 or bfloat16.", show_default="no rounding")
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="Checkpoint to export.", show_default="the newest")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's network to a small file without its zeros; it loads with dirprune.deploy.load_sparse."""
    with clear_errors():
        from dataclasses import asdict

        import torch

        from dirprune.lab.studies.deployment.export import export as exporting
        from dirprune.lab.training import runs

        half = getattr(torch, dtype.value) if dtype else None
        exported = exporting(runs.load(run), to, dtype=half, epoch=epoch, force=force)
        output = Output(as_json)
        output.record(asdict(exported))
        output.table(str(to), ("", f"{exported.network}, epoch {exported.epoch}"), _rows(exported), left=1)
        output.tell(
            f"Load it with `dirprune.deploy.load_sparse({str(to)!r})`; docs/deploy.md of the repository says more."
        )


@app.command()
def speed(
    network: Annotated[Path, typer.Argument(help="A run directory, or a file that a runtime's save() wrote.")],
    batch: Annotated[str, typer.Option(help="Numbers of examples, e.g. 1,16,64.")] = "1",
    threads: Annotated[str, typer.Option(help="Numbers of threads, e.g. 1,2.")] = "1",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each runtime is measured.")] = 10,
    alone: Annotated[bool, typer.Option("--alone", help="Measure no other runtime.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the tables and the figure.", show_default="RUN/speed; runs/speed-FILE"),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a sparse network on this CPU beside torch, ONNX Runtime and OpenVINO, which compute with its zeros."""
    with clear_errors():
        from dataclasses import asdict

        import torch

        from dirprune.lab import plots
        from dirprune.lab.records import provenance
        from dirprune.lab.records.columns import cells
        from dirprune.lab.records.tables import write_rows
        from dirprune.lab.studies.deployment import speed as work
        from dirprune.lab.studies.deployment.figures import speed_figure

        out = out or (network / "speed" if network.is_dir() else Path("runs") / f"speed-{network.stem}")
        batches, counts = integers("--batch", batch, range(1, 100_001)), integers("--threads", threads, range(1, 257))
        cases = [(b, t) for t in counts for b in batches]
        out.mkdir(parents=True, exist_ok=True)
        file = work.saved(network, out / "network.safetensors", trusted=trust)
        output = Output(as_json)
        found = []
        for case in cases:
            for row in work.speed(file, *case, runtimes=() if alone else work.others(say), seconds=seconds, failed=say):
                found.append(row)
                output.record(asdict(row))
        layers = work.layers(file)
        provenance.note_session(out, provenance.environment(torch.device("cpu")))
        write_rows(out / "speed.csv", work.Latency, found)
        write_rows(out / "layers.csv", work.LayerTime, layers)
        output.rows("Layers of one example, one thread", [row.cells() for row in layers], left=3)
        output.rows("Latency", [cells(row) for row in found])
        figure = plots.save(speed_figure(found), out / "speed.png")
        output.tell(f"Numbers: {out}/speed.csv, {out}/layers.csv; figure: {figure}")


def _rows(exported: Exported) -> list[tuple[str, str]]:
    accuracy = NOTHING if exported.accuracy is None else f"{exported.accuracy:.2f}"
    before = "" if exported.dtype == "float32" else f" before rounding to {exported.dtype}"
    return [
        (f"{exported.tested_on} accuracy (%){before}", accuracy),
        ("zeros of all parameters (%)", f"{exported.sparsity:.2%}".rstrip("%")),
        ("zeros of the weights (%)", f"{exported.weight_sparsity:.2%}".rstrip("%")),
        ("dense (MB)", f"{exported.dense_bytes / 1e6:.3g}"),
        ("this file (MB)", f"{exported.file_bytes / 1e6:.3g}"),
        ("times smaller", f"{exported.dense_bytes / exported.file_bytes:.1f}"),
    ]
