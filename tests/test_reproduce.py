"""The published numbers, the ledger of our runs, and the comparison of the two."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import call
from test_runs import record
from test_train import Breaking
from torch import nn

from dirprune.lab import published
from dirprune.lab.cli.output import Output
from dirprune.lab.published import Estimate, PublishedCell, Setting
from dirprune.lab.records import checkpoint
from dirprune.lab.records.files import LOCK, write_text
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.reproduction import cells as reproduce
from dirprune.lab.studies.reproduction import figures as reproduction_plots
from dirprune.lab.studies.reproduction import ledger
from dirprune.lab.studies.reproduction import page as reproduction_page
from dirprune.lab.training import recipes, runs, series
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.surroundings import Surroundings

VGG = recipes.get("vgg16-cifar10")
WRN = recipes.get("wrn28x10-cifar100")
MU6 = Setting("vgg16-cifar10", "grda", 5e-4, 0.6)


def make_run(folder: Path, recipe: Recipe, records: list[EpochRecord]) -> Path:
    run = runs.create(folder, recipe)
    for line in records:
        run.append(line)
    session = {"time": "2030-01-01T00:00:00Z", "command": "dirprune train x", "commit": "abc1234"}
    sessions = [{**session, "torch": "2.6", "device": name} for name in ("GPU one", "GPU two", "GPU one")]
    (folder / "environment.json").write_text(json.dumps(sessions))
    return folder


def published_cell(setting: Setting, metric: str, epoch: int) -> PublishedCell:
    [cell] = [c for c in published.cells() if (c.setting, c.metric, c.epoch) == (setting, metric, epoch)]
    return cell


def our_cell(results: Path, setting: Setting, metric: str, epoch: int) -> reproduce.Cell:
    [cell] = [
        c
        for c in reproduce.compared(ledger.read(results))
        if (c.published.setting, c.published.metric, c.published.epoch) == (setting, metric, epoch)
    ]
    return cell


# The published numbers


@pytest.mark.parametrize(
    ("setting", "metric", "epoch", "mean", "std"),
    [
        (MU6, "sparsity", 200, 79.6367, 0.2028),
        (MU6, "test_accuracy", 600, 90.82, 0.24),
        (Setting("vgg16-cifar10", "sgd"), "train_loss", 1, 2.1797, 0.0859),
        (Setting("vgg16-cifar10", "grda", 5e-4, 0.7), "test_accuracy", 600, 90.64, 0.22),
        (Setting("wrn28x10-cifar10", "grda", 1e-3, 0.55), "sparsity", 200, 94.7444, 0.0367),
        (Setting("wrn28x10-cifar100", "grda", 1e-3, 0.501), "test_accuracy", 200, 76.916, 0.1894),
    ],
)
def test_cells_are_those_of_the_paper(setting: Setting, metric: str, epoch: int, mean: float, std: float) -> None:
    paper = published_cell(setting, metric, epoch).paper
    assert paper.mean == pytest.approx(mean, abs=5e-3)
    assert paper.std == pytest.approx(std, abs=5e-3)


def test_the_tables_are_whole() -> None:
    cells = published.cells()
    assert len(cells) == len({(c.setting, c.metric, c.epoch) for c in cells}) == 450
    for experiment in published.EXPERIMENTS:
        recipe = recipes.get(experiment)
        settings = published.settings(experiment)
        assert {(s.c, s.mu) for s in settings if s.optimizer == "grda"} == set(recipe.published)
        assert sum(s.optimizer == "sgd" for s in settings) == 1
        assert max(c.epoch for c in cells if c.setting.experiment == experiment) == recipe.epochs


def test_the_column_of_wrn_printed_epoch_1_is_epoch_2() -> None:
    for cell in published.cells():
        moved = cell.setting.experiment.startswith("wrn") and cell.printed_epoch == 1
        assert cell.epoch == (2 if moved else cell.printed_epoch)


def test_a_sample_std_is_the_population_std_corrected() -> None:
    """WRN's cells use all ten runs, so the two stds are of the same numbers, up to printing."""
    cells = [cell for cell in published.cells() if cell.setting.experiment.startswith("wrn")]
    printed = np.array([cell.paper.std for cell in cells])
    sample = np.array([cell.comparable.std for cell in cells])
    assert {cell.comparable.n for cell in cells} == {10}
    np.testing.assert_allclose(sample * math.sqrt(9 / 10), printed, atol=6e-5)


def test_comparable_runs_leave_out_what_was_measured_otherwise_and_the_run_that_diverged() -> None:
    diverged = Setting("vgg16-cifar10", "grda", 5e-4, 0.7)
    assert published_cell(MU6, "train_loss", 50).comparable.n == 5
    assert published_cell(MU6, "test_loss", 50).comparable.n == 10
    end = published_cell(diverged, "test_accuracy", 600)
    assert (end.every.n, end.comparable.n) == (10, 9)
    # The run that diverged ended at 10%: it guessed.
    assert end.every.mean == pytest.approx((9 * end.comparable.mean + 10.0) / 10, abs=1e-3)


