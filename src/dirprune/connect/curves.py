"""Mode connectivity: curves of low loss, and planes, through the weights of any networks of one architecture.

Two solutions lie in one valley if a curve joins them along which the loss does not rise. `BezierCurve` is the curve,
`fit_curve` bends it into the valley, and `curve_profile` and `plane_profile` measure the loss along it and around it.

Reference: Garipov et al., "Loss surfaces, mode connectivity, and fast ensembling of DNNs", NeurIPS 2018.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from dirprune._support.batches import Batch, Loss, examples_in, mean_loss, moved, pairs, refuse_iterator
from dirprune._support.graphs import Captured, precision, states
from dirprune._support.modes import seeded
from dirprune._support.rates import set_lr
from dirprune.connect.batchnorm import lacks_variance
from dirprune.connect.landscape import Evaluator, Measurement, means, profile_points, tally
from dirprune.weights import Weights, check_alike, check_fits, check_named, flatten, stateless, unflatten


class BezierCurve(nn.Module):
    """A Bézier curve between two networks (Garipov et al. 2018, section 3); its parameters are the inner points::

        θ(t) = Σᵢ C(n, i) tⁱ (1−t)ⁿ⁻ⁱ pᵢ,   p₀ = start, pₙ = end, n = bends + 1

    One bend gives θ(t) = (1−t)²·start + 2t(1−t)·bend + t²·end; none gives the straight line. The bends begin on that
    line, bend i at the fraction i/n of it, so that the curve starts as the straight line. The endpoints never move.

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
        if not hasattr(bends, "__index__") or bends < 0:  # integers of any kind have it
            raise ValueError(f"bends is {bends}; give 0 for the straight line or a positive number of control points")
        check_named(start, "start")
        check_named(end, "end")
        self._like = {name: tensor.detach().to("meta") for name, tensor in start.items()}
        # Flat vectors: a point of the curve takes a few large operations, however many layers the network has. The
        # endpoints are not persistent, because they are checkpoints already: the state of the curve is its bends.
        ends = _vector(start, self._like, "start", "start"), _vector(end, self._like, "start", "end")
        for name in start:
            first, last = (f"{point[name].dtype} on {point[name].device}" for point in (start, end))
            if first != last:
                raise ValueError(f"{name!r} is {first} in start and {last} in end; bring one to the other with .to")
        self.register_buffer("_ends", torch.stack(ends), persistent=False)
        self.bends = nn.ParameterList([torch.lerp(*ends, i / (bends + 1)) for i in range(1, bends + 1)])

    def point(self, t: float | Tensor) -> Weights:
        """Return the weights θ(t), differentiable in the bends; a tensor t is not checked: that would wait."""
        if not isinstance(t, Tensor):
            if not 0 <= t <= 1:
                raise ValueError(f"t is {t}; the curve runs from t=0 (start) to t=1 (end)")
            t = torch.full((), t, dtype=torch.float64, device=self._ends.device)
        n = len(self.bends) + 1
        coefficients = [math.comb(n, i) * t**i * (1 - t) ** (n - i) for i in range(n + 1)]
        first, *inner, last = (coefficient.to(self._ends.dtype) for coefficient in coefficients)
        vector = torch.addcmul(first * self._ends[0], self._ends[1], last)
        for coefficient, bend in zip(inner, self.bends, strict=True):
            vector = torch.addcmul(vector, bend, coefficient)
        return _weights(vector, self._like)

    def control_points(self) -> list[Weights]:
        """Return copies of start, the bends, and end."""
        return [_weights(vector.detach().clone(), self._like) for vector in (self._ends[0], *self.bends, self._ends[1])]


@dataclass(frozen=True)
class FitRecord:
    """One epoch of a fit: its ``lr``, means of loss and accuracy (in percent) over its minibatches, and its seconds."""

    epoch: int
    lr: float
    loss: float
    accuracy: float
    seconds: float


