"""The verb connect, from run directories to figures, on digits."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import GPU
from matplotlib.axes import Axes
from torch import nn
from typer.testing import CliRunner

from dirprune.connect import CurveProfile, FitRecord
from dirprune.connect.landscape import Measurement
from dirprune.lab import data, models
from dirprune.lab.cli import app as cli
from dirprune.lab.cli import console
from dirprune.lab.methods import MethodSpec
from dirprune.lab.progress import Progress
from dirprune.lab.records import checkpoint
from dirprune.lab.studies.connectivity import work as connectivity
from dirprune.lab.studies.connectivity.figures import _round_numbers, draw, plane, profile
from dirprune.lab.studies.connectivity.folder import coarseness, notes, published_curve
from dirprune.lab.studies.connectivity.folder import table as told
from dirprune.lab.studies.connectivity.published import find
from dirprune.lab.studies.connectivity.work import Options, connect
from dirprune.lab.training import experiment, recipes, runs
from dirprune.lab.training import loop as train
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.surroundings import Surroundings
from dirprune.weights import combine

CPU = torch.device("cpu")
SMALL = Options(epochs=2, points=3, grid=2, batch_size=256, lr=0.02)


def trained(folder: Path, **changes: Any) -> Path:
    run = runs.create(folder, recipes.get("digits-short").but(epochs=2, batch_size=128, **changes))
    for _ in experiment.conduct(run, Surroundings(CPU)):
        pass
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return trained(folder / "grda", optimizer="grda"), trained(folder / "sgd", optimizer="sgd")


@pytest.fixture(scope="module")
def finished(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    out = tmp_path_factory.mktemp("jobs") / "whole"
    steps = list(connect(*pair, out, SMALL, device=CPU))
    draw(out)
    return out, steps


@pytest.fixture(autouse=True)
def _undrawn(finished: tuple[Path, list[Progress]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing: the finished job has its figures, and drawing takes most of the time of these tests."""
    monkeypatch.setattr("dirprune.lab.studies.connectivity.figures.draw", lambda out: None)


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def assert_same_numbers(out: Path, other: Path) -> None:
    for name in ("fit.csv", "profile.csv", "plane.csv", "points.csv"):
        assert table(out / name) == table(other / name), name
    bends = [checkpoint.load(folder / "bend" / "epoch-0002.pt")["model"] for folder in (out, other)]
    assert all(torch.equal(bends[0][name], bends[1][name]) for name in bends[1])


# A whole job.


