"""Mode connectivity: curves of low loss, and planes, through the weights of any networks of one architecture.

Two solutions lie in one valley when a curve joins them along which the loss does not rise. `BezierCurve` is the curve,
`fit_curve` bends it into the valley, `curve_profile` and `plane_profile` measure what it runs through.

Reference: Garipov et al., "Loss surfaces, mode connectivity, and fast ensembling of DNNs", NeurIPS 2018.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from dirprune.weights import Weights, check_alike, flatten, put, unflatten

Batch = tuple[Tensor, Tensor]
Place = tuple[float, ...]
LossFn = Callable[[Tensor, Tensor], Tensor]


class TrainLoader(Protocol):
    """Batches of (inputs, targets) on the device: plain when iterated, shuffled and augmented from `epoch`."""

    def __iter__(self) -> Iterator[Batch]: ...
    def epoch(self, epoch: int, /) -> Iterable[Batch]: ...


class Loaders(Protocol):
    """The two halves of a data set."""

    @property
    def train(self) -> TrainLoader: ...
    @property
    def test(self) -> Iterable[Batch]: ...


class BezierCurve(nn.Module):
    """A Bézier curve between two networks (Garipov et al. 2018, section 3); its parameters are the inner points.

        θ(t) = Σᵢ C(n, i) tⁱ (1−t)ⁿ⁻ⁱ pᵢ,   p₀ = start, pₙ = end, n = bends + 1

    One bend gives θ(t) = (1−t)²·start + 2t(1−t)·bend + t²·end; none gives the straight line. The bends begin on that
    line, bend i at the fraction i/n of it, so that the curve does too. The endpoints never move.

    Args:
        start, end: weights of two networks of the same architecture.
        bends: number of inner control points.

    >>> curve = BezierCurve({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    >>> curve.point(0.25)["w"].tolist()
    [0.25, 0.25]
    """

    _ends: Tensor

    def __init__(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor], *, bends: int = 1) -> None:
        super().__init__()
        if bends < 0:
            raise ValueError(f"bends is {bends}; give 0 for the straight line or a positive number of control points")
        self._like = {name: tensor.detach().to("meta") for name, tensor in start.items()}
        # Flat vectors: a point of the curve is a few large operations, however many layers the network has. Endpoints
        # are checkpoints already, hence not persistent: the state of the curve is its bends.
        ends = _vector(start, self._like, "start", "start"), _vector(end, self._like, "start", "end")
        self.register_buffer("_ends", torch.stack(ends), persistent=False)
        self.bends = nn.ParameterList([torch.lerp(*ends, i / (bends + 1)) for i in range(1, bends + 1)])

    def point(self, t: float) -> Weights:
        """Return the weights θ(t), differentiable in the bends."""
        if not 0 <= t <= 1:
            raise ValueError(f"t is {t}; the curve runs from t=0 (start) to t=1 (end)")
        n = len(self.bends) + 1
        first, *inner, last = (math.comb(n, i) * t**i * (1 - t) ** (n - i) for i in range(n + 1))
        vector = (first * self._ends[0]).add_(self._ends[1], alpha=last)
        for coefficient, bend in zip(inner, self.bends, strict=True):
            vector = vector.add(bend, alpha=coefficient)
        return _weights(vector, self._like)

    def control_points(self) -> list[Weights]:
        """Return copies of start, the bends, and end."""
        return [_weights(vector.detach().clone(), self._like) for vector in (self._ends[0], *self.bends, self._ends[1])]


@dataclass(frozen=True)
class FitRecord:
    """One epoch of a fit: means over its minibatches, each at its own random t; accuracy in percent."""

    epoch: int
    lr: float
    loss: float
    accuracy: float
    seconds: float


def fit_curve(
    model: nn.Module,
    curve: BezierCurve,
    loaders: Loaders,
    *,
    epochs: int = 300,
    first_epoch: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    schedule: Callable[[int], float] | None = None,
    loss_fn: LossFn = cross_entropy,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> Iterator[FitRecord]:
    """Bend the curve into the valley, epoch by epoch: minimise E[loss(θ(t))] over t ~ U(0, 1), one t a minibatch.

    The model lends its architecture and stays as it was. All that an epoch draws (t, dropout) follows from
    ``(seed, epoch)``: to resume, load the states of curve and optimizer and go on at ``first_epoch``.

    Args:
        loaders: ``loaders.train.epoch(e)`` gives the minibatches of epoch e = first_epoch … epochs.
        optimizer: one over ``curve.parameters()``; by default SGD with lr .1 and momentum .9, as published for VGG16.
        schedule: the learning rate of epoch e; by default the optimizer's own.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``.

    >>> from types import SimpleNamespace
    >>> data = type("Data", (list,), {"epoch": lambda self, e: self})([(torch.eye(2), torch.tensor([0, 1]))])
    >>> curve = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)})
    >>> fit = fit_curve(nn.Linear(2, 2, bias=False), curve, SimpleNamespace(train=data), epochs=2)
    >>> [record.epoch for record in fit]
    [1, 2]

    Reference: Garipov et al. 2018, section 3.2. Raises FloatingPointError after an epoch that left the finite numbers.
    """
    check_alike(dict(model.named_parameters()), curve.point(0), "the model", "the curve")
    if not curve.bends:
        raise ValueError("curve has bends=0 and nothing to fit; build it with bends=1 or more")
    if optimizer is None:
        optimizer = torch.optim.SGD(curve.parameters(), lr=0.1, momentum=0.9)
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(p) for p in curve.parameters()}:
        raise ValueError("optimizer trains other tensors than the curve's bends; build it over curve.parameters()")
    network = copy.deepcopy(model).train()  # the caller's model keeps its mode
    for epoch in range(first_epoch, epochs + 1):
        began = time.perf_counter()
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(epoch)
        with _seeded(seed * 1_000_003 + epoch, curve.bends[0].device):
            totals = _fit_epoch(network, curve, loaders.train.epoch(epoch), optimizer, loss_fn, autocast)
        loss, error = _means(totals, "loaders.train.epoch")
        lr = float(optimizer.param_groups[0]["lr"])
        if not (math.isfinite(loss) and all(bend.isfinite().all() for bend in curve.bends)):
            raise FloatingPointError(f"the fit diverged in epoch {epoch} (mean loss {loss}, lr {lr:g}); lower lr")
        yield FitRecord(epoch, lr, loss, 100 - error, time.perf_counter() - began)


def _fit_epoch(
    network: nn.Module,
    curve: BezierCurve,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    autocast: torch.dtype | None,
) -> Tensor:
    # Buffers of its own: nothing but curve and optimizer lives on from one epoch to the next.
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    device = curve.bends[0].device
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        point = curve.point(torch.rand((), dtype=torch.float64, device="cpu").item())
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            outputs = functional_call(network, {**point, **buffers}, (inputs,))
            loss = loss_fn(outputs, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        totals += _tally(outputs.detach(), targets, loss.detach())
    return totals


@dataclass(frozen=True)
class Measurement:
    """At a place, (t,) or (x, y): mean loss, and error in percent (nan where targets are not class numbers)."""

    place: Place
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float


class Evaluator:
    """Measures many points of weight space on one data set: ``evaluator(weights) -> Measurement``.

    Evaluation mode, plain data, a copy of the model. BatchNorm statistics are re-estimated at every point: mean and
    variance of each training batch, averaged over the training samples (without dropout, so that nothing is random).
    Batches stay on the device. On CUDA the forward pass is captured once a batch shape; the host waits once a point.

    Args:
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``.
        channels_last: hold convolution weights in that memory format; images follow in the first layer.
        capture: replay CUDA graphs; by default on CUDA. Turn off for a network whose forward waits for the device.

    >>> from types import SimpleNamespace
    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> evaluate = Evaluator(nn.Linear(2, 2, bias=False), SimpleNamespace(train=data, test=data))
    >>> evaluate({"weight": 100 * torch.eye(2)}).test_error
    0.0
    """

    def __init__(
        self,
        model: nn.Module,
        loaders: Loaders,
        *,
        loss_fn: LossFn = cross_entropy,
        autocast: torch.dtype | None = None,
        channels_last: bool = False,
        capture: bool | None = None,
    ) -> None:
        self._network = copy.deepcopy(model).eval().requires_grad_(False)
        self._device = next(self._network.parameters()).device
        norms = [m for m in self._network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        for norm in norms:
            norm.momentum = 1.0  # a pass in training mode leaves that batch's statistics alone in the buffers
        self._norms = nn.ModuleList(norms).eval()
        if channels_last:
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if capture and self._device.type != "cuda":
            raise ValueError(f"capture is True but the model is on {self._device}; move it to a CUDA device")
        # fork_rng: a torch DataLoader draws from the global generator when it is iterated.
        with torch.random.fork_rng(devices=[]):
            self._train, self._test = list(loaders.train), list(loaders.test)
        self._loss_fn, self._autocast = loss_fn, autocast
        self._capture = self._device.type == "cuda" if capture is None else capture
        self._graphs: dict[Hashable, _CapturedScore] = {}

    @torch.no_grad()
    def __call__(self, weights: Mapping[str, Tensor], place: Place = ()) -> Measurement:
        """Measure the weights; ``place`` is where they lie, for the record."""
        put(self._network, weights)
        with torch.cuda.device_of(next(self._network.parameters())):  # type: ignore[no-untyped-call]
            if self._norms:
                self._estimate_statistics()
            train, test = torch.stack([self._totals(self._train), self._totals(self._test)]).cpu()  # the one wait
        return Measurement(place, *_means(train, "loaders.train"), *_means(test, "loaders.test"))

    def _estimate_statistics(self) -> None:
        """Give BatchNorm the batch statistics of these weights, averaged over the training samples."""
        statistics = [buffer for buffer in self._norms.buffers() if buffer.is_floating_point()]
        torch._foreach_zero_(statistics)  # a nan of the last point would stay: 0 · nan = nan
        sums, seen = [torch.zeros_like(statistic) for statistic in statistics], 0
        self._norms.train()
        for inputs, targets in self._train:
            self._step(inputs, targets)
            torch._foreach_add_(sums, statistics, alpha=len(inputs))
            seen += len(inputs)
        self._norms.eval()
        torch._foreach_copy_(statistics, torch._foreach_div(sums, max(seen, 1)))

    def _totals(self, batches: list[Batch]) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        for inputs, targets in batches:
            totals += self._step(inputs, targets)
        return totals

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if not self._capture:
            return self._score(inputs, targets)
        key = (self._norms.training, inputs.shape, inputs.dtype, targets.shape, targets.dtype)
        if key not in self._graphs:
            self._graphs[key] = _CapturedScore(self._score, inputs, targets)
        return self._graphs[key](inputs, targets)

    def _score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # cache_enabled: a captured pass must cast the weights that it finds when it is replayed.
        lower = self._autocast is not None
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=lower, cache_enabled=False):
            outputs = self._network(inputs)
            loss = self._loss_fn(outputs, targets)
        return _tally(outputs, targets, loss)


class _CapturedScore:
    """The score of one batch shape as a CUDA graph: reads the weights where they lie, writes one fixed result."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        # The first passes choose algorithms and take workspace, which must not be captured.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                score(self._inputs, self._targets)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may use the device meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = score(self._inputs, self._targets)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._result


