"""Time of a Hessian product, compared with a forward and backward pass and with curvlinops in one run.

    python benchmarks/eigenpairs.py [--model vgg16] [--device cuda] [--precision tf32] [--batch 64] [--batches 2]
                                    [--out results/eigenpairs.csv]

Differentiating a gradient costs about twice the gradient. This is the floor for a vector in a block, which shares the
data and the first differentiation with the others. A single vector also pays for the gradient: about three in all.
Compiled (always on CUDA, elsewhere with --compile), the tangent is computed along with the gradient, in fused kernels.
With --precision bfloat16 all rows run in mixed precision except curvlinops', which has no such option.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from turns import turns

from dirprune.curvature import HessianOperator, top_eigenpairs
from dirprune.lab.models.vgg import vgg16
from dirprune.lab.models.wide_resnet import wide_resnet
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import merge_rows

BLOCK = 8


@dataclass(frozen=True)
class Row:
    """A row of the CSV file; ``over_gradient`` is the ratio to one forward and backward pass."""

    model: str
    batch: int
    batches: int
    precision: str
    way: str
    ms: float
    over_gradient: float
    hardware: str
    threads: int
    torch: str
    commit: str


def convnet() -> nn.Module:
    """Return a small VGG for 32×32 images: convolutions, BatchNorm, pooling, a linear classifier."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {"small": convnet, "vgg16": vgg16, "wrn28x10": wide_resnet}


def curvlinops_product(
    model: nn.Module, loss_fn: nn.Module, batches: list[tuple[Tensor, Tensor]], vector: Tensor
) -> Callable[[], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from curvlinops import HessianLinearOperator  # type: ignore[import-untyped]
    other = HessianLinearOperator(model, loss_fn, list(model.parameters()), batches, check_deterministic=False)
    return lambda: (other @ vector).detach()


def measure(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    device: torch.device,
    repeats: int,
    compiled: bool,
    autocast: torch.dtype | None,
) -> dict[str, float]:
    """Return the milliseconds of each way to compute a gradient or a product."""
    loss_fn, parameters = nn.CrossEntropyLoss(), list(model.parameters())
    op = HessianOperator(model, loss_fn, batches, autocast=autocast)
    gauss_newton = HessianOperator(model, loss_fn, batches, kind="gauss-newton", autocast=autocast)
    vector, block = torch.randn(op.size, device=device), torch.randn(op.size, BLOCK, device=device)

    def gradient() -> None:
        for inputs, targets in batches:
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                outputs = model(inputs)
            torch.autograd.grad(loss_fn(outputs.float(), targets), parameters)

    in_a_block = f"dirprune, a vector in a block of {BLOCK}"
    works: dict[str, Callable[[], object]] = {
        "forward + backward": gradient,
        "dirprune, one vector": lambda: op @ vector,
        in_a_block: lambda: op @ block,
        "dirprune, Gauss-Newton": lambda: gauss_newton @ vector,
    }
    products = [op @ vector]
    if compiled:
        fast = HessianOperator(model, loss_fn, batches, compiled=True, autocast=autocast)
        start = time.perf_counter()
        products.append(fast @ vector)
        print(f"compiled in {time.perf_counter() - start:.0f} s")
        works["dirprune, compiled"] = lambda: fast @ vector
    if find_spec("curvlinops"):
        other = curvlinops_product(model, loss_fn, batches, vector)
        works["curvlinops, one vector"] = other
        products.append(other())
    for product in products[1:]:
        assert float((product - products[0]).norm()) < 0.1 * float(products[0].norm()), "the products differ"
    times = turns(works, rounds=repeats)
    return {**times, in_a_block: times[in_a_block] / BLOCK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--compile", action="store_true", help="time the compiled product too; always on CUDA")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file, beside those of other runs")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = options.precision != "float32"

    torch.manual_seed(0)
    model = MODELS[options.model]().to(device).eval()
    if device.type == "cuda" and options.precision != "float32":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    batches = [
        (torch.randn(options.batch, 3, 32, 32, device=device), torch.randint(10, (options.batch,), device=device))
        for _ in range(options.batches)
    ]
    autocast = torch.bfloat16 if options.precision == "bfloat16" else None
    compiled = options.compile or device.type == "cuda"
    rows = measure(model, batches, device, options.repeats, compiled, autocast)
    base = rows["forward + backward"]
    size = sum(parameter.numel() for parameter in model.parameters())
    where = environment(device)
    print(
        f"{options.model}, {size} parameters, {options.batches} batches of {options.batch}, {options.precision}, "
        f"{where.device}, {where.threads} threads, torch {where.torch}"
    )
    print(f"{'':40} {'ms':>9} {'ratio':>7}")
    for name, value in rows.items():
        print(f"{name:40} {value:9.1f} {value / base:7.2f}")
    if options.out:
        work = (options.model, options.batch, options.batches, options.precision)
        here = (where.device, where.threads, where.torch, where.commit)
        lines = [Row(*work, name, value, value / base, *here) for name, value in rows.items()]
        merge_rows(options.out, Row, lines, key=["model", "batch", "batches", "precision", "hardware", "threads"])
    if device.type == "cuda":
        print(f"most memory: {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")

    if options.model == "small":
        start = time.perf_counter()
        op = HessianOperator(model, nn.CrossEntropyLoss(), batches)  # in full precision, for accurate values
        pairs = top_eigenpairs(op, 5, tolerance=1e-3)
        took = time.perf_counter() - start
        print(
            f"top 5 eigenpairs: {took:.1f} s, {pairs.iterations} products and 5 for the residuals, "
            f"worst residual {float(pairs.residuals.max()):.1e}, top value {float(pairs.values[0]):.3g}"
        )


if __name__ == "__main__":
    main()