@pytest.mark.usefixtures("two_threads")
def test_a_job_has_the_threads_of_its_recipe(
    finished: tuple[Path, list[Progress]], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    seen = {torch.get_num_threads() for _ in connect(*pair, tmp_path / "job", SMALL, device=CPU)}
    assert (seen, torch.get_num_threads()) == ({1}, 2)
    assert json.loads((tmp_path / "job" / "environment.json").read_text())[0]["threads"] == 1
    assert_same_numbers(tmp_path / "job", finished[0])


def test_the_stages_count_up_to_their_totals(finished: tuple[Path, list[Progress]]) -> None:
    counts = {stage: [s.done for s in finished[1] if s.what == stage] for stage in ("fit", "curve", "line", "plane")}
    assert counts == {"fit": [0, 1, 2], "curve": [0, 1, 2, 3], "line": [0, 1, 2, 3], "plane": [0, 1, 2, 3, 4]}
    assert {s.what: s.total for s in finished[1]} == {"fit": 2, "curve": 3, "line": 3, "plane": 4}


def test_the_files_are_there_and_the_figures_are_figures(finished: tuple[Path, list[Progress]]) -> None:
    out, _ = finished
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files >= {"config.json", "environment.json", "fit.csv", "profile.csv", "plane.csv", "points.csv"}
    assert files >= {"summary.json", "bend/epoch-0002.pt", "checkpoints/epoch-0002.pt"}
    for name in ("plane", "profile"):
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_ends_score_what_training_recorded(finished: tuple[Path, list[Progress]], pair: tuple[Path, Path]) -> None:
    rows = table(finished[0] / "profile.csv")
    for run, index in zip(pair, (0, 2), strict=True):
        last = runs.load(run).records()[-1]
        for row in (rows[index], rows[3 + index]):  # the curve's rows come first, then those of the line
            assert float(row["test_loss"]) == pytest.approx(last.test_loss, rel=1e-4)
            assert 100 - float(row["test_error"]) == pytest.approx(last.test_accuracy)


def test_the_middle_of_the_line_is_the_mean_network(
    finished: tuple[Path, list[Progress]], pair: tuple[Path, Path]
) -> None:
    model = models.build("small", 10)
    model.load_state_dict(combine([0.5, 0.5], [runs.weights_of(runs.load(run))[1] for run in pair]))
    loaders = data.load("digits", batch_size=500, seed=0)
    row = table(finished[0] / "profile.csv")[4]
    assert (row["path"], row["t"]) == ("line", "0.5")
    for half in ("train", "test"):
        score = train.evaluate(model, getattr(loaders, half))
        assert float(row[f"{half}_loss"]) == pytest.approx(score.loss, rel=1e-4)
        assert float(row[f"{half}_error"]) == pytest.approx(100 - score.accuracy, abs=1e-6)


def test_the_summary_follows_from_the_tables(finished: tuple[Path, list[Progress]], pair: tuple[Path, Path]) -> None:
    out, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    for path in ("curve", "line"):
        rows = [row for row in table(out / "profile.csv") if row["path"] == path]
        for prefix, half in (("", "train"), ("test_", "test")):
            losses = [float(row[f"{half}_loss"]) for row in rows]
            assert summary[path][f"{prefix}barrier"] == max(losses) - max(losses[0], losses[-1])
        best = min(rows, key=lambda row: (float(row["test_error"]), float(row["test_loss"])))
        assert summary[path]["best"]["t"] == float(best["t"])
    a, b = (runs.weights_of(runs.load(run))[1] for run in pair)
    assert summary["distance"] == pytest.approx(math.sqrt(sum((a[n] - b[n]).square().sum().item() for n in a)))
    assert summary["sparsity"] == pytest.approx([runs.load(run).records()[-1].sparsity for run in pair])
    assert summary["config"]["epoch_a"] == 2
    assert summary["sessions"][0]["torch"] == torch.__version__


def test_the_points_lie_on_the_bezier_curve_of_their_corners(finished: tuple[Path, list[Progress]]) -> None:
    rows = table(finished[0] / "points.csv")
    place = {row["name"]: torch.tensor([float(row["x"]), float(row["y"])]) for row in rows[:3]}
    assert place["start"].tolist() == [0, 0]
    assert place["end"][1] == pytest.approx(0, abs=1e-5)
    for row in rows[3:]:
        t = float(row["t"])
        expected = (1 - t) ** 2 * place["start"] + 2 * t * (1 - t) * place["bend"] + t**2 * place["end"]
        assert [float(row["x"]), float(row["y"])] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high"), [(0.557, 11.0), (1.67, 4.2), (2.1, 4.9), (1e-6, 10.0), (8.0, 91.0), (3.1, 3.6)]
)
def test_a_colour_bar_has_enough_ticks_and_none_beyond_its_ends(low: float, high: float) -> None:
    ticks = _round_numbers(low, high)
    assert 3 <= len(ticks) <= 6
    assert low <= ticks[0] < ticks[-1] <= high
    assert all(float(f"{tick:.2g}") == tick for tick in ticks)


def test_the_report_names_networks_and_barriers(finished: tuple[Path, list[Progress]]) -> None:
    title, rows = told(finished[0])
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert title == "small on digits: gRDA c=0.02 μ=0.7 (t=0, epoch 2) to SGD (t=1, epoch 2)"
    assert [row[""] for row in rows] == ["fitted curve", "straight line"]
    line, facts = rows[1], summary["line"]
    assert line["least test error (%)"] == f"{facts['best']['test_error']:.2f} (t={facts['best']['t']:.3f})"
    assert line["test error at t=0 (%)"] == f"{facts['start']['test_error']:.2f}"
    assert notes(finished[0]) == []


