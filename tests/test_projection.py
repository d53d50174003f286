"""The share of gRDA's difference from SGD in the leading eigenspace: dense algebra, resuming, and refusals."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import call, objects
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from dirprune.curvature import HessianOperator
from dirprune.lab import trust
from dirprune.lab.cli import console, drive
from dirprune.lab.cli.output import Output
from dirprune.lab.methods import MethodSpec
from dirprune.lab.plots import save
from dirprune.lab.progress import Progress
from dirprune.lab.records import checkpoint
from dirprune.lab.records.files import locked
from dirprune.lab.records.tables import OtherSettings, read_rows
from dirprune.lab.studies.direction import projection
from dirprune.lab.studies.direction.figures import projection_figure
from dirprune.lab.studies.direction.projection import EigenvalueRow, ProjectionRow, project
from dirprune.lab.studies.direction.published import shares
from dirprune.lab.studies.direction.spectrum import (
    Guarded,
    Journal,
    Lanczos,
    NotKept,
    conv_precision,
    curvature_of,
    leading_eigenpairs,
    part_of,
)
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
TIGHT = Lanczos(examples=200, batch_size=64, tolerance=1e-5)


def tiny(classes: int) -> nn.Module:
    """Return a network so small that its Hessian can be written out: 241 weights, with a hidden layer of three."""
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, classes)
    )


def train(folder: Path, **changes: object) -> Run:
    recipe = recipes.get("digits").but(model="test_projection:tiny", epochs=2, keep=(0, 1, 2), **changes)
    run = runs.create(folder, recipe)
    list(conduct(run, Surroundings(CPU)))
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "sgd": train(folder / "sgd", optimizer="sgd"),
        "grda": train(folder / "grda", c=0.02),
        "other": train(folder / "other", c=0.02, mu=0.55),
    }


def rows_of(events: Iterator[Progress | ProjectionRow]) -> list[ProjectionRow]:
    return [event for event in events if isinstance(event, ProjectionRow)]


def dense_eigenpairs(run: Run, epoch: int, lanczos: Lanczos) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenpairs, largest first, of the tiny network's training Hessian, computed in full in float64."""
    bench = curvature_of(run.recipe, lanczos, device=CPU)
    bench.load(runs.weights_of(run, epoch)[1])
    model = bench.model.double().eval()
    inputs, targets = (torch.cat(part) for part in zip(*bench.curved, strict=True))
    names = {name: p.detach() for name, p in model.named_parameters()}
    flat = torch.cat([p.reshape(-1) for p in names.values()])

    def loss(vector: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(vector, [p.numel() for p in names.values()])
        weights = {name: piece.view(p.shape) for (name, p), piece in zip(names.items(), pieces, strict=True)}
        return cross_entropy(functional_call(model, weights, (inputs.double(),)), targets)

    values, vectors = torch.linalg.eigh(hessian(loss, flat))
    return values.flip(0), vectors.flip(1)


def test_shares_are_those_of_a_dense_eigendecomposition(trained: dict[str, Run], tmp_path: Path) -> None:
    grdas = [trained["grda"], trained["other"]]
    rows = rows_of(project(trained["sgd"], grdas, tmp_path, k=4, lanczos=TIGHT, device=CPU))
    assert [(row.epoch, row.run) for row in rows] == [(1, "grda"), (1, "other"), (2, "grda"), (2, "other")]
    spectrum = read_rows(tmp_path / "eigenvalues.csv", EigenvalueRow)
    for row in rows:
        values, vectors = dense_eigenpairs(trained["sgd"], row.epoch, TIGHT)
        a, b = (runs.weights_of(trained[name], row.epoch)[1] for name in ("sgd", row.run))
        names = [name for name in a if "running" not in name and "num_batches" not in name]
        delta = torch.cat([(b[name].double() - a[name].double()).reshape(-1) for name in names])
        assert row.share == pytest.approx(float((vectors[:, :4].T @ delta).norm() / delta.norm()), rel=1e-3)
        assert row.random_level == pytest.approx(math.sqrt(4 / 241))
        assert row.norm_delta == pytest.approx(float(delta.norm()), rel=1e-5)
        assert row.converged
        assert row.eigenvectors == 4
        assert row.examples == pytest.approx(200, abs=5)
        found = [r.eigenvalue for r in spectrum if r.epoch == row.epoch]
        assert found == pytest.approx(values[:4].tolist(), rel=1e-4)


def test_finished_epochs_are_kept_and_new_runs_are_added(trained: dict[str, Run], tmp_path: Path) -> None:
    first = list(project(trained["sgd"], [trained["grda"]], tmp_path, k=2, epochs=[2], lanczos=TIGHT, device=CPU))
    assert any(isinstance(event, Progress) for event in first)
    again = list(project(trained["sgd"], [trained["grda"]], tmp_path, k=2, epochs=[2], lanczos=TIGHT, device=CPU))
    assert again == rows_of(iter(first))  # no progress is reported, because no product is computed
    both = [trained["grda"], trained["other"]]
    rows = rows_of(project(trained["sgd"], both, tmp_path, k=2, lanczos=TIGHT, device=CPU))
    assert len(rows) == 4
    assert again[0] in rows
    assert sorted(read_rows(tmp_path / "projection.csv", ProjectionRow), key=lambda r: (r.epoch, r.run)) == rows
    with pytest.raises(OtherSettings, match=r"k=2, not k=3"):
        list(project(trained["sgd"], both, tmp_path, k=3, lanczos=TIGHT, device=CPU))


def test_eigenvalues_that_cannot_be_read_are_named_at_once_and_measured_again(
    trained: dict[str, Run], tmp_path: Path
) -> None:
    def projected() -> Iterator[Progress | ProjectionRow]:
        return project(trained["sgd"], [trained["grda"]], tmp_path, k=2, lanczos=TIGHT, device=CPU)

    rows, path = rows_of(projected()), tmp_path / "eigenvalues.csv"
    written = path.read_text()
    path.write_text("garbage")
    with pytest.raises(ValueError, match=r"eigenvalues\.csv cannot be read .* delete it"):
        next(projected())
    path.unlink()
    assert rows_of(projected()) == rows
    assert path.read_text() == written


class Counting:
    """A diagonal matrix that counts its products."""

    size, dtype, device = 50, torch.float32, CPU

    def __init__(self) -> None:
        self.products = 0

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor:
        self.products += 1
        return torch.arange(50.0) * vector


def test_an_interrupted_epoch_goes_on(trained: dict[str, Run], tmp_path: Path) -> None:
    options = {"k": 2, "epochs": [2], "lanczos": TIGHT, "device": CPU}
    events = project(trained["sgd"], [trained["grda"]], tmp_path, **options)
    for _ in range(5):
        next(events)
    events.close()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "products-0002").glob("*.pt")}
    assert len(kept) == 5
    events = project(trained["sgd"], [trained["grda"]], tmp_path, **options)
    for _ in range(6):
        next(events)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # read, not computed again
    assert len(list((tmp_path / "products-0002").glob("*.pt"))) == 6
    whole = rows_of(project(trained["sgd"], [trained["grda"]], tmp_path / "whole", **options))
    assert rows_of(events) == whole
    assert not list(tmp_path.glob("products-*"))


