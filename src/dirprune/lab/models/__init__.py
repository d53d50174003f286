"""The networks of the published experiments, and `build`, which creates one of them or a user's own by name."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dirprune.lab.models.resnet import resnet18, resnet50
from dirprune.lab.models.small import small
from dirprune.lab.models.vgg import vgg16
from dirprune.lab.models.wide_resnet import wide_resnet
from dirprune.lab.names import unknown

__all__ = ["NAMES", "build", "resnet18", "resnet50", "small", "vgg16", "wide_resnet"]

_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "small": small,
    "vgg16": vgg16,
}
NAMES = (*_BUILDERS, "wrn28x10")
OF_DEVICE = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
"""Errors of the device, for which no network is to blame; torch 2.6 has only the first."""
_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parents[2]


def build(name: str, classes: int) -> nn.Module:
    """Return the network called ``name``; its weights depend only on torch's random state, so seed first.

    Args:
        name: ``"vgg16"``, ``"wrn28x10"`` (any ``"wrn{depth}x{width}"``), ``"resnet50"``, ``"resnet18"`` (the CIFAR
            stem), ``"small"``; or ``"package.module:callable"`` for your own, which may be in the current folder. It
            gets the number of classes as ``num_classes`` or ``classes``, whichever it names (``num_classes`` if it
            takes any keyword, as torchvision's and timm's do), and no argument if it takes neither.
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
    if wrn := re.fullmatch(r"wrn(\d+)x(\d+)", name):
        return wide_resnet(int(wrn[1]), int(wrn[2]), classes)
    raise unknown("model", name, NAMES, " (any wrn<depth>x<width>), or your own as package.module:callable")


def _build_own(spec: str, classes: int) -> nn.Module:
    """Import ``package.module:callable`` and call it."""
    module_name, _, attribute = spec.partition(":")
    if module_name.endswith(".py"):
        right = f"{module_name.removesuffix('.py').replace('/', '.')}:{attribute}"
        raise ValueError(f"model={spec!r} names a file; write {right}, without .py")
    try:
        with _current_folder():
            module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty module name
        raise ValueError(
            f"model={spec!r}: cannot import {module_name!r} ({error}); is it in this folder, installed, or its folder "
            "on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise _at_fault(spec, error) from error
    make = getattr(module, attribute, None)
    if not callable(make):
        found = f"is of type {type(make).__name__}" if hasattr(module, attribute) else "does not exist"
        raise ValueError(f"model={spec!r}: {attribute!r} in {module_name!r} {found}; name a function or class there")
    arguments = _class_argument(spec, make, classes)
    try:
        with _current_folder():  # it may import more when it is called
            model = make(**arguments)
    except Exception as error:
        raise _at_fault(spec, error) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={spec!r} returned a value of type {type(model).__name__}; it must return a torch.nn.Module"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model={spec!r} has no parameter to train; give it layers with weights that are not frozen")
    return model


@contextmanager
def blamed(name: str, where: str = "") -> Iterator[None]:
    """Turn an exception in a user's own network into an error that names it; leave all others as they are."""
    try:
        yield
    except Exception as error:
        if ":" not in name or isinstance(error, OF_DEVICE):
            raise
        raise _at_fault(name, error, where) from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Search for modules in the current folder last, where an installed command does not search by itself."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def _at_fault(spec: str, error: Exception, where: str = "") -> ValueError:
    """Return an error that names the line in the user's own code, not the one in torch that it called."""
    if isinstance(error, SyntaxError):
        what, places = error.msg, [(error.filename, error.lineno)]
    else:
        what = str(error).partition("\n")[0]
        frames = traceback.extract_tb(error.__traceback__)
        places = [(f.filename, f.lineno) for f in frames if not Path(f.filename).is_relative_to(_TORCH)]
        places = [place for place in places if not Path(place[0] or "").is_relative_to(_OURS)]
    place = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    words = " ".join(filter(None, [f"model={spec!r} raised {type(error).__name__}", where]))
    return ValueError(f"{words}: {what}{place}; set DIRPRUNE_TRACEBACK=1 for the full traceback")


def _class_argument(spec: str, make: Callable[..., Any], classes: int) -> dict[str, int]:
    """Return the keyword argument by which ``make`` takes the number of classes."""
    try:
        signature = inspect.signature(make)
    except ValueError as error:  # some callables written in C
        raise ValueError(f"model={spec!r}: {error}; wrap it in a function that takes num_classes") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    arguments: dict[str, int] = {}
    if "classes" in signature.parameters and "num_classes" not in signature.parameters:
        arguments = {"classes": classes}
    elif "num_classes" in signature.parameters or takes_any:
        arguments = {"num_classes": classes}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no argument"
        raise ValueError(
            f"model={spec!r}: called with {given}, but {error}; wrap it in a function that takes num_classes alone"
        ) from error
    return arguments