def test_a_grid_too_coarse_for_the_valley_of_the_profile_is_told(tmp_path: Path) -> None:
    """The plane of the digits networks, thinned to three points a side, has lost the valley that the curve follows."""
    job = tmp_path / "job"
    shutil.copytree(Path(__file__).parent.parent / "results" / "connect-digits", job)
    assert coarseness(job) == ""
    header, *rows = (job / "plane.csv").read_text().splitlines()
    x, y = (sorted({float(row.split(",")[axis]) for row in rows}) for axis in (0, 1))
    kept = [
        row
        for row in rows
        if all(float(cell) in ends[::10] for cell, ends in zip(row.split(","), (x, y), strict=False))
    ]
    assert len(kept) == 9
    (job / "plane.csv").write_text("\n".join([header, *kept]) + "\n")
    assert "its grid is too coarse for the valley; give a larger --grid" in coarseness(job)
    assert notes(job) == [coarseness(job)]


def test_where_no_barrier_is_it_has_no_place(finished: tuple[Path, list[Progress]], tmp_path: Path) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    summary["curve"] |= {"barrier": 0.0, "test_barrier": 2e-4}  # the job's own depend on the machine
    summary["curve"]["highest_test"]["t"] = 0.25
    summary["line"] |= {"barrier": None}  # how infinity and NaN are written
    summary["line"]["highest"]["t"] = 0.5
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    curve, line = told(tmp_path)[1]
    assert (curve["train barrier"], curve["test barrier"]) == ("0 (t=–)", "2.00e-04 (t=0.250)")
    assert line["train barrier"] == "not finite (t=0.500)"


# Resuming.


def test_a_job_killed_while_its_first_file_was_written_can_be_started_again(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.tmp.json").write_text('{"weights_a": "3f')
    assert next(connect(*pair, tmp_path, SMALL, device=CPU)).what == "fit"
    assert "weights_a" in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / "config.tmp.json").exists()


def test_a_job_interrupted_after_every_step_gives_the_same_numbers(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path
) -> None:
    out = tmp_path / "job"
    sessions, stages = 0, []
    while not (out / "summary.json").exists():
        sessions += 1
        for step in connect(*pair, out, SMALL, device=CPU):
            if step.note:  # the first step that was computed now, not read from the folder
                stages.append(step.what)
                break
    assert stages == ["fit"] * 2 + ["curve"] * 3 + ["line"] * 3 + ["plane"] * 4
    assert_same_numbers(out, finished[0])
    assert len(json.loads((out / "environment.json").read_text())) == sessions


def test_ctrl_c_keeps_the_epochs_that_were_fitted(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*arguments: Any, **options: Any) -> Iterator[FitRecord]:
        for record in fit_curve(*arguments, **options):
            signal.raise_signal(signal.SIGINT)  # before the job gets the record of this epoch
            yield record

    fit_curve = connectivity.fit_curve
    words = [*pair, "--out", tmp_path / "job", "--epochs", 2, "--points", 3, "--grid", 2, "--batch-size", 256]
    words = ["connect", *map(str, [*words, "--lr", 0.02])]
    monkeypatch.setattr(connectivity, "fit_curve", pressed)
    stopped = CliRunner().invoke(cli.app, words)
    assert stopped.exit_code == console.INTERRUPTED
    assert "Stopping after this epoch or point" in stopped.stderr
    assert "run the same command to continue" in stopped.stderr
    assert checkpoint.epochs(tmp_path / "job" / "checkpoints") == [1]
    monkeypatch.setattr(connectivity, "fit_curve", fit_curve)
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert_same_numbers(tmp_path / "job", finished[0])


