"""Curves, planes and the measurements along them, against valleys whose shape is known."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any, NamedTuple

import pytest
import torch
from marks import GPU
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from dirprune._support.batches import Batch
from dirprune._support.graphs import Captured
from dirprune.connect import BezierCurve, CurveProfile, FitRecord, Plane, curve_profile, fit_curve, plane_profile
from dirprune.connect.landscape import Evaluator, Measurement, profile_points
from dirprune.weights import Weights, flatten, put, take

DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


class Batches(list[Batch]):
    """Fixed batches; their order in an epoch depends on its number alone."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        return (self[i] for i in order.tolist())


class Loaders(NamedTuple):
    train: Any
    test: Any


def loaders_of(train: list[Batch], test: list[Batch] | None = None) -> Loaders:
    return Loaders(Batches(train), Batches(test or train))


class Landscape(nn.Module):
    """A network with two weights, whose output is a given function of them, whatever the inputs."""

    def __init__(self, height: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.height = height

    def forward(self, inputs: Tensor) -> Tensor:
        return self.height(self.w).expand(len(inputs))


def at(x: float, y: float) -> Weights:
    return {"w": torch.tensor([x, y], dtype=torch.float32)}


def output_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


PARABOLA = Landscape(lambda w: (w[1] - w[0] ** 2) ** 2)
RING = Landscape(lambda w: (w.square().sum() - 1) ** 2)
NO_CLASSES = loaders_of([(torch.zeros(1, 1), torch.zeros(1))] * 20)


def fit(model: nn.Module, curve: BezierCurve, loaders: Loaders, **options: Any) -> list[FitRecord]:
    return list(fit_curve(model, curve, loaders.train, **options))


def profile_of(model: nn.Module, curve: BezierCurve, loaders: Loaders, **options: Any) -> CurveProfile:
    return curve_profile(model, curve, *loaders, **options)


def points_of(count: int, *, size: int, seed: int = 0, shape: tuple[int, ...] = (4,)) -> list[Batch]:
    """Two classes given by the sign of a fixed projection; the last batch is short if ``size`` does not divide."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, *shape, generator=generator)
    targets = (inputs.flatten(1).sum(1) > 0).long()
    return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))


def on(device: str, batches: list[Batch]) -> list[Batch]:
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def normalised(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


class Growing(nn.Module):
    """A layer with a buffer that changes in training and that, unlike BatchNorm's, affects the output there."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.scale.mul_(1.1)
        return torch.tanh(self.scale.clone() * inputs)


def convolutional(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4 * 16, 2))


