"""BatchNorm with relu: our kernels compared with torch.compile's, as ratios within one run.

    python benchmarks/rectified.py [--out FILE] [wrn28x10] [shapes] [tiles]

wrn28x10: the captured training step with gRDA as `dirprune bench` takes it, evaluation of 10,000 images, where the time
of a step goes, and the losses of 50 steps from the same weights. shapes: BatchNorm and relu, forward and backward in a
CUDA graph, compared with the floor: a copy of the 16 bytes per element that the two directions must move (three passes
over bfloat16 forward, five backward). tiles: each kernel with its own tiles and with others, on tensors that are not in
the cache. All forms take turns, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from turns import turns

from dirprune.graphs import record
from dirprune.lab import bench, data, recipes
from dirprune.lab.data import Batch, Loaders, Synthetic
from dirprune.lab.models import rectified, rectified_ops
from dirprune.lab.models import rectified_kernels as kernels
from dirprune.lab.models.rectified_kernels import Tile
from dirprune.lab.runs import environment
from dirprune.lab.tables import merge_rows
from dirprune.lab.train import evaluate

DEVICE = torch.device("cuda")
BATCH = 128
ROUNDS = 9
STEPS = 50
SHAPES = ((16, 32), (160, 32), (320, 16), (640, 8))
"""Channels and height of WRN28x10's activations."""
NETWORK = "wrn28x10"
PARTS = (NETWORK, "shapes", "tiles")
TRIED = {
    "moments": [Tile(r, p, warps=1) for r, p in ((4, 24), (8, 12), (8, 16))],
    "sum": [Tile(r, p, warps=1) for r, p in ((4, 16), (4, 20), (8, 12))],
    "map": [Tile(8, 12, warps=4), Tile(4, 16, warps=4)],
    "products": [Tile(r, p, warps=1) for r, p in ((4, 20), (8, 8), (8, 16))],
    "gradient": [Tile(r, p, warps=1) for r, p in ((4, 12), (4, 20), (8, 8))],
}
"""Tiles to try besides those that the kernels use."""
_START = time.perf_counter()


@dataclass(frozen=True)
class Row:
    """A row of the CSV file, with ratios to the compiled plain form and to the floor, if there is one."""

    part: str
    what: str
    form: str
    ms: float
    over_plain: float | None
    over_floor: float | None
    hardware: str
    torch: str
    commit: str


Measured = dict[str, float]
Found = tuple[str, str, str, float, "float | None", "float | None"]
"""The first fields of a `Row`."""


def say(text: str) -> None:
    """Print at once, with the seconds since the start, so that a run that is cut off has shown its progress."""
    print(f"[{time.perf_counter() - _START:5.0f} s] {text}", flush=True)


Both = Callable[[], tuple[Tensor, ...]]


def both_ways(forward: Callable[[Tensor], Tensor], x: Tensor, norm: nn.BatchNorm2d) -> Both:
    """Return a function that computes the result and all gradients."""
    dy = torch.empty_like(x, requires_grad=False).normal_(generator=torch.Generator(DEVICE).manual_seed(1))

    def work() -> tuple[Tensor, ...]:
        y = forward(x)
        return y, *torch.autograd.grad(y, [x, norm.weight, norm.bias], dy)

    return work


def captured(work: Both) -> Callable[[], object]:
    kept = record(work), work  # the graph uses the memory of the work that was recorded
    return lambda: kept[0][0].replay()


