"""The cost of mode connectivity: points of weight space measured per second, and milliseconds per step of the fit.

    python benchmarks/points.py [--model vgg16] [--images 60000] [--batch 128] [--points 5] [--bf16] [--channels-last]
                                [--out results/points.csv]

A point is one weight vector measured on all images, with BatchNorm's statistics re-estimated if there are any. The
images are noise: speed does not depend on their content. Weights and images are on the device. Each way of measuring
gets one warm-up point; then they alternate, point by point, and the median time of each counts. The fit runs a warm-up
epoch and two more, of which the faster one counts. Without CUDA there is nothing to capture, and only the plain ways
are timed, by default on a small network for digits and few images.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from turns import turns

from dirprune.batches import Batch
from dirprune.connect import BezierCurve, fit_curve
from dirprune.lab.models import build
from dirprune.lab.runs import environment
from dirprune.lab.tables import merge_rows
from dirprune.landscape import Evaluator, Loaders
from dirprune.weights import Weights, take

CLASSES = 10


@dataclass(frozen=True)
class Row:
    """A row of the CSV file."""

    model: str
    images: int
    batch: int
    precision: str
    channels_last: bool
    way: str
    points_a_second: float
    over_plain: float
    fit_step_ms: float
    hardware: str
    threads: int
    torch: str
    commit: str


class Batches(list[Batch]):
    def epoch(self, epoch: int) -> Iterator[Batch]:
        return iter(self)


def synthetic(images: int, shape: tuple[int, ...], batch: int, device: str) -> Loaders:
    """Return noise images: five sixths for training and the rest for testing, as in CIFAR."""
    inputs = torch.randn(images, *shape, device=device)
    targets = torch.randint(CLASSES, (images,), device=device)
    batches = list(zip(torch.split(inputs, batch), torch.split(targets, batch), strict=True))
    cut = len(batches) * 5 // 6
    return SimpleNamespace(train=Batches(batches[:cut]), test=batches[cut:])


def point_by_point(evaluator: Evaluator, points: list[Weights]) -> Callable[[], object]:
    """Return a function that measures the next point at each call."""
    following = iter(points)
    return lambda: evaluator(next(following))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16" if device == "cuda" else "small")
    parser.add_argument("--images", type=int, default=60_000 if device == "cuda" else 6_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file, beside those of other runs")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build(options.model, CLASSES).to(device)
    ends = take(model), take(build(options.model, CLASSES).to(device))
    curve = BezierCurve(*ends, bends=0)
    shape = (1, 8, 8) if options.model == "small" else (3, 32, 32)
    loaders = synthetic(options.images, shape, options.batch, device)
    autocast = torch.bfloat16 if options.bf16 else None
    fast: dict[str, dict[str, bool]] = {"plain": {"capture": False}}
    if device == "cuda":
        fast |= {"captured": {"capture": True}, "compiled": {"capture": True, "compiled": True}}
    ways = {
        name: Evaluator(model, loaders, autocast=autocast, channels_last=options.channels_last, **how)
        for name, how in fast.items()
    }
    points = [curve.point(i / options.points) for i in range(options.points + 1)]
    medians = turns({name: point_by_point(way, points) for name, way in ways.items()}, rounds=options.points)

    where = environment(torch.device(device))
    print(
        f"{options.model}, {options.images} images, batch {options.batch}, {where['device']}, "
        f"{where['threads']} threads, torch {where['torch']}"
    )
    rows = []
    for name, how in fast.items():
        fit = fit_curve(
            model,
            BezierCurve(*ends),
            loaders,
            epochs=3,
            schedule=lambda epoch: 1e-4,  # stays near the line, where losses are finite
            autocast=autocast,
            channels_last=options.channels_last,
            **how,
        )
        fastest = 1000 * min([record.seconds for record in fit][1:]) / len(list(loaders.train))
        rate, ratio = 1e3 / medians[name], medians["plain"] / medians[name]
        print(f"{name:>9}: {rate:8.3f} points per second, {ratio:.2f} × plain; {fastest:.3f} ms per step of the fit")
        work = (
            options.model,
            options.images,
            options.batch,
            "bfloat16" if options.bf16 else "float32",
            options.channels_last,
        )
        here = (where["device"], where["threads"], where["torch"], where["commit"])
        rows.append(Row(*work, name, rate, ratio, fastest, *here))
    if options.out:
        merge_rows(
            options.out,
            Row,
            rows,
            key=["model", "images", "batch", "precision", "channels_last", "hardware", "threads"],
        )


if __name__ == "__main__":
    main()
