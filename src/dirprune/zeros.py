"""The exact zeros of a model: per parameter tensor, and in total."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

_WIDTH = 80
_LEAST = 16  # characters of a name that are always shown, however wide the other columns are


@dataclass(frozen=True)
class LayerSparsity:
    """The zeros of one parameter tensor and, for a weight, the output and input channels that are entirely zero."""

    name: str
    shape: tuple[int, ...]
    zeros: int
    output_channels: int | None = None
    zero_output_channels: int | None = None
    input_channels: int | None = None
    zero_input_channels: int | None = None
    cost: float | None = None

    @property
    def total(self) -> int:
        return math.prod(self.shape)

    @property
    def fraction(self) -> float:
        return self.zeros / self.total if self.total else 0.0

    @property
    def cost_left(self) -> float | None:
        """What the elements that are not zero cost; all of them cost `cost`."""
        return None if self.cost is None else self.cost * (1 - self.fraction)

    @property
    def is_weight(self) -> bool:
        """Whether this is a weight (two dimensions or more), not a bias or the scale of a normalisation."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class SparsityReport:
    """The exact zeros of a model's parameters; ``print`` it for a table; `to_dict` returns plain data.

    ``layers`` has for every parameter its name, shape, zeros and cost, and for a weight its channels that are all zero.
    """

    layers: tuple[LayerSparsity, ...]

    @property
    def zeros(self) -> int:
        return sum(layer.zeros for layer in self.layers)

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers)

    @property
    def fraction(self) -> float:
        """Zeros over all parameters, biases and normalisation included; the published figure."""
        return self.zeros / self.total if self.total else 0.0

    @property
    def weight_fraction(self) -> float:
        """Zeros over the weights alone (tensors of two dimensions or more)."""
        total = sum(layer.total for layer in self.layers if layer.is_weight)
        return sum(layer.zeros for layer in self.layers if layer.is_weight) / total if total else 0.0

    @property
    def cost(self) -> float | None:
        """What the model costs without its zeros, if `sparsity` was given the cost of its parameters."""
        costs = [layer.cost for layer in self.layers if layer.cost is not None]
        return sum(costs) if costs else None

    @property
    def cost_left(self) -> float | None:
        """What the model costs with its zeros."""
        costs = [layer.cost_left for layer in self.layers if layer.cost_left is not None]
        return sum(costs) if costs else None

    @property
    def cost_left_fraction(self) -> float | None:
        """What is left of the cost, as a fraction."""
        return self.cost_left / self.cost if self.cost and self.cost_left is not None else None

    def priced(self, cost: Mapping[str, float]) -> SparsityReport:
        """Return the report with what one weight of each parameter costs, by name; parameters not named cost nothing.

        Raises:
            ValueError: ``cost`` names a parameter that the model does not have.
        """
        known = {name.removesuffix("_orig"): each for name, each in cost.items()} | dict(cost)
        strangers = cost.keys() - {name for layer in self.layers for name in (layer.name, f"{layer.name}_orig")}
        if strangers:
            raise ValueError(
                f"cost names {min(strangers)!r}, which the model does not have; give macs(model, x) of this model"
            )
        return SparsityReport(
            tuple(replace(layer, cost=known.get(layer.name, 0.0) * layer.total) for layer in self.layers)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dicts."""
        return {
            "zeros": self.zeros,
            "total": self.total,
            "fraction": self.fraction,
            "weight_fraction": self.weight_fraction,
            "cost": self.cost,
            "cost_left": self.cost_left,
            "cost_left_fraction": self.cost_left_fraction,
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "zeros": layer.zeros,
                    "total": layer.total,
                    "fraction": layer.fraction,
                    "output_channels": layer.output_channels,
                    "zero_output_channels": layer.zero_output_channels,
                    "input_channels": layer.input_channels,
                    "zero_input_channels": layer.zero_input_channels,
                    "cost": layer.cost,
                    "cost_left": layer.cost_left,
                }
                for layer in self.layers
            ],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("parameter", "shape", "zeros", "sparsity", "outputs", "inputs")]
        rows += [
            (
                layer.name,
                "×".join(map(str, layer.shape)) or "scalar",
                f"{layer.zeros:,}",
                f"{layer.fraction:.2%}",
                _units(layer.zero_output_channels, layer.output_channels),
                _units(layer.zero_input_channels, layer.input_channels),
            )
            for layer in self.layers
        ]
        weights = [layer for layer in self.layers if layer.is_weight]
        zeros, total = sum(layer.zeros for layer in weights), sum(layer.total for layer in weights)
        rows.append(("all parameters", f"{self.total:,}", f"{self.zeros:,}", f"{self.fraction:.2%}", "", ""))
        rows.append(("weights alone", f"{total:,}", f"{zeros:,}", f"{self.weight_fraction:.2%}", "", ""))
        note = ["outputs, inputs: channels that are wholly zero"]
        if not any(layer.zero_output_channels or layer.zero_input_channels for layer in weights):
            rows = [row[:-2] for row in rows]
            counted = any(layer.output_channels is not None for layer in weights)
            note = ["No output or input channel is wholly zero."] if counted else []
        if self.cost is not None and self.cost_left is not None:
            lefts = ["cost left", *(_short(layer.cost_left) for layer in self.layers), _short(self.cost_left), ""]
            rows = [(*row, left) for row, left in zip(rows, lefts, strict=True)]
            share = f" ({self.cost_left_fraction:.1%})" if self.cost_left_fraction is not None else ""
            note.append(f"cost left: {_short(self.cost_left)} of {_short(self.cost)}{share}")
        lines = _aligned(rows)
        rule = "-" * len(lines[0])  # ASCII, for any terminal
        return "\n".join(line.rstrip() for line in [lines[0], rule, *lines[1:-2], rule, *lines[-2:], *note])


@torch.no_grad()
def sparsity(model: nn.Module | Mapping[str, Tensor], *, cost: Mapping[str, float] | None = None) -> SparsityReport:
    """Count the parameters that are exactly zero, layer by layer, in one pass on the device with one synchronisation.

    Weights that `torch.nn.utils.prune` masks count as zero.

    Args:
        model: a module, or a mapping of names to tensors. Only a module shows which convolutions are transposed or
            grouped; in a mapping, all weights count as plain ones.
        cost: what one weight of each parameter costs, by name, such as `dirprune.macs` returns; the report then says
            how much of the cost is left.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> _ = nn.init.zeros_(layer.bias)
        >>> sparsity(layer).zeros
        2
    """
    parameters = _named_tensors(model)
    layouts = _layouts(model) if isinstance(model, nn.Module) else {}
    counts: list[Tensor] = []
    for name, parameter in parameters.items():
        tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
        counts.extend(_counts(tensor.detach(), layouts.get(name, _PLAIN)))
    devices = {count.device for count in counts}
    if len(devices) > 1:  # a model spread over devices: a synchronisation for each count
        counts = [count.cpu() for count in counts]
    numbers = iter(torch.stack(counts).tolist() if counts else [])
    layers = tuple(_layer(name, p, layouts.get(name, _PLAIN), numbers) for name, p in parameters.items())
    return SparsityReport(layers) if cost is None else SparsityReport(layers).priced(cost)


class _Layout(NamedTuple):
    """Which of the first two dimensions holds the outputs, and into how many groups the first is divided."""

    output_dim: int
    groups: int


_PLAIN = _Layout(output_dim=0, groups=1)


def _named_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        buffers = dict(model.named_buffers())
        return dict(_as_used(name, p, buffers) for name, p in model.named_parameters())
    remedy = "pass the model itself, or a mapping of names to tensors"
    if not isinstance(model, Mapping):
        raise ValueError(f"model={reprlib.repr(model)} is not a module; {remedy}")
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"model[{name!r}]={reprlib.repr(tensor)} is not a tensor; {remedy}")
    return dict(model)


def _as_used(name: str, parameter: Tensor, buffers: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """Return a parameter's name and value; weight_orig of `torch.nn.utils.prune` becomes the masked weight."""
    plain = name.removesuffix("_orig")
    mask = buffers.get(f"{plain}_mask")
    return (name, parameter) if mask is None or plain == name else (plain, parameter * mask)


def _counts(tensor: Tensor, layout: _Layout) -> list[Tensor]:
    """Return the number of zeros and, for a weight, the numbers of outputs and inputs that are entirely zero."""
    nonzero = tensor != 0
    zeros = tensor.numel() - nonzero.sum()
    if tensor.dim() < 2:
        return [zeros]
    if tensor.numel() == 0:  # channels without elements do not count as pruned
        return [zeros, torch.zeros_like(zeros), torch.zeros_like(zeros)]
    if tensor.dim() > 2:
        nonzero = nonzero.flatten(2).any(2)
    by_group = nonzero.reshape(layout.groups, -1, nonzero.shape[1])
    zero_rows, zero_columns = ((~by_group.any(dim)).sum() for dim in (2, 1))
    return [zeros, zero_columns, zero_rows] if layout.output_dim else [zeros, zero_rows, zero_columns]


def _layer(name: str, parameter: Tensor, layout: _Layout, numbers: Iterator[int]) -> LayerSparsity:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return LayerSparsity(name, shape, next(numbers))
    channels = shape[0], shape[1] * layout.groups
    return LayerSparsity(
        name,
        shape,
        next(numbers),
        output_channels=channels[layout.output_dim],
        zero_output_channels=next(numbers),
        input_channels=channels[1 - layout.output_dim],
        zero_input_channels=next(numbers),
    )


def _layouts(model: nn.Module) -> dict[str, _Layout]:
    """Return the layouts of convolutions' weights, by name."""
    return {
        f"{name}.weight" if name else "weight": _Layout(int(module.transposed), module.groups)
        for name, module in model.named_modules()
        if isinstance(module, _ConvNd)
    }


def _short(number: float | None) -> str:
    """Return a number with three digits, in thousands, millions and so on.

    >>> [_short(number) for number in (0.0, 0.25, 950, 9999, 555_422_720)]
    ['0', '0.25', '950', '10k', '555M']
    """
    number = float(f"{number or 0:.3g}")
    power = min(max(int(math.log10(number)) // 3, 0), 5) if number else 0
    return f"{number / 1000**power:.3g}{' kMGTP'[power].strip()}"


def _units(zero: int | None, total: int | None) -> str:
    return "" if total is None else f"{zero}/{total}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines of one width; names are shortened if the lines would exceed `_WIDTH`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(_WIDTH - sum(2 + width for width in widths[1:]), _LEAST))
    put = [str.ljust, str.ljust] + [str.rjust] * (len(widths) - 2)
    cells = [(_shortened(name, widths[0]), *others) for name, *others in rows]
    return ["  ".join(align(cell, width) for align, cell, width in zip(put, row, widths, strict=True)) for row in cells]


def _shortened(name: str, room: int) -> str:
    """Return the name, with … for its middle if it is longer than ``room``.

    >>> _shortened("encoder.layers.11.attention.weight", 20)
    'encoder.la…on.weight'
    """
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - half]}…{name[-half:]}"
