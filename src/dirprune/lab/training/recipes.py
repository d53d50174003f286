"""The recipes that come with the lab: those of the paper's runs among them."""

from __future__ import annotations

import runpy
from collections.abc import Container
from pathlib import Path
from typing import Any

from dirprune.lab import trust
from dirprune.lab.names import unknown
from dirprune.lab.tasks import Images, Text
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.optimizers import Grda, TargetAdamGrda, TargetGrda
from dirprune.lab.training.recipe import Recipe, differing
from dirprune.lab.training.schedules import Schedule

MODERN: dict[str, Any] = {
    "mu": 0.8,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "exempt": ("bias", "norm"),
    "schedule": Schedule("cosine", warmup=1),
}
"""Training beyond the paper's recipe: momentum, weight decay, and a cosine after an epoch of warm-up."""

_RECIPES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> Recipe:
    """Make a recipe known under its own ``name``."""
    _RECIPES[recipe.name] = recipe
    return recipe


def names() -> list[str]:
    return list(_RECIPES)


def get(name: str) -> Recipe:
    """Return the recipe called ``name``; if there is none, raise an error that lists the known names."""
    if name in _RECIPES:
        return _RECIPES[name]
    raise unknown("recipe", name, _RECIPES)


def find(name: str) -> Recipe:
    """Return the recipe called ``name``, or the one that a Python file of the user's own makes."""
    if not name.endswith(".py"):
        return get(name)
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"{name} does not exist; name a Python file that defines recipe(), or a known recipe")
    try:
        made = runpy.run_path(name)["recipe"]
        made = made() if callable(made) else made
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name} raised {type(error).__name__}: {error}; it must define recipe(), which returns a Recipe; "
            "DIRPRUNE_TRACEBACK=1 shows where it failed"
        ) from error
    if not isinstance(made, Recipe):
        raise ValueError(f"recipe() in {name} returned a {type(made).__name__}; it must return a Recipe")
    for spec in made.code:  # the command names the file, and so what the file names
        trust.allow(spec)
    return made


def departures(recipe: Recipe, free: Container[str]) -> str:
    """Return where a recipe departs from the registered one of its name, except in ``free`` options; "" if nowhere.

    >>> departures(get("digits").but(epochs=9, seed=3), free={"seed"})
    'epochs=9'
    """
    names = differing(recipe, get(recipe.name), free)
    return " ".join(f"{name}={recipe.values()[name]}" for name in names)