def test_an_epoch_that_was_not_saved_is_fitted_again(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, **options: Any) -> Iterator[FitRecord]:
        yield next(fit_curve(*arguments, **options))
        raise KeyboardInterrupt

    fit_curve = connectivity.fit_curve
    monkeypatch.setattr(connectivity, "fit_curve", killed)
    with pytest.raises(KeyboardInterrupt):
        list(connect(*pair, tmp_path / "job", SMALL, device=CPU))
    monkeypatch.setattr(connectivity, "fit_curve", fit_curve)
    assert len(table(tmp_path / "job" / "fit.csv")) == 1
    assert not (tmp_path / "job" / "checkpoints").exists()
    steps = list(connect(*pair, tmp_path / "job", SMALL, device=CPU))
    assert [step.done for step in steps if step.what == "fit"] == [0, 1, 2]
    assert_same_numbers(tmp_path / "job", finished[0])


def test_a_fit_that_has_lost_its_records_keeps_its_curve(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path
) -> None:
    out = tmp_path / "job"
    shutil.copytree(finished[0], out)
    (out / "fit.csv").unlink()
    with pytest.warns(experiment.LostRecords, match=r"fit\.csv lacks epoch 2"):
        list(connect(*pair, out, SMALL, device=CPU))
    assert json.loads((out / "summary.json").read_text())["fit"] == {"loss": None, "seconds": 0}
    assert table(out / "points.csv") == table(finished[0] / "points.csv")


def test_a_finished_job_is_not_computed_again(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a run has been moved: runs are identified by their weights."""
    out, moved = tmp_path / "job", tmp_path / "moved"
    shutil.copytree(finished[0], out)
    shutil.copytree(pair[0], moved)
    monkeypatch.setattr(connectivity, "Evaluator", None)
    steps = list(connect(moved, pair[1], out, SMALL, device=CPU))
    assert [(step.what, step.done) for step in steps] == [("fit", 2), ("curve", 3), ("line", 3), ("plane", 4)]
    assert_same_numbers(out, finished[0])


# Options.


def test_without_a_fit_there_is_the_line_alone(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path
) -> None:
    out = tmp_path / "line"
    assert {step.what for step in connect(*pair, out, replace(SMALL, fit=False), device=CPU)} == {"line"}
    assert table(out / "profile.csv") == table(finished[0] / "profile.csv")[3:]
    assert not (out / "plane.csv").exists()
    assert [row[""] for row in told(out)[1]] == ["straight line"]


def test_the_plane_can_be_measured_on_fewer_examples(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a margin, the first point of the grid is the network at the start of the curve."""
    options = replace(SMALL, epochs=1, points=2, margin=0.0, plane_examples=200)
    for _ in connect(*pair, tmp_path / "job", options, device=CPU):
        pass
    model = models.build("small", 10)
    model.load_state_dict(runs.weights_of(runs.load(pair[0]))[1])
    inputs, targets = next(iter(data.load("digits", batch_size=200, seed=0).train))
    loss = torch.nn.functional.cross_entropy(model(inputs), targets).item()
    assert float(table(tmp_path / "job" / "plane.csv")[0]["train_loss"]) == pytest.approx(loss, rel=1e-4)


def test_an_earlier_checkpoint_can_be_joined(pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = replace(SMALL, fit=False, points=2)
    for _ in connect(pair[1], pair[1], tmp_path / "job", options, epoch_a=0, device=CPU):
        pass
    config = json.loads((tmp_path / "job" / "config.json").read_text())
    assert (config["epoch_a"], config["epoch_b"]) == (0, 2)
    assert (config["network_a"], config["network_b"]) == ("SGD, epoch 0", "SGD, epoch 2")
    first, last = (float(row["train_loss"]) for row in table(tmp_path / "job" / "profile.csv"))
    assert first > last


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 0),
        ("points", 1),
        ("grid", 1),
        ("margin", -1.0),
        ("lr", 0.0),
        ("momentum", 1.0),
        ("batch_size", 0),
        ("plane_examples", 0),
        ("schedule", "steep"),
    ],
)
def test_options_that_cannot_be_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{option}={value!r}"):
        Options(**{option: value})


