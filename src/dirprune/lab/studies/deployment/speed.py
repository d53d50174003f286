"""How fast a sparse network runs on this CPU beside runtimes that compute with its zeros."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from dirprune.deploy import capture, saving
from dirprune.lab import models
from dirprune.lab.records.columns import Column, cells
from dirprune.lab.studies.deployment.peers import HALF, NAMES, OURS, Array, Peer, missing
from dirprune.lab.text import NOTHING
from dirprune.lab.training import runs
from dirprune.lab.training.experiment import load_data
from dirprune.weights import check_alike

_CLOSE = 1e-3  # of the largest output: float32 sums in another order
_TURN = 0.06  # seconds of runs before the next runtime has its turn
_LEAST = 10  # runs
_REST = 0.02  # between turns, so that threads that wait by spinning have gone to sleep


@dataclass(frozen=True)
class Latency:
    """How long a runtime takes for a batch.

    ``ratio`` compares its fastest run with ours, because other work on the machine disturbs long runs more than short
    ones.
    """

    runtime: Annotated[str, Column("runtime")]
    batch: Annotated[int, Column("batch")]
    threads: Annotated[int, Column("threads")]
    milliseconds: Annotated[float, Column("ms (median)", ".3g")]
    """The median of all runs; ``p95`` is their 95th percentile."""
    p95: Annotated[float, Column("ms (95%)", ".3g")]
    fastest: Annotated[float, Column("ms (fastest)", ".3g")]
    per_second: Annotated[float, Column("examples/s", ",.0f")]
    ratio: Annotated[float, Column("fastest / ours", ".2f")]
    runs: int


@dataclass(frozen=True)
class LayerTime:
    """A step of our runtime, for one example."""

    layer: Annotated[str, Column("layer")]
    kernel: Annotated[str, Column("kernel")]
    reason: Annotated[str, Column("why")]
    density: Annotated[float | None, Column("not zero", ".1%")]
    multiplications: Annotated[int, Column("multiplications (M)", ".2f", scale=1e-6)]
    microseconds: Annotated[float, Column("µs", ".1f")]

    def cells(self) -> dict[str, str]:
        """Return the step as text by column."""
        return cells(self) | ({} if self.multiplications else {"multiplications (M)": NOTHING})


def others(told: Callable[[str], None]) -> list[str]:
    """Return the runtimes to compare with that are installed, and tell which are not."""
    lacking = {name: missing(name) for name in NAMES[1:]}
    if absent := [name for name, packages in lacking.items() if packages]:
        packages = sorted({word for name in absent for word in lacking[name].split(" and ")})
        told(f"Not measured: {', '.join(absent)}; they need {', '.join(packages)}, by pip")
    return [name for name, packages in lacking.items() if not packages]


def layers(file: Path) -> list[LayerTime]:
    """Return what our runtime does, step by step, on one thread."""
    return [
        LayerTime(row.layer, row.kernel, row.reason, row.density, row.multiplications, row.microseconds)
        for row in saving.load(file).report()
    ]


def saved(network: Path, to: Path, *, trusted: bool) -> Path:
    """Return the file of a network: itself, or one made of the newest checkpoint of a run.

    Args:
        network: a file that `Runtime.save` wrote, or the folder of a run.
        to: where to write the network of a run.
        trusted: whether a network of its own that the run names may be imported.
    """
    if network.is_file():
        return network
    run = runs.load(network, trusted=trusted)
    _, state = runs.state_of(run)
    tensors: dict[str, torch.Tensor] = state["model"]
    channels = [tensor.shape[1] for tensor in tensors.values() if tensor.dim() == 4][:1]
    classes = [tensor.shape[0] for tensor in tensors.values() if tensor.dim()][-1:]
    if not (channels and classes):
        raise ValueError(f"{network} has no convolutional network; only those are compiled")
    model = models.build(run.recipe.model, *classes)
    check_alike(model.state_dict(), tensors, "the network of config.json", str(network))
    model.load_state_dict(tensors)
    capture.compile(model, torch.zeros(1, *channels, *_sides(run))).save(to)
    return to


def _sides(run: runs.Run) -> tuple[int, ...]:
    """Return height and width of the images that a run was trained on; a data set of one's own has to be asked."""
    task = run.recipe.task
    if ":" in task.data:
        return load_data(run.recipe, device=torch.device("cpu"), root=run.last_root()).shape[1:]
    side = getattr(task, "size", 0) or _SIDES.get(task.data, 32)
    return side, side


_SIDES = {"digits": 8, "imagenet": 224, "folder": 224}
"""The sides of a data set's images; 32 in the others."""


def speed(
    file: Path, batch: int, threads: int, *, runtimes: Sequence[str], seconds: float = 10, failed: Callable[[str], None]
) -> Iterator[Latency]:
    """Yield the latencies of runtimes that take turns on the same random inputs; ours comes first.

    Args:
        file: what `Runtime.save` wrote.
        batch: number of examples.
        threads: how many threads each runtime uses.
        runtimes: names of `peers.NAMES`.
        seconds: how long each one is measured, about.
        failed: told of each runtime that cannot run the network.

    Raises:
        RuntimeError: a runtime in float32 makes something else of the inputs than ours.
    """
    random = np.random.default_rng(0)
    shapes = [value.shape for value in saving.read(file).inputs]
    inputs = [random.standard_normal((batch, *shape), np.float32) for shape in shapes]
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name, file, threads)) for name in (OURS, *runtimes)]
        for peer, wanted in _ready(peers, inputs, failed):
            times[peer.name] = []
            if wanted is not None and peer.name != HALF:
                _compare(peer.name, *wanted)
        _take_turns([peer for peer in peers if peer.name in times], times, seconds)
    ours = min(times[OURS])
    for name, taken in times.items():
        median, late, fastest = (1e3 * float(x) for x in np.quantile(taken, [0.5, 0.95, 0]))
        ratio = fastest / 1e3 / ours
        yield Latency(name, batch, threads, median, late, fastest, 1e3 * batch / median, ratio, len(taken))


def _ready(
    peers: list[Peer], inputs: list[Array], failed: Callable[[str], None]
) -> Iterator[tuple[Peer, tuple[list[Array], list[Array]] | None]]:
    """Yield every runtime that runs the network, with our outputs and its own."""
    ours = peers[0].ready(inputs)
    yield peers[0], None
    for peer in peers[1:]:
        if theirs := _outputs(peer, inputs, failed):
            yield peer, (ours, theirs)


def _outputs(peer: Peer, inputs: list[Array], failed: Callable[[str], None]) -> list[Array] | None:
    try:
        return peer.ready(inputs)
    except (RuntimeError, TimeoutError, EOFError, OSError) as error:
        failed(f"{peer.name} is left out: {str(error) or type(error).__name__}"[:300])
        return None


def _compare(name: str, ours: list[Array], theirs: list[Array]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        if not np.abs(own - other).max() <= _CLOSE * np.abs(other).max():
            raise RuntimeError(
                f"{name} and dirprune differ by {np.abs(own - other).max():.3g}; please report this network"
            )


def _take_turns(peers: list[Peer], times: dict[str, list[float]], seconds: float) -> None:
    """Let the runtimes run in turn until each has had its seconds."""
    repeats = {}
    for peer in peers:
        took = min(peer.time(3))
        repeats[peer.name] = max(1, int(_TURN / took))
    ends = time.monotonic() + seconds * len(peers)
    while time.monotonic() < ends or len(times[peers[-1].name]) < _LEAST:
        for peer in peers:
            time.sleep(_REST)
            times[peer.name] += peer.time(repeats[peer.name])
