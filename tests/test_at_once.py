"""Several runs at once: the same results as one after the other, whatever happens in between."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from test_cli import call
from test_train import numbers
from torch import nn

from dirprune.lab.records.files import LOCK
from dirprune.lab.studies.tune import paper_rule as tune
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.at_once import Failed, FailedSoFar, Lost, at_once, trained
from dirprune.lab.training.series import Planned, RunStep
from dirprune.lab.training.surroundings import Surroundings

HERE = Surroundings(torch.device("cpu"), at_once=2)
QUICK = recipes.get("digits").but(epochs=2, batch_size=700)


def plans(folder: Path, count: int = 3) -> list[Planned]:
    """Return runs of different lengths, the longest first, so that they end in another order."""
    return [Planned(folder / f"run{i}", QUICK.but(seed=i, epochs=count - i + 1)) for i in range(count)]


def test_the_results_are_those_of_one_after_the_other_in_the_order_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signal.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    forkserver._forkserver._stop()  # so that Python is started here, among files of others
    steps = list(trained(plans(tmp_path / "together"), HERE))
    assert [step.number for step in steps if step.ended] == [1, 2, 3]
    assert not (tmp_path / "executed").exists()
    list(trained(plans(tmp_path / "alone"), replace(HERE, at_once=1)))
    for plan in plans(tmp_path / "together"):
        alone, together = (runs.load(tmp_path / where / plan.folder.name) for where in ("alone", "together"))
        assert numbers(together.records()) == numbers(alone.records())
        torch.testing.assert_close(runs.weights_of(together), runs.weights_of(alone), rtol=0, atol=0)
    assert [step.ended for step in trained(plans(tmp_path / "together"), replace(HERE, at_once=1))] == [True] * 3


def after(times: int) -> Callable[[], bool]:
    asked = itertools.count(1)
    return lambda: next(asked) > times


def test_what_was_stopped_goes_on_with_another_number_at_once(tmp_path: Path) -> None:
    long = [Planned(tmp_path / f"run{i}", QUICK.but(seed=i, epochs=200, batch_size=500)) for i in range(3)]
    started: list[RunStep] = []
    # Both have trained, and neither has ended: they do run at the same time.
    stopping = replace(HERE, stopping=lambda: {step.number for step in started if step.epoch} >= {1, 2})
    for step in trained(long, stopping):
        started += [step]
    assert not any(step.ended for step in started)
    reached = [runs.load(plan.folder).saved for plan in long[:2]]
    assert all(0 < epoch < 200 for epoch in reached)
    assert [runs.load(plan.folder).records()[-1].epoch for plan in long[:2]] == reached
    assert not long[2].folder.exists()
    again = next(
        step for step in trained(long[:1], replace(HERE, at_once=1, stopping=after(2))) if step.epoch > reached[0]
    )
    assert again.epoch == reached[0] + 1


def test_a_run_that_fails_is_named_and_the_others_are_trained(tmp_path: Path) -> None:
    good, bad, other = plans(tmp_path)
    bad = Planned(bad.folder, QUICK.but(model="vgg16"))
    ended: list[int] = []
    with (
        pytest.warns(FailedSoFar, match=r"run1: model='vgg16' does not fit .* The others go on"),
        pytest.raises(
            Failed, match=r"1 of 3 failed; the same command tries them again\n.*run1: model='vgg16' does not"
        ),
    ):
        ended.extend(step.number for step in trained([bad, good, other], HERE) if step.ended)
    assert ended == [2, 3]
    assert not bad.folder.exists()


def killed(num_classes: int) -> nn.Module:
    os.kill(os.getpid(), signal.SIGKILL)
    return nn.Identity()


def test_a_run_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan = Planned(tmp_path / "run", QUICK.but(epochs=12, batch_size=500))
    epochs: list[int] = []

    def killing(step: RunStep) -> bool:
        if step.epoch == 2 and 2 not in epochs:
            os.kill(int((plan.folder / LOCK).read_text().split()[1]), signal.SIGKILL)
        epochs.append(step.epoch)
        return step.ended

    with pytest.warns(Lost, match=r"run: its process ended with code -9: it was killed, or .* started again"):
        assert sum(map(killing, trained([plan], replace(HERE, save_every=1)))) == 1
    assert epochs.count(0) == 1  # it did not start again from the beginning
    assert [record.epoch for record in runs.load(plan.folder).records()] == list(range(1, 13))


def test_a_run_that_kills_its_process_every_time_is_given_up(tmp_path: Path) -> None:
    good, doomed = plans(tmp_path, 2)
    doomed = Planned(tmp_path / "doomed", QUICK.but(model="test_at_once:killed"))
    runs.create(doomed.folder, doomed.recipe)  # which trusts its network
    with (
        pytest.warns(Lost) as told,
        pytest.raises(Failed, match=r"doomed: its process ended with code -9: .*, 3 times"),
    ):
        list(trained([doomed, good], HERE))
    assert len([each for each in told if each.category is Lost]) == 2
    assert runs.load(good.folder).outcome() is not None


def test_nothing_goes_on_when_the_caller_is_gone(tmp_path: Path) -> None:
    long = [Planned(tmp_path / f"run{i}", QUICK.but(seed=i, epochs=500)) for i in range(2)]
    steps = at_once(long, HERE)
    assert next(steps)[0] in (1, 2)
    steps.close()
    time.sleep(0.5)
    before = [len(runs.load(plan.folder).records()) for plan in long if plan.folder.exists()]
    time.sleep(0.5)
    assert [len(runs.load(plan.folder).records()) for plan in long if plan.folder.exists()] == before


def test_a_comparison_has_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dirprune.lab.studies.comparison.tables.figures", lambda *_: {})
    words = "compare digits-short --methods sgd,rigl --sparsity 0.5,0.8 --epochs 1 --device cpu --at-once 2 --out"
    result = call(*words.split(), tmp_path / "together")
    assert result.exit_code == 0, result.stderr
    call(*words.replace("--at-once 2", "--at-once 1").split(), tmp_path / "alone")
    ours, theirs = ((tmp_path / name / "layers.csv").read_bytes() for name in ("together", "alone"))
    assert ours == theirs
    columns = slice(0, 9)
    ours, theirs = (
        [line.split(",")[columns] for line in (tmp_path / name / "comparison.csv").read_text().splitlines()]
        for name in ("together", "alone")
    )
    assert ours == theirs


def test_a_search_has_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "C_LIMIT", 4e-4)
    recipe = recipes.get("digits-short").but(batch_size=500)
    together, alone = (
        list(tune.tune(recipe, replace(HERE, at_once=count), epochs=1, mus=(0.6, 0.55), out=tmp_path / str(count)))
        for count in (2, 1)
    )
    assert together == alone
    assert (tmp_path / "2" / "trials.csv").read_bytes() == (tmp_path / "1" / "trials.csv").read_bytes()
