"""From a torch module to layers of plain data, by torch.export."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dirprune._support.modes import eval_mode
from dirprune.deploy.fusion import fuse
from dirprune.deploy.network import (
    Activation,
    Array,
    Kind,
    Layer,
    Network,
    Pair,
    Unsupported,
    Value,
    Weight,
    Window,
    check,
)
from dirprune.deploy.packing import pack
from dirprune.deploy.runtime import Runtime


def compile(  # noqa: A001  # as torch names its own
    model: nn.Module, *inputs: Tensor, threads: int = 1, checked: bool = False
) -> Runtime:
    """Return a model in evaluation mode as a runtime for this machine; the model is left unchanged.

    Args:
        model: any module of convolutions, linear layers and what surrounds them (docs/deploy.md lists what is known).
        inputs: an example of each of its inputs, of any number of examples.
        threads: how many threads a call uses.
        checked: as for `Runtime`.

    Raises:
        Unsupported: the model does something that the runtime does not know; the message says what and where.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        >>> runtime = compile(model, torch.zeros(1, 3, 8, 8))
        >>> runtime(torch.zeros(5, 3, 8, 8)).shape
        (5, 10)
    """
    return Runtime(fuse(capture(model, *inputs)), threads=threads, checked=checked)


_EXAMPLES = 3  # of a batch that is traced: a number that shows where the batch is


def capture(model: nn.Module, *inputs: Tensor) -> Network:
    """Return a model's layers in evaluation mode, as they are; the model is left unchanged.

    Raises:
        Unsupported: it does something that the runtime does not know; the message says what and where.
    """
    for number, each in enumerate(inputs):
        if not isinstance(each, Tensor) or each.dim() < 2 or not len(each):
            raise ValueError(f"input {number} is not a tensor of examples; give one of shape (examples, ...)")
    batch = tuple(torch.cat([each[:1]] * _EXAMPLES).detach() for each in inputs)
    with eval_mode(model), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, batch).run_decompositions({})
    return _Capture(exported).network


class _Capture:
    """Goes through an exported graph and collects its layers."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        signature = exported.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        held = {**exported.state_dict, **exported.constants}
        self.tensors: dict[str, Tensor] = {name: held[target] for name, target in names.items()}
        self.tensors |= {name: held[target] for name, target in signature.inputs_to_lifted_tensor_constants.items()}
        self.inputs: list[Value] = []
        self.layers: list[Layer] = []
        self.numbers: dict[fx.Node, int] = {}
        self.outputs: tuple[int, ...] = ()
        nodes = list(exported.graph.nodes)
        given = [node for node in nodes if node.op == "placeholder" and node.name not in self.tensors]
        for node in given:
            self._input(node)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.outputs = tuple(self.numbers[each] for each in node.args[0])
        self.network = Network(tuple(self.inputs), tuple(self.layers), self.outputs)
        try:
            check(self.network)
        except ValueError as error:
            raise Unsupported(f"the runtime does not know networks in which {error}") from error

    def _input(self, node: fx.Node) -> None:
        shape = tuple(node.meta["val"].shape[1:])
        linear = any(user.target is torch.ops.aten.linear.default for user in node.users)
        self.numbers[node] = len(self.inputs)
        self.inputs.append(Value(shape, len(shape) == 3 and not linear))

    def _call(self, node: fx.Node) -> None:
        name = str(node.target).removeprefix("aten.")
        operation = _OPERATIONS.get(name.split(".")[0])
        if name == "<built-in function getitem>" and node.args[1] == 0:
            operation = _same
        if operation is None or node.kwargs:
            raise Unsupported(_said(node, f"does {name}"))
        try:
            operation(self, node, *node.args)
        except (_Refused, KeyError, TypeError) as error:
            what = str(error) if isinstance(error, _Refused) else "in a form that the runtime does not know"
            raise Unsupported(_said(node, f"does {name} {what}")) from error

    def value(self, node: Any) -> Value:
        """Return the value that a node has made."""
        number = self.numbers[node]
        inputs = len(self.inputs)
        return self.inputs[number] if number < inputs else self.layers[number - inputs].output

    def array(self, node: Any, default: Array) -> Array:
        """Return a constant as float32, or the default where there is none."""
        return default if node is None else self.tensors[node.name].detach().cpu().float().numpy().copy()

    def add(self, node: fx.Node, kind: Kind, *inputs: Any, image: bool | None = None, **options: Any) -> None:
        """Add a layer that makes a node's value."""
        shape = tuple(_val(node).shape)
        if shape[:1] != (_EXAMPLES,):
            raise _Refused(f"to {shape[1:]}, which is not per example")
        made = Value(shape[1:], self.value(inputs[0]).image if image is None else image)
        numbers = tuple(self.numbers[each] for each in inputs)
        self.numbers[node] = len(self.inputs) + len(self.layers)
        self.layers.append(Layer(kind, _module(node), numbers, made, **options))