def test_products_that_a_stop_left_behind_go(trained: dict[str, Run], tmp_path: Path) -> None:
    def projected() -> list[ProjectionRow]:
        events = project(trained["sgd"], [trained["grda"]], tmp_path, k=2, epochs=[2], lanczos=TIGHT, device=CPU)
        return rows_of(events)

    rows, products = projected(), tmp_path / "products-0002"
    checkpoint.save(products, 1, {})
    assert projected() == rows
    assert not products.exists()


def test_without_room_for_its_products_a_computation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(checkpoint, "save", full)
    op = Counting()
    journal, vectors = Journal(op, tmp_path), torch.eye(50)
    with pytest.warns(NotKept, match="No space left on device; products are no longer kept"):
        torch.testing.assert_close(journal @ vectors[0], op @ vectors[0])
    torch.testing.assert_close(journal @ vectors[1], op @ vectors[1])  # without a second warning


def test_a_journal_believes_only_products_of_the_same_vector_that_are_whole(tmp_path: Path) -> None:
    vectors = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    first = Journal(Counting(), tmp_path)
    made = [first @ vector for vector in vectors]
    op = Counting()
    again = Journal(op, tmp_path)
    assert torch.equal(again @ vectors[0], made[0])
    assert op.products == 0
    torch.testing.assert_close(again @ vectors[2], made[2])  # the journal's second product is of another vector
    assert op.products == 1
    file = tmp_path / "epoch-0003.pt"
    file.write_bytes(file.read_bytes()[:-1])
    torch.testing.assert_close(again @ vectors[2], made[2])
    assert op.products == 2