def fit_curve(
    model: nn.Module,
    curve: BezierCurve,
    train: Iterable[Batch],
    *,
    epochs: int = 300,
    first_epoch: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    schedule: Callable[[int], float] | None = None,
    loss_fn: Loss = cross_entropy,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
    compiled: bool = False,
    capture: bool = False,
) -> Iterator[FitRecord]:
    """Bend the curve into the valley, epoch by epoch: minimise E[loss(θ(t))] over t ~ U(0, 1), one t per batch.

    Only the model's architecture is used; the model itself does not change. All random numbers of an epoch (t, dropout)
    follow from ``(seed, epoch)``: to resume, load the states of curve and optimizer and continue at ``first_epoch``.

    Args:
        train: ``train.epoch(e)`` gives the minibatches of epoch e = first_epoch … epochs; a DataLoader, or anything
            else without ``epoch``, is iterated once per epoch. Inputs, targets and outputs may be tensors in
            any nesting, and are moved to the curve's device.
        optimizer: over ``curve.parameters()``; by default SGD with lr .1 and momentum .9, as published for VGG16.
        schedule: the learning rate of epoch e; by default the optimizer's own.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch; the record weights batches by their size.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``.
        channels_last: give images to the network in that memory format.
        compiled: `torch.compile` the network, for batches of the shape of the first one.
        capture: replay whole steps as CUDA graphs; the optimizer must then be a fused SGD with lr a CUDA tensor.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> curve = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)})
    >>> fit = fit_curve(nn.Linear(2, 2, bias=False), curve, train=data, epochs=2)
    >>> [record.epoch for record in fit]
    [1, 2]

    Reference: Garipov et al. 2018, section 3.2. Raises FloatingPointError if a loss or bend is no longer finite.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; a fit needs at least one")
    optimizer = _checked(model, curve, optimizer, capture)
    refuse_iterator(train, "train")
    kind = _CapturedFitStep if capture else _FitStep
    with torch.inference_mode(False):  # the caller may be in it
        step = kind(model, curve, optimizer, loss_fn, autocast, channels_last, compiled)
    device = curve.bends[0].device
    for epoch in range(first_epoch, epochs + 1):
        began = time.perf_counter()
        lr = float(optimizer.param_groups[0]["lr"]) if schedule is None else schedule(epoch)
        if schedule is not None:
            set_lr(optimizer, lr)
        step.reset()
        with seeded(seed * 1_000_003 + epoch, device), torch.inference_mode(False), torch.enable_grad():
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            for inputs, targets in pairs(_minibatches(train, epoch), "train"):
                if not examples_in(targets):  # its mean loss would be NaN
                    continue
                t = torch.rand((), dtype=torch.float64, device="cpu").item()
                totals += step(moved(inputs, device), moved(targets, device), t)
        loss, error = means(totals, "train")
        if not (math.isfinite(loss) and all(bend.isfinite().all() for bend in curve.bends)):
            raise FloatingPointError(f"the fit diverged in epoch {epoch} (mean loss {loss}, lr {lr:g}); lower lr")
        yield FitRecord(epoch, lr, loss, 100 - error, time.perf_counter() - began)


def _minibatches(train: Any, epoch: int) -> Iterable[Batch]:
    batches: Iterable[Batch] = train.epoch(epoch) if hasattr(train, "epoch") else train
    return batches


class _FitStep:
    """One step of the fit at a given t, not captured."""

    def __init__(
        self,
        model: nn.Module,
        curve: BezierCurve,
        optimizer: torch.optim.Optimizer,
        loss_fn: Loss,
        autocast: torch.dtype | None,
        channels_last: bool,
        compiled: bool,
    ) -> None:
        self._network = copy.deepcopy(model).train()  # the caller's model keeps its mode
        self._outputs = stateless(self._network)
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._curve, self._optimizer, self._loss_fn = curve, optimizer, loss_fn
        self._autocast, self._channels_last = autocast, channels_last
        self._compiled = torch.compile(self._outputs, dynamic=False) if compiled else self._outputs
        self._device = curve.bends[0].device
        self._shapes: list[torch.Size] = []

    def reset(self) -> None:
        """Begin an epoch with the model's own buffers: only curve and optimizer carry over from the last one."""
        for name, buffer in self._network.named_buffers():
            self._buffers[name].copy_(buffer)

    def __call__(self, inputs: Any, targets: Any, t: float | Tensor) -> Tensor:
        if self._channels_last:
            inputs = tree_map(_channels_last, inputs)
        shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._shapes = self._shapes or shapes
        forward = self._compiled if shapes == self._shapes else self._outputs  # a short last batch is not worth it
        weights = self._curve.point(t)
        # Leaves, so that only the network's derivative is compiled; the curve's follows by `backward` below.
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with precision(self._device, self._autocast):
            with _variance_asked_for():
                outputs = forward({**leaves, **self._buffers}, inputs)
            loss = mean_loss(self._loss_fn, outputs, targets)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        self._optimizer.zero_grad()
        torch.autograd.backward(list(weights.values()), gradients)  # on to the bends
        self._optimizer.step()
        with torch.no_grad():
            return tally(outputs, targets, loss)