def profile_points(measure: Evaluator, point: Callable[..., Weights], places: Iterable[Place]) -> Iterator[Measurement]:
    """Measure ``point(*place)`` place by place, with the ``point`` of a curve or plane; resume with the places left."""
    for place in places:
        with torch.no_grad():
            weights = point(*place)
        yield measure(weights, place)


@dataclass(frozen=True)
class CurveProfile:
    """The points of a curve in the order of t, and what they say of the valley."""

    points: tuple[Measurement, ...]

    @property
    def highest(self) -> Measurement:
        """Where the barrier is: the point of greatest training loss (nan counts as the greatest)."""
        return max(self.points, key=lambda point: _nan_is_worst(point.train_loss))

    @property
    def barrier(self) -> float:
        """max loss − loss of the worse endpoint, on the training data: 0 when the curve stays in the valley."""
        return self.highest.train_loss - max(self.points[0].train_loss, self.points[-1].train_loss)

    @property
    def best(self) -> Measurement:
        """The point of least test error; of equals, that of least test loss."""
        return min(self.points, key=lambda point: (_nan_is_worst(point.test_error), _nan_is_worst(point.test_loss)))


def curve_profile(
    model: nn.Module, curve: BezierCurve, loaders: Loaders, *, points: int = 61, **options: Any
) -> CurveProfile:
    """Measure the curve at ``points`` equidistant t from 0 to 1, endpoints included. ``options`` are the `Evaluator`'s.

    >>> from types import SimpleNamespace
    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> line = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)}, bends=0)
    >>> curve_profile(nn.Linear(2, 2, bias=False), line, SimpleNamespace(train=data, test=data), points=3).best.place
    (1.0,)
    """
    if points < 2:
        raise ValueError(f"points is {points}; a profile needs at least its two endpoints")
    places = [(i / (points - 1),) for i in range(points)]
    return CurveProfile(tuple(profile_points(Evaluator(model, loaders, **options), curve.point, places)))