class _Refused(Exception):
    """An operation has options that the runtime does not know."""


def _val(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value


def _module(node: fx.Node) -> str:
    """Return the dotted name of the module whose forward does this."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def _said(node: fx.Node, what: str) -> str:
    """Return an error that names an operation's place in the user's model."""
    own = [
        line
        for line in re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
        if "/torch/nn/" not in line[0]
    ]
    place = f" ({own[-1][0]}, line {own[-1][1]})" if own else ""
    return (
        f"module {_module(node)!r}{place} {what}, which the runtime does not know; it knows convolution, linear, "
        "BatchNorm, relu and its kin, addition, max, average and adaptive pools, cat and flatten"
    )


def _weight(array: Array) -> Weight:
    flat = np.ascontiguousarray(array, np.float32).ravel()
    return Weight(array.shape, pack(np.where(flat == 0, np.float32(0), flat).view(np.uint32)))


def _pair(value: Any, default: Any = None) -> Pair:
    given = [value] * 2 if isinstance(value, int) else list(value) or list(default)
    return Pair(*(given * 2)[:2])


def _refuse(wrong: bool, said: str) -> None:
    if wrong:
        raise _Refused(said)


def _conv(
    c: _Capture,
    node: fx.Node,
    x: Any,
    w: Any,
    b: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    weight = c.array(w, np.empty(0))
    _refuse(_pair(dilation) != (1, 1), f"with dilation {dilation}")
    if padding == "same":  # an even window has less padding in front, so it gets zeros there
        weight = np.pad(weight, [(0, 0), (0, 0), *((1 - k % 2, 0) for k in weight.shape[2:])])
        padding = [k // 2 for k in weight.shape[2:]]
    window = Window(Pair(*weight.shape[2:]), _pair(stride), _pair(0 if padding == "valid" else padding))
    bias = c.array(b, np.zeros(len(weight), np.float32))
    c.add(node, "conv", x, window=window, groups=groups, weight=_weight(weight), bias=bias)


def _linear(c: _Capture, node: fx.Node, x: Any, w: Any, b: Any = None) -> None:
    weight = c.array(w, np.empty(0))
    c.add(node, "linear", x, weight=_weight(weight), bias=c.array(b, np.zeros(len(weight), np.float32)))


def _batch_norm(c: _Capture, node: fx.Node, x: Any, w: Any, b: Any, mean: Any, var: Any, *options: Any) -> None:
    epsilon = [each for each in options if isinstance(each, float)][-1]
    variance = c.tensors[var.name].detach().cpu().double().numpy()
    scale = c.array(w, np.ones(len(variance), np.float32)) / np.sqrt(variance + epsilon)
    bias = (
        c.array(b, np.zeros(len(variance), np.float32)) - c.tensors[mean.name].detach().cpu().double().numpy() * scale
    )
    _refuse(not c.value(x).image and len(c.value(x).shape) > 1, "over more than one dimension of rows")
    c.add(node, "affine", x, scale=scale.astype(np.float32), bias=bias.astype(np.float32))


def _activation(make: Callable[..., Activation]) -> Callable[..., None]:
    def operation(c: _Capture, node: fx.Node, x: Any, *options: Any) -> None:
        c.add(node, "affine", x, activation=make(*options))

    return operation


def _clamp(low: float | None = None, high: float | None = None) -> Activation:
    return Activation(-math.inf if low is None else float(low), math.inf if high is None else float(high))


def _add(c: _Capture, node: fx.Node, x: Any, y: Any, alpha: Any = 1) -> None:
    _refuse(not isinstance(y, fx.Node) or y not in c.numbers or alpha != 1, "of something else than two activations")
    _refuse(c.value(x) != c.value(y), f"of shapes {c.value(x).shape} and {c.value(y).shape}")
    c.add(node, "affine", x, y)


def _max_pool(
    c: _Capture,
    node: fx.Node,
    x: Any,
    size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> None:
    _refuse(_pair(dilation) != (1, 1), f"with dilation {dilation}")
    c.add(node, "max_pool", x, window=Window(_pair(size), _pair(stride, _pair(size)), _pair(padding)))


def _average_pool(
    c: _Capture,
    node: fx.Node,
    x: Any,
    size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    count: bool = True,
    by: Any = None,
) -> None:
    _refuse(by is not None, "with a divisor of its own")
    if _pair(size) == c.value(x).shape[1:] and not any(_pair(padding)):
        c.add(node, "adaptive_average_pool", x)
    else:
        window = Window(_pair(size), _pair(stride, _pair(size)), _pair(padding))
        c.add(node, "average_pool", x, window=window, count_padding=count)


def _adaptive(kind: Kind) -> Callable[..., None]:
    def operation(c: _Capture, node: fx.Node, x: Any, size: Any) -> None:
        if tuple(_val(node).shape[1:]) == c.value(x).shape:
            c.numbers[node] = c.numbers[x]
        else:
            c.add(node, kind, x)

    return operation


def _mean(c: _Capture, node: fx.Node, x: Any, axes: Any, keep: bool = False) -> None:
    value = c.value(x)
    _refuse(not value.image or {axis % 4 for axis in axes} != {2, 3}, f"over axes {axes}")
    kinds: list[tuple[Kind, Value]] = [("adaptive_average_pool", Value((value.shape[0], 1, 1), True))]
    kinds += [] if keep else [("flatten", Value((value.shape[0],), False))]
    c.numbers[node] = c.numbers[x]
    for kind, made in kinds:
        c.layers.append(Layer(kind, _module(node), (c.numbers[node],), made))
        c.numbers[node] = len(c.inputs) + len(c.layers) - 1


def _cat(c: _Capture, node: fx.Node, those: Any, axis: int = 0) -> None:
    dimensions = _val(node).dim()
    wanted = 1 if c.value(those[0]).image else dimensions - 1
    _refuse(axis % dimensions != wanted, f"along axis {axis}")
    c.add(node, "cat", *those)


def _view(c: _Capture, node: fx.Node, x: Any, *_: Any) -> None:
    value, shape = c.value(x), tuple(_val(node).shape)
    if shape[1:] == value.shape:
        c.numbers[node] = c.numbers[x]
        return
    _refuse(not value.image or len(shape) != 2, f"from {value.shape} to {shape[1:]}")
    c.add(node, "flatten", x, image=False)


def _same(c: _Capture, node: fx.Node, x: Any, *_: Any) -> None:
    if x in c.numbers:
        c.numbers[node] = c.numbers[x]


_RELU = _activation(lambda: Activation(low=0.0))
_HARDTANH = _activation(lambda low=-1.0, high=1.0: Activation(float(low), float(high)))
_OPERATIONS: dict[str, Callable[..., None]] = {
    "conv2d": _conv,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "relu": _RELU,
    "relu6": _activation(lambda: Activation(0.0, 6.0)),
    "hardtanh": _HARDTANH,
    "leaky_relu": _activation(lambda slope=0.01: Activation(low=0.0, slope=float(slope))),
    "clamp": _activation(_clamp),
    "clamp_min": _activation(_clamp),
    "add": _add,
    "max_pool2d": _max_pool,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _average_pool,
    "adaptive_avg_pool2d": _adaptive("adaptive_average_pool"),
    "adaptive_max_pool2d": _adaptive("adaptive_max_pool"),
    "mean": _mean,
    "cat": _cat,
    "view": _view,
    "reshape": _view,
    "flatten": _view,
    **dict.fromkeys(("clone", "contiguous", "alias", "detach", "dropout"), _same),
}