@pytest.mark.parametrize("experiment", published.EXPERIMENTS)
def test_bands_pass_through_the_cells(experiment: str) -> None:
    bands = published.bands(experiment)
    for cell in published.cells():
        if cell.setting.experiment == experiment:
            band = bands[cell.setting, cell.metric]
            at = band.epochs.index(cell.epoch)
            assert band.mean[at] == pytest.approx(cell.comparable.mean, rel=1e-4)
            assert band.std[at] == pytest.approx(cell.comparable.std, rel=6e-3)
            assert band.low[at] <= band.mean[at] * 1.0001
            assert band.high[at] >= band.mean[at] * 0.9999


def test_bands_of_another_experiment_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experiment='digits' was not published"):
        published.bands("digits")


def test_figure_2_starts_alike_and_stays_above_its_bound() -> None:
    curves = published.norm_ratios()
    assert {curve.parameters for curve in curves} == {15_245_130, 36_546_980}
    for curve in curves:
        assert min(curve.ratios) > curve.parameters**-0.5
        other = next(c for c in curves if c.parameters == curve.parameters and c is not curve)
        assert (curve.epochs[0], curve.ratios[0]) == (0, other.ratios[0])


def test_costs_are_those_of_the_paper() -> None:
    ratios = {}
    costs = {(cost.model, cost.optimizer): cost for cost in published.costs()}
    for model in ("resnet50", "vgg16", "wrn28x10"):
        ratios[model] = round(100 * costs[model, "grda"].ms / costs[model, "sgd"].ms - 100)
    assert ratios == {"resnet50": 16, "vgg16": 42, "wrn28x10": 11}
    assert costs["wrn28x10", "grda"].peak_mib - costs["wrn28x10", "sgd"].peak_mib == 288


# The ledger


def test_collecting_keeps_six_digits_and_the_circumstances(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(VGG, seed=3), [record(1), record(2)])
    assert ledger.collect([run], tmp_path / "results") == ["vgg16-cifar10/grda-c0.0005-mu0.6/seed3"]
    [found] = ledger.read(tmp_path / "results")
    assert found.epochs[1].train_loss == 0.333333
    assert (found.epochs[1].epoch, found.epochs[1].dataset, found.epochs[1].model) == (2, "cifar10", "vgg16")
    entry = found.entry
    assert (entry.epochs_done, entry.epochs, entry.complete, entry.departs) == (2, 600, "no", "")
    assert (entry.hardware, entry.torch, entry.commit) == ("GPU one; GPU two", "2.6", "abc1234")
    header = (tmp_path / "results" / "trajectories.csv").read_text().splitlines()[0]
    assert header == (
        "run,dataset,model,optimizer,c,mu,seed,epoch,lr,train_loss,train_accuracy,test_loss,test_accuracy,"
        "sparsity,weight_sparsity,norm_ratio,train_seconds,test_seconds,signs_kept"
    )


def test_collecting_twice_changes_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results"
    folders = [
        make_run(tmp_path / "a", VGG, [record(1)]),
        make_run(tmp_path / "b", WRN.but(optimizer="sgd"), [record(1)]),
    ]
    ledger.collect(folders, results)
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    ledger.collect(folders[:1], results)
    ledger.collect(folders, results)
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before
    assert set(before) - {LOCK} == {"ledger.csv", "trajectories.csv"}


def test_a_longer_version_of_a_run_replaces_the_shorter_one(tmp_path: Path) -> None:
    results = tmp_path / "results"
    short = make_run(tmp_path / "short", VGG, [record(1)])
    long = make_run(tmp_path / "long", VGG, [record(1), record(2, test_loss=0.25)])
    other = make_run(tmp_path / "other", replace(VGG, seed=1), [record(1)])
    ledger.collect([short, other], results)
    assert len(ledger.collect([long], results)) == 1
    assert ledger.collect([short], results) == []
    first, second = ledger.read(results)
    assert [epoch.test_loss for epoch in first.epochs] == [0.5, 0.25]
    assert second.entry.seed == 1


def test_a_folder_that_is_no_run_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    results = tmp_path / "results"
    ledger.collect([make_run(tmp_path / "run", VGG, [record(1)])], results)
    before = (results / "ledger.csv").read_bytes()
    with pytest.raises(FileNotFoundError, match="is not a run"):
        ledger.collect([make_run(tmp_path / "two", replace(VGG, seed=2), []), tmp_path], results)
    assert (results / "ledger.csv").read_bytes() == before


# The comparison


