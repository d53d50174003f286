"""How fast sparse networks run on this CPU beside runtimes that compute with their zeros.

    python benchmarks/speed.py                            # every network, one example, one thread
    python benchmarks/speed.py resnet18 --batch 1,16,64 --threads 1,2 --out results/speed.csv

`resnet18-cifar10` is a network that dirprune trained, by `train resnet18-cifar10 --macs 0.15 --epochs 2 --seed 1
--precision bfloat16` and then `--from` it with `--sparsity 0.96 --epochs 1 --schedule cosine --lr 0.05 --seed 1`; its
packed weights lie in benchmarks/networks. The others have
random masks at recorded layer densities: those of this repository's runs (results/compare-*/layers.csv), and for
resnet50 published ones. Each runtime has a process of its own, and all take turns. `pip install -e '.[lab,bench]'`
brings ONNX Runtime and OpenVINO; without them torch is compared alone.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from dirprune import deploy
from dirprune.deploy import saving
from dirprune.lab.models import build
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import merge_rows
from dirprune.lab.studies.comparison.published import layerwise
from dirprune.lab.studies.deployment import speed

HERE = Path(__file__).parent
TRAINED = HERE / "networks"
PEERS = ("torch", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Row:
    """A row of the CSV file: a runtime on a network."""

    network: str
    weights_left: float
    multiplications: int
    multiplications_left: float
    batch: int
    threads: int
    runtime: str
    milliseconds: float
    p95: float
    fastest: float
    per_second: float
    times_ours: float
    """Its median latency over ours in the same run; ``fastest_times_ours`` compares the fastest runs."""
    fastest_times_ours: float
    runs: int
    hardware: str
    versions: str
    commit: str
    command: str


def masked(model: nn.Module, densities: dict[str, float]) -> nn.Module:
    """Set random weights to zero, so many in each layer as were recorded, and give BatchNorm statistics that matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1), module.running_var.uniform_(0.5, 1.5)
            if name in densities:
                density = max(densities[name], 1e-6)
                module.weight *= (torch.rand_like(module.weight) < density) / density**0.5
    return model.eval()


def recorded(comparison: str, run: str) -> dict[str, float]:
    """Return the density of every layer of a run of this repository."""
    with (HERE.parent / "results" / comparison / "layers.csv").open() as lines:
        return {row["layer"]: 1 - float(row["sparsity"]) for row in csv.DictReader(lines) if row["run"] == run}


def cifar(model: str, comparison: str, run: str) -> tuple[nn.Module, Tensor]:
    return masked(build(model, 10), recorded(comparison, run)), torch.zeros(1, 3, 32, 32)


def resnet50(method: str) -> tuple[nn.Module, Tensor]:
    densities = {bar.layer: 1 - bar.sparsity for bar in layerwise() if bar.method == method}
    return masked(build("resnet50", 1000), densities), torch.zeros(1, 3, 224, 224)


class Linears(nn.Module):
    """The linear layers of a GPT's blocks, one after the other; what attention would read is a result as well."""

    def __init__(self, blocks: int, width: int = 512) -> None:
        super().__init__()
        names = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape) for name, shape in names.items()}) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        read = []
        for block in self.blocks:
            read.append(block["qkv"](x))
            x = block["down"](torch.relu(block["up"](block["out"](x))))
        return (x, *read)


def gpt(blocks: int, density: float) -> tuple[nn.Module, Tensor]:
    model = Linears(blocks)
    layers = {name: density for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return masked(model, layers), torch.zeros(1, 512)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet18": lambda: cifar("resnet18", "compare-resnet18-cifar10", "grda-c0.00016-s0"),
    "resnet18-sparser": lambda: cifar("resnet18", "compare-resnet18-cifar10", "grda-c0.00032-s0"),
    "vgg16": lambda: cifar("vgg16", "compare-vgg16-cifar10-modern", "grda-c0.00012-s0"),
    "resnet50": lambda: resnet50("RigL's ERK densities, 90 %"),
    "resnet50-grda": lambda: resnet50("gRDA c = 0.005, μ = 0.55"),
    **{
        f"gpt-linears-{blocks}x{zeros}%": lambda blocks=blocks, zeros=zeros: gpt(blocks, 1 - zeros / 100)
        for blocks in (1, 12)
        for zeros in (90, 95)
    },
}


