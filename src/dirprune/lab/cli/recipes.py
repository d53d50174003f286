"""The command that shows what can be trained."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Annotated, Any

import typer

from dirprune.lab.cli.console import clear_errors
from dirprune.lab.cli.output import JsonOption, Output
from dirprune.lab.text import NOTHING

app = typer.Typer()


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Show every value of this recipe.", show_default="list all")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, or show every value of one."""
    with clear_errors():
        from dirprune.lab.training import recipes as known

        found = [known.get(each) for each in ([name] if name else known.names())]
        output = Output(as_json)
        for recipe in found:
            output.record(recipe.to_dict())
        if name:
            values = found[0].values()
            output.table(
                f"dirprune train {name}", ("field", "value"), [(key, _text(values[key])) for key in values], left=2
            )
            return
        rows = [(r.name, r.about + _published(r.published), str(r.epochs), r.setting) for r in found]
        output.table("dirprune train RECIPE", ("recipe", "what", "epochs", "setting"), rows, left=2, spare=("setting",))


def _text(value: Any) -> str:
    """Return a recipe value as text for a table cell."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return "\n".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return (
            "\n".join(" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value) or NOTHING
        )
    return NOTHING if value == "" else str(value)


def _published(settings: tuple[tuple[float, float], ...]) -> str:
    """Return the paper's settings as lines to append to a recipe's description."""
    by_c: dict[float, list[str]] = {}
    for c, mu in settings:
        by_c.setdefault(c, []).append(f"{mu:g}")
    return "".join(f"\npublished: c={c:g}, μ={' '.join(mus)}" for c, mus in by_c.items())