def test_deviation_is_in_stds() -> None:
    assert reproduce.deviation(79.4339, Estimate(79.6367, 0.2028, 9)) == pytest.approx(-1.0)
    assert reproduce.deviation(5.18, Estimate(5.19, 0.0, 9)) is None
    assert reproduce.deviation(math.nan, Estimate(5.19, 0.1, 9)) is None


@pytest.mark.parametrize("n", [1, 3])
def test_chance_is_how_often_runs_of_the_same_kind_lie_that_far(n: int) -> None:
    rng = np.random.default_rng(0)
    theirs, ours = rng.normal(size=(1500, 5)), rng.normal(size=(1500, n)).mean(axis=1)
    estimates = [Estimate(row.mean(), row.std(ddof=1), 5) for row in theirs]
    chances = np.array([reproduce.chance(mean, n, e) for mean, e in zip(ours, estimates, strict=True)], dtype=float)
    for share in (0.1, 0.5, 0.9):  # a p-value is uniform
        assert np.mean(chances < share) == pytest.approx(share, abs=0.04)


def test_without_results_every_cell_is_missing(tmp_path: Path) -> None:
    cells = reproduce.compared(ledger.read(tmp_path))
    assert len(cells) == 450
    assert all(cell.missing and cell.deviation is None and cell.chance is None for cell in cells)
    assert len(reproduce.missing(cells)) == 15
    assert reproduce.tables(cells) == {}
    assert reproduce.conclusion(cells) == [
        "0 of 450 published cells have a run of ours.",
        "Of 15 settings, 15 have no run yet, and 0 an unfinished one.",
    ]


def test_seeds_are_averaged_and_compared_in_the_paper_s_units(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / str(seed), replace(VGG, seed=seed), [record(200, sparsity=value)])
        for seed, value in ((0, 0.795), (1, 0.799))
    ]
    ledger.collect(folders, tmp_path / "results")
    cell = our_cell(tmp_path / "results", MU6, "sparsity", 200)
    assert len(cell.ours) == 2
    assert cell.mean == pytest.approx(79.7)
    assert cell.deviation == pytest.approx((79.7 - 79.6367) / 0.2028)
    assert cell.comparable_deviation == pytest.approx((79.7 - 79.622) / 0.2080, abs=5e-3)


def test_an_unfinished_run_counts_as_far_as_it_came(tmp_path: Path) -> None:
    ledger.collect([make_run(tmp_path / "run", VGG, [record(1), record(50)])], tmp_path / "results")
    assert not our_cell(tmp_path / "results", MU6, "test_loss", 50).missing
    assert our_cell(tmp_path / "results", MU6, "test_loss", 100).missing
    gaps = reproduce.missing(reproduce.compared(ledger.read(tmp_path / "results")))
    assert "vgg16-cifar10, gRDA μ=0.6: epochs 100, 200, 300, 600" in gaps


def test_a_run_that_diverged_is_told_from_one_that_was_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results"
    folder = make_run(tmp_path / "run", VGG.but(mu=0.7, seed=1), [record(1), record(50)])
    runs.load(folder).conclude(runs.Outcome(diverged="the training loss became nan in step 2 of epoch 51"))
    ledger.collect([folder], results)
    assert [found.entry.complete for found in ledger.read(results)] == ["diverged"]
    vgg = ["vgg16-cifar10"]
    assert 0.7 not in [recipe.values().get("mu") for recipe in reproduce.wanted(results, experiments=vgg)]
    second = [
        recipe for recipe in reproduce.wanted(results, experiments=vgg, seeds=2) if recipe.values().get("mu") == 0.7
    ]
    assert [recipe.seed for recipe in second] == [2]


@pytest.mark.parametrize(("examples", "departs"), [(20, "examples=20"), (50_000, "")])
def test_a_run_on_a_part_of_the_data_is_no_reproduction(tmp_path: Path, examples: int, departs: str) -> None:
    folder = make_run(tmp_path / "run", VGG, [record(50)])
    runs.load(folder).note_session(torch.device("cpu"), 1, None, examples)
    ledger.collect([folder], tmp_path / "results")
    [found] = ledger.read(tmp_path / "results")
    assert found.entry.departs == departs
    assert bool(reproduce.reproductions([found])) == (not departs)


@pytest.mark.parametrize("change", [{"epochs": 200}, {"momentum": 0.9}, {"lr": 0.05}, {"c": 1e-3}])
def test_a_run_that_departs_from_the_publication_is_no_reproduction(tmp_path: Path, change: dict[str, Any]) -> None:
    ledger.collect([make_run(tmp_path / "run", VGG.but(**change), [record(50)])], tmp_path / "results")
    assert all(cell.missing for cell in reproduce.compared(ledger.read(tmp_path / "results")))


