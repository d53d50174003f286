"""The commands, one function per verb. Heavy imports happen inside the functions, so that --help is instant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dirprune import __version__
from dirprune.lab.cli import demo
from dirprune.lab.cli.console import (
    INTERRUPTED,
    DataOption,
    DeviceOption,
    KeepOption,
    MinutesOption,
    ModelOption,
    RecipeArgument,
    RunDataOption,
    SeedOption,
    StepPrecisionOption,
    TrustOption,
    clear_errors,
    integers,
    say,
    say_once,
)
from dirprune.lab.cli.output import HtmlOption, JsonOption, Output
from dirprune.lab.studies.comparison import verb as comparison
from dirprune.lab.studies.connectivity import verb as connectivity
from dirprune.lab.studies.deployment import verb as deployment
from dirprune.lab.studies.direction import verb as direction
from dirprune.lab.studies.reproduction import verb as reproduction
from dirprune.lab.studies.theorem import verb as theorem
from dirprune.lab.studies.tune import verb as tuning
from dirprune.lab.text import NOTHING

if TYPE_CHECKING:
    from dirprune.lab.training.recipe import Recipe


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


class OptimizerName(str, Enum):
    grda = "grda"
    sgd = "sgd"
    adamgrda = "adamgrda"
    adamw = "adamw"


class ThresholdShape(str, Enum):
    soft = "soft"
    garrote = "garrote"
    hard = "hard"


class DownloadName(str, Enum):
    cifar10 = "cifar10"
    cifar100 = "cifar100"


SaveOption = Annotated[
    int | None, typer.Option(min=1, help="Epochs between checkpoints.", show_default="one per minute")
]
BoardOption = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files into the run.")]
KeepGoingOption = Annotated[
    bool, typer.Option("--keep-going", help="Train on even if every weight is zero and nothing can recover.")
]
LeanOption = Annotated[
    bool | None,
    typer.Option("--lean/--no-lean", help="With bfloat16, store gRDA's weights in bfloat16; results are unchanged."),
]
RateOption = Annotated[float | None, typer.Option(help="Base learning rate.")]
BatchOption = Annotated[int | None, typer.Option(help="Global batch size, summed over all processes.")]


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


@app.command()
def train(
    recipe: RecipeArgument,
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(help="Sparse: grda, adamgrda. Dense: sgd, adamw.", show_default="the recipe's"),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(help="The share of zeros to end with, met exactly by gRDA; in place of --c and --mu."),
    ] = None,
    macs: Annotated[
        float | None,
        typer.Option(
            help="The share of the multiplications to leave, likewise: 0.1 saves 90%. In place of --sparsity."
        ),
    ] = None,
    c: Annotated[float | None, typer.Option(help="gRDA's pruning strength, ≥ 0.")] = None,
    mu: Annotated[float | None, typer.Option(help="gRDA's growth exponent, in (0, 1].")] = None,
    exempt: Annotated[
        str | None, typer.Option(help="What gRDA keeps dense, e.g. bias,norm,head.*; none for nothing.")
    ] = None,
    shape: Annotated[
        ThresholdShape | None,
        typer.Option(
            help="What a threshold with a target leaves of larger weights.",
            show_default="soft; hard with adamgrda and --from",
        ),
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(
            help="How far adamgrda's thresholds follow Adam's metric: 0 all alike, 1 wholly.",
            show_default="0; 0.5 with --from",
        ),
    ] = None,
    lr: RateOption = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum, in [0, 1).")] = None,
    nesterov: Annotated[bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov's momentum.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay, ≥ 0.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="The rate over training: constant, cosine:warmup=2, drop:after=30,60, …")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs to train.")] = None,
    batch_size: BatchOption = None,
    seed: SeedOption = None,
    model: ModelOption = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Hold out this fraction of the training set and report on it instead of the test set."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Another data set; folder for the images in --data, or your own as package.module:name."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images of a folder or of CIFAR, in pixels.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Start from these weights: a run, or a .safetensors or torch.save file."),
    ] = None,
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="Crop and mirror training images at random.")
    ] = None,
    keep: KeepOption = None,
    precision: StepPrecisionOption = None,
    compile: Annotated[  # noqa: A002
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile the network.")
    ] = None,
    lean: LeanOption = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="a new one under runs/")] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    save_every: SaveOption = None,
    minutes: MinutesOption = None,
    keep_going: KeepGoingOption = False,
    tensorboard: BoardOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe. Options you leave out keep the recipe's values.

    On several processes: torchrun --nproc-per-node N -m dirprune train RECIPE …
    """
    with clear_errors():
        from dirprune.lab.cli.follow import device_of, follow
        from dirprune.lab.training import recipes, runs
        from dirprune.lab.training.optimizers import OPTIMIZERS
        from dirprune.lab.training.recipe import changed

        base = recipes.find(recipe)
        kind = OPTIMIZERS[optimizer.value if optimizer else base.optimizer.name]
        if sparsity is not None and macs is not None:
            raise ValueError(f"--sparsity {sparsity:g} and --macs {macs:g} exclude each other; give one")
        if macs is not None and not 0 < macs < 1:
            raise ValueError(f"--macs {macs:g} is not a share; give what is to be left, between 0 and 1, e.g. 0.1")
        share = sparsity if macs is None else round(1 - macs, 12)
        to_target = share is not None and (optimizer is None or kind.knob)
        named = kind.targeted if to_target else optimizer and optimizer.value
        usual = OPTIMIZERS[named or base.optimizer.name].fine_tuning if start else {}
        own = {"shape": shape and shape.value, "power": power}
        chosen = changed(
            base,
            optimizer=named,
            **{**usual, **{option: value for option, value in own.items() if value is not None}},
            sparsity=share,
            of=None if macs is None else "macs",
            c=c,
            mu=mu,
            exempt=None if exempt is None else _names(exempt),
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            schedule=schedule,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            model=model,
            validation=validation,
            data=dataset,
            size=image_size,
            start=None if start is None else str(start.resolve()),
            augment=augment,
            keep=tuple(integers("--keep", keep)) if keep else None,
            precision=precision.value if precision else None,
            compile=compile,
            lean=lean,
        )
        if keep and max(chosen.keep) > chosen.epochs:
            raise ValueError(
                f"--keep {keep!r} names epoch {max(chosen.keep)}, but the run ends after epoch {chosen.epochs}; give "
                "epochs up to that, or a larger --epochs"
            )
        for remark in _remarks(chosen, device_of(device).type, lean=lean):
            say_once(remark)
        folder = out or runs.unused(Path("runs") / runs.default_name(chosen))
        follow(
            lambda: runs.create(folder, chosen),
            device=device,
            root=data,
            save_every=save_every,
            tensorboard=tensorboard,
            minutes=minutes,
            keep_going=keep_going,
            output=Output(as_json),
        )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    trust: TrustOption = False,
    data: RunDataOption = None,
    device: DeviceOption = "auto",
    save_every: SaveOption = None,
    minutes: MinutesOption = None,
    keep_going: KeepGoingOption = False,
    tensorboard: BoardOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from its last good checkpoint."""
    with clear_errors():
        from dirprune.lab.cli.follow import follow
        from dirprune.lab.training import runs

        found = runs.load(run, trusted=trust)
        root = data or found.last_root()
        follow(
            found,
            device=device,
            root=root,
            save_every=save_every,
            tensorboard=tensorboard,
            minutes=minutes,
            keep_going=keep_going,
            output=Output(as_json),
        )


@app.command()
def report(
    run: Annotated[
        list[Path], typer.Argument(help="Run directories; those that differ only in the seed are averaged.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figures.", show_default="RUN/figures; report/ for several runs")
    ] = None,
    html: HtmlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side: table, curves, layerwise sparsity."""
    with clear_errors():
        from dirprune.lab.records.columns import cells
        from dirprune.lab.studies.report import figures
        from dirprune.lab.studies.report import report as reports

        output, found, paths = Output(as_json), reports.report(run), []
        output.rows("Runs", found.cells, left=2, spare=reports.SPARE)  # before the figures, which may fail
        for note in found.notes:
            output.tell(note)
        if found.signs:
            output.rows("Signs after the same epochs", [cells(row) for row in found.signs], left=2)
        out = out or (None if len(run) == 1 else Path("report"))
        try:
            paths = figures.draw(found, out)
            if html:
                from dirprune.lab.cli.page_of_runs import page_of_runs, write_with_progress

                paths.append(write_with_progress(page_of_runs(found), figures.folder(found, out) / "report.html"))
        finally:
            output.record({**found.to_dict(), "figures": [str(path) for path in paths]})
        if len(run) == 1 and (networks := found.layers):
            ((label, (zeros,)),) = networks[next(iter(networks))].items()
            output.tell(f"\nLayer by layer, {label}:\n\n{zeros}\n")
        for path in paths:
            output.tell(f"{'page' if path.suffix == '.html' else 'figure'}: {path}")


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
        from dirprune.lab.cli.console import bar
        from dirprune.lab.cli.follow import device_of
        from dirprune.lab.studies import bench as benchmark

        where = device_of(device)
        names = model or (["vgg16", "wrn28x10", "resnet50"] if where.type == "cuda" else ["small"])
        costs: list[benchmark.Cost] = []
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


for study in (demo, tuning, theorem, direction, connectivity, comparison, reproduction, deployment):
    app.add_typer(study.app)


def _remarks(recipe: Recipe, device_type: str, *, lean: bool | None) -> Iterator[str]:
    """Yield remarks on effects of the given options that a user may not expect."""
    if lean and recipe.execution(device_type).precision != "bfloat16":
        yield "--lean has no effect in float32; add --precision bfloat16."
    factor = recipe.schedule.factor(1, recipe.epochs)
    if recipe.schedule.kind != "cosine" and factor < 1:
        many = f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}"
        start = f"training starts at lr {factor * recipe.optimizer.lr:g}"
        yield f"With {many} this schedule never reaches the base rate; {start}."


def _names(text: str) -> tuple[str, ...]:
    """Read an option like bias,norm; "none" stands for no name."""
    return () if text == "none" else tuple(filter(None, text.split(",")))


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
