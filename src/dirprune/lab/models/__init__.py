"""The networks of the published experiments, and `build`, which creates one of them or a user's own by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dirprune.lab import own
from dirprune.lab.models.gpt import gpt
from dirprune.lab.models.resnet import resnet18, resnet50, resnet_small
from dirprune.lab.models.small import small
from dirprune.lab.models.vgg import vgg16
from dirprune.lab.models.weights import size
from dirprune.lab.models.wide_resnet import wide_resnet
from dirprune.lab.names import unknown

__all__ = ["NAMES", "build", "gpt", "narrower", "resnet18", "resnet50", "resnet_small", "small", "vgg16", "wide_resnet"]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet18-imagenet": partial(resnet18, small_images=False),
    "resnet50": resnet50,
    "resnet-small": resnet_small,
    "small": small,
    "vgg16": vgg16,
}
_FAMILIES: dict[str, Callable[[int, int, int], nn.Module]] = {"wrn": wide_resnet, "gpt": gpt}
NAMES = (*_BUILDERS, "wrn28x10", "gpt64x2")
_SIZED = re.compile(r"(small|resnet-small|gpt)(\d{0,4})(x\d{1,2})?")
"""Names of networks that have narrow forms."""
OF_DEVICE = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
"""Errors of the device, for which no network is to blame; torch 2.6 has only the first."""


def build(name: str, classes: int) -> nn.Module:
    """Return the network called ``name``; its weights depend only on torch's random state, so seed first.

    Args:
        name: ``"vgg16"``, ``"wrn28x10"`` (any ``"wrn{depth}x{width}"``), ``"resnet50"``, ``"resnet18"`` (the CIFAR
            stem), ``"resnet18-imagenet"`` (torchvision's), ``"small"`` (any ``"small{width}"``), ``"resnet-small"``
            (any ``"resnet-small{width}"``), ``"gpt64x2"`` (any ``"gpt{width}x{depth}"``); or
            ``"package.module:callable"`` for your own, which may be in the current folder. It gets the number of
            classes as ``num_classes`` or ``classes``, whichever it names (``num_classes`` if it takes any keyword, as
            torchvision's and timm's do), and no argument if it takes neither. Such a name is imported and called only
            after `dirprune.lab.trust.allow`.
        classes: number of outputs, at least 1.

    Example:
        >>> sum(p.numel() for p in build("small", classes=10).parameters())
        40394
    """
    if classes < 1:
        raise ValueError(f"classes={classes} must be at least 1")
    if ":" in name:
        return _build_own(name, classes)
    if name in _BUILDERS:
        return _BUILDERS[name](classes)
    for family, make in _FAMILIES.items():
        if shape := re.fullmatch(family + r"(\d{1,4})x(\d{1,4})", name):
            try:
                return make(int(shape[1]), int(shape[2]), classes)
            except RuntimeError as error:  # torch has no other type for memory that is not there
                raise ValueError(f"model={name!r} cannot be built: {error}; take a smaller one") from error
    if (sized := _SIZED.fullmatch(name)) and sized[1] in _BUILDERS and not sized[3]:
        return _BUILDERS[sized[1]](classes, width=int(sized[2]))
    raise unknown(
        "model", name, NAMES, " (any wrn<depth>x<width> or gpt<width>x<depth>), or your own as package.module:callable"
    )


def is_built_quickly(name: str) -> bool:
    """Return whether a name, which may come from somebody else's file, is that of a network of the lab."""
    return name in NAMES or bool(_SIZED.fullmatch(name))


def narrower(name: str, classes: int, weights: float) -> str:
    """Return the name of the widest network of this kind that has at most so many weights to prune.

    >>> narrower("small", 10, 4000), narrower("gpt64x2", 256, 10_650)
    ('small4', 'gpt16x2')

    Raises:
        ValueError: networks of this kind have one width, or none of them is that small.
    """
    if not (kind := _SIZED.fullmatch(name)):
        raise ValueError(f"model={name!r} has no narrow form; small, resnet-small16 and gpt64x2 have one")
    fitting = ""
    for width in range(2, int(kind[2] or 16), 2 if kind[1] == "gpt" else 1):
        narrow = f"{kind[1]}{width}{kind[3] or ''}"
        with torch.device("meta"):
            if size(build(narrow, classes)) > weights:
                break
        fitting = narrow
    if not fitting:
        raise ValueError(f"model={name!r} has no form of at most {weights:.0f} weights; give a lower sparsity")
    return fitting


def _build_own(spec: str, classes: int) -> nn.Module:
    """Import ``package.module:callable`` and call it."""
    needs = "needs no argument but num_classes (or classes) and returns the network"
    model = own.call("model", spec, lambda make: _class_argument(make, classes), needs)
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"model={spec!r} returned an object of type {type(model).__name__}; it must return a torch.nn.Module "
            "with parameters to train"
        )
    return model


def _class_argument(make: Callable[..., Any], classes: int) -> dict[str, int]:
    """Return the keyword argument by which ``make`` takes the number of classes."""
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "num_classes" in parameters or (takes_any and "classes" not in parameters):
        return {"num_classes": classes}
    return {"classes": classes} if "classes" in parameters else {}