# Refusals.


def start(a: Path, b: Path, out: Path, options: Options = SMALL, **arguments: Any) -> Progress:
    return next(connect(a, b, out, options, device=CPU, **arguments))


def with_recipe(run: Path, copy: Path, **changes: Any) -> Path:
    shutil.copytree(run, copy)
    recipe = runs.load(run).recipe.but(**changes)
    (copy / "config.json").write_text(json.dumps(recipe.to_dict()))
    return copy


@pytest.mark.parametrize(
    ("name", "other"), [("model", "vgg16"), ("data", "cifar10"), ("statistics", "cifar"), ("validation", 0.1)]
)
def test_runs_that_do_not_belong_together_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, name: str, other: Any
) -> None:
    stranger = with_recipe(pair[1], tmp_path / "stranger", **{name: other})
    with pytest.raises(ValueError, match=rf"grda has {name}=.* and .*stranger has {name}={other!r}"):
        start(pair[0], stranger, tmp_path / "job")
    assert not (tmp_path / "job").exists()


class Tied(nn.Module):
    """A layer that is registered twice, a tensor that two layers share, and BatchNorm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.again = self.first
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.relu(self.norm(self.first(images.flatten(1)))))
        return self.last(hidden)[:, :10]


def test_networks_with_shared_weights_are_joined(tmp_path: Path) -> None:
    own = {"model": "test_connectivity:Tied", "optimizer": "sgd"}
    a, b = (trained(tmp_path / str(seed), **own, seed=seed) for seed in range(2))
    for _ in connect(a, b, tmp_path / "job", SMALL, device=CPU):
        pass
    network = Tied().eval()
    network.load_state_dict(runs.weights_of(runs.load(a))[1])
    test = data.load("digits", batch_size=512, seed=0).test
    losses = [(len(y), torch.nn.functional.cross_entropy(network(x), y).item()) for x, y in test]
    own_loss = sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)
    first = next(row for row in table(tmp_path / "job" / "profile.csv") if row["path"] == "curve")
    # The job estimates BatchNorm's statistics on all training data; the run's are an average over its last steps.
    assert float(first["test_loss"]) == pytest.approx(own_loss, rel=0.2)


def test_a_state_with_a_name_too_many_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = with_recipe(pair[1], tmp_path / "other")
    state = runs.weights_of(runs.load(other))[1]
    checkpoint.save(other / "checkpoints", 3, {"model": {**state, "fc3.weight": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"'fc3\.weight' is in .*other but not in the network 'small'"):
        start(pair[0], other, tmp_path / "job")


def test_networks_of_another_architecture_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = with_recipe(pair[1], tmp_path / "wide")
    state = runs.weights_of(runs.load(wide))[1]
    checkpoint.save(wide / "checkpoints", 3, {"model": {**state, "fc2.weight": torch.zeros(10, 65)}})
    message = r"'fc2\.weight' has shape \(10, 64\) in the network 'small' and \(10, 65\) in .*wide"
    with pytest.raises(ValueError, match=message):
        start(pair[0], wide, tmp_path / "job")


def test_a_network_is_not_joined_to_itself_nor_to_what_is_not_there(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold the same weights"):
        start(pair[0], pair[0], tmp_path / "job")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of epoch 7; it has 0, 2"):
        start(*pair, tmp_path / "job", epoch_b=7)
    with pytest.raises(FileNotFoundError, match="does not exist; name the folder of a run"):
        start(pair[0], tmp_path / "nothing", tmp_path / "job")


def test_initial_weights_are_joined_on_request_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    young = runs.create(tmp_path / "young", runs.load(pair[0]).recipe)
    checkpoint.save(young.checkpoints, 0, {"epoch": 0, "model": runs.weights_of(runs.load(pair[0]), 0)[1]})
    with pytest.raises(ValueError, match="young has only its initial weights; train it, or give --epoch-b 0 to join"):
        start(pair[0], young.folder, tmp_path / "job")
    assert start(pair[0], young.folder, tmp_path / "job", epoch_b=0)


def test_another_job_and_other_files_are_never_overwritten(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]]
) -> None:
    out, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(runs.RunExists, match=r"another job: epochs=2 there and 3 here"):
        start(*pair, out, replace(SMALL, epochs=3))
    with pytest.raises(runs.RunExists, match=r"network_a='gRDA c=0\.02 μ=0\.7' there and 'SGD' here"):
        start(pair[1], pair[0], out)
    with pytest.raises(runs.RunExists) as refusal:
        start(pair[1], pair[0], out)
    assert "weights_" not in str(refusal.value)  # hashes would tell the user nothing
    for other in (pair[0], out / "figures"):
        with pytest.raises(runs.RunExists, match="is not a job"):
            start(*pair, other)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_fit_that_diverges_says_what_to_do(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(experiment.Diverged, match=r"diverged in epoch 1 .*lower lr .* another --out"):
        list(connect(*pair, tmp_path / "job", replace(SMALL, lr=1e20), device=CPU))


# The published curves.


ALL_PUBLISHED = [("cifar10", "vgg16", 5e-4, mu) for mu in (0.4, 0.51, 0.6, 0.7)]
ALL_PUBLISHED += [("cifar100", "wrn28x10", 1e-3, mu) for mu in (0.501, 0.55, 0.6, 0.65)]


def test_the_published_curves_have_the_published_barriers() -> None:
    """The barriers are those of a table in the paper's source; the 61 points that are shipped come from other files."""
    vgg = {0.4: 0.0024, 0.51: 0.0041, 0.6: 0.0021, 0.7: 0.0320}
    wrn = {0.501: 7e-5, 0.55: 1.2e-4, 0.6: 2.9e-4, 0.65: 4.3e-4}
    for settings, barriers in (
        ({"data": "cifar10", "model": "vgg16", "c": 5e-4}, vgg),
        ({"data": "cifar100", "model": "wrn28x10", "c": 1e-3}, wrn),
    ):
        for mu, barrier in barriers.items():
            curve = find(**settings, mu=mu)
            assert curve is not None
            assert len(curve.profile.points) == 61
            assert curve.profile.barrier == pytest.approx(barrier, rel=0.03)
    assert find(data="cifar10", model="vgg16", c=5e-4, mu=0.55) is None


