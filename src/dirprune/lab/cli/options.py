"""Options that several commands take, and how their texts are read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="One of `dirprune recipes`, or a Python file that defines recipe().")
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets.", show_default="$DIRPRUNE_DATA or ~/.cache/dirprune"),
]
RunDataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets.", show_default="where the last session found them"),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto for the fastest available.")]
ModelOption = Annotated[str | None, typer.Option(help="Another network, or your own as package.module:name.")]


class Precision(str, Enum):
    """Precisions of a training step."""

    float32 = "float32"
    bfloat16 = "bfloat16"


StepPrecisionOption = Annotated[
    Precision | None,
    typer.Option("--precision", help="Precision of the forward and backward pass.", show_default="by recipe"),
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run the code that the run names as its network (package.module:name).")
]
SeedOption = Annotated[
    int | None, typer.Option(help="Random seed for initial weights, data order and augmentation.", show_default="0")
]
KeepOption = Annotated[str | None, typer.Option(help="Epochs whose checkpoints are kept, e.g. 0,10,100.")]
AtOnceOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs to train at the same time, each in a process with one CPU thread.",
        show_default="1, or what a cluster has room for",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(help="Train on the Ray cluster at this address, or on your own here: auto.", show_default="none"),
]
MinutesOption = Annotated[
    float | None, typer.Option(help="Save and stop after this many minutes.", show_default="no limit")
]
LeanOption = Annotated[
    bool | None,
    typer.Option("--lean/--no-lean", help="With bfloat16, store gRDA's weights in bfloat16; results are unchanged."),
]


def integers(option: str, text: str, valid: range = range(2**31)) -> list[int]:
    """Read an option like 0,10,100."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of numbers; write e.g. 0,10,100") from None
    if strange := [number for number in found if number not in valid]:
        raise ValueError(f"{option} {strange[0]} cannot be used; give numbers from {valid[0]} to {valid[-1]}")
    return found


def fractions(option: str, text: str) -> list[float]:
    """Read an option like 0.8,0.9."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1 for value in values):
        raise ValueError(f"{option} {text!r} is not a list of shares; write fractions between 0 and 1, e.g. 0.8,0.9")
    return list(dict.fromkeys(values))