def test_bfloat16_finds_the_subspace_and_tf32_judges_it(trained: dict[str, Run], tmp_path: Path) -> None:
    rough = replace(TIGHT, precision="bfloat16", tolerance=5e-2)
    (row,) = rows_of(project(trained["sgd"], [trained["grda"]], tmp_path, k=3, epochs=[2], lanczos=rough, device=CPU))
    (exact,) = rows_of(
        project(trained["sgd"], [trained["grda"]], tmp_path / "exact", k=3, epochs=[2], lanczos=TIGHT, device=CPU)
    )
    assert row.share == pytest.approx(exact.share, rel=0.05)
    bench = curvature_of(trained["sgd"].recipe, rough, device=CPU)
    strict = curvature_of(trained["sgd"].recipe, replace(rough, precision="float32"), device=CPU)
    vector = torch.randn(241, generator=torch.Generator().manual_seed(0))
    for one in (bench, strict):
        one.load(runs.weights_of(trained["sgd"], 2)[1])
    assert torch.equal(bench.exact @ vector, strict.hessian @ vector)  # on a CPU tf32 is float32
    error = (bench.hessian @ vector - strict.hessian @ vector).norm() / (strict.hessian @ vector).norm()
    assert 1e-4 < error < 0.1


def test_residuals_of_bfloat16_are_not_its_own(trained: dict[str, Run]) -> None:
    rough = replace(TIGHT, precision="bfloat16", tolerance=5e-2)
    bench = curvature_of(trained["sgd"].recipe, rough, device=CPU)
    bench.load(runs.weights_of(trained["sgd"], 2)[1])

    def returned() -> Iterator[Any]:
        yield (yield from leading_eigenpairs(bench.hessian, 3, rough, what="", exact=bench.exact))

    *_, (pairs, goal) = returned()
    values, vectors = dense_eigenpairs(trained["sgd"], 2, rough)
    matrix = vectors @ torch.diag(values) @ vectors.T
    found = pairs.vectors.double()
    true = torch.linalg.vector_norm(matrix @ found - found * pairs.values.double(), dim=0)
    own = torch.linalg.vector_norm(bench.hessian @ pairs.vectors - pairs.vectors * pairs.values, dim=0)
    torch.testing.assert_close(pairs.residuals.double(), true, rtol=1e-3, atol=1e-6)
    assert ((own.double() - true).abs() > 1e-2 * true).any()
    assert true.max() <= goal


def without_forward_mode(classes: int) -> nn.Module:
    return nn.Sequential(tiny(classes), Halved())


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Half.apply(x)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, before it raises the error
def test_a_network_that_cannot_be_compiled_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    trust.allow("test_projection:without_forward_mode")
    bench = curvature_of(
        replace(recipes.get("digits"), model="test_projection:without_forward_mode"), TIGHT, device=CPU
    )
    plain = HessianOperator(bench.model, cross_entropy, bench.curved)
    fast = Guarded(HessianOperator(bench.model, cross_entropy, bench.curved, compiled=True), tf32=False)
    vector = torch.randn(241, generator=torch.Generator().manual_seed(0))
    with pytest.warns(RuntimeWarning, match="run uncompiled"):
        torch.testing.assert_close(fast @ vector, plain @ vector)
    assert torch.equal(fast @ vector, plain @ vector)  # without a second warning
    torch.compiler.reset()


def test_progress_is_told_where_no_bar_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = ("residual 1.0e-02", "residual 2.0e-03")
    events = [Progress("epoch 2", done, 300, note, "products") for done, note in enumerate(worst, start=7)]
    assert drive.drive("project", (event for event in events), console.Interruption(), Output(False)) == []
    assert capsys.readouterr().err == ""  # the first line comes after ten seconds
    monkeypatch.setattr(console, "QUIET", 0.0)
    drive.drive("project", (event for event in events), console.Interruption(), Output(False))
    lines = capsys.readouterr().err.splitlines()
    assert "epoch 2: 7/300 products, residual 1.0e-02" in lines
    assert lines[-1] == "epoch 2: 8/300 products, residual 2.0e-03"


def test_not_converging_is_said(trained: dict[str, Run], tmp_path: Path) -> None:
    hasty = replace(TIGHT, tolerance=1e-9, max_iterations=4)
    (row,) = rows_of(project(trained["sgd"], [trained["grda"]], tmp_path, k=3, epochs=[2], lanczos=hasty, device=CPU))
    assert not row.converged
    assert row.products == 4
    assert row.residual > 1e-4


def altered(run: Run, folder: Path, **changes: object) -> Run:
    """Return a copy of a run with a changed recipe."""
    copy = runs.create(folder / run.folder.name, run.recipe.but(**changes))
    for epoch in checkpoint.epochs(run.checkpoints):
        checkpoint.save(copy.checkpoints, epoch, checkpoint.load(run.checkpoints / f"epoch-{epoch:04d}.pt"))
    return copy


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"batch_size": 64}, {"lr": 0.05}, {"data": "synthetic"}, {"augment": False}]
)
def test_runs_that_do_not_share_their_minibatches_are_refused(
    trained: dict[str, Run], tmp_path: Path, changes: dict[str, object]
) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} is"):
        list(project(trained["sgd"], [altered(trained["grda"], tmp_path, **changes)], tmp_path / "out", device=CPU))
    assert not (tmp_path / "out").exists()