def test_the_published_curve_runs_the_way_of_the_job() -> None:
    config = {"data": "cifar10", "model": "vgg16", "published": [5e-4, 0.6, False]}
    there, back = published_curve(config), published_curve({**config, "published": [5e-4, 0.6, True]})
    assert there is not None
    assert back is not None
    assert there.profile.highest.place[0] + back.profile.highest.place[0] == pytest.approx(1)
    assert there.profile.points[0].train_loss == back.profile.points[-1].train_loss
    assert sorted(there.plane.corners) == sorted(back.reversed().plane.corners)
    assert {name: x for name, x, _ in back.plane.corners}["end"] == pytest.approx(110.0, abs=0.01)
    near_sgd = max(there.plane.rows, key=lambda row: (-row["y"], row["x"]))
    assert {**near_sgd, "x": 110.005 - near_sgd["x"]} in back.plane.rows
    assert published_curve({**config, "published": None}) is None


def test_a_network_that_another_method_pruned_is_not_called_sgd() -> None:
    grda = recipes.get("vgg16-cifar10")
    sgd = grda.but(optimizer="sgd")
    rigl = replace(sgd, method=MethodSpec.of("rigl", sparsity=0.9))
    assert connectivity._labels((grda, 600), (sgd, 600)) == ("gRDA c=0.0005 μ=0.6", "SGD")
    assert connectivity._labels((grda, 600), (rigl, 600)) == ("gRDA c=0.0005 μ=0.6", "rigl sparsity=0.9")
    assert connectivity._published_key(grda, sgd) == (5e-4, 0.6, False)
    assert connectivity._published_key(grda, rigl) is None