class _CapturedFitStep(_FitStep):
    """The same step as a CUDA graph, which reads t and the learning rate from tensors on the device."""

    def __init__(self, model: nn.Module, curve: BezierCurve, optimizer: torch.optim.Optimizer, *options: Any) -> None:
        super().__init__(model, curve, optimizer, *options)
        device = self._device
        if device.type != "cuda":
            raise ValueError(f"capture is True but the curve is on {device}; move its endpoints to a CUDA device")
        for group in optimizer.param_groups:
            lr = group["lr"]
            on_device = isinstance(lr, Tensor) and lr.device == device
            if not (isinstance(optimizer, torch.optim.SGD) and group["fused"] and on_device and not group["dampening"]):
                raise ValueError(
                    f"capture is True but optimizer is {type(optimizer).__name__} with lr={lr!r}; give SGD with "
                    f"lr=torch.tensor(…, device={str(device)!r}), fused=True and no dampening"
                )
        self._t = torch.zeros((), dtype=torch.float64, device=device)
        self._replay = Captured(
            lambda inputs, targets: super(_CapturedFitStep, self).__call__(inputs, targets, self._t),
            changes=lambda: [*curve.bends, *states(optimizer), *self._buffers.values()],
        )

    def __call__(self, inputs: Any, targets: Any, t: float | Tensor) -> Tensor:
        self._t.fill_(t)
        return self._replay(inputs, targets)


def _channels_last(leaf: Any) -> Any:
    images = isinstance(leaf, Tensor) and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if images else leaf


@contextmanager
def _variance_asked_for() -> Iterator[None]:
    """Name the remedy if a batch is too small to train a BatchNorm on."""
    try:
        yield
    except ValueError as error:
        if not lacks_variance(error):
            raise
        raise ValueError(
            "train gave a batch of one example, of which BatchNorm has no variance; leave it out, e.g. with "
            "DataLoader(…, drop_last=True)"
        ) from error


def _checked(
    model: nn.Module, curve: BezierCurve, optimizer: torch.optim.Optimizer | None, capture: bool
) -> torch.optim.Optimizer:
    """Return the optimizer, by default the published one; raise if it or the curve cannot be fitted."""
    check_fits(model, curve.point(0), "the curve")
    if not curve.bends:
        raise ValueError("curve has bends=0 and nothing to fit; build it with bends=1 or more")
    if optimizer is None:
        device = curve.bends[0].device
        replayed = capture and device.type == "cuda"
        lr = torch.tensor(0.1, device=device) if replayed else 0.1
        optimizer = torch.optim.SGD(curve.parameters(), lr=lr, momentum=0.9, fused=replayed or None)
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(p) for p in curve.parameters()}:
        raise ValueError("optimizer trains other tensors than the curve's bends; build it over curve.parameters()")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer is {name}, whose step needs a closure; give one that does without, e.g. SGD, Adam")
    return optimizer


@dataclass(frozen=True)
class Profile:
    """The measured points of a curve or a plane, and the extremes among them."""

    points: tuple[Measurement, ...]

    @property
    def highest(self) -> Measurement:
        """The point with the highest training loss, where the barrier is; NaN counts as highest."""
        return max(self.points, key=lambda point: _nan_is_worst(point.train_loss))

    @property
    def highest_test(self) -> Measurement:
        """The same on the test data."""
        return max(self.points, key=lambda point: _nan_is_worst(point.test_loss))

    @property
    def best(self) -> Measurement:
        """The point with the lowest test error; among equals, the one with the lowest test loss."""
        return min(self.points, key=lambda point: (_nan_is_worst(point.test_error), _nan_is_worst(point.test_loss)))


@dataclass(frozen=True)
class CurveProfile(Profile):
    """The measured points of a curve in the order of t, and its barriers."""

    @property
    def barrier(self) -> float:
        """max loss − loss of the worse endpoint, on the training data; 0 when the curve stays in the valley."""
        return self.highest.train_loss - max(self.points[0].train_loss, self.points[-1].train_loss)

    @property
    def test_barrier(self) -> float:
        """The same on the test data."""
        return self.highest_test.test_loss - max(self.points[0].test_loss, self.points[-1].test_loss)