def test_runs_from_other_initial_weights_are_refused(trained: dict[str, Run], tmp_path: Path) -> None:
    moved = altered(trained["grda"], tmp_path)
    state = checkpoint.load(moved.checkpoints / "epoch-0000.pt")
    state["model"]["5.bias"][0] += 1e-6
    checkpoint.save(moved.checkpoints, 0, state)
    with pytest.raises(ValueError, match=r"initial weights .* differ \(5\.bias\)"):
        list(project(trained["sgd"], [moved], tmp_path / "out", device=CPU))
    (moved.checkpoints / "epoch-0000.pt").unlink()  # then equal seeds are taken to mean equal initial weights
    lanczos = replace(TIGHT, tolerance=1e-2)
    assert rows_of(project(trained["sgd"], [moved], tmp_path / "out", k=1, lanczos=lanczos, device=CPU))


def test_other_bad_requests_are_refused(trained: dict[str, Run], tmp_path: Path) -> None:
    sgd, grda = trained["sgd"], trained["grda"]
    rigl = replace(sgd, recipe=replace(sgd.recipe, method=MethodSpec.of("rigl", sparsity=0.5)))
    for first, others, message in (
        (grda, [grda], "the first run must be the SGD run"),
        (rigl, [grda], "was trained with rigl; the first run must be the SGD run"),  # it uses SGD, but with masks
        (sgd, [sgd], "only the first run is SGD's"),
        (sgd, [], "grdas is empty"),
        (sgd, [grda, grda], "two runs of one name"),
    ):
        with pytest.raises(ValueError, match=message):
            list(project(first, others, tmp_path, device=CPU))
    with pytest.raises(ValueError, match=r"epochs=\[7\].*they share \[1, 2\]"):
        list(project(sgd, [grda], tmp_path, epochs=[1, 7], device=CPU))
    with pytest.raises(ValueError, match="examples=9999, but the training set has 1438"):
        list(project(sgd, [grda], tmp_path, lanczos=Lanczos(examples=9999), device=CPU))
    with pytest.raises(ValueError, match="precision='half'"):
        Lanczos(precision="half")
    with pytest.raises(ValueError, match="examples=1: the same fraction of every class rounds to no examples"):
        list(project(sgd, [grda], tmp_path / "one", lanczos=Lanczos(examples=1), device=CPU))


def test_a_part_of_the_data_is_stratified_and_fixed(trained: dict[str, Run]) -> None:
    loader = curvature_of(trained["sgd"].recipe, Lanczos(), device=CPU).train
    part, again = part_of(loader, 300), part_of(loader, 300)
    targets = torch.cat([targets for _, targets in part])
    assert torch.equal(targets, torch.cat([targets for _, targets in again]))
    assert part.examples == len(targets)
    assert abs(len(targets) - 300) <= 5  # the number is rounded in each class
    whole = torch.cat([targets for _, targets in loader])
    expected = torch.bincount(whole) * 300 / len(whole)
    assert (torch.bincount(targets) - expected).abs().max() <= 0.5


def test_precision_is_given_back_as_it_was() -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    for tf32 in (False, True):
        with conv_precision(tf32=tf32):
            assert (cudnn.enabled, cudnn.allow_tf32, matmul.allow_tf32) == (before[0], tf32, False)
        assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32) == before


def test_published_shares_are_the_corrected_ones() -> None:
    vgg, wrn = shares("cifar10", "vgg16"), shares("cifar10", "wrn28x10")
    assert [run.mu for run in wrn] == [0.501, 0.55, 0.6, 0.65]
    assert {run.epochs[0] for run in vgg} == {10}
    assert {run.epochs[-1] for run in vgg} == {600}
    first, last = [run.shares[0] for run in vgg], [run.shares[-1] for run in vgg]
    assert (round(min(first), 3), round(max(first), 3)) == (0.037, 0.069)
    assert (round(min(last), 4), round(max(last), 4)) == (0.0021, 0.0034)
    assert shares("digits", "small") == []