def made(name: str, folder: Path) -> Path:
    """Return the file of a network: one that was trained, or one that is made now."""
    if name not in NETWORKS:
        return TRAINED / f"{name}.safetensors"
    file = folder / f"{name}.safetensors"
    deploy.compile(*NETWORKS[name]()).save(file)
    return file


def left(file: Path) -> tuple[float, int, float]:
    """Return the share of weights that is left, the multiplications of a dense network, and the share that is left."""
    weights = nonzero = dense = multiplications = 0
    for layer in saving.read(file).layers:
        if layer.weight:
            places = layer.output.size // layer.weight.shape[0]
            weights, nonzero = weights + layer.weight.size, nonzero + layer.weight.nonzero
            dense += places * layer.weight.size
            multiplications += places * layer.weight.nonzero
    return nonzero / weights, dense, multiplications / dense


_LOAD = """if True:
    import sys, time
    import numpy
    began = time.perf_counter()
    from dirprune import deploy
    deploy.load(sys.argv[1])
    print(time.perf_counter() - began)
"""


def loading(file: Path) -> float:
    """Return the milliseconds that a process which has numpy takes to load a network: the least of ten processes."""
    command = [sys.executable, "-c", _LOAD, str(file)]
    return 1e3 * min(float(subprocess.check_output(command)) for _ in range(10))


def installed() -> str:
    """Return the runtimes that are compared, with their versions."""
    return ", ".join(f"{name} {version(name)}" for name in PEERS if find_spec(name))


def measured(name: str, file: Path, batch: int, threads: int, runtimes: list[str], seconds: float) -> list[Row]:
    where = environment(torch.device("cpu"))
    machine = f"{where.device}, {platform.machine()}"
    command = shlex.join(["python", *sys.argv])
    share, dense, kept = left(file)
    rows = list(speed.speed(file, batch, threads, runtimes=runtimes, seconds=seconds, failed=print))
    found = []
    for row in rows:
        told = asdict(row)
        told["fastest_times_ours"], told["times_ours"] = told.pop("ratio"), row.milliseconds / rows[0].milliseconds
        told |= {"network": name, "weights_left": share, "multiplications": dense, "multiplications_left": kept}
        found.append(Row(**told, hardware=machine, versions=installed(), commit=where.commit, command=command))
        print(f"  {row.runtime:20}{row.milliseconds:10.3f} ms{row.p95:10.3f}{row.fastest:10.3f}{row.ratio:8.2f} ×")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained = sorted(path.stem for path in TRAINED.glob("*.safetensors"))
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join([*trained, *NETWORKS])}")
    parser.add_argument("--batch", default="1", help="numbers of examples")
    parser.add_argument("--threads", default="1", help="numbers of threads")
    parser.add_argument("--seconds", type=float, default=5, help="how long each runtime is measured")
    parser.add_argument("--runtimes", help="those to compare with, separated by commas; by default all installed ones")
    parser.add_argument("--out", type=Path, help="also write the rows to this CSV file, in place of older ones")
    args = parser.parse_args()
    if unknown := [name for name in args.networks if name not in (*trained, *NETWORKS)]:
        parser.error(f"no network {unknown[0]!r}; known are {', '.join([*trained, *NETWORKS])}")
    runtimes = args.runtimes.split(",") if args.runtimes else speed.others(print)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks or [*trained, *NETWORKS]:
            file = made(name, Path(folder))
            memory = deploy.load(file).nbytes / file.stat().st_size
            print(f"{name}: loads in {loading(file):.0f} ms beyond numpy, takes {memory:.2f} times its file in memory")
            for threads in map(int, args.threads.split(",")):
                for batch in map(int, args.batch.split(",")):
                    print(
                        f"{name}, batch {batch}, {threads} thread{'s' * (threads > 1)}: ms, 95%, fastest, ratio to ours"
                    )
                    rows = measured(name, file, batch, threads, runtimes, args.seconds)
                    if args.out:
                        key = ["network", "batch", "threads", "runtime", "hardware"]
                        merge_rows(args.out, Row, rows, key=key)


if __name__ == "__main__":
    main()
