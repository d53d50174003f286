"""The command that downloads a data set."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dirprune.lab.cli.console import clear_errors
from dirprune.lab.cli.output import JsonOption, Output

app = typer.Typer()


class DownloadName(str, Enum):
    cifar10 = "cifar10"
    cifar100 = "cifar100"


@app.command()
def data(
    name: Annotated[DownloadName, typer.Argument(help="The data set to download.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to put it in.", show_default="$DIRPRUNE_DATA or ~/.cache/dirprune")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download a data set, check it and unpack it."""
    with clear_errors():
        from dirprune.lab.data import data_root
        from dirprune.lab.data.download import fetch

        folder = data_root(to)
        fetched = fetch(name.value, folder)
        how = {"present": "already present and verified", "archive": "unpacked from the archive that was already there"}
        output = Output(as_json)
        output.tell(
            f"{fetched.folder}: {how.get(fetched.source, 'downloaded and verified')}. Use it with --data {folder}"
        )
        output.record({"folder": str(fetched.folder), "source": fetched.source})