class Plane:
    """The plane through three networks, with orthonormal axes (Garipov et al. 2018, figure 1).

        u = (w₁ − w₀)/‖w₁ − w₀‖,   v ∝ (w₂ − w₀) − ⟨w₂ − w₀, u⟩u,   weights = w₀ + x·u + y·v

    Args:
        w0, w1, w2: weights of networks of the same architecture, not on one line; of a curve, its start, end and bend.

    >>> plane = Plane({"w": torch.zeros(3)}, {"w": torch.tensor([2.0, 0, 0])}, {"w": torch.tensor([1.0, 3, 0])})
    >>> plane.coordinates({"w": torch.tensor([1.0, 1, 0])})
    (1.0, 1.0)
    """

    def __init__(self, w0: Mapping[str, Tensor], w1: Mapping[str, Tensor], w2: Mapping[str, Tensor]) -> None:
        self._like = {name: tensor.detach().to("meta") for name, tensor in w0.items()}
        vectors = [_vector(w, self._like, "w0", f"w{i}") for i, w in enumerate((w0, w1, w2))]
        # Double, because x and y are small differences of long vectors.
        self._origin, second, third = (vector.double() for vector in vectors)
        across, beyond = second - self._origin, third - self._origin
        rounding = 4 * torch.finfo(vectors[0].dtype).eps * max(v.norm().item() for v in (self._origin, across, beyond))
        if across.norm() <= rounding:
            raise ValueError("w0 and w1 are the same point; a plane needs three networks that differ")
        self._u = across / across.norm()
        rest = beyond - (beyond @ self._u) * self._u
        if rest.norm() <= rounding:
            raise ValueError("w2 is on the line through w0 and w1; give a third network off it, or fit the curve first")
        self._v = rest / rest.norm()
        self.corners = tuple(self.coordinates(w) for w in (w0, w1, w2))

    def coordinates(self, weights: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return (x, y) of the weights' orthogonal projection on the plane."""
        offset = _vector(weights, self._like, "the plane", "weights").to(self._origin) - self._origin
        return (offset @ self._u).item(), (offset @ self._v).item()

    def point(self, x: float, y: float) -> Weights:
        """Return the weights w₀ + x·u + y·v."""
        return _weights(torch.add(self._origin, self._u, alpha=x).add_(self._v, alpha=y), self._like)

    def grid(self, grid: int = 21, margin: float = 0.2) -> list[tuple[float, float]]:
        """Return grid × grid places (x, y), x fastest: the networks' box and ``margin`` of it on each side."""
        if grid < 2 or not 0 <= margin < math.inf:
            raise ValueError(f"grid is {grid} and margin {margin}; give at least 2 points a side and a margin ≥ 0")
        steps = [(1 + 2 * margin) * i / (grid - 1) - margin for i in range(grid)]
        xs, ys = zip(*self.corners, strict=True)
        return [(min(xs) + a * (max(xs) - min(xs)), min(ys) + b * (max(ys) - min(ys))) for b in steps for a in steps]


def plane_profile(
    model: nn.Module, plane: Plane, loaders: Loaders, *, grid: int = 21, margin: float = 0.2, **options: Any
) -> list[Measurement]:
    """Measure the places of ``plane.grid(grid, margin)``, in that order, as `curve_profile` does those of a curve."""
    return list(profile_points(Evaluator(model, loaders, **options), plane.point, plane.grid(grid, margin)))


def _vector(weights: Mapping[str, Tensor], like: Weights, like_is: str, weights_is: str) -> Tensor:
    """Return the weights as one vector in the order of ``like``, or refuse those of another network."""
    check_alike(like, weights, like_is, weights_is)
    return flatten({name: weights[name] for name in like})


def _weights(vector: Tensor, like: Weights) -> Weights:
    return {name: piece.to(like[name].dtype) for name, piece in unflatten(vector, like).items()}


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _tally(outputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
    """Return batch size · (loss, error in percent, 1), to be summed over batches."""
    known = not targets.is_floating_point()
    wrong = (outputs.argmax(1) != targets).double().mean() if known else torch.full_like(loss, math.nan)
    return torch.stack([loss.double(), 100 * wrong.double(), torch.ones_like(loss).double()]) * len(targets)


def _means(totals: Tensor, source: str) -> tuple[float, float]:
    loss, error, size = totals.tolist()
    if size == 0:
        raise ValueError(f"{source} gave no batches; there is nothing to measure on")
    return loss / size, error / size


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run the body on random numbers of its own; the caller's come back as they were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # Not torch.manual_seed, which seeds every device, also those whose state is not kept.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d.index] for d in cuda)):
            generator.manual_seed(seed)
        yield