def apart(ours: Both, theirs: Both) -> float:
    """Return the greatest relative distance between their results and gradients."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours(), theirs(), strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def shape(channels: int, height: int) -> tuple[Measured, float]:
    """Return the milliseconds of all forms, and the distance between the plain form and the kernels."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(BATCH, channels, height, height, device=DEVICE, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(channels).to(DEVICE)
    source = torch.ones(4 * x.numel(), device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy, _ = record(lambda: target.copy_(source))
    plain = torch.compile(lambda x: F.relu(norm(x)), dynamic=False)
    theirs = both_ways(plain, x, norm)
    ours = both_ways(lambda x: rectified_ops.rectify(x, None, norm.weight, norm.bias, norm.eps)[0], x, norm)
    off = apart(ours, theirs)
    return turns({"floor": copy.replay, "plain": captured(theirs), "kernels": captured(ours)}, ROUNDS, repeats=20), off


def shapes() -> list[Found]:
    found: list[Found] = []
    print(f"\n{'BatchNorm and relu, both ways':32}{'floor ms':>10}{'plain ×':>10}{'ours ×':>10}{'ours ÷ plain':>14}")
    for channels, height in SHAPES:
        times, off = shape(channels, height)
        floor, what = times["floor"], f"{BATCH}×{channels}×{height}×{height}"
        ratios = f"{times['plain'] / floor:10.2f}{times['kernels'] / floor:10.2f}"
        print(
            f"{what:32}{floor:10.4f}{ratios}{times['kernels'] / times['plain']:14.3f}   apart by {off:.1e}",
            flush=True,
        )
        found += [("shapes", what, form, ms, ms / times["plain"], ms / floor) for form, ms in times.items()]
    return found


def launched(
    kernel: str, tile: Tile, tensors: list[Tensor], channels: int, *, empty: bool = False
) -> Callable[[int], object]:
    """Return a function that launches the kernel on the i-th tensor and those after it; with ``empty``, on no tile."""
    device = tensors[0].device
    plan = kernels.plan(tile, tensors[0].numel(), channels, kernels._multiprocessors(device))
    sums = torch.empty(2 * plan.rows * channels, device=device)
    numbers, line = torch.randn(5, channels, device=device), torch.randn(2, channels, device=device)
    told = plan.sizes | kernels.accumulated(tensors[0])
    if empty:
        told["tiles"] = 0

    def launch(i: int) -> object:
        a, b, c, d = (tensors[(i + k) % len(tensors)] for k in range(4))
        if kernel in ("moments", "sum"):
            adds = {"ADDS": kernel == "sum", "BIASED": kernel == "sum"}
            total = c if kernel == "sum" else a
            return kernels._moments_kernel[plan.grid](a, b, line, total, sums, **adds, **plan.sums, **told)
        if kernel == "products":
            return kernels._products_kernel[plan.grid](a, b, sums, numbers, **plan.sums, **told)
        if kernel == "gradient":
            sides = {"BESIDE": True, "BIASED": True}
            return kernels._gradient_kernel[plan.grid](a, b, c, d, sums, numbers, line, **sides, **plan.sums, **told)
        return kernels._forward_kernel[plan.grid](a, b, numbers, **told)

    return launch


def tiles() -> list[Found]:
    found: list[Found] = []
    passes = {"moments": 1, "sum": 3, "map": 2, "products": 2, "gradient": 4}
    for channels, height in SHAPES[1:]:
        what = f"{BATCH}×{channels}×{height}×{height}"
        elements = BATCH * channels * height**2
        many = max(5, 120_000_000 // elements)  # more than the cache holds
        tensors = [torch.randn(elements, device=DEVICE, dtype=torch.bfloat16) for _ in range(many)]
        copies = record(lambda n=many, t=tensors: [t[i].copy_(t[(i + 1) % n]) for i in range(n)])[0]  # type: ignore[misc]
        for kernel, others in TRIED.items():
            forms = {str(tile): tile for tile in (kernels.TILES[kernel], *others)}
            launches = {form: launched(kernel, tile, tensors, channels) for form, tile in forms.items()}
            launches["no tile"] = launched(kernel, kernels.TILES[kernel], tensors, channels, empty=True)
            work = {"floor": copies.replay}
            for form, launch in launches.items():
                work[form] = record(lambda n=many, go=launch: [go(i) for i in range(n)])[0].replay  # type: ignore[misc]
            times = {form: ms / many for form, ms in turns(work, 5).items()}
            floor = times["floor"] * passes[kernel] / 2
            print(f"\n{what}: {kernel}, {1e3 * floor:.1f} µs if as fast as a copy")
            for form in launches:
                print(f"  {times[form] / floor:6.2f} ×  {1e3 * times[form]:6.1f} µs  {form}", flush=True)
                found.append(("tiles", f"{what}, {kernel}", form, times[form], None, times[form] / floor))
    return found


@cache
def images(workload: bench.Workload, batch_size: int) -> tuple[Loaders, list[Batch]]:
    synthetic = Synthetic(workload.shape, workload.classes, workload.examples, workload.test_examples)
    loaders = data.load("synthetic", batch_size=batch_size, seed=0, device=DEVICE, synthetic=synthetic)
    return loaders, list(islice(loaders.train.epoch(1), 8))


def trainer(form: str) -> bench._Trainer:
    """Return a trainer of the network with captured step and evaluation."""
    workload = bench.WORKLOADS[NETWORK]
    recipe = recipes.get(workload.recipe)
    without = mock.patch.object(rectified, "find_spec", return_value=None)
    with without if form == "plain" else nullcontext():
        made = bench._Trainer(recipe, *images(workload, recipe.batch_size), DEVICE)
        say(f"{form}: step captured")
        scored(made)()
        say(f"{form}: evaluation captured")
    return made


def scored(made: bench._Trainer) -> Callable[[], object]:
    return lambda: evaluate(made.model, made.loaders.test, scoring=made.scoring)


def breakdown(made: bench._Trainer) -> Counter[str]:
    """Return the milliseconds of a step by kernel; inductor's kernels are counted together."""
    steps = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        made.steps(steps)
    spent: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "triton, by inductor" if event.name.startswith("triton_") else event.name.split("(")[0][:72]
            spent[kind] += event.time_range.elapsed_us() / 1e3 / steps
    return spent


def network() -> list[Found]:
    both = {form: trainer(form) for form in ("plain", "kernels")}
    losses = {}
    for form, made in both.items():
        made.steps(STEPS)
        losses[form] = made.tally.losses[:STEPS].cpu()
    print(f"\n{NETWORK}: loss of step" + "".join(f"{step:>10}" for step in (1, 2, 5, 10, 20, STEPS)))
    for form, values in losses.items():
        print(f"  {form:20}" + "".join(f"{values[step - 1]:10.4f}" for step in (1, 2, 5, 10, 20, STEPS)), flush=True)
    found: list[Found] = []
    work = {
        "training step": turns({form: lambda m=m: m.steps(STEPS) for form, m in both.items()}, ROUNDS),
        "evaluation": turns({form: scored(made) for form, made in both.items()}, 5),
    }
    work["training step"] = {form: ms / STEPS for form, ms in work["training step"].items()}
    for what, times in work.items():
        print(f"{what:16}" + "".join(f"  {form} {ms:.3f} ms" for form, ms in times.items()), end="")
        print(f"  kernels ÷ plain {times['kernels'] / times['plain']:.4f}", flush=True)
        found += [(NETWORK, what, form, ms, ms / times["plain"], None) for form, ms in times.items()]
    for form, made in both.items():
        print(f"where a step goes, {form}")
        for kind, ms in breakdown(made).most_common(20):
            print(f"  {kind:72}{ms:9.3f} ms", flush=True)
            found.append((NETWORK, f"in a step: {kind}", form, ms, None, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them if none")
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file, beside other hardware's")
    args = parser.parse_args()
    if strange := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(strange)}: the parts are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    where = environment(DEVICE)
    say(f"{where['device']}, torch {torch.__version__}")
    results: list[Row] = []
    for part in args.parts or PARTS:
        found = {"shapes": shapes, "tiles": tiles, NETWORK: network}[part]()
        results += [Row(*row, where["device"], where["torch"], where["commit"]) for row in found]
        say(f"{part} done")
        if args.out:  # after every part, in case the run is cut off
            merge_rows(args.out, Row, results, key=["hardware", "part"])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