def test_a_departing_run_does_not_replace_the_faithful_one(tmp_path: Path) -> None:
    faithful = make_run(tmp_path / "a", VGG, [record(1)])
    short = make_run(tmp_path / "b", replace(VGG, epochs=50), [record(1), record(50)])
    ledger.collect([faithful, short], tmp_path / "results")
    assert [found.entry.departs for found in ledger.read(tmp_path / "results")] == ["", "epochs=50"]
    assert our_cell(tmp_path / "results", MU6, "test_loss", 1).ours == (0.5,)


def test_what_the_seeds_do_not_explain_is_listed(tmp_path: Path) -> None:
    near = published_cell(MU6, "test_accuracy", 300).comparable
    line = record(300, sparsity=0.5, test_accuracy=near.mean + near.std)
    ledger.collect([make_run(tmp_path / "run", VGG, [line])], tmp_path / "results")
    odd = [
        cell.published.metric for cell in reproduce.surprising(reproduce.compared(ledger.read(tmp_path / "results")))
    ]
    assert "sparsity" in odd
    assert "test_accuracy" not in odd


def their_mean(setting: Setting, metric: str, epoch: int) -> float:
    band = published.bands(setting.experiment)[setting, metric]
    return band.mean[list(band.epochs).index(epoch)]


def test_an_odd_cell_is_shown_with_the_epochs_around_it(tmp_path: Path) -> None:
    alone = make_run(tmp_path / "alone", replace(VGG, seed=1), [record(300, sparsity=0.5)])
    lines = [record(epoch, sparsity=0.86 if epoch != 300 else 0.5) for epoch in (200, 295, 300, 301)]
    for folder, means in ((alone, None), (make_run(tmp_path / "run", VGG, lines), 86.0)):
        results = folder / "results"
        ledger.collect([folder], results)
        near = reproduce.around(our_cell(results, MU6, "sparsity", 300), ledger.read(results))
        if means is None:
            assert near is None
        else:
            assert near is not None
            assert near[0] == pytest.approx(means)
            assert near[1] == pytest.approx(their_mean(MU6, "sparsity", 295))  # the only epoch that both have
        assert ("In the epochs around it" in reproduction_page.page(ledger.read(results), results)) == (
            means is not None
        )


def test_epochs_around_a_cell_count_only_if_both_have_them(tmp_path: Path) -> None:
    """Sparsity grows fast at first: compared with a mean over epochs that it has not reached, ours would look low."""
    run = make_run(tmp_path / "run", VGG, [record(epoch, sparsity=0.05) for epoch in (1, 2)])
    results = tmp_path / "results"
    ledger.collect([run], results)
    near = reproduce.around(our_cell(results, MU6, "sparsity", 1), ledger.read(results))
    assert near == pytest.approx((5.0, their_mean(MU6, "sparsity", 2)))


def test_runs_of_unequal_length_on_the_authors_curve_deviate_nowhere(tmp_path: Path) -> None:
    lengths = {1: 3, 2: 5}
    for seed, length in lengths.items():
        lines = [record(epoch, sparsity=their_mean(MU6, "sparsity", epoch) / 100) for epoch in range(1, length + 1)]
        ledger.collect([make_run(tmp_path / str(seed), replace(VGG, seed=seed), lines)], tmp_path / "results")
    ours, theirs = reproduce.around(
        our_cell(tmp_path / "results", MU6, "sparsity", 1), ledger.read(tmp_path / "results")
    )
    assert ours == pytest.approx(theirs)


# The page


