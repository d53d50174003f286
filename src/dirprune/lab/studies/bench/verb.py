"""The command that times training steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dirprune.lab.cli.console import INTERRUPTED, bar, clear_errors, say
from dirprune.lab.cli.options import DeviceOption, LeanOption
from dirprune.lab.cli.output import JsonOption, Output

app = typer.Typer()


@app.command()
def bench(
    model: Annotated[
        list[str] | None, typer.Argument(help="Networks to measure: vgg16, wrn28x10, resnet50, small.")
    ] = None,
    lean: LeanOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this CSV file.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Time a training step with SGD and with gRDA, next to the arithmetic floor and the paper's figures."""
    with clear_errors():
        from dirprune.lab.cli.follow import device_of
        from dirprune.lab.studies.bench import work as benchmark

        where = device_of(device)
        names = model or (["vgg16", "wrn28x10", "resnet50"] if where.type == "cuda" else ["small"])
        costs: list[benchmark.StepCost] = []
        if out:
            benchmark.write([], out, where)  # fail before measuring if the file cannot be read or written
        output, finished = Output(as_json), False
        with bar("benchmarks", total=2 * len(names)) as advance, suppress(KeyboardInterrupt):
            for name in names:
                for cost in benchmark.bench(name, device=where, lean=lean):
                    costs.append(cost)
                    advance(1, note=f"{cost.model} {cost.optimizer}: {cost.ms:.2f} ms")
                    output.record({**cost.to_dict(), "ratio_to_sgd": benchmark.ratio_to_sgd(cost, costs)})
                if out:  # after each network, so that an interruption loses at most one
                    benchmark.write(costs, out, where)
            finished = True
        if costs:
            output.rows("A training step", benchmark.table(costs), left=2, spare=benchmark.SPARE)
        if bars := benchmark.bars(costs):
            output.rows("\nOur targets", [each.cells() for each in bars], left=2)
            for each in bars:
                output.record({**asdict(each), "met": each.met})
        if not finished:
            say(f"Stopped; {len(costs)} of {2 * len(names)} measurements are complete.")
            raise typer.Exit(INTERRUPTED)
