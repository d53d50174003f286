"""The commands that train one recipe, and continue a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dirprune.lab.cli.console import clear_errors, say_once
from dirprune.lab.cli.options import (
    DataOption,
    DeviceOption,
    KeepOption,
    LeanOption,
    MinutesOption,
    ModelOption,
    RecipeArgument,
    RunDataOption,
    SeedOption,
    StepPrecisionOption,
    TrustOption,
    integers,
)
from dirprune.lab.cli.output import JsonOption, Output

if TYPE_CHECKING:
    from dirprune.lab.training.recipe import Recipe

app = typer.Typer()


class OptimizerName(str, Enum):
    grda = "grda"
    sgd = "sgd"
    adamgrda = "adamgrda"
    adamw = "adamw"


class ThresholdShape(str, Enum):
    auto = "auto"
    soft = "soft"
    garrote = "garrote"
    hard = "hard"


SaveOption = Annotated[
    int | None, typer.Option(min=1, help="Epochs between checkpoints.", show_default="one per minute")
]
BoardOption = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files into the run.")]
KeepGoingOption = Annotated[
    bool, typer.Option("--keep-going", help="Train on even if every weight is zero and nothing can recover.")
]
RateOption = Annotated[float | None, typer.Option(help="Base learning rate.")]
BatchOption = Annotated[int | None, typer.Option(help="Global batch size, summed over all processes.")]


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
            show_default="auto; hard with adamgrda and --from",
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
        from dirprune.lab.data import RESIZED
        from dirprune.lab.training import recipes, runs

        options = {
            "shape": shape and shape.value,
            "power": power,
            "c": c,
            "mu": mu,
            "exempt": None if exempt is None else _names(exempt),
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "schedule": schedule,
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "model": model,
            "validation": validation,
            "data": dataset,
            "size": image_size if image_size or dataset in (None, *RESIZED) else 0,
            "start": None if start is None else str(start.resolve()),
            "augment": augment,
            "keep": tuple(integers("--keep", keep)) if keep else None,
            "precision": precision and precision.value,
            "compile": compile,
            "lean": lean,
        }
        chosen = _chosen(recipes.find(recipe), optimizer and optimizer.value, sparsity, macs, options)
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


def _chosen(
    base: Recipe, optimizer: str | None, sparsity: float | None, macs: float | None, options: Mapping[str, Any]
) -> Recipe:
    """Return the recipe with these options; a share of zeros takes an optimizer with a target, trained weights others.

    What suits trained weights gives way to ``options`` that are not None.
    """
    from dirprune.lab.training.optimizers import OPTIMIZERS
    from dirprune.lab.training.recipe import changed

    if sparsity is not None and macs is not None:
        raise ValueError(f"--sparsity {sparsity:g} and --macs {macs:g} exclude each other; give one")
    if macs is not None and not 0 < macs < 1:
        raise ValueError(f"--macs {macs:g} is not a share; give what is to be left, between 0 and 1, e.g. 0.1")
    share = sparsity if macs is None else round(1 - macs, 12)
    kind = OPTIMIZERS[optimizer or base.optimizer.name]
    if share is not None and (optimizer is None or kind.knob):
        optimizer = kind.targeted
    usual = OPTIMIZERS[optimizer or base.optimizer.name].fine_tuning if options["start"] else {}
    given = {name: value for name, value in options.items() if value is not None}
    of = None if macs is None else "macs"
    return changed(base, optimizer=optimizer, sparsity=share, of=of, **{**usual, **given})


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


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Your recipe, a Python file: what it names may run.", show_default="none"),
    ] = None,
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
        from dirprune.lab.training import recipes, runs

        if recipe is not None:
            recipes.find(recipe)
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