@pytest.mark.parametrize("curve", ALL_PUBLISHED, ids=lambda curve: f"{curve[1]}-{curve[3]}")
def test_a_published_plane_holds_its_curve(curve: tuple[str, str, float, float]) -> None:
    data, model, c, mu = curve
    found = find(data=data, model=model, c=c, mu=mu)
    assert found is not None
    side = {"vgg16": 21, "wrn28x10": 29}[model]
    assert len(found.plane.rows) == side**2
    corner = {name: np.array(place) for name, *place in found.plane.corners}
    assert corner["start"].tolist() == [0, 0]
    # The Bézier curve through the corners has the published length, and the plane is its loss's plane: at the ends,
    # the nearest point of the grid has a lower test error than most.
    t = np.linspace(0, 1, 1000)[:, None]
    path = (1 - t) ** 2 * corner["start"] + 2 * t * (1 - t) * corner["bend"] + t**2 * corner["end"]
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).sum() == pytest.approx(found.length, rel=2e-3)
    places = np.array([(row["x"], row["y"]) for row in found.plane.rows])
    errors = np.array([row["test_error"] for row in found.plane.rows])
    for name in ("start", "end"):
        assert errors[np.linalg.norm(places - corner[name], axis=1).argmin()] < np.median(errors)


def test_the_published_plane_is_drawn_on_our_axes() -> None:
    found = find(data="cifar10", model="vgg16", c=5e-4, mu=0.6)
    assert found is not None
    ours = [{**row, "x": row["x"] + 9.0, "train_loss": 1.0, "test_error": 50.0} for row in found.plane.rows]
    moved = [(name, x + 9.0, y) for name, x, y in found.plane.corners]
    figure = plane(ours, moved, ("gRDA", "SGD"), (found.plane.rows, found.plane.corners))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["our train loss", "our test error (%)", "published train loss", "published test error (%)"]
    for one, other in ((0, 2), (1, 3)):
        assert figure.axes[one].get_xlim() == figure.axes[other].get_xlim()
        norms = [figure.axes[i].collections[0].norm for i in (one, other)]  # type: ignore[attr-defined]
        assert (norms[0].vmin, norms[0].vmax) == (norms[1].vmin, norms[1].vmax)


