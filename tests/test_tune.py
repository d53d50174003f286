"""The search for the largest target: which targets are tried, how they are judged, and on which data."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from scipy.stats import norm
from test_cli import call, objects

from dirprune.lab import data
from dirprune.lab.studies.tune import target as search_
from dirprune.lab.studies.tune.paired import loss
from dirprune.lab.studies.tune.target import Search, TriedTarget, answers, best, loss_at, remarks
from dirprune.lab.training import at_once, recipes, runs
from dirprune.lab.training.experiment import load_data
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
QUICK = replace(recipes.get("digits-short"), batch_size=512, epochs=2)


def searched(search: Search, lost: Callable[[float], float]) -> list[TriedTarget]:
    """Return what a search tries if a target loses this much."""
    judged: list[TriedTarget] = []
    while (target := search.next(judged)) is not None:
        points = lost(target)
        passes = points <= search.tolerance
        judged.append(TriedTarget(target, 90.0, points, points, points, passes=passes, verdict="", seeds=1, examples=9))
    return judged


@pytest.mark.parametrize("answer", [0.52, 0.7, 0.873, 0.95, 0.985])
def test_every_trial_halves_what_is_open_of_the_weights_left(answer: float) -> None:
    judged = searched(Search(QUICK, Path("none"), trials=6), lambda target: 0.0 if target <= answer else 5.0)
    passed = max([0.5, *(each.sparsity for each in judged if each.passes)])
    failed = min(each.sparsity for each in judged if not each.passes)
    assert passed <= answer < failed
    assert math.log((1 - passed) / (1 - failed)) == pytest.approx(math.log(0.5 / 0.01) / 2**6, rel=0.2)
    assert len(judged) == 6


def test_the_search_ends_where_no_number_is_left_to_try() -> None:
    search = Search(QUICK, Path("none"), trials=50)
    assert len(searched(search, lambda target: 5.0)) < 15
    assert best(searched(search, lambda target: 5.0)) is None
    everything = searched(search, lambda target: 0.0)
    assert best(everything) == everything[-1]
    assert any("No larger target was tried" in line for line in remarks(search, everything))


def test_runs_of_a_target_differ_from_dense_ones_in_nothing_else() -> None:
    search = Search(recipes.get("gpt-python").but(seed=3), Path("out"), seeds=2, validation=0.2)
    dense, sparse = search.planned(None), search.planned(0.9)
    assert [plan.folder.name for plan in dense + sparse] == ["dense-s3", "dense-s4", "sparsity0.9-s3", "sparsity0.9-s4"]
    assert [plan.recipe.optimizer.name for plan in dense + sparse] == ["adamw"] * 2 + ["adamgrda"] * 2
    for plans in zip(dense, sparse, strict=True):
        one, other = (replace(plan.recipe, optimizer=QUICK.optimizer) for plan in plans)
        assert one == other
        assert one.task.validation == 0.2
    assert Search(QUICK, Path("out")).planned(None)[0].recipe.task.validation == 0.1
    assert Search(QUICK.but(validation=0.3), Path("out")).planned(None)[0].recipe.task.validation == 0.3


# The interval


def test_the_interval_covers_what_it_should_also_for_few_and_rare_differences() -> None:
    """Draw held-out sets from a population in which the true loss is known: 95% of the intervals hold it."""
    random = np.random.default_rng(0)
    for examples, only_dense, only_sparse in ((143, 0.02, 0.01), (143, 0.1, 0.02), (1000, 0.005, 0.005)):
        hits = 0
        for _ in range(1000):
            chance = torch.from_numpy(random.random((1, examples)))
            dense = (chance >= only_sparse).double()
            sparse = ((chance < only_sparse) | (chance >= only_sparse + only_dense)).double()
            found = loss(dense, sparse)
            hits += found.low <= 100 * (only_dense - only_sparse) <= found.high
        assert 930 <= hits <= 985


def test_the_interval_is_that_of_the_mean_difference_where_there_are_many() -> None:
    torch.manual_seed(0)
    dense, sparse = (torch.rand(3, 20_000) < chance for chance in (0.9, 0.87))
    found = loss(dense.double(), sparse.double())
    d = 100 * (dense.double() - sparse.double()).mean(0).numpy()
    low, high = norm.interval(0.95, d.mean(), d.std(ddof=1) / math.sqrt(len(d)))
    assert found.points == pytest.approx(d.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.005)


def test_pairing_and_seeds_narrow_the_interval() -> None:
    torch.manual_seed(0)
    dense = (torch.rand(4, 500) < 0.8).double()
    alike = dense.clone()
    alike[:, :10] = 0.0
    shuffled = alike[:, torch.randperm(500)]
    half = [loss(dense, other) for other in (alike, shuffled)]
    assert half[0].points == half[1].points
    assert half[0].noise < half[1].noise / 2
    assert loss(dense[:1], shuffled[:1]).noise > 1.5 * half[1].noise


# With real training


class Untouchable:
    """A test set that raises an error when it is used."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the test set was asked for {name}")

    def __iter__(self) -> NoReturn:
        raise AssertionError("the test set was read")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search whose first target, 92.9%, is trained, without a test set."""
    search = Search(QUICK, tmp_path_factory.mktemp("search"), seeds=2, tolerance=100.0)
    load = data.load
    with pytest.MonkeyPatch.context() as patch:
        for module in (data, __import__("dirprune.lab.tasks.images", fromlist=["load"])):
            patch.setattr(module, "load", lambda *a, **options: replace(load(*a, **options), test=Untouchable()))
        list(at_once.trained([*search.planned(None), *search.planned(0.929)], Surroundings(CPU)))
    return search


def test_a_target_is_judged_by_the_answers_of_both_networks(trained: Search) -> None:
    found = loss_at(trained, 0.929, Surroundings(CPU))
    loaders = load_data(trained.planned(None)[0].recipe, device=CPU, root=None)
    every = {}
    for name, target in (("dense", None), ("sparse", 0.929)):
        ran = [runs.load(plan.folder) for plan in trained.planned(target)]
        every[name] = torch.stack([answers(run, loaders, CPU) for run in ran])
        for run, right in zip(ran, every[name], strict=True):
            assert run.records()[-1].test_accuracy == pytest.approx(100 * float(right.mean()))
            assert set(right.tolist()) <= {0.0, 1.0}
    assert (found.examples, found.seeds) == (143, 2)
    assert found.lost == pytest.approx(100 * float((every["dense"] - every["sparse"]).mean()))
    assert found.accuracy == pytest.approx(100 * float(every["sparse"].mean()))
    assert (found.verdict, found.passes) == ("within", True)
    strict = loss_at(replace(trained, tolerance=found.low - 0.1 if found.low > 0.1 else 0.0), 0.929, Surroundings(CPU))
    assert strict.verdict == ("beyond" if found.low > 0.1 else "unclear")
    assert replace(strict, verdict="", passes=True) == replace(found, verdict="", passes=True)


def test_a_target_that_diverges_fails_and_dense_training_that_does_is_an_error(trained: Search, tmp_path: Path) -> None:
    for diverging, plans in (("sparsity0.929", trained.planned(None)), ("dense", trained.planned(0.929))):
        folder = tmp_path / diverging
        search = replace(trained, out=folder)
        for plan in plans:
            (folder / plan.folder.name).parent.mkdir(exist_ok=True)
            (folder / plan.folder.name).symlink_to(plan.folder)
        lost = search.planned(0.929 if diverging != "dense" else None)
        for plan in lost:
            runs.create(plan.folder, plan.recipe).conclude(runs.Outcome(diverged="the loss became nan"))
        if diverging == "dense":
            with pytest.raises(ValueError, match=r"dense training diverges at lr=0\.1; lower --lr first"):
                loss_at(search, 0.929, Surroundings(CPU))
        else:
            found = loss_at(search, 0.929, Surroundings(CPU))
            assert (found.verdict, found.passes, math.isnan(found.lost)) == ("diverged", False, True)


# The command


@pytest.fixture
def words(trained: Search, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """The command of the trained search: its runs are there already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    common = ("--batch-size", 512, "--epochs", 2, "--seeds", 2, "--trials", 1, "--out", trained.out)
    return ["tune", "digits-short", *common]