def trained(model: nn.Module, batches: list[Batch], *, epochs: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for inputs, targets in batches * epochs:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    return model


# The curve.


def test_one_bend_is_the_published_quadratic() -> None:
    start, end, bend = at(1, 2), at(-3, 5), torch.tensor([7.0, -4.0])
    curve = BezierCurve(start, end)
    with torch.no_grad():
        curve.bends[0].copy_(bend)
    for t in (0.0, 0.125, 0.25, 0.5, 0.75, 1.0):
        expected = (1 - t) ** 2 * start["w"] + 2 * t * (1 - t) * bend + t**2 * end["w"]
        assert torch.equal(curve.point(t)["w"], expected)


@pytest.mark.parametrize("bends", [0, 1, 2, 5])
def test_ends_are_exact_and_the_unfitted_curve_is_the_straight_line(bends: int) -> None:
    start, end = take(normalised(0)), take(normalised(1))
    curve = BezierCurve(start, end, bends=bends)
    assert all(torch.equal(curve.point(0)[name], start[name]) for name in start)
    assert all(torch.equal(curve.point(1)[name], end[name]) for name in start)
    for i, control in enumerate(curve.control_points()):
        torch.testing.assert_close(flatten(control), torch.lerp(flatten(start), flatten(end), i / (bends + 1)))
    torch.testing.assert_close(flatten(curve.point(0.3)), torch.lerp(flatten(start), flatten(end), 0.3))


def test_higher_degrees_follow_de_casteljau() -> None:
    curve = BezierCurve(at(0, 0), at(1, 0), bends=3)
    with torch.no_grad():
        for bend in curve.bends:
            bend.normal_(generator=torch.Generator().manual_seed(3))
    points = torch.stack([control["w"] for control in curve.control_points()])
    while len(points) > 1:
        points = torch.lerp(points[:-1], points[1:], 0.37)
    torch.testing.assert_close(curve.point(0.37)["w"], points[0])


def test_only_the_bends_are_parameters_and_state() -> None:
    curve = BezierCurve(take(normalised(0)), take(normalised(1)), bends=2)
    size = flatten(take(normalised(0))).numel()
    assert [p.numel() for p in curve.parameters()] == [size, size]
    assert list(curve.state_dict()) == ["bends.0", "bends.1"]


def test_a_point_is_differentiable_in_the_bend_with_its_coefficient() -> None:
    curve = BezierCurve(take(normalised(0)), take(normalised(1)))
    total = torch.stack([piece.sum() for piece in curve.point(0.25).values()]).sum()
    (gradient,) = torch.autograd.grad(total, list(curve.parameters()))
    torch.testing.assert_close(gradient, torch.full_like(curve.bends[0], 2 * 0.25 * 0.75))


def test_t_may_lie_in_a_tensor() -> None:
    curve = BezierCurve(take(normalised(0)), take(normalised(1)), bends=2)
    for t in (0.0, 0.3, 1.0):
        assert torch.equal(flatten(curve.point(torch.tensor(t, dtype=torch.float64))), flatten(curve.point(t)))


def test_the_order_of_names_does_not_matter() -> None:
    start, end = take(normalised(0)), take(normalised(1))
    point = BezierCurve(start, dict(reversed(end.items()))).point(1)
    assert all(torch.equal(point[name], end[name]) for name in end)


def test_mixed_precisions_are_kept() -> None:
    start = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    assert {n: p.dtype for n, p in BezierCurve(start, start).point(0.5).items()} == {
        n: p.dtype for n, p in start.items()
    }


class Noting(nn.Module):
    """Keeps a running mean of its inputs, even in eval mode."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.layer, self.rebinds = nn.Linear(4, 3), rebinds
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = 0.5 * self.mean + 0.5 * x.mean(0)
        if self.rebinds:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return self.layer(x - mean)


@pytest.mark.parametrize("rebinds", [True, False])
def test_no_point_depends_on_those_measured_before_it(rebinds: bool) -> None:
    model = Noting(rebinds)
    data = [(inputs + 1, targets % 3) for inputs, targets in points_of(8, size=4)]
    profile = curve_profile(model, BezierCurve(take(model), take(model)), *loaders_of(data, data), points=3)
    assert len({astuple(point)[1:] for point in profile.points}) == 1
    assert profile.points[0].train_loss == profile.points[0].test_loss
    assert not model.mean.any()


def test_bad_curves_are_refused_by_name() -> None:
    wider = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 2))
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(8, 4\) in start and \(9, 4\) in end"):
        BezierCurve(take(normalised(0)), take(wider))
    with pytest.raises(ValueError, match=r"'1\.weight' is in start but not in end"):
        BezierCurve(take(normalised(0)), take(nn.Sequential(nn.Linear(4, 8))))
    for bends in (-1, 1.5):
        with pytest.raises(ValueError, match=f"bends is {bends}"):
            BezierCurve(at(0, 0), at(1, 1), bends=bends)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'w' is torch\.float32 on cpu in start and torch\.float64 on cpu in end"):
        BezierCurve(at(0, 0), {"w": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"t is 1\.5"):
        BezierCurve(at(0, 0), at(1, 1)).point(1.5)


# The fit.


@pytest.mark.parametrize("build", [None, lambda parameters: torch.optim.Adam(parameters, lr=0.1)], ids=["sgd", "adam"])
def test_the_fit_finds_a_valley_that_is_a_parabola(build: Callable[[Any], torch.optim.Optimizer] | None) -> None:
    """(y − x²)² vanishes on the curve from (−1, 1) to (1, 1) whose bend is (0, −1), and on no other."""
    curve = BezierCurve(at(-1, 1), at(1, 1))
    optimizer = build(curve.parameters()) if build else None
    before = curve_profile(PARABOLA, curve, *NO_CLASSES, loss_fn=output_itself)
    records = fit(PARABOLA, curve, NO_CLASSES, epochs=40, optimizer=optimizer, loss_fn=output_itself)
    after = curve_profile(PARABOLA, curve, *NO_CLASSES, loss_fn=output_itself)
    assert (before.barrier, before.highest.place) == (1.0, (0.5,))
    torch.testing.assert_close(curve.bends[0].detach(), torch.tensor([0.0, -1.0]), atol=1e-2, rtol=0)
    assert after.barrier < 1e-4
    assert records[-1].loss < 1e-4 < records[0].loss
    assert [record.epoch for record in records] == list(range(1, 41))


@pytest.mark.parametrize(("bends", "height"), [(1, 1e-3), (2, 1e-4)])
def test_the_barrier_across_a_ring_vanishes_on_the_way_around_it(bends: int, height: float) -> None:
    """(|w|² − 1)²: the chord of a quarter circle climbs to ¼ at its middle; the more bends, the nearer to the arc."""
    line, curve = BezierCurve(at(1, 0), at(0, 1), bends=0), BezierCurve(at(1, 0), at(0, 1), bends=bends)
    fit(RING, curve, NO_CLASSES, epochs=30, loss_fn=output_itself, schedule=lambda epoch: 0.1 if epoch < 20 else 0.01)
    across = curve_profile(RING, line, *NO_CLASSES, loss_fn=output_itself)
    around = curve_profile(RING, curve, *NO_CLASSES, loss_fn=output_itself)
    assert across.barrier == pytest.approx(0.25)
    assert around.barrier < height


def test_one_uniform_t_a_minibatch() -> None:
    drawn: list[float] = []

    class Watched(BezierCurve):
        def point(self, t: float | Tensor) -> Weights:
            drawn.append(float(t))
            return super().point(t)

    fit(RING, Watched(at(1, 0), at(0, 1)), NO_CLASSES, epochs=50, loss_fn=output_itself)
    drawn.pop(0)  # the check that curve and model match takes one point
    ordered = torch.tensor(drawn).sort().values
    ranks = torch.arange(1, len(drawn) + 1) / len(drawn)
    assert len(set(drawn)) == 50 * 20
    assert (ordered - ranks).abs().max() < 1.63 / math.sqrt(len(drawn))  # Kolmogorov-Smirnov test at the 1% level


def test_the_schedule_sets_the_recorded_learning_rate() -> None:
    records = fit(
        RING,
        BezierCurve(at(1, 0), at(0, 1)),
        NO_CLASSES,
        epochs=3,
        loss_fn=output_itself,
        schedule=lambda e: 1 / (10 * e),
    )
    assert [record.lr for record in records] == [1 / 10, 1 / 20, 1 / 30]


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_fit_equals_an_uninterrupted_one_bit_for_bit(device: str) -> None:
    model, first, last = (nn.Sequential(Growing(), *normalised(seed)).to(device) for seed in range(3))
    start, end, loaders = take(first), take(last), loaders_of(on(device, points_of(60, size=20)))

    def prepared() -> tuple[BezierCurve, torch.optim.Optimizer]:
        curve = BezierCurve(start, end)
        return curve, torch.optim.SGD(curve.parameters(), lr=0.1, momentum=0.9)

    whole, optimizer = prepared()
    expected = fit(model, whole, loaders, epochs=4, optimizer=optimizer, seed=5)
    half, optimizer = prepared()
    records = fit(model, half, loaders, epochs=2, optimizer=optimizer, seed=5)
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict()))
    torch.manual_seed(1234)
    rest, optimizer = prepared()
    rest.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    records += fit(model, rest, loaders, epochs=4, first_epoch=3, optimizer=optimizer, seed=5)
    assert torch.equal(rest.bends[0], whole.bends[0])
    assert [(r.epoch, r.lr, r.loss, r.accuracy) for r in records] == [
        (r.epoch, r.lr, r.loss, r.accuracy) for r in expected
    ]
    other, optimizer = prepared()
    fit(model, other, loaders, epochs=4, optimizer=optimizer, seed=6)
    assert not torch.equal(other.bends[0], whole.bends[0])


def test_fitting_uses_batch_statistics_and_leaves_the_running_ones() -> None:
    """By the running mean, one class would be a thousand standard deviations ahead for every input."""
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False))
    mean = model[1].running_mean
    assert mean is not None
    mean[0] = 1000.0
    curve = BezierCurve(take(model), {name: w + 1 for name, w in take(model).items()})
    (record,) = fit(model.eval(), curve, loaders_of(points_of(40, size=20)), epochs=1)
    assert record.loss < 5
    assert mean.tolist() == [1000.0, 0.0]


def test_fitting_uses_dropout() -> None:
    """A dropout of 1 zeroes all logits, which gives a loss of log 2; it acts only if the fit uses training mode."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(1.0))
    curve = BezierCurve(take(model), {name: w + 1 for name, w in take(model).items()})
    (record,) = fit(model.eval(), curve, loaders_of(points_of(40, size=20)), epochs=1)
    assert record.loss == pytest.approx(math.log(2))


def test_a_diverging_fit_stops_and_says_where() -> None:
    curve = BezierCurve(at(-1, 1), at(1, 1))
    optimizer = torch.optim.SGD(curve.parameters(), lr=1e6)
    with pytest.raises(FloatingPointError, match=r"diverged in epoch 1 .*lr 1e\+06"):
        fit(PARABOLA, curve, NO_CLASSES, epochs=2, optimizer=optimizer, loss_fn=output_itself)


def test_a_fit_that_cannot_be_is_refused() -> None:
    curve, loaders = BezierCurve(at(1, 0), at(0, 1)), loaders_of(points_of(20, size=20))
    with pytest.raises(ValueError, match=r"'0\.weight' is in the model but not in the curve"):
        fit(normalised(0), curve, loaders)
    with pytest.raises(ValueError, match="bends=0"):
        fit(RING, BezierCurve(at(1, 0), at(0, 1), bends=0), loaders)
    with pytest.raises(ValueError, match="other tensors"):
        fit(RING, curve, loaders, optimizer=torch.optim.SGD(RING.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no batches"):
        fit(RING, curve, Loaders([], []), epochs=1)


def test_a_capture_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="capture is True but the curve is on cpu"):
        fit(RING, BezierCurve(at(1, 0), at(0, 1)), NO_CLASSES, capture=True)


def test_a_loader_without_epochs_is_iterated_anew_for_each() -> None:
    torch.manual_seed(0)
    examples = [(torch.randn(2), torch.tensor(i % 2)) for i in range(12)]
    loaders = Loaders(DataLoader(examples, batch_size=4, shuffle=True), None)
    ends = {"weight": torch.eye(2)}, {"weight": -torch.eye(2)}
    losses = []
    for seed in (1, 1, 2):
        curve = BezierCurve(*ends)
        records = fit_curve(nn.Linear(2, 2, bias=False), curve, loaders.train, epochs=2, seed=seed)
        losses.append([record.loss for record in records])
    assert losses[0] == losses[1] != losses[2]  # the order of a shuffling loader follows from the seed too


def test_what_is_not_weights_by_name_and_a_fit_without_epochs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"end is a Tensor; give weights by name, as dirprune.weights.take\(model\)"):
        BezierCurve({"weight": torch.ones(2)}, torch.ones(2))  # type: ignore[arg-type]
    curve = BezierCurve({"weight": torch.eye(2)}, {"weight": torch.eye(2)})
    with pytest.raises(ValueError, match="epochs is 0; a fit needs at least one"):
        next(fit_curve(nn.Linear(2, 2, bias=False), curve, [], epochs=0))


def test_compiled_networks_fit_and_measure_as_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit compiles once, for batches of the common size; measuring compiles for every size."""
    compiled_for: list[tuple[int, ...]] = []
    torch.compiler.reset()  # torch compiles a function for at most eight kinds of arguments, other tests' included

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled_for.append(next(tuple(x.shape) for x in inputs if x.shape[1:] == (3, 8, 8)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    start, end = take(convolutional(1)), take(convolutional(2))
    loaders = loaders_of(points_of(56, size=16, shape=(3, 8, 8)))
    monkeypatch.setattr(Batches, "epoch", lambda self, epoch: iter(self))  # not shuffled: the short batch comes last
    results = []
    for compiled in (False, True):
        curve = BezierCurve(start, end)
        fit(convolutional(0), curve, loaders, epochs=2, compiled=compiled, schedule=lambda epoch: 0.05)
        if compiled:
            assert compiled_for == [(16, 3, 8, 8)]
        profile = curve_profile(convolutional(0), curve, *loaders, points=2, compiled=compiled)
        results.append([*(astuple(point) for point in profile.points), curve.bends[0].tolist()])
    assert results[0] == results[1]
    assert set(compiled_for) == {(16, 3, 8, 8), (8, 3, 8, 8)}


def test_control_points_are_copies() -> None:
    curve = BezierCurve({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    for point in curve.control_points():
        point["w"].fill_(9.0)
    assert curve.point(0.5)["w"].tolist() == [0.5, 0.5]


def test_a_fit_whose_last_step_leaves_the_numbers_is_refused() -> None:
    loaders = Loaders([(torch.eye(2), torch.tensor([0, 1]))], None)
    curve = BezierCurve({"weight": torch.eye(2)}, {"weight": -torch.eye(2)})
    optimizer = torch.optim.SGD(curve.parameters(), lr=math.inf)
    with pytest.raises(FloatingPointError, match="diverged in epoch 1"):
        list(fit_curve(nn.Linear(2, 2, bias=False), curve, loaders.train, epochs=1, optimizer=optimizer))


def test_a_weight_that_the_network_does_not_use_stays_on_the_line() -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2, bias=False)
            self.spare = nn.Parameter(torch.ones(3))

    start = take(Spare())
    curve = BezierCurve(start, {name: weight + 1 for name, weight in start.items()})
    loaders = Loaders([(torch.eye(2), torch.tensor([0, 1]))], None)
    assert len(list(fit_curve(Spare(), curve, loaders.train, epochs=1))) == 1
    assert curve.control_points()[1]["spare"].tolist() == [1.5] * 3


def with_shared_layer(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


def test_a_shared_layer_is_fitted_and_measured_as_one() -> None:
    """Compare with a loop in which the network is written out by hand."""
    start, end = take(with_shared_layer(1)), take(with_shared_layer(2))
    loaders = Loaders(points_of(60, size=20), points_of(20, size=20))
    model = with_shared_layer(3)
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]

    def loss_at(w: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = nn.functional.linear(inputs, w["0.weight"], w["0.bias"])
        hidden = nn.functional.linear(torch.tanh(hidden), w["0.weight"], w["0.bias"])
        return nn.functional.cross_entropy(nn.functional.linear(hidden, w["3.weight"], w["3.bias"]), targets)

    fitted, expected = BezierCurve(start, end), BezierCurve(start, end)
    fit(model, fitted, loaders, epochs=1, seed=0, optimizer=torch.optim.SGD(fitted.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    torch.manual_seed(1)  # as the fit does for epoch 1 with seed=0
    for inputs, targets in loaders.train:
        t = torch.rand((), dtype=torch.float64).item()
        optimizer.zero_grad()
        loss_at(expected.point(t), inputs, targets).backward()
        optimizer.step()
    torch.testing.assert_close(fitted.bends[0], expected.bends[0])
    middle = curve_profile(model, fitted, *loaders, 3).points[1]
    measured = [loss_at(fitted.point(0.5), *batch).item() for batch in loaders.train]
    assert middle.train_loss == pytest.approx(sum(measured) / 3)
    assert [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)] == before


class Nested(nn.Module):
    """`normalised`, with nested inputs and outputs."""

    def __init__(self, seed: int, key: Any, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.key, self.pack = normalised(seed), key, pack

    def forward(self, inputs: Any) -> Any:
        return self.pack(self.body(inputs[self.key]))


@pytest.mark.parametrize(
    ("key", "pack"), [("x", lambda x: {"x": x, "n": 1}), (0, lambda x: (x, 1))], ids=["dict", "tuple"]
)
def test_inputs_outputs_and_targets_may_be_nested(key: Any, pack: Callable[[Any], Any]) -> None:
    plain, loss_fn = points_of(50, size=20), nn.functional.cross_entropy
    results = []
    for nested in (False, True):
        models = [Nested(seed, key, pack) if nested else normalised(seed) for seed in range(3)]
        curve = BezierCurve(take(models[1]), take(models[2]))
        batches = [(pack(inputs), {"y": targets}) for inputs, targets in plain] if nested else plain
        loaders = Loaders(batches, batches)
        loss = (lambda outputs, targets: loss_fn(outputs[key], targets["y"])) if nested else loss_fn
        records = fit(models[0], curve, loaders, epochs=2, loss_fn=loss)
        profile = curve_profile(models[0], curve, *loaders, 3, loss_fn=loss)
        results.append([r.loss for r in records] + [p.train_loss for p in profile.points])
        assert all(math.isnan(p.train_error) == nested for p in profile.points)
    assert results[1] == results[0]


def test_whole_numbers_that_are_no_classes_have_no_error() -> None:
    batches = [(torch.randn(4, 6), torch.randint(9, (4, 3)))]
    loaders, ends = loaders_of(batches), [take(nn.Linear(6, 3)) for _ in range(2)]
    options: dict[str, Any] = {"loss_fn": lambda outputs, targets: nn.functional.mse_loss(outputs, targets.float())}
    (record,) = fit(nn.Linear(6, 3), BezierCurve(*ends), loaders, epochs=1, **options)
    profile = curve_profile(nn.Linear(6, 3), BezierCurve(*ends), *loaders, 2, **options)
    assert math.isnan(record.accuracy)
    assert all(math.isnan(point.test_error) and math.isfinite(point.test_loss) for point in profile.points)


def test_a_single_example_is_left_out_of_the_statistics_and_refused_by_the_fit() -> None:
    """In the measured loss, the batch of one still counts."""
    batches = points_of(41, size=20)
    curve = BezierCurve(take(normalised(1)), take(normalised(2)))
    point = curve_profile(normalised(0), curve, *loaders_of(batches), 2).points[0]
    network = normalised(1)
    hidden = [network[0](inputs).detach() for inputs, _ in batches[:2]]
    network[1].running_mean.copy_(torch.stack([h.mean(0) for h in hidden]).mean(0))
    network[1].running_var.copy_(torch.stack([h.var(0) for h in hidden]).mean(0))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = nn.functional.cross_entropy(network.eval()(inputs), targets)
    assert point.train_loss == pytest.approx(loss.item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"a batch of one example, .*drop_last=True"):
        fit(normalised(0), curve, loaders_of(batches), epochs=1)


def test_a_fit_makes_its_own_gradients() -> None:
    loaders, bends = loaders_of(points_of(40, size=20)), []
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            curve = BezierCurve(take(normalised(1)), take(normalised(2)))
            for _ in fit_curve(normalised(0), curve, loaders.train, epochs=2):
                assert torch.is_grad_enabled() == recording
        bends.append(curve.bends[0])
    assert torch.equal(*bends)


def test_what_a_fit_cannot_use_is_refused_with_the_remedy() -> None:
    model, loaders = normalised(0), loaders_of(points_of(20, size=20))
    curve = BezierCurve(take(normalised(1)), take(normalised(2)))
    with pytest.raises(ValueError, match="optimizer is LBFGS, whose step needs a closure"):
        fit(model, curve, loaders, optimizer=torch.optim.LBFGS(curve.parameters()))
    scheduled = torch.optim.SGD(curve.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)  # wraps the optimizer's step, which must still be accepted
    assert len(fit(model, curve, loaders, epochs=1, optimizer=scheduled)) == 1
    with pytest.raises(ValueError, match=r"train is an iterator, spent after one pass"):
        fit(model, curve, Loaders(iter(loaders.train), None))
    with pytest.raises(ValueError, match=r"train gave a tuple of 3; a batch must be a pair"):
        fit(model, curve, Loaders([(*loaders.train[0], 0)], None))
    with pytest.raises(ValueError, match=r"test gave a tuple of 3; a batch must be a pair"):
        curve_profile(model, curve, loaders.train, [(*loaders.test[0], 0)])
    for measure in (fit, profile_of):
        with pytest.raises(ValueError, match=r"loss_fn returned a tensor of shape \(20,\)"):
            measure(model, curve, loaders, loss_fn=functools.partial(nn.functional.cross_entropy, reduction="none"))


def test_a_state_dict_is_not_weights() -> None:
    states = [normalised(seed).state_dict() for seed in range(3)]
    for build, name in ((lambda: BezierCurve(states[0], states[1]), "start"), (lambda: Plane(*states), "w0")):
        with pytest.raises(
            ValueError, match=rf"'1\.num_batches_tracked' in {name} is torch\.int64, not a weight; .*take\(model\)"
        ):
            build()
    model, loaders = nn.Sequential(Growing(), nn.Linear(4, 2)), loaders_of(points_of(20, size=20))
    curve = BezierCurve(model.state_dict(), model.state_dict())
    for use in (fit, profile_of):
        with pytest.raises(ValueError, match=r"'0\.scale' in .* is a buffer of the model, .*take\(model\)"):
            use(model, curve, loaders)


def test_a_graph_is_recorded_for_tensors() -> None:
    with pytest.raises(ValueError, match=r"inputs is a dict and targets a Tensor; .*capture=False"):
        Captured(lambda inputs, targets: targets)({"x": torch.ones(1)}, torch.ones(1))  # type: ignore[arg-type]


def captured_optimizer(curve: BezierCurve, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(curve.parameters(), lr=torch.tensor(lr, device="cuda"), momentum=0.9, fused=True)


@GPU
@pytest.mark.parametrize(("channels_last", "compiled"), [(False, False), (True, False), (True, True)])
def test_the_captured_fit_is_the_plain_one(
    channels_last: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum, a schedule, BatchNorm, and a ragged last batch, which has a graph of its own."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = convolutional(0).cuda()
    start, end = (take(convolutional(seed).cuda()) for seed in (1, 2))
    loaders = loaders_of(on("cuda", points_of(56, size=16, shape=(3, 8, 8))))
    options: dict[str, Any] = {"epochs": 3, "schedule": lambda epoch: 0.05 / epoch, "seed": 3}
    plain, captured = BezierCurve(start, end), BezierCurve(start, end)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = fit(model, plain, loaders, optimizer=optimizer, **options)
    optimizer = captured_optimizer(captured, 0.1)
    fast = {"capture": True, "channels_last": channels_last, "compiled": compiled}
    records = fit(model, captured, loaders, optimizer=optimizer, **fast, **options)
    moved = (plain.bends[0] - BezierCurve(start, end).bends[0]).norm()
    assert moved > 0
    assert (captured.bends[0] - plain.bends[0]).norm() < 1e-3 * moved
    assert [r.loss for r in records] == pytest.approx([r.loss for r in expected], rel=1e-4)
    assert [r.lr for r in records] == [r.lr for r in expected]


@GPU
def test_a_captured_fit_with_dropout_resumes_bit_for_bit() -> None:
    model, start, end = normalised(0).cuda(), take(normalised(1).cuda()), take(normalised(2).cuda())
    loaders = loaders_of(on("cuda", points_of(50, size=20)))
    whole, half, rest = (BezierCurve(start, end) for _ in range(3))
    expected = fit(model, whole, loaders, epochs=4, optimizer=captured_optimizer(whole, 0.1), capture=True)
    optimizer = captured_optimizer(half, 0.1)
    records = fit(model, half, loaders, epochs=2, optimizer=optimizer, capture=True)
    rest.load_state_dict(half.state_dict())
    resumed = captured_optimizer(rest, 0.1)
    resumed.load_state_dict(optimizer.state_dict())
    records += fit(model, rest, loaders, epochs=4, first_epoch=3, optimizer=resumed, capture=True)
    assert torch.equal(rest.bends[0], whole.bends[0])
    assert [r.loss for r in records] == [r.loss for r in expected]
    assert len({r.loss for r in records}) == 4


@GPU
def test_an_optimizer_that_cannot_be_captured_is_refused() -> None:
    curve = BezierCurve(take(normalised(1).cuda()), take(normalised(2).cuda()))
    loaders = loaders_of(on("cuda", points_of(50, size=20)))
    with pytest.raises(ValueError, match="fused=True and no dampening"):
        fit(normalised(0).cuda(), curve, loaders, optimizer=torch.optim.SGD(curve.parameters()), capture=True)


# The caller's model and random state.


def lent_state(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires grad": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "momentum": [getattr(module, "momentum", None) for module in model.modules()],
        "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if "cuda" in DEVICES else [])],
    }


@pytest.mark.parametrize("device", DEVICES)
def test_model_and_random_state_are_untouched_even_between_epochs_and_points(device: str) -> None:
    model, batches = normalised(0).to(device), on(device, points_of(60, size=20))
    loaders = loaders_of(batches)
    trained(model, batches, epochs=1)
    model[3].eval()
    model[4].bias.requires_grad_(False)
    start, end, other = take(model), take(normalised(1).to(device)), take(normalised(2).to(device))
    curve, plane = BezierCurve(start, end), Plane(start, end, other)
    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batches[0]), batch_size=5, shuffle=True)
    before = lent_state(model)

    def assert_untouched() -> None:
        torch.testing.assert_close(lent_state(model), before, rtol=0, atol=0)

    for _ in fit_curve(model, curve, loaders.train, epochs=2):
        assert_untouched()
    evaluator = Evaluator(model, shuffled, shuffled)
    for _ in profile_points(evaluator, curve.point, [(0.0,), (0.5,)]):
        assert_untouched()
    plane_profile(model, plane, *loaders, grid=2)
    assert_untouched()
    assert all(torch.equal(curve.point(0)[name], start[name]) for name in start)


# Measuring.


def plain_scores(model: nn.Module, weights: Weights, loaders: Loaders) -> list[float]:
    """Return losses and errors over all samples at once, after torch's own re-estimation of BatchNorm."""
    network = copy.deepcopy(model)
    put(network, weights)
    update_bn(loaders.train, network)
    network.eval()
    scores = []
    for half in (loaders.train, loaders.test):
        inputs, targets = (torch.cat(pieces) for pieces in zip(*half, strict=True))
        outputs = network(inputs)
        wrong = (outputs.argmax(1) != targets).sum().item()
        scores += [nn.functional.cross_entropy(outputs, targets).item(), 100 * wrong / len(targets)]
    return scores


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_evaluator_agrees_with_a_plain_loop(
    device: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several weights in turn, and the first ones again; with equal training batches and a ragged test batch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding depends on the batch size
    train, test = points_of(48, size=16, shape=(3, 8, 8)), points_of(35, size=16, seed=1, shape=(3, 8, 8))
    loaders = loaders_of(on(device, train), on(device, test))
    model = convolutional(0).to(device)
    evaluator = Evaluator(model, *loaders, channels_last=channels_last)
    for seed in (1, 2, 1):
        weights = take(convolutional(seed).to(device))
        measured = evaluator(weights, (0.5,))
        expected = plain_scores(model, weights, loaders)
        actual = [measured.train_loss, measured.train_error, measured.test_loss, measured.test_error]
        assert actual == pytest.approx(expected, rel=1e-4)
        assert measured.place == (0.5,)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_lowers_the_precision_and_little_else(device: str) -> None:
    loaders = loaders_of(on(device, points_of(48, size=16, shape=(3, 8, 8))))
    model = convolutional(0).to(device)
    full, low = (Evaluator(model, *loaders, autocast=dtype)(take(model)) for dtype in (None, torch.bfloat16))
    assert low.train_loss != full.train_loss
    assert low.train_loss == pytest.approx(full.train_loss, rel=0.02)


def test_uneven_batches_count_by_their_samples() -> None:
    """One BatchNorm layer by hand: statistics and loss weigh a batch by its size."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    batches = [
        (torch.tensor([[0.0, 1], [2, 5], [4, 0]]), torch.tensor([0, 0, 1])),
        (torch.tensor([[9.0, 3], [1, 3]]), torch.tensor([1, 0])),
    ]
    mean = torch.stack([len(x) * x.mean(0) for x, _ in batches]).sum(0) / 5
    variance = torch.stack([len(x) * x.var(0) for x, _ in batches]).sum(0) / 5
    inputs, targets = (torch.cat(pieces) for pieces in zip(*batches, strict=True))
    expected = nn.functional.cross_entropy((inputs - mean) / (variance + 1e-5).sqrt(), targets)
    assert Evaluator(model, *loaders_of(batches))(take(model)).train_loss == pytest.approx(expected.item(), rel=1e-5)


def test_batchnorm_ends_reproduce_the_networks_and_stale_statistics_do_not_matter() -> None:
    train, test = points_of(320, size=32), points_of(200, size=50, seed=1)
    loaders = loaders_of(train, test)
    networks = [trained(normalised(seed), train, epochs=20) for seed in (0, 1)]
    stale = normalised(2)
    stale.get_buffer("1.running_mean").fill_(100.0)
    profile = curve_profile(stale, BezierCurve(*(take(network) for network in networks)), *loaders, points=3)
    for network, measured in zip(networks, (profile.points[0], profile.points[-1]), strict=True):
        own = torch.cat([network.eval()(inputs).argmax(1) != targets for inputs, targets in test]).double().mean()
        assert measured.test_error == pytest.approx(100 * own.item(), abs=2)
        assert measured.test_error < 15
        assert measured.test_error == pytest.approx(plain_scores(network, take(network), loaders)[3])


def test_a_nan_at_one_point_does_not_reach_the_next() -> None:
    model, loaders = normalised(0), loaders_of(points_of(40, size=20))
    evaluator = Evaluator(model, *loaders)
    before = evaluator(take(model))
    assert math.isnan(evaluator({name: w * math.nan for name, w in take(model).items()}).train_loss)
    assert evaluator(take(model)) == before


def test_the_evaluator_refuses_what_it_cannot_measure() -> None:
    loaders = loaders_of(points_of(20, size=20))
    with pytest.raises(ValueError, match="capture is True but the model is on cpu"):
        Evaluator(normalised(0), *loaders, capture=True)
    with pytest.raises(ValueError, match=r"'0\.weight' is in the model but not in weights"):
        Evaluator(normalised(0), *loaders)(at(0, 0))
    with pytest.raises(ValueError, match=r"test gave no batches"):
        Evaluator(normalised(0), loaders.train, [])(take(normalised(0)))


def test_a_profile_gives_barrier_place_and_best_point() -> None:
    rows = [(0.0, 0.1, 9.0, 0.5), (0.5, 0.7, 8.0, 0.4), (0.75, 0.2, 8.0, 0.3), (1.0, 0.3, 9.5, 0.2)]
    profile = CurveProfile(tuple(Measurement((t,), loss, 0.0, test, error) for t, loss, error, test in rows))
    assert profile.barrier == pytest.approx(0.7 - 0.3)
    assert profile.highest.place == (0.5,)
    assert profile.test_barrier == pytest.approx(0.5 - 0.5)
    assert profile.highest_test.place == (0.0,)
    assert profile.best.place == (0.75,)
    broken = CurveProfile((profile.points[0], Measurement((0.5,), *[math.nan] * 4), profile.points[-1]))
    assert broken.highest.place == (0.5,)
    assert broken.best.place == (0.0,)


def test_a_profile_is_equidistant_and_can_be_taken_up_where_it_was_left() -> None:
    line = BezierCurve(at(1, 0), at(0, 1), bends=0)
    whole = curve_profile(RING, line, *NO_CLASSES, points=5, loss_fn=output_itself)
    rest = profile_points(Evaluator(RING, *NO_CLASSES, loss_fn=output_itself), line.point, [(0.5,), (0.75,), (1.0,)])
    assert [point.place for point in whole.points] == [(0.0,), (0.25,), (0.5,), (0.75,), (1.0,)]
    assert [(p.place, p.train_loss) for p in rest] == [(p.place, p.train_loss) for p in whole.points[2:]]
    assert all(math.isnan(point.train_error) for point in whole.points)
    with pytest.raises(ValueError, match="points is 1"):
        curve_profile(RING, line, *NO_CLASSES, points=1)


# The plane.


def test_plane_coordinates_invert_and_keep_distances() -> None:
    corners = [take(normalised(seed)) for seed in range(3)]
    plane = Plane(*corners)
    places = [(0.0, 0.0), (1.5, -2.0), (-0.3, 4.0)]
    for place in places:
        assert plane.coordinates(plane.point(*place)) == pytest.approx(place, abs=1e-5)
    for a in places:
        for b in places:
            apart = (flatten(plane.point(*a)) - flatten(plane.point(*b))).norm().item()
            assert apart == pytest.approx(math.dist(a, b), abs=1e-5)
    for weights, place in zip(corners, plane.corners, strict=True):
        torch.testing.assert_close(flatten(plane.point(*place)), flatten(weights))


def test_plane_axes_are_origin_second_and_orthogonalised_third() -> None:
    plane = Plane(at(1, 1), at(1, 3), at(4, 2))
    torch.testing.assert_close(torch.tensor(plane.corners), torch.tensor([[0.0, 0], [2, 0], [1, 3]]))
    assert plane.coordinates(at(0, 0)) == pytest.approx((-1, -1))


def test_plane_coordinates_of_weights_outside_are_those_of_the_nearest_point() -> None:
    plane = Plane(*(take(normalised(seed)) for seed in range(3)))
    outside = flatten(take(normalised(3)))
    nearest = flatten(plane.point(*plane.coordinates(take(normalised(3)))))
    for direction in (plane.point(1, 0), plane.point(0, 1)):
        assert (outside - nearest) @ (flatten(direction) - flatten(plane.point(0, 0))) == pytest.approx(0, abs=1e-5)


def test_the_curve_lies_in_the_plane_of_its_control_points() -> None:
    start, end, third = (take(normalised(seed)) for seed in range(3))
    curve = BezierCurve(start, end)
    with torch.no_grad():
        curve.bends[0].copy_(flatten(third))
    start, bend, end = curve.control_points()
    plane = Plane(start, end, bend)
    point = curve.point(0.3)
    torch.testing.assert_close(flatten(plane.point(*plane.coordinates(point))), flatten(point))


def test_planes_without_area_and_of_other_networks_are_refused() -> None:
    start, end = take(normalised(0)), take(normalised(1))
    with pytest.raises(ValueError, match="w2 is on the line"):
        Plane(start, end, BezierCurve(start, end).control_points()[1])
    with pytest.raises(ValueError, match="w0 and w1 are the same"):
        Plane(start, start, end)
    with pytest.raises(ValueError, match=r"'0\.weight' is in w0 but not in w2"):
        Plane(start, end, at(0, 0))
    with pytest.raises(ValueError, match=r"grid is 1 and margin 0\.2"):
        Plane(at(0, 0), at(1, 0), at(0, 1)).grid(1)
    with pytest.raises(ValueError, match="margin -1"):
        Plane(at(0, 0), at(1, 0), at(0, 1)).grid(3, -1)


def test_plane_profile_measures_the_box_and_its_margin() -> None:
    """On |w|² the loss at a place is known from its coordinates alone."""
    bowl = Landscape(lambda w: w.square().sum())
    profile = plane_profile(
        bowl, Plane(at(0, 0), at(2, 0), at(1, 1)), *NO_CLASSES, grid=3, margin=0.5, loss_fn=output_itself
    )
    expected = [(x, y) for y in (-0.5, 0.5, 1.5) for x in (-1.0, 1.0, 3.0)]
    torch.testing.assert_close(torch.tensor([point.place for point in profile.points]), torch.tensor(expected))
    assert [point.train_loss for point in profile.points] == pytest.approx([x * x + y * y for x, y in expected])


def test_an_empty_batch_counts_for_nothing() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    full, padded = loaders_of([(x, y)]), loaders_of([(x, y), (x[:0], y[:0])])
    profiles = [curve_profile(model, BezierCurve(take(model), take(other)), *each, 3) for each in (full, padded)]
    assert profiles[0] == profiles[1]
    losses = [
        [record.loss for record in fit_curve(model, BezierCurve(take(model), take(other)), each.train, epochs=1)]
        for each in (full, padded)
    ]
    assert losses[0] == losses[1]


def test_one_logit_of_two_classes_has_no_error_that_could_be_told() -> None:
    model = nn.Linear(3, 1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())

    found = Evaluator(model, *loaders_of([(torch.randn(6, 3), torch.randint(2, (6,)))]), loss_fn=loss)(take(model))
    assert math.isfinite(found.test_loss)
    assert math.isnan(found.test_error)


def test_what_is_no_weights_is_refused_by_every_curve_and_plane() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="w0 is a Linear; give weights by name"):
        Plane(model, model, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ReLU without parameters"):
        Evaluator(nn.ReLU(), *loaders_of([(torch.zeros(2, 3), torch.zeros(2))]))


def test_a_loss_that_is_a_sum_is_refused() -> None:
    model, loss_fn = nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="sum")
    curve, loaders = BezierCurve(take(model), take(model)), loaders_of([(torch.randn(6, 3), torch.randint(2, (6,)))])
    with pytest.raises(ValueError, match="loss_fn has reduction='sum'"):
        next(fit_curve(model, curve, loaders.train, loss_fn=loss_fn))
    with pytest.raises(ValueError, match="loss_fn has reduction='sum'"):
        curve_profile(model, curve, *loaders, 2, loss_fn=loss_fn)


def test_data_of_inference_mode_can_be_fitted_and_measured() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    data = torch.randn(6, 3), torch.randint(2, (6,))
    with torch.inference_mode():
        copies = data[0].clone(), data[1].clone()
    ours, theirs = (BezierCurve(take(model), take(other)) for _ in range(2))
    losses = [
        [record.loss for record in fit_curve(model, curve, [batch], epochs=2)]
        for curve, batch in ((ours, copies), (theirs, data))
    ]
    assert losses[0] == losses[1]
    assert curve_profile(model, ours, *loaders_of([copies]), 3) == curve_profile(model, theirs, *loaders_of([data]), 3)


def test_a_fit_leaves_the_inference_mode_of_its_caller() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    loaders = loaders_of([(torch.randn(6, 3), torch.randint(2, (6,)))])
    curves = [BezierCurve(take(model), take(other)) for _ in range(2)]
    with torch.inference_mode():
        inside = [record.loss for record in fit_curve(model, curves[0], loaders.train, epochs=2)]
        assert torch.is_inference_mode_enabled()
    assert inside == [record.loss for record in fit_curve(model, curves[1], loaders.train, epochs=2)]