def test_the_page_shows_ours_beside_the_paper_s(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    folders = [
        make_run(tmp_path / "vgg", VGG, [record(1), record(200, sparsity=0.7943)]),
        make_run(
            tmp_path / "wrn",
            WRN.but(optimizer="sgd"),
            [record(epoch, sparsity=0.0) for epoch in (*range(2, 22), 200)],
        ),
    ]
    ledger.collect(folders, results)
    (results / "bench.csv").write_text(
        "model,batch_size,parameters,optimizer,ms,floor_ms,peak_mib,overhead,hardware,torch,commit,command\n"
        "vgg16,128,15245130,sgd,1.2,0.3,500,0.06,H200,2.11,abc,x\n"
        "vgg16,128,15245130,grda,1.5,0.3,560,0.041,H200,2.11,abc,x\n"
        "resnet50,256,25557032,sgd,37.6,7.95,,0.026,H200,2.11,abc,x\n"
    )
    text = reproduction_page.write_page(ledger.read(results), results, docs).read_text(encoding="utf-8")
    assert "| vgg16 | 128 | grda | 30.3 | 1.42 | 1809 | 1.5 | 1.250 | 560 |" in text
    assert "| resnet50 | 256 | sgd | 396.4 | 1.00 | 14221 | 37.6 | 1.000 | — |" in text
    assert "Ours, vgg16, resnet50: H200, torch 2.11, commit abc." in text
    assert text.count("10 of 150 cells have a run of ours.") == 2
    assert "| wrn28x10-cifar100 | SGD | 200 | 4.000e-04 | 3.434e-04 | 1.654e-04 |" in text
    figures = {path.name for path in (docs / "figures").iterdir()}
    assert all(f"(figures/{name})" in text for name in figures)
    assert text.count("](figures/") == len(figures) == 3  # one of the experiment with a tenth of a run, Figures 2 and 3
    assert "735,735 steps of 256 images: 93.6 hours on the paper's two V100s." in text
    assert "$" not in text.replace("$^", "")


def test_cells_csv_has_every_cell(tmp_path: Path) -> None:
    """Three lines of the tables that the page once had: ours, the paper's as printed, and those that compare."""
    ledger.collect([make_run(tmp_path / "vgg", VGG, [record(1), record(200, sparsity=0.7943)])], tmp_path / "results")
    reproduction_page.write_page(ledger.read(tmp_path / "results"), tmp_path / "results", tmp_path / "docs")
    rows = read_rows(tmp_path / "results" / "cells.csv", reproduction_page.CellRow)
    assert len(rows) == len(published.cells()) == 450
    assert sum(row.ours is not None for row in rows) == 10
    vgg = [row for row in rows if row.experiment == "vgg16-cifar10"]
    [row] = [each for each in vgg if (each.run, each.metric, each.epoch) == ("gRDA μ=0.6", "sparsity", 200)]
    assert (row.our_runs, row.comparable_runs) == (1, 10)
    assert row.ours == pytest.approx(79.43)
    assert [f"{value:.3f}" for value in (row.paper_mean, row.paper_std)] == ["79.637", "0.203"]
    assert [f"{value:.3f}" for value in (row.comparable_mean, row.comparable_std)] == ["79.622", "0.208"]
    assert row.deviation == pytest.approx(-1.0, abs=0.05)
    assert row.comparable_deviation == pytest.approx(-0.9, abs=0.05)


def test_a_figure_shows_our_settings_and_how_far_they_have_come() -> None:
    bands = published.bands("vgg16-cifar10")
    sgd, mu6 = (setting for setting, metric in bands if metric == "sparsity" and str(setting) in ("SGD", "gRDA μ=0.6"))
    ours = {
        (setting, metric): [([1, last], [2.0, 1.0])]
        for setting, last in ((sgd, 100), (mu6, 600))
        for metric in published.METRICS
    }
    figure = reproduction_plots.trajectories({key: bands[key] for key in ours}, ours)
    assert len(figure.axes) == 2 * 5
    assert [axes.get_ylabel() for axes in figure.axes[::5]] == ["SGD,\nepoch 100 so far", "gRDA μ=0.6"]


def test_a_run_is_drawn_from_a_tenth_of_its_epochs_on(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "young", VGG.but(mu=0.4), [record(1)]),
        make_run(tmp_path / "old", VGG, [record(epoch) for epoch in range(1, 61)]),
    ]
    ledger.collect(folders, tmp_path / "results")
    groups = reproduce.reproductions(ledger.read(tmp_path / "results"))
    assert [str(setting) for setting in reproduction_page.drawable("vgg16-cifar10", groups)] == ["gRDA μ=0.6"]
    assert reproduction_page.drawable("wrn28x10-cifar10", groups) == {}


def test_the_imagenet_curves_have_the_peaks_that_the_authors_name() -> None:
    """Epoch, accuracy and sparsity of the best epochs, as the README of the authors' repository lists them."""
    runs = {(run.setting.c, run.setting.mu): run for run in published.imagenet_runs()}
    assert len(runs) == 5
    assert all(run.epochs == tuple(range(1, 148)) for run in runs.values())
    for key, epoch, accuracy, sparsity in (
        ((None, None), 89, 68.71, 0.0),
        ((0.005, 0.501), 145, 70.60, 86.03),
        ((0.005, 0.51), 136, 70.35, 87.38),
        ((0.005, 0.55), 145, 69.76, 91.54),
    ):
        assert max(runs[key].test_accuracy) == runs[key].test_accuracy[epoch - 1] == pytest.approx(accuracy, abs=0.01)
        assert runs[key].sparsity[epoch - 1] == pytest.approx(sparsity, abs=0.1)


def test_figure_3_draws_the_five_runs() -> None:
    train, test, left = reproduction_plots.imagenet(published.imagenet_runs()).axes
    assert [len(axes.get_lines()) for axes in (train, test, left)] == [5, 5, 5]
    assert left.get_lines()[0].get_ydata()[-1] == 100  # SGD keeps all
    assert train.get_lines()[0].get_ydata()[-1] > 80 > test.get_ylim()[1]


def test_the_published_norms_are_drawn_over_ours() -> None:
    theirs = published.norm_ratios()
    ours = {curve.setting: [(curve.epochs, curve.ratios)] for curve in theirs}
    for axes in reproduction_plots.norm_ratio(theirs, ours).axes:
        labels = [str(line.get_label()) for line in axes.lines]
        widths = [line.get_linewidth() for line in axes.lines]
        for name in ("SGD", "gRDA"):
            first, last = labels.index(f"{name}, ours"), labels.index(f"{name}, paper")
            assert first < last
            assert widths[first] > widths[last]


