"""The program: all of its commands, each of which has a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dirprune import __version__
from dirprune.lab.cli import data, demo, recipes, train
from dirprune.lab.cli.console import clear_errors
from dirprune.lab.studies.bench import verb as bench
from dirprune.lab.studies.comparison import verb as comparison
from dirprune.lab.studies.connectivity import verb as connectivity
from dirprune.lab.studies.deployment import verb as deployment
from dirprune.lab.studies.direction import verb as direction
from dirprune.lab.studies.report import verb as report
from dirprune.lab.studies.reproduction import verb as reproduction
from dirprune.lab.studies.theorem import verb as theorem
from dirprune.lab.studies.tune import verb as tuning


class _Verbs(TyperGroup):
    """The commands; a word that is empty, as from a variable that is not set, is refused for all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for before, word in zip(["", *args], args, strict=False):
            option = (
                word[:-1] if word.startswith("--") and word.find("=") == len(word) - 1 else before if not word else ""
            )
            if option or not word:
                with clear_errors():
                    what = option if option.startswith("-") else "an argument"
                    raise ValueError(f"{what} is empty; give a value, or leave it out")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train sparse networks with gRDA, and see what it does. Start with: dirprune demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dirprune {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before the verb."""


for room in (train, report, data, recipes, bench, demo):
    app.add_typer(room.app)
for study in (tuning, theorem, direction, connectivity, comparison, reproduction, deployment):
    app.add_typer(study.app)
