"""Time of a Hessian product: against one forward and backward pass, and against curvlinops, in one run.

    python benchmarks/eigenpairs.py [--device cuda] [--batch 64] [--batches 2] [--repeats 5]

Differentiating a gradient costs about twice the gradient: the floor for a vector of a block, which shares the data and
the first differentiation with the others. A vector alone pays for the gradient too, which makes about three.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dirprune.curvature import HessianOperator, top_eigenpairs

BLOCK = 8


def convnet() -> nn.Module:
    """Return a small VGG for 32×32 images: convolutions, BatchNorm, pooling, a linear classifier."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)).eval()


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def curvlinops_product(
    model: nn.Module, loss_fn: nn.Module, batches: list[tuple[Tensor, Tensor]], vector: Tensor
) -> Callable[[], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from curvlinops import HessianLinearOperator
    other = HessianLinearOperator(model, loss_fn, list(model.parameters()), batches, check_deterministic=False)
    return lambda: (other @ vector).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)

    torch.manual_seed(0)
    model, loss_fn = convnet().to(device), nn.CrossEntropyLoss()
    batches = [
        (torch.randn(options.batch, 3, 32, 32, device=device), torch.randint(10, (options.batch,), device=device))
        for _ in range(options.batches)
    ]
    op = HessianOperator(model, loss_fn, batches)
    gauss_newton = HessianOperator(model, loss_fn, batches, kind="gauss-newton")
    vector, block = torch.randn(op.size, device=device), torch.randn(op.size, BLOCK, device=device)
    parameters = list(model.parameters())

    def gradient() -> None:
        for inputs, targets in batches:
            torch.autograd.grad(loss_fn(model(inputs), targets), parameters)

    other = curvlinops_product(model, loss_fn, batches, vector)
    torch.testing.assert_close(op @ vector, other(), rtol=1e-2, atol=1e-2)
    rows = {
        "forward + backward": seconds(gradient, device, options.repeats),
        "dirprune, one vector": seconds(lambda: op @ vector, device, options.repeats),
        f"dirprune, a vector in a block of {BLOCK}": seconds(lambda: op @ block, device, options.repeats) / BLOCK,
        "dirprune, Gauss-Newton": seconds(lambda: gauss_newton @ vector, device, options.repeats),
        "curvlinops, one vector": seconds(other, device, options.repeats),
    }
    base = rows["forward + backward"]
    print(f"{op.size} parameters, {options.batches} batches of {options.batch}, {device}, torch {torch.__version__}")
    print(f"{'':40} {'ms':>9} {'ratio':>7}")
    for name, value in rows.items():
        print(f"{name:40} {1000 * value:9.1f} {value / base:7.2f}")

    start = time.perf_counter()
    pairs = top_eigenpairs(op, 5, tolerance=1e-3)
    took = time.perf_counter() - start
    print(
        f"top 5 eigenpairs: {took:.1f} s, {pairs.iterations} products and 5 for the residuals, "
        f"worst residual {float(pairs.residuals.max()):.1e}, top value {float(pairs.values[0]):.3g}"
    )


if __name__ == "__main__":
    main()