def curve_profile(
    model: nn.Module,
    curve: BezierCurve,
    train: Iterable[Batch],
    test: Iterable[Batch],
    points: int = 61,
    **options: Any,
) -> CurveProfile:
    """Measure loss and error along the curve on plain data, with BatchNorm statistics of their own at every point.

    With BatchNorm, ``train`` must not be sorted by class. If it shuffles, the result depends on the global seed,
    because the statistics are means over its batches; a batch of one example has no part in them.

    Args:
        model: gives the architecture; it does not change.
        curve: a curve between its weights.
        train, test: minibatches of (inputs, targets).
        points: how many equidistant t from 0 to 1, endpoints included.
        options: the `Evaluator`'s.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> line = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)}, bends=0)
    >>> curve_profile(nn.Linear(2, 2, bias=False), line, train=data, test=data, points=3).best.place
    (1.0,)
    """
    if points < 2:
        raise ValueError(f"points is {points}; a profile needs at least its two endpoints")
    places = [(i / (points - 1),) for i in range(points)]
    return CurveProfile(tuple(profile_points(Evaluator(model, train, test, **options), curve.point, places)))


class Plane:
    """The plane through three networks, with orthonormal axes (Garipov et al. 2018, figure 1)::

        u = (w₁ − w₀)/‖w₁ − w₀‖,   v ∝ (w₂ − w₀) − ⟨w₂ − w₀, u⟩u,   weights = w₀ + x·u + y·v

    Args:
        w0, w1, w2: weights of networks of the same architecture, not on one line; of a curve, its start, end and bend.

    >>> plane = Plane({"w": torch.zeros(3)}, {"w": torch.tensor([2.0, 0, 0])}, {"w": torch.tensor([1.0, 3, 0])})
    >>> plane.coordinates({"w": torch.tensor([1.0, 1, 0])})
    (1.0, 1.0)
    """

    def __init__(self, w0: Mapping[str, Tensor], w1: Mapping[str, Tensor], w2: Mapping[str, Tensor]) -> None:
        for i, w in enumerate((w0, w1, w2)):
            check_named(w, f"w{i}")
        self._like = {name: tensor.detach().to("meta") for name, tensor in w0.items()}
        vectors = [_vector(w, self._like, "w0", f"w{i}") for i, w in enumerate((w0, w1, w2))]
        # In float64, because x and y are small differences of long vectors.
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
        """Return grid × grid places (x, y), x fastest, over the networks' box and ``margin`` of it on each side."""
        if grid < 2 or not 0 <= margin < math.inf:
            raise ValueError(f"grid is {grid} and margin {margin}; give at least 2 points per side and a margin ≥ 0")
        steps = [(1 + 2 * margin) * i / (grid - 1) - margin for i in range(grid)]
        xs, ys = zip(*self.corners, strict=True)
        return [(min(xs) + a * (max(xs) - min(xs)), min(ys) + b * (max(ys) - min(ys))) for b in steps for a in steps]


def plane_profile(
    model: nn.Module,
    plane: Plane,
    train: Iterable[Batch],
    test: Iterable[Batch],
    *,
    grid: int = 21,
    margin: float = 0.2,
    **options: Any,
) -> Profile:
    """Measure the places of ``plane.grid(grid, margin)``, in that order, as `curve_profile` does those of a curve.

    ``model``, ``train``, ``test`` and ``options`` are what they are there.
    """
    return Profile(
        tuple(profile_points(Evaluator(model, train, test, **options), plane.point, plane.grid(grid, margin)))
    )


def _vector(weights: Mapping[str, Tensor], like: Weights, like_is: str, weights_is: str) -> Tensor:
    """Return the weights as one vector in the order of ``like``; raise if they belong to another network."""
    check_alike(like, weights, like_is, weights_is)
    if other := next((name for name, tensor in weights.items() if not tensor.is_floating_point()), None):
        raise ValueError(
            f"{other!r} in {weights_is} is {weights[other].dtype}, not a weight; give take(model), not state_dict()"
        )
    return flatten({name: weights[name] for name in like})


def _weights(vector: Tensor, like: Weights) -> Weights:
    return {name: piece.to(like[name].dtype) for name, piece in unflatten(vector, like).items()}


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