DIGITS = register(
    Recipe(
        name="digits",
        about="a small conv net on scikit-learn's embedded digits: seconds on a CPU, no download",
        task=Images("digits"),
        model="small",
        epochs=60,
        optimizer=Grda(c=0.016, mu=0.7),
        batch_size=32,
        schedule=Schedule("constant-linear-constant"),
        cpu=Execution(threads=1),  # as fast for such small tensors, and results do not depend on the number of cores
        cuda=Execution(),
    )
)
register(
    Recipe(
        name="vgg16-cifar10",
        about="the paper's VGG16 on CIFAR-10",
        task=Images("cifar10", statistics="imagenet"),
        model="vgg16",
        epochs=600,
        optimizer=Grda(c=5e-4, mu=0.6),
        schedule=Schedule("constant-linear-constant"),
        published=((5e-4, 0.4), (5e-4, 0.51), (5e-4, 0.6), (5e-4, 0.7)),
    )
)
WRN28X10_CIFAR10 = register(
    Recipe(
        name="wrn28x10-cifar10",
        about="the paper's WRN28x10 on CIFAR-10",
        task=Images("cifar10", statistics="cifar"),
        model="wrn28x10",
        epochs=200,
        optimizer=Grda(c=1e-3, mu=0.55),
        schedule=Schedule("constant-linear-constant"),
        published=((1e-3, 0.501), (1e-3, 0.55), (1e-3, 0.6), (1e-3, 0.65)),
    )
)
register(
    WRN28X10_CIFAR10.but(
        name="wrn28x10-cifar100",
        about="the paper's WRN28x10 on CIFAR-100",
        data="cifar100",
    )
)
RESNET50_IMAGENET = register(
    Recipe(
        name="resnet50-imagenet",
        about="the paper's ResNet50 on ImageNet at a constant learning rate",
        task=Images("imagenet", statistics="imagenet"),
        model="resnet50",
        epochs=147,
        optimizer=Grda(c=5e-3, mu=0.55),
        batch_size=256,
        published=((5e-3, 0.501), (5e-3, 0.51), (5e-3, 0.55), (1e-2, 0.4)),
    )
)
register(
    RESNET50_IMAGENET.but(
        name="resnet50-imagenet-drop140",
        about="the same with the learning rate ÷10 after epoch 140",
        epochs=153,
        schedule=Schedule("drop", after=(140,)),
        published=(*((5e-3, mu) for mu in (0.501, 0.51, 0.55, 0.6, 0.65, 0.7)), (1e-2, 0.4)),
    )
)
register(
    RESNET50_IMAGENET.but(
        name="resnet50-imagenet-every30",
        about="the same with the learning rate ÷10 after every 30 epochs",
        epochs=120,
        c=4e-3,
        mu=0.65,
        schedule=Schedule("drop", every=30),
        published=(
            *((2e-3, 0.75), (3e-3, 0.7), (3e-3, 0.75), (4e-3, 0.65), (4e-3, 0.7), (4e-3, 0.75)),
            *((5e-3, 0.65), (5e-3, 0.7), (5e-3, 0.75), (5e-3, 0.8), (5e-3, 0.85)),
        ),
    )
)
RESNET18_CIFAR10 = register(
    Recipe(
        name="resnet18-cifar10",
        about="ResNet-18 on CIFAR-10 the modern way: momentum, weight decay, cosine",
        task=Images("cifar10", statistics="cifar"),
        model="resnet18",
        epochs=60,
        optimizer=Grda(c=8e-5),
    ).but(**MODERN)
)
WRN28X10_CIFAR10_MODERN = register(
    RESNET18_CIFAR10.but(
        name="wrn28x10-cifar10-modern",
        about="WRN28x10 on CIFAR-10 the modern way, at full length",
        model="wrn28x10",
        epochs=200,
    )
)
VGG16_CIFAR10_MODERN = register(
    RESNET18_CIFAR10.but(
        name="vgg16-cifar10-modern",
        about="VGG16 on CIFAR-10 the modern way, at a rate that a network without BatchNorm tolerates",
        model="vgg16",
        lr=0.03,
        c=1.2e-4,
    )
)
register(
    RESNET18_CIFAR10.but(
        name="resnet18-cifar100",
        about="ResNet-18 on CIFAR-100 the modern way",
        data="cifar100",
    )
)
register(
    WRN28X10_CIFAR10_MODERN.but(
        name="wrn28x10-cifar100-modern",
        about="WRN28x10 on CIFAR-100 the modern way, at full length",
        data="cifar100",
    )
)
register(
    VGG16_CIFAR10_MODERN.but(
        name="vgg16-cifar100-modern",
        about="VGG16 on CIFAR-100 the modern way",
        data="cifar100",
    )
)
WRN10X1_CIFAR10_SHORT = register(
    WRN28X10_CIFAR10.but(
        name="wrn10x1-cifar10-short",
        about="a thin WRN on CIFAR-10 for 5 epochs: minutes on a CPU, to try things out",
        model="wrn10x1",
        epochs=5,
        c=5e-3,
        published=(),
    )
)
register(
    WRN10X1_CIFAR10_SHORT.but(
        name="wrn10x1-cifar100-short",
        about="a thin WRN on CIFAR-100 for 5 epochs: minutes on a CPU, to try things out",
        data="cifar100",
    )
)
register(
    DIGITS.but(
        name="digits-modern",
        about="the digits network the modern way: momentum, weight decay, cosine",
        lr=0.05,
        c=2e-3,
        **MODERN,
    )
)
register(DIGITS.but(name="digits-short", about="the digits recipe for 5 epochs: a second on a CPU", epochs=5, c=0.02))
register(
    Recipe(
        name="resnet-small-cifar10-16",
        about="a small residual network on CIFAR-10 at 16×16 pixels: a minute on a CPU, for comparisons",
        task=Images("cifar10", statistics="cifar", size=16),
        model="resnet-small",
        epochs=4,
        optimizer=Grda(
            lr=0.05, c=2e-3, mu=0.8, momentum=0.9, nesterov=True, weight_decay=5e-4, exempt=("bias", "norm")
        ),
        batch_size=64,
        schedule=Schedule("cosine", warmup=0.2),
        cpu=Execution(precision="bfloat16", channels_last=True, threads=1),
    )
)
register(
    Recipe(
        name="pictures",
        about="ResNet-18 on your own pictures at 64×64 pixels, with 90% zeros: --data is a folder with one per class",
        task=Images("folder", size=64),
        model="resnet18-imagenet",
        epochs=30,
        optimizer=TargetGrda(  # hard, because a few hundred pictures make few steps
            lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, sparsity=0.9, shape="hard"
        ),
        batch_size=32,
        schedule=Schedule("cosine", warmup=1),
    )
)
GPT_PYTHON = register(
    Recipe(
        name="gpt-python",
        about="a GPT of .15 million parameters on the bytes of Python's standard library: half a minute on a CPU",
        task=Text(),
        model="gpt64x2",
        epochs=12,
        optimizer=TargetAdamGrda(lr=8e-3, exempt=("bias", "norm", "tokens.*", "positions.*")),
        batch_size=16,
        schedule=Schedule("cosine", warmup=0.6),
        cpu=Execution(threads=1),
        cuda=Execution(precision="bfloat16", compile=True, capture=True),
    )
)
register(
    GPT_PYTHON.but(
        name="gpt-python-10m",
        about="a GPT of 11 million parameters on the same text, for a GPU",
        model="gpt384x6",
        context=256,
        windows=32_000,
        epochs=10,
        batch_size=64,
        lr=2e-3,
    )
)
