"""The cost of an optimizer step, as ratios measured in one run.

    python benchmarks/step.py [--out results/step.csv]

Compares GRDA on every path, torch.optim.SGD on every path, the formulation of the paper's authors (abs, sign, clamp and
multiply with new tensors), and the floor: copying the 16 bytes per parameter that the update must move. Beside it AdamW
and AdamGRDA, and what a step costs after something else has written to every parameter.

What is left on a CPU: GRDA passes over memory twice (v ← v − γg, w ← T(v)), SGD once, so that 20 bytes against 12 are
the least for large tensors. For small ones the calls are the cost: SGD makes one for each tensor, or one for all; GRDA
one for all and one for each, and counts steps and thresholds of every tensor on the host. Of 10.4 µs for one of 1,000
small tensors, with one thread, torch's softshrink takes 2.3 and its call 1.0, the update 1.6, counting 1.0, and Python
the rest, in which it collects state and checks shapes; SGD takes 3.4 in all. Joining small tensors costs more (2.2 to
join, 4.3 to copy back) than it saves.

After an outside write, the accumulators are set in four passes over pieces that stay in the cache (NaN to 0, add the
weights times a large number, clip, add the weights), and read and written in memory once more than in a plain step: 12
bytes beside 20. With one thread the whole takes 2.2 to 2.3 plain steps; with pieces four times smaller 2.6, four times
larger 2.5, and without the pass against NaN the same. Only a step that treats each piece right after its adoption would
save more.

The cost of a new tensor on a CPU depends on malloc. In a program as small as this one, glibc soon reuses freed memory.
With `MALLOC_MMAP_THRESHOLD_=131072 python benchmarks/step.py` it gets the memory of every large tensor from the system,
which clears each page, as happens in programs that use more memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from turns import turns

from dirprune import GRDA, AdamGRDA
from dirprune.lab.models import build
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import merge_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 30


@dataclass(frozen=True)
class Row:
    """A row of the CSV file."""

    shapes: str
    step: str
    ms: float
    over_floor: float
    authors_over: float
    hardware: str
    torch: str
    commit: str


@cache
def resnet50() -> list[Tensor]:
    return [p.detach() for p in build("resnet50", 1000).parameters()]


@cache
def many_small() -> list[Tensor]:
    return [torch.randn(shape) for _ in range(250) for shape in ((64, 64), (64,), (64,), (64, 32))]


def authors(params: list[nn.Parameter]) -> Callable[[], None]:
    """Return the update as its authors published it: step and threshold of each parameter are tensors on the host, and
    every intermediate and the parameter itself are new tensors."""
    lr, c, mu = 0.1, 5e-4, 0.51
    state = [(torch.zeros(1), torch.zeros(1), p.detach().clone()) for p in params]

    @torch.no_grad()
    def step() -> None:
        for p, (n, tau, v) in zip(params, state, strict=True):
            n.add_(1)
            v.add_(p.grad, alpha=-lr)
            tau += c * torch.tensor(lr) ** (mu + 0.5) * n**mu - c * torch.tensor(lr) ** (mu + 0.5) * (n - 1) ** mu
            shrunk = torch.abs(v) - tau.to(p.device)
            p.data = torch.sign(v) * shrunk.clamp(min=0)

    return step


def floor(params: list[nn.Parameter]) -> Callable[[], None]:
    # Written first: memory that was never written is one page of zeros, which is read from the cache.
    source = torch.ones(2 * sum(p.numel() for p in params), device=DEVICE)
    target = torch.ones_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step as a CUDA graph: the time that the device needs, without Python's launch overhead."""
    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        step()
    kept = (graph, step)  # the graph reads the optimizer's memory, so keep the optimizer alive

    def replay() -> None:
        kept[0].replay()

    return replay


def clamped(params: list[nn.Parameter], step: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return a write to every parameter in place, and the step after it."""

    @torch.no_grad()
    def work() -> None:
        for p in params:
            p.clamp_(-2, 2)
        if step is not None:
            step()

    return work


def candidates(shapes: Callable[[], list[Tensor]]) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)

    def fresh() -> list[nn.Parameter]:
        params = [nn.Parameter(t.clone().to(DEVICE)) for t in shapes()]
        for p in params:
            p.grad = 0.01 * torch.randn_like(p)
        return params

    cuda = DEVICE.type == "cuda"
    found: dict[str, Callable[[], None]] = {"floor: copy 16 bytes a parameter": floor(fresh())}
    found["GRDA single"] = GRDA(fresh(), foreach=False, fused=False).step
    found["GRDA foreach"] = GRDA(fresh(), foreach=True).step
    params = fresh()
    found["clamp_ of every parameter"] = clamped(fresh())
    found["clamp_ of every parameter, then GRDA single"] = clamped(
        params, GRDA(params, foreach=False, fused=False).step
    )
    found["torch.optim.AdamW fused"] = torch.optim.AdamW(fresh(), fused=True).step
    found["AdamGRDA fused"] = AdamGRDA(fresh(), c=0.1, fused=True).step
    found["AdamGRDA fused, power .5"] = AdamGRDA(fresh(), c=0.1, power=0.5, fused=True).step
    if cuda:
        found["GRDA fused"] = GRDA(fresh(), fused=True).step
        found["GRDA fused, in a CUDA graph"] = captured(GRDA(fresh(), fused=True, capturable=True).step)
    found["torch.optim.SGD loop"] = torch.optim.SGD(fresh(), lr=0.1, foreach=False).step
    found["torch.optim.SGD foreach"] = torch.optim.SGD(fresh(), lr=0.1, foreach=True).step
    found["torch.optim.SGD fused"] = torch.optim.SGD(fresh(), lr=0.1, fused=True).step
    if cuda:
        found["torch.optim.SGD fused, in a CUDA graph"] = captured(torch.optim.SGD(fresh(), lr=0.1, fused=True).step)
    found["the authors' formulation"] = authors(fresh())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="also write the numbers to this CSV file, beside those of other hardware"
    )
    args = parser.parse_args()
    where = environment(DEVICE)
    name = where.device
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}; median of {ROUNDS} rounds")
    results = []
    for title, shapes in (("ResNet50, 161 tensors", resnet50), ("1,000 small tensors", many_small)):
        times = turns(candidates(shapes), ROUNDS, warm=3)
        least, theirs = times["floor: copy 16 bytes a parameter"], times["the authors' formulation"]
        print(f"\n{title}\n{'':46}{'ms':>9}{'× floor':>9}{'authors ÷':>11}")
        for label, ms in times.items():
            print(f"{label:46}{ms:9.3f}{ms / least:9.2f}{theirs / ms:11.1f}")
            results.append(Row(title, label, ms, ms / least, theirs / ms, name, where.torch, where.commit))
    if args.out:
        merge_rows(args.out, Row, results, key=["hardware"])


if __name__ == "__main__":
    main()