def test_a_job_like_a_published_one_is_reported_beside_it(
    pair: tuple[Path, Path], finished: tuple[Path, list[Progress]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(**settings: Any) -> Any:
        asked.append(settings)
        return find(data="cifar10", model="vgg16", c=5e-4, mu=0.6)

    monkeypatch.setattr("dirprune.lab.studies.connectivity.published.find", answer)
    shutil.copytree(finished[0], tmp_path / "job")
    list(connect(*pair, tmp_path / "job", SMALL, device=CPU))
    before = (tmp_path / "job" / "figures" / "profile.png").read_bytes()
    draw(tmp_path / "job")
    assert (tmp_path / "job" / "figures" / "profile.png").read_bytes() != before
    assert asked[0] == {"data": "digits", "model": "small", "c": 0.02, "mu": 0.7}
    last = told(tmp_path / "job")[1][-1]
    assert (last[""], last["train barrier"]) == ("published", "2.13e-03 (t=0.100)")
    first = notes(tmp_path / "job")[0]
    assert first.startswith("Fitted for 2 epochs, lr 0.02, momentum 0.9; the published curve for 300")


@GPU
def test_a_captured_job_measures_what_a_plain_one_does(pair: tuple[Path, Path], tmp_path: Path) -> None:
    rows = {}
    for name, execution in (
        ("plain", Execution()),
        ("captured", Execution(channels_last=True, compile=True, capture=True)),
    ):
        start = with_recipe(pair[0], tmp_path / f"run-{name}", cuda=execution)
        list(connect(start, pair[1], tmp_path / name, SMALL, device=torch.device("cuda")))
        rows[name] = table(tmp_path / name / "profile.csv")
    for plain, captured in zip(rows["plain"], rows["captured"], strict=True):
        assert float(captured["train_loss"]) == pytest.approx(float(plain["train_loss"]), rel=0.02)


@pytest.mark.parametrize(("errors", "scale"), [((8.3, 60.0), "log"), ((0.0, 60.0), "log"), ((0.0, 5.0), "linear")])
def test_a_small_error_is_seen_beside_a_large_one(errors: tuple[float, float], scale: str) -> None:
    points = [Measurement((t,), 0.1, error, 0.1, error) for t, error in zip((0.0, 1.0), errors, strict=True)]
    *_, axes = profile({"curve": CurveProfile(tuple(points))}, ("gRDA", "SGD"), None).axes
    assert axes.get_yscale() == scale
    heights = axes.transAxes.inverted().transform(axes.transData.transform(axes.get_lines()[0].get_xydata()))[:, 1]
    assert heights.min() > 0.02  # of the axes' height
    assert ("cut at 0.01" in axes.get_ylabel()) == (errors == (0.0, 60.0))


def drawn_plane(height: float, errors: np.ndarray) -> list[Axes]:
    """Return the panels of a plane 10 wide, with these test errors on its grid."""
    x, y = np.meshgrid(np.linspace(0, 10, errors.shape[1]), np.linspace(0, height, errors.shape[0]))
    rows = [
        {"x": a, "y": b, "train_loss": 0.1, "test_error": error}
        for a, b, error in zip(x.flat, y.flat, errors.flat, strict=True)
    ]
    return plane(rows, [("start", 0, 0), ("end", 10, 0), ("bend", 5, height)], ("gRDA", "SGD")).axes[:2]


def test_one_point_without_errors_leaves_the_levels_to_the_others() -> None:
    errors = np.linspace(2.0, 12.0, 25).reshape(5, 5)
    errors[2, 2] = 0.0
    levels = drawn_plane(6.0, errors)[1].collections[0].norm  # type: ignore[attr-defined]
    assert (levels.vmin, levels.vmax) == (1.0, 12.0)


@pytest.mark.parametrize("errors", [np.zeros((3, 3)), np.full((3, 3), np.nan)])
def test_a_plane_without_any_error_can_be_drawn(errors: np.ndarray) -> None:
    errors[0, 0] = 0.0
    assert drawn_plane(6.0, errors)[1].get_title() == "test error (%)"


@pytest.mark.parametrize(("height", "aspect"), [(0.3, "auto"), (2.0, 1.0)])
def test_a_flat_plane_is_not_drawn_to_scale_and_says_so(height: float, aspect: object) -> None:
    for axes in drawn_plane(height, np.linspace(1.0, 2.0, 9).reshape(3, 3)):
        assert axes.get_aspect() == aspect
        assert ("not to scale" in axes.get_ylabel()) == (aspect == "auto")
        assert axes.get_position().height * axes.figure.get_figheight() > 0.8  # its height in inches


@pytest.mark.parametrize("least", [1e-9, 1e-5])
def test_figures_say_where_a_loss_is_cut(least: float) -> None:
    points = [Measurement((t,), loss, 10.0, loss, 10.0) for t, loss in ((0.0, 0.1), (0.5, least), (1.0, 0.1))]
    loss, error, *_ = profile({"curve": CurveProfile(tuple(points))}, ("gRDA", "SGD"), None).axes
    assert loss.get_ylabel() == ("train loss (cut at 1e-06)" if least < 1e-6 else "train loss")
    assert error.get_ylabel() == "train error (%)"
    rows = [
        {"x": x, "y": y, "train_loss": least * 10 ** (x + y), "test_error": 10.0 + x} for x in (0, 4) for y in (0, 3)
    ]
    corners = [("start", 0, 0), ("end", 4, 0), ("bend", 2, 3)]
    bar = plane(rows, corners, ("gRDA", "SGD")).axes[0].child_axes[0]
    assert bar.get_yticklabels()[0].get_text() == ("≤ 1e-06" if least < 1e-6 else "1e-05")
