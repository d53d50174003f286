"""The paper's rule for choosing c: what is tried, what passes, what is chosen, and on which data."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from test_cli import call

from dirprune import GRDA
from dirprune.lab import data
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.tune import paper_rule as tune
from dirprune.lab.studies.tune.paper_rule import JudgedRun, ShortRun, choose
from dirprune.lab.training import experiment, runs
from dirprune.lab.training.at_once import together
from dirprune.lab.training.loop import Divergence, EpochRecord, train
from dirprune.lab.training.recipe import Recipe, changed
from dirprune.lab.training.recipes import get
from dirprune.lab.training.surroundings import Surroundings

HERE = Surroundings(torch.device("cpu"))
QUICK = replace(get("digits-short"), batch_size=256)


def record(accuracy: float, sparsity: float) -> EpochRecord:
    names = [name for name in EpochRecord.__dataclass_fields__ if name not in ("test_accuracy", "sparsity")]
    return EpochRecord(**dict.fromkeys(names, 0), test_accuracy=accuracy, sparsity=sparsity)


@pytest.fixture
def imagine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Recipe], float | None]], list[Recipe]]:
    """Give trials these accuracies (None: it diverges) and a sparsity of c; return the recipes that were trained."""

    def with_accuracy(accuracy: Callable[[Recipe], float | None]) -> list[Recipe]:
        tried: list[Recipe] = []

        def last(recipe: Recipe, epochs: int, device: torch.device, root: Path | None) -> EpochRecord | None:
            tried.append(recipe)
            found = accuracy(recipe)
            return None if found is None else record(found, recipe.optimizer.value or 0.0)

        monkeypatch.setattr(tune, "_last", last)
        return tried

    return with_accuracy


def test_c_doubles_from_1e_4_until_two_trials_in_a_row_fail(imagine: Any) -> None:
    misses = {2e-4, 1.6e-3, 3.2e-3}
    tried = imagine(
        lambda r: 90.0 if r.optimizer.value is None else 88.9 if round(r.optimizer.value, 6) in misses else 89.0
    )
    trials = list(tune.tune(QUICK, mus=(0.51, 0.6), here=HERE))
    assert trials[0] == JudgedRun("sgd", 0.0, 0.0, 90.0, 0.0, True)
    for mu, part in ((0.51, trials[1:7]), (0.6, trials[7:])):
        assert [trial.mu for trial in part] == [mu] * 6
        assert [trial.c for trial in part] == pytest.approx([1e-4 * 2**i for i in range(6)])
        assert [trial.passes for trial in part] == [True, False, True, True, False, False]
    assert len(tried) == len(trials)
    assert {recipe.task.validation for recipe in tried} == {0.1}


def test_the_search_ends_where_nothing_ever_fails(imagine: Any) -> None:
    imagine(lambda r: 90.0)
    trials = list(tune.tune(QUICK, mus=(0.6,), here=HERE))
    assert 0.5 < trials[-1].c <= 1.0
    assert choose(trials) == trials[-1]


def test_a_validation_share_of_the_recipe_is_kept(imagine: Any) -> None:
    tried = imagine(lambda r: 90.0)
    next(tune.tune(QUICK.but(validation=0.3), here=HERE))
    assert tried[0].task.validation == 0.3


def test_divergence_fails_a_trial_and_has_no_accuracy(imagine: Any) -> None:
    imagine(lambda r: 90.0 if r.optimizer.value is None or r.optimizer.value < 3e-4 else None)
    trials = list(tune.tune(QUICK, mus=(0.6,), here=HERE))
    assert [(trial.accuracy, trial.passes) for trial in trials[1:]] == [
        *((90.0, True), (90.0, True)),
        *((None, False), (None, False)),
    ]
    best = choose(trials)
    assert best is not None
    assert best.c == pytest.approx(2e-4)


def test_a_bad_mu_is_refused_before_any_work(imagine: Any) -> None:
    tried = imagine(lambda r: 90.0)
    with pytest.raises(ValueError, match=r"--mu -0\.5 cannot be used"):
        next(tune.tune(QUICK, mus=(0.6, -0.5), here=HERE))
    assert tried == []


@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": 6}, {"tolerance": -1.0}, {"tolerance": math.nan}])
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        next(tune.tune(QUICK, here=HERE, **options))


def trial(c: float, mu: float, sparsity: float, passes: bool = True) -> JudgedRun:
    return JudgedRun("grda", c, mu, 90.0 if passes else 10.0, sparsity, passes)


def test_of_the_greatest_passing_c_of_each_mu_the_sparsest_is_chosen() -> None:
    dense = JudgedRun("sgd", 0.0, 0.0, 90.0, 0.99, True)
    trials = [dense, trial(1e-4, 0.5, 0.8), trial(2e-4, 0.5, 0.3), trial(4e-4, 0.5, 0.9, False), trial(1e-4, 0.6, 0.4)]
    assert choose(trials) == trials[4]
    assert choose(reversed(trials)) == trials[4]
    assert choose([dense, trial(1e-4, 0.5, 0.5, False)]) is None


def test_recorded_trials_are_not_trained_again(imagine: Any, tmp_path: Path) -> None:
    tried = imagine(
        lambda r: (
            90.0 if r.optimizer.value is None else None if r.optimizer.value > 5e-4 else 90.0 - 2000 * r.optimizer.value
        )
    )
    options: dict[str, Any] = {"mus": (0.51,), "here": HERE, "out": tmp_path / "search"}
    first = list(islice(tune.tune(QUICK, **options), 3))
    assert len(tried) == 3
    whole = list(tune.tune(QUICK, **options))
    assert [trial.passes for trial in whole] == [True, True, True, True, False, False]
    assert whole[:3] == first
    assert [round(recipe.optimizer.value, 6) for recipe in tried[3:]] == [4e-4, 8e-4, 1.6e-3]
    recorded = read_rows(tmp_path / "search" / "trials.csv", ShortRun)
    assert [(each.optimizer, each.c, each.mu, each.accuracy) for each in recorded] == [
        (each.optimizer, each.c, each.mu, each.accuracy) for each in whole
    ]
    strict = list(tune.tune(QUICK, tolerance=0.3, **options))
    assert len(tried) == 6
    assert [trial.passes for trial in strict] == [True, True, False, False]
    more = list(tune.tune(QUICK, **{**options, "mus": (0.51, 0.6)}))
    assert more[:6] == whole
    assert read_rows(tmp_path / "search" / "trials.csv", ShortRun)[:6] == recorded
    assert [recipe.values()["mu"] for recipe in tried[6:]] == [0.6] * 5


@pytest.mark.parametrize("count", [1, 3, 100])
def test_several_trials_at_once_are_those_of_the_search_and_no_more(
    imagine: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accuracy(recipe: Recipe) -> float | None:
        mu = recipe.values().get("mu")
        return 90.0 if recipe.optimizer.value is None else 90.0 - 1e3 * recipe.optimizer.value * (2 if mu == 0.6 else 1)

    waves: list[list[str]] = []

    def one_by_one(jobs: Any, here: Surroundings) -> Iterator[Any]:
        waves.append([job.name for job in jobs])
        return together(jobs, HERE)

    monkeypatch.setattr(tune, "together", one_by_one)
    tried = imagine(accuracy)
    found = list(tune.tune(QUICK, replace(HERE, at_once=count), mus=(0.6, 0.51)))
    assert [(trial.mu, trial.passes) for trial in found] == [
        (0.0, True),
        *((0.6, passes) for passes in (True, True, True, False, False)),
        *((0.51, passes) for passes in (True, True, True, True, False, False)),
    ]
    assert len(tried) == len(found)
    if count == 100:
        assert waves == [
            ["SGD", "c=0.0001, mu=0.6", "c=0.0002, mu=0.6", "c=0.0001, mu=0.51", "c=0.0002, mu=0.51"],
            ["c=0.0004, mu=0.6", "c=0.0008, mu=0.6", "c=0.0004, mu=0.51", "c=0.0008, mu=0.51"],
            ["c=0.0016, mu=0.6", "c=0.0016, mu=0.51", "c=0.0032, mu=0.51"],
        ]
    else:
        assert max(map(len, waves)) == count


def test_a_folder_of_other_trials_is_refused_and_left_alone(imagine: Any, tmp_path: Path) -> None:
    tried = imagine(lambda r: 90.0)
    next(tune.tune(QUICK, here=HERE, out=tmp_path))
    before = (tmp_path / "trials.csv").read_text()
    with pytest.raises(ValueError, match=r"was started with lr=0\.1, not lr=0\.2; give another --out"):
        next(tune.tune(QUICK.but(lr=0.2), here=HERE, out=tmp_path))
    with pytest.raises(ValueError, match=r"--epochs=3, not --epochs=2"):
        next(tune.tune(QUICK, epochs=2, here=HERE, out=tmp_path))
    with pytest.raises(ValueError, match=r"--precision=float32, not --precision=bfloat16"):
        next(tune.tune(changed(QUICK, precision="bfloat16"), here=HERE, out=tmp_path))
    run = runs.create(tmp_path / "run", QUICK)
    with pytest.raises(ValueError, match=r"run is a run directory; give another --out"):
        next(tune.tune(QUICK, here=HERE, out=run.folder))
    assert (len(tried), (tmp_path / "trials.csv").read_text()) == (1, before)


def test_a_search_that_sgd_ends_records_nothing(imagine: Any, tmp_path: Path) -> None:
    imagine(lambda r: None)
    with pytest.raises(ValueError, match="SGD itself diverges"):
        next(tune.tune(QUICK, here=HERE, out=tmp_path / "search"))
    assert not (tmp_path / "search").exists()


# With real training


def test_a_trial_is_the_beginning_of_the_recipes_own_schedule() -> None:
    """A trial of 2 epochs equals the first 2 epochs of a run of 5 with the same data held out."""
    trials = tune.tune(QUICK, epochs=2, mus=(0.7,), here=HERE)
    dense, sparse = next(trials), next(trials)
    for found, recipe in (
        (dense, QUICK.but(optimizer="sgd", validation=0.1)),
        (sparse, QUICK.but(c=1e-4, mu=0.7, validation=0.1)),
    ):
        parts = experiment.assemble(recipe, device=HERE.device, root=None)
        assert parts.loaders.validation is not None
        whole = train(
            parts.model,
            parts.optimizer,
            parts.loaders.train,
            parts.loaders.validation,
            epochs=5,
            lr=recipe.optimizer.lr,
            schedule=recipe.schedule,
            seed=recipe.seed,
        )
        second = [next(whole) for _ in range(2)][1]
        assert (found.accuracy, found.sparsity) == (second.test_accuracy, second.sparsity)


class Untouchable:
    """A test set that raises an error when it is used."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the test set was asked for {name}")

    def __iter__(self) -> NoReturn:
        raise AssertionError("the test set was read")

    def __len__(self) -> NoReturn:
        raise AssertionError("the test set was counted")


