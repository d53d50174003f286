"""Runtimes to compare with, each in a process of its own, so that the threads of one never take time from another."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune.deploy import saving
from dirprune.deploy.network import IDENTITY, Layer, Network

OURS = "dirprune"
HALF = "OpenVINO bfloat16"
NAMES = (OURS, "torch", "torch.compile", "ONNX Runtime", "OpenVINO", HALF)
_OPENVINO = ("openvino", "onnxscript")
_NEEDS = {"ONNX Runtime": ("onnxruntime", "onnxscript"), "OpenVINO": _OPENVINO, HALF: _OPENVINO}
_LOADS = 600  # seconds that a runtime may take to load or compile a network
Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[list[Array]], list[Array]]


def missing(name: str) -> str:
    """Return the packages that a runtime needs and that are not here, or an empty string."""
    return " and ".join(package for package in _NEEDS.get(name, ()) if not find_spec(package))


class Twin(nn.Module):
    """A saved network as a torch module, BatchNorm folded, zeros and all: what the other runtimes are given."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        for number, layer in enumerate(network.layers):
            for name in ("weight", "scale", "bias"):
                self.register_buffer(f"{name}{number}", _dense(getattr(layer, name)))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = list(inputs)
        for number, layer in enumerate(self.network.layers):
            given = [values[i] for i in layer.inputs]
            arrays = [getattr(self, f"{name}{number}") for name in ("weight", "scale", "bias")]
            values.append(_activated(layer, _apply(layer, given, *arrays)))
        outputs = tuple(values[i] for i in self.network.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _dense(array: Any) -> Tensor | None:
    if array is None or isinstance(array, np.ndarray):
        return None if array is None else torch.from_numpy(array.copy())
    return torch.from_numpy(array.packed.unpacked().view(np.float32)).reshape(array.shape)


def _apply(layer: Layer, given: list[Tensor], *arrays: Tensor | None) -> Tensor:
    x, sides = given[0], layer.output.shape[1:]
    weight, scale, bias = arrays
    if layer.window:
        size, stride, padding = layer.window
        ceil = layer.kind != "conv" and sides != tuple(layer.window.results(*x.shape[2:]))
    if layer.kind == "conv":
        assert weight is not None
        made = F.conv2d(x, weight, bias, stride, padding, 1, layer.groups)
    elif layer.kind == "linear":
        assert weight is not None
        made = F.linear(x, weight, bias)
    elif layer.kind == "max_pool":
        return F.max_pool2d(x, size, stride, padding, ceil_mode=ceil)
    elif layer.kind == "average_pool":
        return F.avg_pool2d(x, size, stride, padding, ceil, layer.count_padding)
    elif layer.kind.startswith("adaptive"):
        pool: Any = F.adaptive_max_pool2d if "max" in layer.kind else F.adaptive_avg_pool2d
        return cast(Tensor, pool(x, sides))
    elif layer.kind == "cat":
        return torch.cat(given, 1 if layer.output.image else -1)
    elif layer.kind == "flatten":
        return x.flatten(1)
    else:
        channels = (-1, 1, 1) if layer.output.image else (-1,)
        made = x if scale is None or bias is None else x * scale.view(channels) + bias.view(channels)
    return made + given[1] if len(given) == 2 else made


def _activated(layer: Layer, x: Tensor) -> Tensor:
    low, high, slope = layer.activation
    if layer.activation == IDENTITY:
        return x
    if (low, high) == (0, math.inf):
        return F.leaky_relu(x, slope) if slope else F.relu(x)
    if slope and low > -math.inf:
        x = torch.where(x < low, low + slope * (x - low), x)
        low = -math.inf
    return x.clamp(low, high)


class Peer:
    """A runtime in a process of its own that runs one network."""

    def __init__(self, name: str, file: Path, threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, str(file), threads), daemon=True)
        before = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        os.environ |= dict.fromkeys(before, str(threads))
        try:
            self._process.start()
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._ours.send(None)
        self._process.join(5)
        self._process.kill()

    def ready(self, inputs: list[Array]) -> list[Array]:
        """Load or compile the network for these inputs, and return what it makes of them."""
        outputs: list[Array] = self._ask(inputs)
        return outputs

    def time(self, repeats: int) -> list[float]:
        """Return the seconds of so many runs on the inputs it is ready for."""
        seconds: list[float] = self._ask(repeats)
        return seconds

    def _ask(self, what: Any) -> Any:
        self._ours.send(what)
        if not self._ours.poll(_LOADS):
            raise TimeoutError(f"{self.name} did not answer within {_LOADS} s")
        answer = self._ours.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: {answer}")
        return answer


def _serve(connection: Connection, name: str, file: str, threads: int) -> None:
    """The life of a peer's process: inputs make it ready, a number makes it run, None ends it."""
    warnings.simplefilter("ignore")
    call: Call | None = None
    inputs: list[Array] = []
    while (asked := connection.recv()) is not None:
        try:
            if isinstance(asked, list):
                inputs = asked
                call = _MAKERS[name](Path(file), inputs, threads)
                connection.send(call(inputs))
                continue
            assert call is not None
            times = []
            for _ in range(asked):
                began = time.perf_counter()
                call(inputs)
                times.append(time.perf_counter() - began)
            connection.send(times)
        except Exception as error:  # whatever a peer does wrong, the others go on
            connection.send(f"{type(error).__name__}: {error}")


def _made(outputs: Any) -> list[Array]:
    return [np.asarray(each) for each in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]


def _dirprune(file: Path, inputs: list[Array], threads: int) -> Call:
    runtime = saving.load(file, threads=threads)
    return lambda given: _made(runtime(*given))


def _torch(file: Path, inputs: list[Array], threads: int, *, compiled: bool = False) -> Call:
    torch.set_num_threads(threads)
    twin: Any = Twin(saving.read(file)).eval()
    if any(value.ndim == 4 for value in inputs):
        twin = twin.to(memory_format=torch.channels_last)
    if compiled:
        twin = torch.compile(twin)

    def call(given: list[Array]) -> list[Array]:
        with torch.inference_mode():
            tensors = [torch.from_numpy(each) for each in given]
            tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
            return _made(twin(*tensors))

    return call


def _onnx(file: Path, inputs: list[Array]) -> bytes:
    import io
    from contextlib import redirect_stdout

    tensors = tuple(torch.from_numpy(each) for each in inputs)
    with redirect_stdout(io.StringIO()):
        program = torch.onnx.export(Twin(saving.read(file)).eval(), tensors, dynamo=True, verbose=False)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _onnxruntime(file: Path, inputs: list[Array], threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(_onnx(file, inputs), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda given: _made(session.run(None, dict(zip(names, given, strict=True))))


def _openvino(file: Path, inputs: list[Array], threads: int, precision: str = "f32") -> Call:
    import openvino

    core = openvino.Core()
    hints = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision
    }  # fmt: skip
    request = core.compile_model(core.read_model(_onnx(file, inputs)), "CPU", hints).create_infer_request()
    return lambda given: _made(list(request.infer(dict(enumerate(given))).values()))


_MAKERS: dict[str, Callable[[Path, list[Array], int], Call]] = {
    OURS: _dirprune,
    "torch": _torch,
    "torch.compile": lambda file, inputs, threads: _torch(file, inputs, threads, compiled=True),
    "ONNX Runtime": _onnxruntime,
    "OpenVINO": _openvino,
    HALF: lambda file, inputs, threads: _openvino(file, inputs, threads, "bf16"),
}
