"""How close cuDNN's convolutions come to the arithmetic floor, by shape and pass.

    python benchmarks/convolutions.py [--model wrn28x10] [--out FILE]

Times every convolution of the network at the recipe's batch size, in bfloat16 and channels_last, with the algorithms
that cuDNN finds by benchmarking: forward, the gradient by the input, the gradient by the weights. Each pass is repeated
in a CUDA graph; all passes of a shape take turns, and the median of the rounds is shown. The floor is the arithmetic at
the peak rate that `dirprune bench` uses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from turns import turns

from dirprune.graphs import record
from dirprune.lab import bench, models, recipes
from dirprune.lab.runs import environment
from dirprune.lab.tables import merge_rows

REPEATS, ROUNDS = 6, 9


@dataclass(frozen=True)
class Shape:
    """A convolution without groups, and the size of its square inputs."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    size: int

    def __str__(self) -> str:
        return f"{self.inputs}→{self.outputs}, {self.kernel}×{self.kernel}/{self.stride}, {self.size}×{self.size}"

    @property
    def result(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def floor_ms(self, batch: int) -> float:
        products = batch * self.result**2 * self.inputs * self.outputs * self.kernel**2
        return 1e3 * 2 * products / bench.PEAK_FLOPS


@dataclass(frozen=True)
class Row:
    """A row of the CSV file: one pass of one convolution, which occurs ``count`` times in the network."""

    model: str
    convolution: str
    count: int
    direction: str
    ms: float
    floor_ms: float
    hardware: str
    torch: str
    commit: str


def shapes(model: nn.Module, images: Tensor) -> Counter[Shape]:
    """Return the convolutions that the images pass through, and how often each occurs."""
    found: Counter[Shape] = Counter()

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        assert not isinstance(module.padding, str)
        sides = module.kernel_size[0], module.stride[0], module.padding[0]
        found[Shape(module.in_channels, module.out_channels, *sides, inputs[0].shape[-1])] += 1

    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            module.register_forward_pre_hook(note)
    model.eval()(images)
    return found


def passes(shape: Shape, batch: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return functions that run each pass on random numbers."""

    def random(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, device=device, dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    x = random(batch, shape.inputs, shape.size, shape.size)
    weight = random(shape.outputs, shape.inputs, shape.kernel, shape.kernel)
    dy = random(batch, shape.outputs, shape.result, shape.result)
    sides = [shape.stride] * 2, [shape.padding] * 2, [1, 1]

    def backward(*wanted: bool) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *sides, False, [0, 0], 1, wanted)

    return {
        "forward": lambda: torch.ops.aten.convolution(x, weight, None, *sides, False, [0, 0], 1),
        "by the input": backward(True, False, False),
        "by the weights": backward(False, True, False),
    }


def measure(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the milliseconds of each pass in a CUDA graph."""
    graphs = {name: record(lambda work=work: [work() for _ in range(REPEATS)]) for name, work in works.items()}  # type: ignore[misc]
    times = turns({name: graph.replay for name, (graph, _) in graphs.items()}, ROUNDS)
    return {name: ms / REPEATS for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn28x10", choices=bench.WORKLOADS, help="whose convolutions")
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file, beside other hardware's")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device, workload = torch.device("cuda"), bench.WORKLOADS[args.model]
    batch, where = recipes.get(workload.recipe).batch_size, environment(device)
    found = shapes(models.build(args.model, workload.classes), torch.zeros(1, *workload.shape))
    rows, sums = [], Counter[str]()
    for shape, count in found.items():
        floor = shape.floor_ms(batch)
        times = measure(passes(shape, batch, device))
        told = "".join(f"{name:>18} {1e3 * ms:7.1f} µs {floor / ms:4.0%}" for name, ms in times.items())
        print(f"{count} × {shape!s:28}{told}", flush=True)
        for name, ms in times.items():
            about = where["device"], where["torch"], where["commit"]
            rows.append(Row(args.model, str(shape), count, name, ms, floor, *about))
            sums[name] += count * ms
        sums["floor of each"] += count * floor
    print("a step, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in sums.items()))
    if args.out:
        merge_rows(args.out, Row, rows, key=["hardware", "model"])


if __name__ == "__main__":
    main()