def test_the_test_set_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    load = data.load
    monkeypatch.setattr(data, "load", lambda *args, **options: replace(load(*args, **options), test=Untouchable()))
    monkeypatch.setattr(tune, "C_LIMIT", 2e-4)
    assert len(list(tune.tune(QUICK, epochs=1, tolerance=100.0, mus=(0.6,), here=HERE))) == 3


def test_sgd_that_diverges_is_an_error_that_names_the_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"SGD itself diverges at lr=1e\+30; .*--lr"):
        next(tune.tune(QUICK.but(lr=1e30), epochs=1, here=HERE))


def test_grda_that_diverges_in_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(model: Any, optimizer: Any, *args: Any, **options: Any) -> Iterator[EpochRecord]:
        yield next(train(model, optimizer, *args, **options))
        if isinstance(optimizer, GRDA):
            raise Divergence(2, 1, math.nan)
        yield record(90.0, 0.0)

    monkeypatch.setattr(tune, "train", diverging)
    trials = list(tune.tune(QUICK, epochs=2, mus=(0.6,), here=HERE))
    assert [found.accuracy for found in trials[1:]] == [None, None]
    assert choose(trials) is None


# The command


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "C_LIMIT", 2e-4)
    options = {"--epochs": 1, "--tolerance": 100, "--mu": 0.6, "--batch-size": 256, "--seed": 3, "--data": "my data"}
    return ["tune", "digits-short", "--rule", "paper", *(str(word) for pair in options.items() for word in pair)]