def test_a_page_without_runs_says_so(tmp_path: Path) -> None:
    text = reproduction_page.page(ledger.read(tmp_path), tmp_path)
    assert "0 of 450 published cells have a run of ours." in text
    assert "No run yet." in text
    assert "Ours are not measured yet" in text
    assert re.search(r"[+−]\d+\.\dσ", text) is None


def test_the_page_s_tables_are_rectangular(tmp_path: Path) -> None:
    ledger.collect([make_run(tmp_path / "run", VGG, [record(1)])], tmp_path / "results")
    blocks = [
        block
        for block in reproduction_page.page(ledger.read(tmp_path / "results"), tmp_path / "results").split("\n\n")
        if block.startswith("|")
    ]
    assert len(blocks) == 1 + 1  # Figure 2, costs
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.parametrize("width", [80, 60])
def test_the_tables_fit_a_terminal_whatever_the_numbers(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = [
        replace(cell, ours=(cell.published.paper.mean - 99.9 * cell.published.paper.std - 2.6e-5,))
        for cell in reproduce.compared(ledger.read(Path("nowhere")))
    ]
    for title, rows in reproduce.tables(cells).items():
        Output().rows(title, rows, spare=reproduce.SPARE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum("−99.9σ" in line for line in lines) > 100


def test_the_tables_name_what_there_is(tmp_path: Path) -> None:
    ledger.collect([make_run(tmp_path / "run", VGG, [record(200, sparsity=0.79434)])], tmp_path / "results")
    cells = reproduce.compared(ledger.read(tmp_path / "results"))
    [row] = [row for row in reproduce.tables(cells)["vgg16-cifar10, gRDA μ=0.6"] if row["metric"] == "sparsity"]
    shown = ["sparsity", "200", "79.43", "1", "79.64 ± 0.20", "−1.0σ", "79.62 ± 0.21 (10)", "−0.9σ"]
    assert list(row.values()) == shown
    assert "vgg16-cifar10, gRDA μ=0.6: epochs 1, 50, 100, 300, 600" in reproduce.missing(cells)


# Details of the comparison and of the ledger


def test_two_published_runs_leave_one_degree_of_freedom() -> None:
    assert reproduce.chance(1.0, 2, Estimate(0.0, 1.0, 2)) == pytest.approx(0.5)  # by Cauchy's distribution


def cell(ours: float, std: float) -> reproduce.Cell:
    estimate = Estimate(1.0, std, 9)
    setting = Setting("vgg16-cifar10", "sgd")
    return reproduce.Cell(PublishedCell(setting, 1, 1, "train_loss", estimate, estimate, estimate), (ours,))


def test_where_theirs_do_not_differ_ours_are_told_by_the_greatest_distance_on_either_side() -> None:
    lines = reproduce.conclusion([cell(1.0, 0.1), cell(0.5, 0.0), cell(1.1, 0.0)])
    assert "In 2 more all their runs logged the same digits; ours differ by at most 0.5." in lines


@pytest.mark.parametrize("n", [1, 3])
def test_as_many_cells_are_expected_far_off_as_runs_of_the_same_kind_lie_there(n: int) -> None:
    rng = np.random.default_rng(0)
    theirs, ours = rng.normal(size=(4000, 9)), rng.normal(size=(4000, n))
    setting, found = Setting("vgg16-cifar10", "sgd"), []
    for row, own in zip(theirs, ours, strict=True):
        estimate = Estimate(row.mean(), row.std(ddof=1), 9)
        given = PublishedCell(setting, 1, 1, "train_loss", estimate, estimate, estimate)
        found.append(reproduce.Cell(given, tuple(own)))
    seen = sum(map(reproduce.is_beyond, found))
    expected = sum(map(reproduce.chance_beyond, found))
    assert seen == pytest.approx(expected, abs=4 * expected**0.5)
    assert f"{seen} of 4000 cells, where {expected:.0f} are" in reproduce.conclusion(found)[1]


def test_the_conclusion_names_where_ours_are_off() -> None:
    lines = reproduce.conclusion([cell(1.0, 0.1), cell(1.5, 0.1), cell(0.5, 0.1)])
    assert "Most often: vgg16-cifar10, SGD, train loss, 2 of 3 cells." in lines
    assert not any("Most often" in line for line in reproduce.conclusion([cell(1.1, 0.1)]))


def test_the_most_surprising_cell_comes_first() -> None:
    near, far = cell(2.0, 0.1), cell(3.0, 0.1)
    assert reproduce.surprising([near, far]) == [far, near]


def test_a_run_without_an_epoch_reproduces_nothing() -> None:
    entry = SimpleNamespace(departs="", recipe="vgg16-cifar10", optimizer="sgd")
    assert reproduce.reproductions([ledger.Recorded(entry, ())]) == {}


def test_whatever_is_not_ours_to_choose_departs_from_the_published_run() -> None:
    ours = {"name", "about", "optimizer", "c", "mu", "seed", "keep", "published", "cpu", "cuda"}
    assert set(ledger.CHOICES) <= ours
    assert recipes.departures(replace(VGG, batch_size=64), ledger.CHOICES) == "batch_size=64"


def test_a_stop_between_the_two_tables_leaves_nothing_that_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", VGG.but(optimizer="sgd", seed=1), [record(1)])
    ledger.collect([folder], tmp_path)
    for epoch in range(2, 601):
        runs.load(folder).append(record(epoch))
    written: list[str] = []

    def stopped(path: Path, text: str) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path.name)
        write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "write_text", stopped)
        with pytest.raises(KeyboardInterrupt):
            ledger.collect([folder], tmp_path)
    wanted = [recipe.optimizer.name for recipe in reproduce.wanted(tmp_path, experiments=["vgg16-cifar10"])]
    assert "sgd" in wanted  # so that `reproduce --train` collects the run again
    ledger.collect([folder], tmp_path)
    assert [len(run.epochs) for run in ledger.read(tmp_path)] == [600]