def test_the_command_for_machines_says_how_to_train_the_chosen_target(words: list[object]) -> None:
    *judged, chosen = objects(call(*words, "--tolerance", 100, "--json"))
    assert [each["sparsity"] for each in judged] == [0.929]
    program, *command = shlex.split(chosen["command"])
    assert program == "dirprune"
    assert call(*command, "--out", "run").exit_code == 0
    run = runs.load(Path("run"))
    assert run.recipe.but(seed=0) == search_.Search(QUICK, Path()).planned(0.929)[0].recipe.but(validation=0.0)
    zeros = run.outcome()
    assert zeros is not None
    assert zeros.zeros is not None
    assert zeros.zeros.weight_fraction == pytest.approx(0.929, abs=1e-4)


def test_the_command_at_a_terminal_shows_the_interval_and_its_noise(words: list[object]) -> None:
    result = call(*words, "--tolerance", 100)
    assert result.exit_code == 0
    assert "paired over 143 held-out examples, mean of 2 seeds" in result.stdout
    assert "Noise:" not in result.stdout  # the whole interval is within 100 points
    noisy = float(json.loads(call(*words, "--tolerance", 100, "--json").stdout.splitlines()[0])["lost"])
    result = call(*words, "--tolerance", noisy + 0.01)
    assert "Noise: ±" in result.stdout
    assert "More --seeds or a larger --validation narrow the interval" in result.stdout
    assert max(map(len, result.stdout.split("Chosen")[0].splitlines())) <= 80


def test_when_no_target_passes_the_command_says_what_to_do(
    words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(search: Search, target: float, here: Surroundings) -> TriedTarget:
        return TriedTarget(target, 50.0, 40.0, 30.0, 50.0, passes=False, verdict="beyond", seeds=2, examples=143)

    monkeypatch.setattr(search_, "loss_at", too_much)
    result = call(*words)
    assert result.exit_code == 1
    assert "--between with less than 0.5" in result.stderr


def test_a_search_of_ones_own_recipe_goes_on_where_its_time_was_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_tune_net.py").write_text(
        "from torch import nn\n\n"
        "def net(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    Path("mine.py").write_text(
        "from dirprune.lab.training import recipes\n\n"
        "def recipe():\n"
        "    return recipes.get('digits-short').but(name='mine', model='my_tune_net:net', epochs=1)\n"
    )
    command = ["tune", "mine.py", "--batch-size", 512, "--trials", 1, "--tolerance", 100]
    stopped = call(*command, "--minutes", 1e-9)
    assert (stopped.exit_code, stopped.stdout) == (0, "")
    assert "0 of 2 runs are complete. Run the same command to continue." in stopped.stderr
    for _ in range(2):  # the second time its runs exist, and their network is trusted because the file is named
        assert "Chosen: --sparsity 0.929" in call(*command).stdout
    assert sorted(path.name for path in Path("runs/tune-mine").iterdir()) == ["dense-s0", "sparsity0.929-s0"]
    other: Any = call(*command, "--lr", 0.2)
    assert (other.exit_code, "holds a run with lr=0.1, not 0.2; give another folder" in other.stderr) == (1, True)