def test_the_command_for_machines_trains_what_was_chosen(tuned: list[str]) -> None:
    result = call(*tuned, "--json")
    *trials, chosen = [json.loads(line) for line in result.stdout.splitlines()]
    assert [found["optimizer"] for found in trials] == ["sgd", "grda", "grda"]
    assert (chosen["c"], chosen["mu"]) == (2e-4, 0.6)
    program, *words = shlex.split(chosen["command"])
    assert program == "dirprune"
    assert call(*words, "--epochs", 1, "--out", "run").exit_code == 0
    run = runs.load(Path("run"))
    assert (*(run.recipe.values()[name] for name in ("c", "mu")), run.recipe.seed, run.recipe.batch_size) == (
        2e-4,
        0.6,
        3,
        256,
    )
    assert run.sessions()[-1].data == str(Path("my data").resolve())


def test_the_command_at_a_terminal_shows_every_trial(tuned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = call(*tuned)
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "Trials of 1 epoch, on held-out data"
    rows = [[word.strip() for word in line.split("│")] for line in lines if "│" in line]
    assert [row[:3] for row in rows] == [["SGD", "", ""], ["gRDA", "0.0001", "0.6"], ["gRDA", "0.0002", "0.6"]]
    assert "Chosen: c=0.0002, mu=0.6" in result.stdout
    assert lines[-1].startswith("    dirprune train digits-short --c 0.0002 --mu 0.6")


def test_a_slip_in_a_users_network_is_told_in_one_line(tuned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("slip_of_a_user.py").write_text(
        "from torch import nn\n\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(64, 10)\n\n"
        "    def forward(self, inputs):\n        return self.layers[0](inputs)\n"
    )
    result = call(*tuned, "--model", "slip_of_a_user:Net")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "model='slip_of_a_user:Net' does not fit data='digits', whose examples have shape (1, 8, 8)" in line
    assert "'Net' object has no attribute 'layers'" in line


def test_ctrl_c_shows_the_trials_that_are_done(tuned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune.tune

    def interrupted(*arguments: Any, **options: Any) -> Iterator[tune.JudgedRun]:
        yield from islice(whole(*arguments, **options), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    result = call(*tuned)
    assert result.exit_code == 130
    rows = [[word.strip() for word in line.split("│")] for line in result.stdout.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [["SGD", "", ""], ["gRDA", "0.0001", "0.6"]]
    assert result.stderr.startswith("Stopped; the search is not finished. Best so far: c=0.0001, mu=0.6 (")


def test_an_interrupted_search_goes_on_where_it_stopped(tuned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train_, used = tune._last, []

    def once(recipe: Recipe, *others: Any) -> EpochRecord | None:
        used.append(recipe.cpu.precision)
        if len(used) in (1, 3):
            raise KeyboardInterrupt
        return train_(recipe, *others)

    monkeypatch.setattr(tune, "_last", once)
    words = [*tuned, "--json", "--precision", "bfloat16", "--out", "search"]
    stopped = call(*words)
    assert stopped.exit_code == 130
    assert "trials.csv" not in stopped.stderr  # there are none
    stopped = call(*words)
    assert stopped.exit_code == 130
    assert "Its trials are in search/trials.csv. Run the same command to continue." in stopped.stderr
    result = call(*words)
    assert (result.exit_code, used) == (0, ["bfloat16"] * 5)
    assert json.loads(result.stdout.splitlines()[-1])["command"].endswith("--precision bfloat16 --data 'my data'")


def test_when_nothing_passes_the_command_says_what_to_do(tuned: list[str], imagine: Any) -> None:
    imagine(lambda r: 90.0 if r.optimizer.value is None else None)
    result = call(*tuned)
    assert result.exit_code == 1
    assert "--tolerance" in result.stderr
