"""The command that turns a run into a file to ship."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dirprune.lab.cli.console import clear_errors
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