def test_two_jobs_that_collect_at_once_lose_no_run(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(seed), replace(VGG, seed=seed), [record(1)]) for seed in range(8)]
    with ThreadPoolExecutor() as jobs:
        list(jobs.map(lambda folder: ledger.collect([folder], tmp_path), folders))
    assert sorted(run.entry.seed for run in ledger.read(tmp_path)) == list(range(8))


def test_of_two_folders_of_one_run_and_length_the_later_counts(tmp_path: Path) -> None:
    for name, accuracy in (("a", 10.0), ("b", 20.0)):
        run = make_run(tmp_path / name, VGG, [record(1, test_accuracy=accuracy)])
        assert len(ledger.collect([run], tmp_path / "results")) == 1
    assert ledger.read(tmp_path / "results")[0].epochs[0].test_accuracy == 20.0


def test_a_run_began_with_its_first_session(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", VGG, [record(1)])
    sessions = json.loads((run / "environment.json").read_text())
    first = (sessions[0]["time"], sessions[0]["command"])
    sessions.append({**sessions[0], "time": "2031-01-01T00:00:00Z", "command": "dirprune resume x"})
    (run / "environment.json").write_text(json.dumps(sessions))
    ledger.collect([run], tmp_path / "results")
    entry = ledger.read(tmp_path / "results")[0].entry
    assert (entry.started, entry.command) == first


# What is missing, and training it


def settings_of(planned: list[Recipe]) -> list[tuple[str, float | None, int]]:
    return [(r.name, r.values().get("mu"), r.seed) for r in planned]


def test_without_a_ledger_every_setting_is_wanted_once_and_follows_its_recipe(tmp_path: Path) -> None:
    planned = reproduce.wanted(tmp_path)
    assert len(planned) == 15
    assert settings_of(planned)[:6] == [
        *(("vgg16-cifar10", mu, 1) for mu in (None, 0.6, 0.51, 0.7, 0.4)),
        ("wrn28x10-cifar10", 0.55, 1),
    ]
    assert {recipes.departures(recipe, ledger.CHOICES) for recipe in planned} == {""}
    folders = [make_run(tmp_path / str(i), recipe, [record(1)]) for i, recipe in enumerate(planned)]
    ledger.collect(folders, tmp_path / "results")
    groups = reproduce.reproductions(ledger.read(tmp_path / "results"))
    assert set(groups) == {cell.setting for cell in published.cells()}
    assert settings_of(reproduce.wanted(tmp_path / "results")) == settings_of(planned)  # no run is complete


def test_what_the_ledger_has_in_full_is_not_wanted_again(tmp_path: Path) -> None:
    def whole(seed: int, **changes: Any) -> Path:
        recipe = VGG.but(seed=seed, **changes)
        return make_run(tmp_path / f"{seed}{changes}", recipe, [record(epoch) for epoch in range(1, 601)])

    ledger.collect([whole(2), whole(7, optimizer="sgd"), whole(1, momentum=0.9)], tmp_path / "results")
    for seeds, expected in {
        1: [(0.51, 1), (0.7, 1), (0.4, 1)],
        2: [(0.51, 1), (0.7, 1), (0.4, 1), (None, 1), (0.6, 1), (0.51, 2), (0.7, 2), (0.4, 2)],
    }.items():
        planned = reproduce.wanted(tmp_path / "results", experiments=["vgg16-cifar10"], seeds=seeds)
        assert [(mu, seed) for _, mu, seed in settings_of(planned)] == expected


def test_what_was_not_published_cannot_be_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no published experiment 'vgg16-cifar11'. Did you mean 'vgg16-cifar10'"):
        reproduce.wanted(tmp_path, experiments=["vgg16-cifar11"])


def small(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


BREAKS: list[bool] = []


def at_first_breaking(num_classes: int) -> nn.Module:
    return Breaking(step=6, value=math.nan) if BREAKS.pop(0) else small(num_classes)


TWO = [
    recipes.get("digits-short").but(model="test_reproduce:small", epochs=3, batch_size=400, optimizer=optimizer, seed=1)
    for optimizer in ("sgd", "grda")
]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `reproduce --train` train two runs that take no time."""
    monkeypatch.setattr(reproduce, "wanted", lambda *_, **__: TWO)
    return ["reproduce", "--train", "--device", "cpu", "--results", tmp_path / "results", "--runs", tmp_path / "runs"]


def names_and_epochs(results: Path) -> list[tuple[str, int]]:
    return [(run.entry.run.split(" ")[0], len(run.epochs)) for run in ledger.read(results)]


def test_what_is_missing_is_trained_and_in_the_ledger(tmp_path: Path, command: list[Any]) -> None:
    assert call(*command, "--keep", "1").exit_code == 0
    expected = [("digits-short/sgd/seed1", 3), ("digits-short/grda-c0.02-mu0.7/seed1", 3)]
    assert names_and_epochs(tmp_path / "results") == expected
    [sgd, grda] = [runs.load(tmp_path / "runs" / runs.default_name(recipe)) for recipe in TWO]
    assert checkpoint.epochs(sgd.checkpoints) == checkpoint.epochs(grda.checkpoints) == [1, 3]
    before = (tmp_path / "results" / "trajectories.csv").read_bytes()
    assert call(*command).exit_code == 0
    assert (tmp_path / "results" / "trajectories.csv").read_bytes() == before


def test_training_that_is_stopped_is_in_the_ledger_and_goes_on(
    tmp_path: Path, command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = series.Planned.steps

    def interrupted(plan: series.Planned, here: Surroundings) -> Iterator[series.RunStep]:
        for step in plain(plan, here):
            if (plan.recipe, step.epoch) == (TWO[1].but(keep=(1,)), 1):
                signal.raise_signal(signal.SIGINT)
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(series.Planned, "steps", interrupted)
        stopped = call(*command, "--keep", "1")
    assert stopped.exit_code == 130
    assert "Stopped; 1 of 2 runs are complete. Run the same command to continue." in stopped.stderr
    assert [epochs for _, epochs in names_and_epochs(tmp_path / "results")] == [3, 2]
    assert call(*command, "--keep", "2").exit_code == 0
    second = runs.load(tmp_path / "runs" / runs.default_name(TWO[1]))
    assert second.recipe.keep == (1, 2)  # what both commands asked for
    assert checkpoint.epochs(second.checkpoints) == [1, 2, 3]
    other = tmp_path / "other"
    assert call(*command, "--results", other, "--runs", other).exit_code == 0
    whole, pieces = (ledger.read(results) for results in (other, tmp_path / "results"))
    assert [[e.test_loss for e in run.epochs] for run in whole] == [[e.test_loss for e in run.epochs] for run in pieces]


def test_a_run_that_diverges_is_told_and_the_next_one_trained(
    tmp_path: Path, command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [replace(recipe, model="test_reproduce:at_first_breaking") for recipe in TWO]
    BREAKS[:] = [True, False]
    monkeypatch.setattr(reproduce, "wanted", lambda *_, **__: broken)
    result = call(*command)
    assert result.exit_code == 0
    assert "the training loss became nan in step 2 of epoch 2. The other runs continue" in result.stderr
    assert [epochs for _, epochs in names_and_epochs(tmp_path / "results")] == [1, 3]


def test_without_data_nothing_is_left_behind(
    tmp_path: Path, command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "wanted", lambda *_, **__: [VGG])
    result = call(*command, "--data", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "cifar10" in result.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.filterwarnings("always:.*The others go on")
def test_a_folder_of_another_run_is_refused_and_the_next_run_trained(tmp_path: Path, command: list[Any]) -> None:
    runs.create(tmp_path / "runs" / runs.default_name(TWO[0]), TWO[0].but(lr=0.5))
    result = call(*command)
    assert result.exit_code == 1
    assert "holds a run with lr=0.5, not 0.1; give another folder. The others go on." in result.stderr
    assert "dirprune: 1 of 2 failed; the same command tries them again" in result.stderr
    assert names_and_epochs(tmp_path / "results") == [("digits-short/grda-c0.02-mu0.7/seed1", 3)]


def test_with_nothing_missing_there_is_nothing_to_train(
    tmp_path: Path, command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "wanted", lambda *_, **__: [])
    assert "Every setting has its runs; raise --seeds for more." in call(*command).stderr