def test_figure_shows_every_run_and_the_random_level(trained: dict[str, Run], tmp_path: Path) -> None:
    grdas = [trained["grda"], trained["other"]]
    rows = rows_of(project(trained["sgd"], grdas, tmp_path, k=2, lanczos=TIGHT, device=CPU))
    figure = projection_figure(rows, shares("cifar10", "vgg16"))
    (axes,) = figure.axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert axes.get_yscale() == "log"
    few = projection_figure([row for row in rows if row.epoch <= 2]).axes[0]
    assert all(float(tick).is_integer() for tick in few.get_xticks())
    assert not [text for text in few.get_yticklabels(which="both") if "times" in text.get_text()]  # no 3×10⁻³
    drawn = lines["ours, gRDA c = 0.02, μ = 0.55"].get_ydata()
    assert list(drawn) == [row.share for row in rows if row.run == "other"]
    assert lines["a random direction"].get_ydata()[0] == pytest.approx(math.sqrt(2 / 241))
    assert [len(lines[f"published, μ = {mu}"].get_xdata()) for mu in (0.51, 0.6, 0.7)] == [16] * 3
    assert not any(line.get_markerfacecolor() == "white" for line in axes.get_lines())
    unfinished = projection_figure([replace(rows[0], converged=False)])
    assert any(line.get_markerfacecolor() == "white" for line in unfinished.axes[0].get_lines())
    told = [[text.get_text() for text in each.legends[0].get_texts()] for each in (figure, unfinished)]
    assert ["not converged" in texts for texts in told] == [False, True]
    assert axes.get_title() == f"k = 2, Hessian of {rows[0].examples:,} training examples"
    assert save(figure, tmp_path / "figure.png").stat().st_size > 1000
    flat = projection_figure([replace(rows[0], share=0.0, random_level=0.0)])  # if no eigenvalue is positive
    assert flat.axes[0].get_yscale() == "linear"
    with pytest.raises(ValueError, match="rows is empty"):
        projection_figure([])


def test_rows_and_products_of_another_network_of_the_same_name_are_never_taken_for_ours(
    trained: dict[str, Run], tmp_path: Path
) -> None:
    others = [
        train(tmp_path / name, seed=5, **how) for name, how in (("sgd", {"optimizer": "sgd"}), ("grda", {"c": 0.02}))
    ]
    options = {"k": 2, "lanczos": TIGHT, "device": CPU}
    rows_of(project(trained["sgd"], [trained["grda"]], tmp_path / "done", epochs=[1], **options))
    stopped = project(trained["sgd"], [trained["grda"]], tmp_path / "begun", epochs=[1], **options)
    for _ in range(4):
        next(stopped)
    stopped.close()
    for out in ("done", "begun"):
        with pytest.raises(OtherSettings, match="another file as epoch 1 of sgd"):
            rows_of(project(others[0], others[1:], tmp_path / out, epochs=[1], **options))
    rows_of(project(trained["sgd"], [trained["grda"], trained["other"]], tmp_path / "done", epochs=[1, 2], **options))
    assert len(read_rows(tmp_path / "done" / "projection.csv", ProjectionRow)) == 4  # more runs and epochs may join


@pytest.mark.parametrize("command", ["project", "score", "connect"])
def test_one_job_at_a_time_writes_to_a_folder(command: str, trained: dict[str, Run], tmp_path: Path) -> None:
    ends = [trained["sgd"].folder] if command == "score" else [trained["sgd"].folder, trained["grda"].folder]
    work = [command, *ends, "--out", tmp_path / "p", *(["--epochs", 1, "--no-fit"] if command == "connect" else [])]
    if command == "connect":
        assert call(*work, "--points", 2).exit_code == 0
        work += ["--points", 2]
    with locked(tmp_path / "p"):
        refused = call(*work)
    assert refused.exit_code == 1
    assert f"p is being written by process {os.getpid()}" in refused.stderr


@pytest.mark.parametrize("stop", ["--minutes", "SIGTERM"])
def test_a_study_that_is_stopped_says_that_it_goes_on(
    trained: dict[str, Run], tmp_path: Path, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "project",
        trained["sgd"].folder,
        trained["grda"].folder,
        "--k",
        2,
        "--examples",
        200,
        "--out",
        tmp_path / "p",
    ]
    plain = projection.project

    def slow(*arguments: object, **options: object) -> Iterator[Progress | ProjectionRow]:
        for step in plain(*arguments, **options):  # type: ignore[arg-type]
            time.sleep(0.05)
            if stop == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(projection, "project", slow)
        stopped = call(*command, *([stop, 0.001] if stop == "--minutes" else []))
    assert stopped.exit_code == (0 if stop == "--minutes" else 130)
    assert "Stopped; run the same command to continue." in stopped.stderr
    assert not (tmp_path / "p" / "projection.csv").exists()
    assert len(objects(call(*command, "--json"))) == 2
