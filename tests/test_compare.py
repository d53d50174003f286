"""Comparisons: which methods take part, what they share, how they are ranked, and resuming."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import GPU
from scipy.stats import ttest_rel
from test_cli import call, objects
from test_recipes import flat
from test_train import Breaking, numbers
from torch import nn
from torch._dynamo.utils import counters
from typer.testing import Result

from dirprune.lab import methods, models, trust
from dirprune.lab.methods import MethodSpec, amc
from dirprune.lab.records import checkpoint
from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.studies.comparison import rows as rows_of_runs
from dirprune.lab.studies.comparison import tables as comparison
from dirprune.lab.studies.comparison import trials, tuning
from dirprune.lab.studies.comparison import work as compare
from dirprune.lab.studies.comparison.ranking import Point, Reached, paired_gap, rank, read_at
from dirprune.lab.studies.comparison.rows import Ended, LayerRow, Row, as_text, read
from dirprune.lab.studies.comparison.tradeoff import MACS, Level
from dirprune.lab.studies.comparison.trials import enter, plan, run_name
from dirprune.lab.tasks import Images
from dirprune.lab.tasks.measure import ACCURACY, LOSS
from dirprune.lab.text import NOTHING
from dirprune.lab.training import recipes, runs, series
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.experiment import assemble
from dirprune.lab.training.optimizers import Sgd, TrainingPlan
from dirprune.lab.training.recipe import FAST, Recipe, differing
from dirprune.lab.training.reward import Reward
from dirprune.lab.training.schedules import Schedule
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")


def tiny(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_classes))


EXAMPLE = torch.zeros(1, 4)
BREAKS = [True, False]


def at_first_breaking(num_classes: int) -> nn.Module:
    """Return a network that diverges in the second of four steps of epoch 2; when called again, a good one."""
    return Breaking(step=6, value=math.nan) if BREAKS.pop(0) else tiny(num_classes)


# Four steps per epoch; every method acts in some of them and pauses in others.
SHORT = recipes.get("resnet18-cifar10").but(
    data="digits", statistics="", model="test_compare:tiny", epochs=4, batch_size=400
)

ONE_EACH = {"grda": [0.01], "rda": [0.01], "str": [0.3], "variational-dropout": [1.0]}


def trials_of(recipe: Recipe = SHORT, *, batches: int = 4, **options: Any) -> list[Recipe]:
    return plan(recipe, **{"methods": ("sgd", "rigl"), "sparsities": (0.5, 0.8), "batches": batches, **options})


def run(planned: list[Recipe], out: Path, **options: Any) -> list[compare.ComparisonStep]:
    return list(compare.compare(planned, out, Surroundings(CPU, **options)))


def after(times: int) -> Callable[[], bool]:
    asked = itertools.count(1)
    return lambda: next(asked) > times


@pytest.fixture(autouse=True)
def _quick_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amc, "LEARNING_STEPS", 1)


# ---- which methods take part


def test_by_default_every_method_takes_part_and_shares_all_but_its_own_options() -> None:
    planned = plan(SHORT, sparsities=(0.5, 0.8), seeds=2, batches=4)
    assert {recipe.pruner.name for recipe in planned} == {
        "grda",
        "grda-target",
        "grda-macs",
        "sgd",
        "rda",
        "st3",
        "magnitude",
        *(name for name, each in methods.METHODS.items() if not (each.fixed or each.is_control)),
    }
    own = {"optimizer", "method", "options", "c", "lam", "of", "seed"}
    assert all(differing(recipe, SHORT, free=own) == [] for recipe in planned)
    assert [recipe.seed for recipe in planned] == sorted(recipe.seed for recipe in planned)
    assert {recipe.seed for recipe in planned} == {0, 1}
    assert len({run_name(recipe) for recipe in planned}) == len(planned)
    for recipe in planned:
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        if recipe.pruner.knob == "sparsity":
            assert recipe.pruner.value in (0.5, 0.8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("magnitude", {"allocation": "uniform"}),
        ("magnitude-global", {"allocation": "global"}),
        ("magnitude-one-shot", {"allocation": "global", "start": 0.5, "end": 0.5}),
    ],
)
def test_files_from_before_variants_had_names_are_recognised_by_their_options(
    name: str, options: dict[str, Any]
) -> None:
    values = flat(recipes.get("digits")) | {"optimizer": "sgd", "method": "magnitude"}
    values["options"] = [["sparsity", 0.9], *options.items()]
    method = Recipe.from_dict(values).method
    assert method is not None
    assert (method.name, method.value) == (name, 0.9)


def test_a_sweep_replaces_the_default_values() -> None:
    sweeps = trials.read_sweeps(["grda:c=1e-3,2e-3", "rigl:sparsity=0.7"])
    planned = trials_of(methods=("grda", "rigl"), sweeps=sweeps)
    assert [run_name(recipe) for recipe in planned] == ["grda-c0.001-s0", "grda-c0.002-s0", "rigl-sparsity0.7-s0"]


@pytest.mark.parametrize("text", ["grda:mu=0.5", "grda:c=", "grda:c=a", "grda", "sgd:c=1", "rig:sparsity=0.5"])
def test_a_sweep_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--sweep|Did you mean 'rigl'"):
        trials.read_sweeps([text])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ("rigel",)}, "Did you mean 'rigl'"),
        ({"methods": ()}, r"methods=\(\) names no method; choose from grda, grda-target, grda-macs, sgd, rda"),
        ({"sweeps": {"grda": [1e-3]}}, "--sweep names grda, which is not among --methods"),
        ({"sparsities": (0.5, 1.5)}, "sparsity=1.5"),
        ({"seeds": 0}, "seeds=0"),
        ({"methods": ("grda",), "sweeps": {"grda": [-1.0]}}, r"c=-1\.0"),
    ],
)
def test_a_bad_plan_is_refused_before_any_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trials_of(**options)


def threshold(optimizer: Sgd, steps: int) -> float:
    """Return the optimizer's own threshold after so many steps at a constant learning rate."""
    model = nn.Linear(1, 1, bias=False)
    made = optimizer.make(model)
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(steps):
        made.step()
    return float(made.state[model.weight]["threshold"])


def test_the_default_sweeps_of_rda_end_at_the_thresholds_of_grda() -> None:
    recipe = replace(SHORT, schedule=Schedule(), epochs=10)
    values = {name: trials.default_sweep(name, recipe, batches=20) for name in ("grda", "rda")}
    for c, lam in zip(values["grda"], values["rda"], strict=True):
        ours, theirs = (enter(recipe, *each).optimizer for each in (("grda", c), ("rda", lam)))
        assert threshold(theirs, 200) == pytest.approx(threshold(ours, 200), rel=6e-3)  # λ is rounded to three digits


@pytest.mark.parametrize(
    ("steps", "weight_decay", "end"),
    [
        (4000, 0.0, math.exp(-11)),
        (4000, 4.7 / 400, math.exp(-11 / 8)),  # weight decay also pulls the weights to the threshold
        (4000, 1.0, math.exp(-11 / 8)),
        (20, 0.0, 0.99**20),  # too few steps to get that far: s shrinks by at most 1% per step
    ],
)
def test_the_default_sweep_of_str_is_as_strong_as_the_length_and_weight_decay_ask_for(
    steps: int, weight_decay: float, end: float
) -> None:
    plain = {"momentum": 0.0, "nesterov": False, "schedule": Schedule(), "epochs": steps // 10}
    recipe = SHORT.but(weight_decay=weight_decay, **plain)
    decay = trials.default_sweep("str", recipe, batches=10)[1]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.lr)
    methods.Str(decay=decay).attach(model, optimizer, steps=steps, examples=1)
    [s] = optimizer.param_groups[-1]["params"]
    start = s.item()
    s.grad = torch.zeros_like(s)
    for _ in range(steps):
        optimizer.step()
    assert s.item() / start == pytest.approx(end, rel=0.05)


@pytest.mark.filterwarnings("ignore:c=.* prunes next to nothing")  # a weight without gradients stays where it began
@pytest.mark.parametrize("changes", [{}, {"lr": 0.025}, {"epochs": 3}, {"epochs": 300, "lr": 0.2}])
def test_default_thresholds_end_where_those_of_the_unchanged_recipe_do(changes: dict[str, Any]) -> None:
    own = replace(recipes.get("digits"), schedule=Schedule())
    recipe = own.but(**changes)
    expected = threshold(own.optimizer, own.epochs * 45)
    for name in ("grda", "rda"):
        value = trials.default_sweep(name, recipe, 45)[1]
        found = threshold(enter(recipe, name, value).optimizer, recipe.epochs * 45)
        assert found == pytest.approx(expected, rel=6e-3)  # the knob is rounded to three digits


def test_the_default_sweep_of_an_unchanged_recipe_is_around_its_own_c() -> None:
    for name in ("digits", "resnet18-cifar10", "vgg16-cifar10-modern"):
        recipe = recipes.get(name)
        assert trials.default_sweep("grda", recipe, 391)[1] == recipe.optimizer.value


def test_what_str_loses_in_a_step_counts_momentum() -> None:
    recipe = recipes.get("digits").but(epochs=1, momentum=0.5, lr=0.1, weight_decay=0.0)
    assert trials.str_decay(recipe, 1) == pytest.approx(0.01 * 0.5 / 0.1)


def test_the_exposure_follows_the_schedule_within_an_epoch() -> None:
    recipe = recipes.get("digits").but(epochs=1, momentum=0.0, lr=1.0, schedule=Schedule("cosine"))
    assert trials.exposure(recipe, 1000) == pytest.approx(500, rel=0.01)


def test_seeds_count_from_the_recipe_s_own() -> None:
    recipe = replace(recipes.get("digits"), seed=3)
    assert [each.seed for each in plan(recipe, methods=("sgd",), seeds=2, batches=45)] == [3, 4]


def test_what_is_named_twice_is_run_once() -> None:
    assert len(plan(recipes.get("digits"), methods=("sgd", "sgd"), batches=45)) == 1
    assert trials.read_sweeps(["grda:c=0.1,0.1"]) == {"grda": [0.1]}


def test_another_knob_than_the_method_s_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="grda is swept over c; write --sweep grda:c=VALUE,VALUE"):
        trials.read_sweeps(["grda:foo=1"])


def test_a_contestant_brings_its_own_method_alone() -> None:
    recipe = enter(recipes.get("digits"), "rigl", 0.9)
    assert recipe.method == MethodSpec.of("rigl", sparsity=0.9)
    assert enter(recipe, "sgd", None).method is None
    assert enter(recipe, "grda", 0.01).method is None


@pytest.mark.parametrize(("name", "betas"), [("digits", (0.03, 1.0)), ("resnet18-cifar10", (0.00375, 0.125))])
def test_the_default_sweep_of_variational_dropout_leaves_room_for_weight_decay(
    name: str, betas: tuple[float, float]
) -> None:
    recipe = recipes.get(name)
    values = trials.default_sweep("variational-dropout", recipe, batches=391)
    assert (values[0], values[-1]) == betas


def ended(recipe: Recipe, sparsity: float, **changes: Any) -> Ended:
    known = {"overall_sparsity": sparsity, "test_accuracy": 90.0, "test_loss": 0.1, "seconds": 1.0, "epochs": 2}
    known |= {"peak_memory_mib": 1.0, "diverged": "", "commit": "", "device": "", "recipe": "", **changes}
    pruner = recipe.pruner
    knob, value = pruner.knob or "", pruner.value or math.nan
    row = Row(run_name(recipe), pruner.name, knob, value, recipe.seed, sparsity, **known)
    return Ended(row, ())


@pytest.mark.parametrize(
    ("reached", "value"),
    [
        ({0.1: 0.5, 0.2: 0.85}, 0.4),  # no run reaches 90%
        ({0.1: 0.5, 0.2: 0.7, 0.4: 0.85, 0.8: 0.92}, None),
        ({0.1: 0.85, 0.2: 0.92}, 0.05),  # for 80%, the least sparse run gives only a lower bound
        ({0.1: 0.5, 0.4: 0.99}, 0.2),  # the two runs are too far apart to interpolate
        ({0.1: 0.5, 0.2: 0.9, 0.21: 0.8}, None),
        ({0.1: math.nan}, None),  # the only run diverged
        ({0.1: 0.5, 0.2: math.nan}, None),  # the next value would be 0.2, which diverged
        ({0.1 * (i + 1): 0.1 * i for i in range(8)}, None),  # eight values are the most that are tried
    ],
)
def test_a_sweep_is_widened_until_it_encloses_the_sparsities(reached: dict[float, float], value: float | None) -> None:
    for seeds in (1, 2):
        planned = trials_of(methods=("sgd", "rigl", "grda"), sweeps={"grda": list(reached)}, seeds=seeds)
        found = [
            ended(trial, sparsity, diverged="" if sparsity == sparsity else "nan")
            for trial in planned
            for sparsity in [reached[trial.pruner.value] if trial.pruner.name == "grda" else 0.0]
        ]
        elsewhere = trials_of(methods=("grda",), sweeps={"grda": [0.3]})  # a run of another command must not count
        found += [ended(trial, 0.9) for trial in elsewhere]
        assert compare.wider(planned, found, (0.8, 0.9)) == ({} if value is None else {"grda": [*reached, value]})


def test_every_seed_has_to_enclose_a_sparsity() -> None:
    planned = trials_of(methods=("grda",), sweeps={"grda": [0.1, 0.2]}, seeds=2)
    for sparsities, value in (
        ((0.6, 0.81, 0.6, 0.79), 0.4),  # both runs of the second seed are less sparse than 80%
        ((0.78, 0.82, 0.81, 0.85), 0.05),  # both are sparser
        ((0.6, 0.81, 0.6, 0.99), 0.141),  # they are too far apart to interpolate
    ):
        found = [ended(*each) for each in zip(planned, sparsities, strict=True)]
        assert compare.wider(planned, found, (0.8,)) == {"grda": [0.1, 0.2, value]}


def test_a_second_seed_asks_for_what_the_first_alone_asked_for() -> None:
    values = {seeds: [0.1, 0.2] for seeds in (1, 2)}
    for seeds, tried in values.items():
        for _ in range(2):
            planned = trials_of(methods=("grda",), sweeps={"grda": tried}, seeds=seeds)
            reached = {
                0: {0.1: 0.5, 0.2: 0.79, 0.4: 0.999, 0.283: 0.85},
                1: {0.1: 0.5, 0.2: 0.95, 0.4: 0.999, 0.283: 0.97},
            }
            found = [ended(trial, reached[trial.seed][trial.pruner.value or 0]) for trial in planned]
            tried[:] = compare.wider(planned, found, (0.8, 0.82))["grda"]
    assert values[1] == values[2]
    assert sorted(values[1]) == [0.1, 0.2, 0.283, 0.4]


def test_a_sparsity_that_nothing_leads_to_does_not_keep_others_from_being_enclosed() -> None:
    planned = trials_of(methods=("grda",), sweeps={"grda": [0.1, 0.2]})
    found = [ended(trial, reached) for trial, reached in zip(planned, (0.5, 0.99), strict=True)]
    assert compare.wider(planned, found, (0.8, 0.999)) == {"grda": [0.1, 0.2, 0.4]}


# ---- how they are ranked


def points(method: str, seed: int = 0, **accuracy: float) -> list[Point]:
    """Return points at the sparsities in the names: s90=93.0 is an accuracy of 93% at a sparsity of 90%."""
    return [Point(method, name, seed, int(name[1:]) / 100, Reached(value)) for name, value in accuracy.items()]


def test_between_two_runs_accuracy_is_linear_in_the_logarithm_of_what_is_left() -> None:
    known = points("grda", s80=95.0, s90=94.0, s98=90.0)
    for sparsity in (0.82, 0.9, 0.93, 0.96):
        low, high = (0.8, 0.9) if sparsity < 0.9 else (0.9, 0.98)
        slope = torch.tensor([math.log(1 - low), math.log(1 - high)], dtype=torch.float64)
        ends = {0.8: 95.0, 0.9: 94.0, 0.98: 90.0}
        way = (math.log(1 - sparsity) - slope[0]) / (slope[1] - slope[0])
        expected = float((1 - way) * ends[low] + way * ends[high])
        reading = read_at(known, sparsity)
        assert reading.reached.score == pytest.approx(expected)
        assert (reading.sparsity, reading.is_there) == (sparsity, True)


@pytest.mark.parametrize(("sparsity", "nearest"), [(0.5, 0.8), (0.985, 0.98)])
def test_beyond_the_runs_nothing_is_said_but_what_the_nearest_one_gave(sparsity: float, nearest: float) -> None:
    reading = read_at(points("grda", s80=95.0, s90=94.0, s98=90.0), sparsity)
    assert (reading.sparsity, reading.is_there) == (nearest, False)
    assert reading.reached.score == {0.8: 95.0, 0.98: 90.0}[nearest]
    assert "nearest run" in reading.source


def test_a_sparser_run_says_what_its_method_has_at_least() -> None:
    """A method is not left out because its runs are sparser: 94.5% with fewer weights ranks above 94.4%."""
    sparser, other = rank([*points("swept", s92=94.5, s98=93.0), *points("preset", s90=94.4)], [0.9])
    assert (sparser.rank, sparser.method, sparser.sparsity, sparser.score.mean) == (1, "swept", 0.92, 94.5)
    assert sparser.source == "at least: s92 (92.0%)"
    assert other.rank == 2
    assert not read_at(points("swept", s98=93.0), 0.95).is_there  # fewer than half as many weights: too sparse


def test_the_runs_of_the_first_seed_are_named() -> None:
    known = [Point("m", "c=1", 1, 0.9, Reached(90.0)), Point("m", "c=0", 0, 0.9, Reached(91.0))]
    assert [standing.source for standing in rank(known, [0.9])] == ["c=0"]


def test_of_several_seeds_the_nearest_runs_are_told_by_their_mean() -> None:
    known = [Point("grda", "c=1", 0, 0.568, Reached(95.0)), Point("grda", "c=1", 1, 0.564, Reached(96.0))]
    [standing] = rank(known, [0.1])
    assert standing.sparsity == pytest.approx(0.566)
    assert standing.source == "nearest runs, 56.6% on average"


def test_a_network_that_lost_everything_does_not_rank_its_method_where_it_was_not_run() -> None:
    for nothing in (0.999, 1.0):
        swept = [Point("swept", "weak", 0, 0.7, Reached(95.0)), Point("swept", "strong", 0, nothing, Reached(10.0))]
        measured, other = rank([*swept, *points("measured", s95=60.0)], [0.95])
        assert (measured.method, measured.rank) == ("measured", 1)
        assert (other.method, other.rank, other.sparsity) == ("swept", 0, 0.7)


@pytest.mark.parametrize(("sparsity", "is_there"), [(0.9, True), (0.9985, False)])
def test_how_near_is_near_enough_depends_on_what_is_left(sparsity: float, is_there: bool) -> None:
    reading = read_at([Point("m", "", 0, sparsity - 0.0005, Reached(90.0))], sparsity)
    assert reading.is_there == is_there


def test_the_most_accurate_comes_first_and_who_has_no_runs_around_last() -> None:
    known = [
        *points("far", s50=99.0),
        *points("good", seed=0, s90=94.0),
        *points("good", seed=1, s90=93.0),
        *points("swept", s80=95.0, s95=90.0),
    ]
    standings = rank(known, [0.9, 0.5])
    assert [(each.asked, each.rank, each.method) for each in standings] == [
        (0.9, 1, "good"),
        (0.9, 2, "swept"),
        (0.9, 0, "far"),
        (0.5, 1, "far"),
        (0.5, 0, "swept"),
        (0.5, 0, "good"),
    ]
    assert standings[0].score.mean == 93.5
    assert standings[0].score.std == pytest.approx(math.sqrt(0.5))
    assert (standings[2].sparsity, standings[2].score.std, standings[2].seeds) == (0.5, None, 1)


def test_a_seed_without_runs_around_a_sparsity_does_not_speak_for_its_method() -> None:
    [standing] = rank([*points("m", seed=0, s80=95.0, s95=90.0), *points("m", seed=1, s80=10.0)], [0.95])
    assert (standing.rank, standing.seeds, standing.score.mean) == (1, 1, 90.0)


def test_the_gap_to_dense_training_is_that_of_a_paired_t_test() -> None:
    pruned, dense = {0: 93.1, 1: 94.0, 2: 93.2, 7: 91.0}, {2: 93.9, 1: 94.1, 0: 93.5, 5: 99.0}
    gap, margin = paired_gap(pruned, dense)  # over the seeds 0, 1 and 2, which both have
    expected = ttest_rel([93.1, 94.0, 93.2], [93.5, 94.1, 93.9]).confidence_interval(0.95)
    assert (gap - margin, gap + margin) == pytest.approx((expected.low, expected.high))


def test_one_seed_tells_a_gap_and_not_how_sure_it_is() -> None:
    gap, margin = paired_gap({0: 93.0}, {0: 94.0})
    assert gap == -1.0
    assert math.isnan(margin)
    assert all(map(math.isnan, paired_gap({0: 93.0}, {1: 94.0})))


def test_the_ranking_tells_what_pruning_costs_against_dense_training_of_the_same_seeds() -> None:
    accuracies = {("sgd", 0): 95.0, ("sgd", 1): 96.0, ("rigl", 0): 94.0, ("rigl", 1): 95.5}
    planned = trials_of(sparsities=(0.9,), seeds=2)
    rows = [
        ended(trial, trial.pruner.value or 0.0, test_accuracy=accuracies[trial.pruner.name, trial.seed])
        for trial in planned
    ]
    first, pruned = comparison.ranking(rows, [Level(0.9)])
    assert (pruned.gap, pruned.seeds) == (-0.75, 2)
    assert pruned.gap_margin == pytest.approx(0.25 * 12.706, abs=1e-3)  # t(0.975) for one degree of freedom
    assert math.isnan(first.gap)
    assert "-0.75 ± 3.18" in pruned.cells().values()
    assert "95% confidence" in " ".join(comparison.notes(rows))
    assert "95% confidence" not in " ".join(comparison.notes(rows[1:2]))  # no dense run to compare with


def test_times_of_different_devices_are_not_averaged() -> None:
    planned = trials_of(sparsities=(0.5, 0.8), sweeps={"str": [0.1, 0.2]}, methods=["sgd", "rigl", "str"])
    costs = {"sgd": ("GPU", 2.0), "rigl": ("GPU", 4.0), "str": ("CPU", 900.0)}
    rows = [
        ended(trial, trial.pruner.value or 0.0, device=costs[name][0], seconds=costs[name][1])
        for trial in planned
        for name in [trial.pruner.name]
    ]
    rows[-1] = replace(rows[-1], row=replace(rows[-1].row, device="GPU", seconds=6.0))
    seconds = {row.method: row.seconds for row in comparison.ranking(rows, [Level(0.5)])}
    assert seconds == {"sgd": 2.0, "rigl": 4.0, "str": 6.0}
    broken = [replace(row, row=replace(row.row, device="CPU", diverged="in step 1")) for row in rows]
    assert "Times and memory are those of runs on GPU; without 1 on CPU." in comparison.notes([*broken, *rows])
    rows[-1] = replace(rows[-1], row=replace(rows[-1].row, device="CPU"))
    unknown = next(row for row in comparison.ranking(rows, [Level(0.5)]) if row.method == "str")
    assert math.isnan(unknown.seconds)
    assert tuple(unknown.cells().values())[-2:] == (NOTHING, NOTHING)
    assert not any("Times" in line for line in comparison.notes(rows[:1]))


# ---- how they are run


def test_every_method_starts_alike_and_sees_the_same_minibatches(tmp_path: Path) -> None:
    run(trials_of(methods=("sgd", "magnitude-one-shot"), sparsities=(0.8,)), tmp_path)
    dense, pruned = (
        runs.load(tmp_path / "runs" / name).records() for name in ("sgd-s0", "magnitude-one-shot-sparsity0.8-s0")
    )
    assert numbers(dense[:1]) == numbers(pruned[:1])  # bit for bit the same, until one is pruned at half time
    assert dense[1].train_loss == pruned[1].train_loss
    assert dense[2].train_loss != pruned[2].train_loss
    parts = [assemble(trial, device=CPU, root=None) for trial in plan(SHORT, batches=4)]
    for other in parts[1:]:
        torch.testing.assert_close(other.model.state_dict(), parts[0].model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(next(other.loaders.train.epoch(3)), next(parts[0].loaders.train.epoch(3)))


@pytest.mark.parametrize(
    "methods",
    [("grda-target", "rigl", "amc", "str", "acdc"), pytest.param(None, marks=pytest.mark.soak)],
    ids=["each-kind-of-state", "all"],
)
def test_methods_go_on_after_any_stop_as_if_nothing_had_happened(methods: Sequence[str] | None, tmp_path: Path) -> None:
    sweeps = {name: values for name, values in ONE_EACH.items() if methods is None or name in methods}
    planned = plan(SHORT, methods=methods, sparsities=(0.8,), batches=4, sweeps=sweeps)
    steps = run(planned, tmp_path / "whole")
    rows = [step.row for step in steps if step.row]
    assert [row.run for row in rows] == [run_name(recipe) for recipe in planned]
    asked = 0
    while len([step for step in run(planned, tmp_path / "pieces", stopping=after(3)) if step.row]) < len(planned):
        asked += 1
    assert asked > len(planned) / 2
    for trial in planned:
        whole, pieces = (runs.load(tmp_path / name / "runs" / run_name(trial)) for name in ("whole", "pieces"))
        assert numbers(whole.records()) == numbers(pieces.records())
        states = [checkpoint.latest(each.checkpoints) for each in (whole, pieces)]
        assert states[0] is not None
        assert states[1] is not None
        torch.testing.assert_close(states[0][1]["model"], states[1][1]["model"], rtol=0, atol=0)
        assert checkpoint.epochs(whole.checkpoints) == [SHORT.epochs]  # only the last checkpoint is kept


def test_runs_that_have_ended_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = trials_of()
    first = [step.row for step in run(planned, tmp_path) if step.row]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(series, "conduct", lambda *_, **__: pytest.fail("it trains again"))
    assert [step.row for step in run(planned, tmp_path)] == first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_tables_stand_for_runs_that_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, only = (tmp_path / name for name in ("here", "there", "only"))
    run(trials_of(), here)
    whole = read(here)
    comparison.write(whole, here, [Level(0.5)])
    for folder in (there, only):
        folder.mkdir()
        for name in ("comparison.csv", "layers.csv"):
            shutil.copy(here / name, folder / name)
    assert repr(read(there)) == repr(whole)  # as text, because NaN in the rows is not equal to itself
    with monkeypatch.context() as patch:
        patch.setattr(series, "conduct", lambda *_, **__: pytest.fail("it trains again"))
        again = [step.row for step in run(trials_of(), there)]
    assert sorted(row.run for row in again if row) == sorted(each.row.run for each in whole)
    more = run(trials_of(methods=("sgd", "rigl", "magnitude")), there)
    assert {step.row.run for step in more if step.row} >= {"sgd-s0", "magnitude-sparsity0.5-s0"}
    assert {path.name for path in (there / "runs").iterdir()} == {
        "magnitude-sparsity0.5-s0",
        "magnitude-sparsity0.8-s0",
    }
    # This run has only begun here; it must not hide the row of the same run, which ended elsewhere.
    runs.create(there / "runs" / "sgd-s0", trials_of(methods=("sgd",))[0])
    comparison.write(read(there), there, [Level(0.5)])
    assert len(read_rows(there / "comparison.csv", Row)) == len(whole) + 2
    with pytest.raises(ValueError, match=r"comparison.csv has runs of resnet18-cifar10 .*epochs=4.*epochs=9"):
        run(trials_of(replace(SHORT, epochs=9), methods=("sgd",)), only)


def test_a_trial_whose_checkpoints_are_gone_keeps_its_records(tmp_path: Path) -> None:
    planned = trials_of(methods=("sgd",))
    run(planned, tmp_path, stopping=after(2))
    begun = runs.load(tmp_path / "runs" / run_name(planned[0]))
    records = begun.records()
    assert records
    shutil.rmtree(begun.checkpoints)
    with pytest.raises(ValueError, match="no checkpoint to continue from"):
        run(planned, tmp_path)
    assert begun.records() == records


def test_a_trial_that_has_lost_its_last_record_is_not_judged_by_an_earlier_one(tmp_path: Path) -> None:
    planned = trials_of(methods=("grda",), sweeps={"grda": [0.01]})
    run(planned, tmp_path)
    comparison.write(read(tmp_path), tmp_path, [Level(0.5)])
    folder = tmp_path / "runs" / run_name(planned[0])
    [row] = [each.row for each in read(tmp_path)]
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl ends at epoch 3, but the run has 4; restore it .* or remove"):
        read(tmp_path)
    shutil.rmtree(folder)
    # Once the folder is removed, as the message advises, the row in the table counts.
    [noted] = [each.row for each in read(tmp_path)]
    assert (noted.run, noted.test_accuracy, noted.epochs) == (row.run, row.test_accuracy, 4)


def test_a_trial_that_diverges_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    planned = trials_of(replace(SHORT, model="test_compare:at_first_breaking"), sparsities=(0.5,))
    rows = [step.row for step in run(planned, tmp_path) if step.row]
    assert [(row.run, row.diverged, row.epochs) for row in rows] == [
        ("sgd-s0", "the training loss became nan in step 2 of epoch 2", 1),
        ("rigl-sparsity0.5-s0", "", 4),
    ]
    found = read(tmp_path)
    assert [row.method for row in comparison.ranking(found, [Level(0.5)])] == [
        "rigl"
    ]  # no number of a broken run is shown
    assert any("sgd-s0 diverged" in line for line in comparison.notes(found))
    assert len(run(planned, tmp_path)) == 2  # the run that diverged is not tried again


def test_runs_of_another_comparison_are_refused(tmp_path: Path) -> None:
    run(trials_of(methods=("sgd",)), tmp_path)
    with pytest.raises(ValueError, match=r"sgd-s0 was trained with epochs=4, .* epochs=9; give another --out"):
        run(trials_of(replace(SHORT, epochs=9)), tmp_path)
    run(trials_of(methods=("sgd", "rigl"), seeds=2, sparsities=(0.6,)), tmp_path)  # more runs of the recipe may join


def test_a_trial_that_cannot_begin_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model 'nonsense'"):
        run(trials_of(replace(SHORT, model="nonsense"), methods=("sgd",)), tmp_path)
    assert run(trials_of(methods=("sgd",)), tmp_path)[-1].row is not None


def test_models_that_cannot_share_compiled_code_never_use_up_the_room_for_it() -> None:
    """Without a reset, torch would give up compiling a function after two graphs of it."""
    [trial, *_] = trials_of(methods=("str",))
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            series._clear(trial)
            model = tiny(3)
            methods.Str().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1, examples=1)
            before = counters["stats"]["unique_graphs"]
            torch.compile(model, backend="eager", dynamic=False)(torch.zeros(2, 64))
            assert counters["stats"]["unique_graphs"] > before
    torch.compiler.reset()


# ---- their tables and figures


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three methods over two seeds."""
    out = tmp_path_factory.mktemp("compared")
    sweeps = {"grda": [0.01, 0.3]}
    run(plan(SHORT, methods=("sgd", "rigl", "grda"), sparsities=(0.5,), seeds=2, sweeps=sweeps, batches=4), out)
    return out


def test_tables_are_those_of_the_networks(compared: Path, tmp_path: Path) -> None:
    comparison.write(read(compared), tmp_path, [Level(0.5)])
    rows = {row.run: row for row in read_rows(tmp_path / "comparison.csv", Row)}
    assert len(rows) == 8
    for name, row in rows.items():
        found = runs.load(compared / "runs" / name)
        weights = {key: w for key, w in runs.weights_of(found)[1].items() if w.dim() == 2}
        zeros = sum(int((w == 0).sum()) for w in weights.values())
        assert row.sparsity == pytest.approx(zeros / sum(w.numel() for w in weights.values()))
        assert (row.test_accuracy, row.epochs) == (found.records()[-1].test_accuracy, SHORT.epochs)
        layers = [layer for layer in read_rows(tmp_path / "layers.csv", LayerRow) if layer.run == name]
        assert {layer.layer: layer.sparsity for layer in layers} == {
            key.removesuffix(".weight"): pytest.approx(float((w == 0).float().mean())) for key, w in weights.items()
        }
        assert {layer.kind for layer in layers} == {"linear"}
    assert {(row.method, row.knob) for row in rows.values()} == {("sgd", ""), ("rigl", "sparsity"), ("grda", "c")}


def test_small_files_are_enough_for_tables_and_figures(compared: Path, tmp_path: Path) -> None:
    brought = tmp_path / "brought"
    shutil.copytree(compared, brought, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    written = {}
    for name, folder in (("here", compared), ("there", brought)):
        paths = comparison.write(read(folder), tmp_path / name, [Level(0.5), Level(0.9)])
        written[name] = {path.name: path.read_bytes() for path in paths}
    assert written["here"] == written["there"]
    assert set(written["there"]) == {
        *("comparison.csv", "layers.csv", "ranking.csv", "paired.csv", "tradeoff.png", "tradeoff-macs.png"),
        *("layers-0.5.png", "layers-0.9.png"),
    }


def test_multiplications_left_are_read_between_runs_like_the_accuracy() -> None:
    known = [
        Point("m", "c=1", 0, 0.9, Reached(94.0, 0.3, 0.1, 0.6)),
        Point("m", "c=2", 0, 0.975, Reached(92.0, 0.1, 0.2, 0.8)),
    ]
    between = read_at(known, 0.95).reached  # what is left is halved, then halved again
    assert (between.macs_left, between.first, between.last) == pytest.approx((0.03**0.5, 0.15, 0.7))
    assert read_at(known, 0.9).reached.macs_left == 0.3
    (place,) = rank([*known, replace(known[0], seed=1, reached=Reached(94.0, 0.5))], [0.9])
    assert place.mean("macs_left") == pytest.approx(0.4)


def test_methods_are_ranked_where_equally_many_multiplications_are_left() -> None:
    """Each method has other weights left there; one whose multiplications nobody knows takes no part."""
    left = {"rigl": (0.2, 0.05), "str": (0.1, 0.025), "rda": (math.nan, math.nan)}
    rows = []
    for name, shares in left.items():
        knob = trials.contestant(name).knob or ""
        for zeros, accuracy, share in zip((0.9, 0.975), (94.0, 92.0), shares, strict=True):
            each = ended(enter(SHORT, name, zeros), zeros, test_accuracy=accuracy, macs_left=share)
            rows.append(replace(each, row=replace(each.row, knob=knob)))
    first, second = comparison.ranking(rows, [Level(0.9, MACS)])
    assert (first.method, first.score, first.weights_left) == ("str", 94.0, 1 - 0.9)
    assert (second.method, second.score) == ("rigl", pytest.approx(93.0))  # halved, then halved again
    assert (second.macs_left, second.weights_left) == pytest.approx((0.1, 0.05))
    assert {(row.of, row.asked_sparsity) for row in (first, second)} == {(MACS, 0.9)}
    (better, worse) = comparison.pairs(rows, [Level(0.9, MACS)])
    assert better.cells()["at"] == worse.cells()["at"] == "10% of the multiplications left"
    assert sorted([better.difference, worse.difference]) == pytest.approx([-1.0, 1.0])


def test_tables_from_before_multiplications_were_counted_gain_them(tmp_path: Path) -> None:
    """With the same sparsity in all layers, as many multiplications as weights are left."""
    recorded = Path(__file__).parent.parent / "results" / "compare-resnet18-cifar10"
    shutil.copytree(recorded, tmp_path / "old")
    with (recorded / "comparison.csv").open(newline="") as file:
        lines = [line[:16] for line in csv.reader(file)]
    assert lines[0][-1] == "recipe"
    with (tmp_path / "old" / "comparison.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    old, now = ([each.row for each in read(folder)] for folder in (tmp_path / "old", recorded))
    assert [row.macs_left for row in old] == pytest.approx([row.macs_left for row in now], nan_ok=True)
    for row in old:
        if row.method in ("magnitude", "sgd"):
            assert row.macs_left == pytest.approx(1 - row.sparsity, abs=1e-3)
        else:
            assert 0 < row.macs_left < 0.4


def test_curves_are_means_over_seeds_and_the_dense_network_is_a_line(compared: Path) -> None:
    found = read(compared)
    curves = {curve.label: curve for curve in comparison.curves(found)}
    assert list(curves) == ["gRDA", "SGD (dense)", "RigL"]
    assert curves["SGD (dense)"].is_dense
    accuracies = [each.row.test_accuracy for each in found if each.row.method == "rigl"]
    [mean], [std] = curves["RigL"].accuracy, curves["RigL"].spread or []
    assert mean == pytest.approx(sum(accuracies) / 2)
    assert std == pytest.approx(abs(accuracies[0] - accuracies[1]) / math.sqrt(2))
    assert len(curves["gRDA"].sparsity) == 2


def test_layers_are_those_of_the_nearest_run(compared: Path) -> None:
    found = read(compared)
    grda = [each.row.sparsity for each in found if each.row.method == "grda"]
    for sparsity in (0.0, 1.0):
        nearest = min(grda, key=lambda value: abs(value - sparsity))
        names = {bar.method for bar in comparison.nearest_layers(found, sparsity)}
        assert names == {f"gRDA, {nearest:.1%}", "RigL, 50.0%"}


def test_of_layers_too_nearness_is_told_by_what_is_left(compared: Path) -> None:
    weak, strong, *_ = (each for each in read(compared) if each.row.method == "grda")
    found = [replace(each, row=replace(each.row, sparsity=s)) for each, s in ((weak, 0.7), (strong, 0.999))]
    assert {bar.method for bar in comparison.nearest_layers(found, 0.9)} == {"gRDA, 70.0%"}


def test_a_reward_is_measured_on_held_out_data_and_never_on_the_test_set() -> None:
    parts = assemble(SHORT.but(validation=0.2), device=CPU, root=None)
    assert Reward(parts.loaders).images is parts.loaders.validation
    plain = assemble(SHORT, device=CPU, root=None)
    images = Reward(plain.loaders).images
    assert images.examples == sum(len(targets) for _, targets in images) == plain.loaders.train.examples
    first, _ = next(iter(images))
    torch.testing.assert_close(first, next(plain.loaders.train.epoch(0))[0])


# ---- the command


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures, which take longer than these runs and are tested elsewhere."""
    monkeypatch.setattr(comparison, "figures", lambda *_: {})


def command(*words: object) -> list[object]:
    return ["compare", "digits-short", "--model", SHORT.model, "--epochs", 2, "--device", "cpu", "--json", *words]


@pytest.mark.usefixtures("undrawn")
def test_the_precision_is_that_of_every_run(tmp_path: Path) -> None:
    call(*command("--methods", "sgd", "--epochs", 1, "--precision", "bfloat16", "--out", tmp_path / "half"))
    call(*command("--methods", "sgd", "--epochs", 1, "--out", tmp_path / "full"))
    run, other = (runs.load(tmp_path / name / "runs" / "sgd-s0") for name in ("half", "full"))
    assert run.recipe.cpu.precision == run.recipe.cuda.precision == "bfloat16"
    assert run.records()[0].train_loss == pytest.approx(other.records()[0].train_loss, rel=0.05)
    assert run.records()[0].train_loss != other.records()[0].train_loss
    mixed = call(*command("--methods", "sgd,rigl", "--epochs", 1, "--out", tmp_path / "half"))
    assert mixed.exit_code == 1
    assert "sgd-s0 is for bfloat16, not float32; give --precision bfloat16, or another --out" in mixed.stderr


@pytest.mark.usefixtures("undrawn")
def test_the_command_trains_tells_and_goes_on(tmp_path: Path) -> None:
    words = command("--methods", "sgd,rigl", "--sparsity", "0.5,0.8", "--seeds", 2, "--out", tmp_path / "out")
    stopped = call(*words, "--minutes", 1e-9)
    assert (stopped.exit_code, stopped.stdout) == (0, "")
    assert "0 of 6 runs are complete. Run the same command to continue" in stopped.stderr
    result = call(*words)
    rows = objects(result)
    kinds = ("sgd", "rigl-sparsity0.5", "rigl-sparsity0.8")
    assert [row["run"] for row in rows[:6]] == [f"{kind}-s{seed}" for seed in (0, 1) for kind in kinds]
    ranked = rows[6:]
    assert [(row["asked_sparsity"], row["rank"], row["method"]) for row in ranked] == [
        (0.0, 0, "sgd"),
        (0.5, 1, "rigl"),
        (0.8, 1, "rigl"),
    ]
    assert all(row["seeds"] == 2 and row["score_std"] >= 0 for row in ranked)
    assert objects(call(*words)) == rows
    last = ("compare", "--no-train", "--sparsity", "0.5,0.8", "--out", tmp_path / "out", "--json")
    again = call(*last)
    assert objects(again) == ranked
    assert "Every run had 2 epochs of the same minibatches" in call(*last[:-1]).stdout


def numbers_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.usefixtures("undrawn")
def test_the_command_widens_the_sweeps_that_nobody_gave(tmp_path: Path) -> None:
    words = command("--methods", "grda,rda", "--sweep", "rda:lam=1e-9", "--sparsity", 0.8, "--out", tmp_path / "out")
    result = call(*words)
    rows = objects(result)
    values = {
        name: [row["value"] for row in rows if "run" in row and row["method"] == name] for name in ("grda", "rda")
    }
    assert values["rda"] == [1e-9]
    assert len(values["grda"]) > len(trials.FACTORS)
    assert [row["rank"] for row in rows if "rank" in row] == [1, 0]
    assert f"Not every sparsity lies between two runs of grda; trying c={values['grda'][4]:g}." in result.stderr
    assert objects(call(*words)) == rows
    late = call(*words, "--minutes", 1e-9)
    assert objects(late) == rows  # nothing was left to train
    assert "run the same command to continue" not in late.stderr
    shutil.rmtree(tmp_path / "out" / "runs" / f"grda-c{values['grda'][4]:g}-s0")
    (tmp_path / "out" / "comparison.csv").unlink()
    late = call(*words, "--minutes", 1e-9)
    assert "of 6 runs are complete. Run the same command to continue." in late.stderr
    assert numbers_of(objects(call(*words))) == numbers_of(rows)
    more = objects(call(*words, "--seeds", 2))
    assert {row["value"] for row in more if row.get("seed") == 1} >= {*values["grda"], 1e-9}


@pytest.mark.usefixtures("undrawn")
def test_every_method_has_as_many_trials_on_held_out_data_and_then_trains_on_all(tmp_path: Path) -> None:
    names, out = ("sgd", "grda-target", "magnitude-global"), tmp_path / "out"
    words = command("--methods", ",".join(names), "--sparsity", "0.5,0.8", "--tune", 2, "--out", out)
    rows = objects(call(*words))
    tried = read_rows(out / tuning.TABLE, tuning.Trial)
    assert [(trial.number, trial.method) for trial in tried] == [(number, name) for number in (0, 1) for name in names]
    plain = recipes.get("digits-short").but(epochs=2, model=SHORT.model)
    held_out = plain.but(validation=tuning.HELD_OUT, seed=tuning.FIRST_SEED)
    validation = assemble(held_out, device=CPU, root=None).loaders.validation
    assert validation is not None
    for number in (0, 1):
        there = {each.row.method: each.row for each in read(out / "tuning" / str(number))}
        for trial in tried[3 * number : 3 * number + 3]:
            row, settings = there[trial.method], json.loads(trial.settings)
            assert rows_of_runs.recipe_of(row) == enter(held_out, trial.method, 0.8, settings)
            assert row.score == trial.score
            assert row.score / 100 * validation.examples == pytest.approx(round(row.score / 100 * validation.examples))
    best = tuning.chosen(tried, ACCURACY)
    compared = [Row(**row) for row in rows if "run" in row and "validation" not in row["recipe"]]
    assert len(compared) == 5
    for row in compared:
        assert rows_of_runs.recipe_of(row) == enter(plain, row.method, row.value, best[row.method])
    before = (out / tuning.TABLE).read_bytes()
    again = objects(call(*words))
    assert again == rows[-len(again) :]  # the trials are not trained again
    assert (out / tuning.TABLE).read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_runs_start_from_the_dense_network_of_their_seed_and_trials_from_one_that_saw_no_held_out_data(
    tmp_path: Path,
) -> None:
    dense, out = tmp_path / "dense", tmp_path / "out"
    objects(call(*command("--methods", "sgd", "--seeds", 2, "--tune", 1, "--sparsity", 0.5, "--out", dense)))
    words = command("--methods", "grda-target", "--sparsity", 0.5, "--tune", 1, "--epochs", 1, "--from", dense)
    objects(call(*words, "--seeds", 2, "--out", out))
    for run in ("runs/{}-s0", "runs/{}-s1", "tuning/0/runs/{}-s100"):
        recipe = runs.load(out / run.format("grda-target-sparsity0.5")).recipe
        assert recipe.start == str(dense / run.format("sgd"))
        assert runs.load(Path(recipe.start)).recipe.task == recipe.task  # the same data are held out
    refused = call(*words, "--seeds", 3, "--out", out)
    assert "has no dense run of seed 2; give a run, a file, or a comparison" in refused.stderr
    assert enter(recipes.get("digits").but(start="somewhere"), "narrow", 0.5).start == ""


def trial(method: str, number: int, score: float, **settings: float) -> tuning.Trial:
    return tuning.Trial(method, number, 0.9, json.dumps(settings), score, 1, 1.0, "")


def test_the_best_trial_is_chosen_and_the_first_of_equals() -> None:
    trials = [trial("a", 1, 90.0, lr=1.0), trial("a", 0, 90.0), trial("a", 2, 80.0, lr=2.0), trial("b", 0, math.nan)]
    assert tuning.chosen([*trials, trial("b", 1, 10.0, lr=3.0)], ACCURACY) == {"a": {}, "b": {"lr": 3.0}}
    assert tuning.chosen([*trials, trial("b", 1, 10.0, lr=3.0)], LOSS)["a"] == {"lr": 2.0}
    with pytest.raises(ValueError, match=r"no trial of b reached 90%; give more trials \(--tune\)"):
        tuning.chosen(trials, ACCURACY)


def test_drawn_options_come_equally_often_and_rates_alike_for_all() -> None:
    recipe = recipes.get("digits")
    for name in ("sgd", "pat", "grda-target"):
        drawn = [tuning.drawn(recipe, name, number) for number in range(1, 13)]
        assert [each["lr"] for each in drawn] == [tuning.drawn(recipe, "rigl", n)["lr"] for n in range(1, 13)]
        for option, values in tuning.OPTIONS.get(name, {"lr": [0.025, 0.05, 0.1, 0.2]}).items():
            counts = [sum(each[option] == value for each in drawn[: 12 - 12 % len(values)]) for value in values]
            assert len(set(counts)) == 1, option
        for each in drawn:
            enter(recipe, name, 0.9, each)  # none is out of range


@pytest.mark.parametrize("name", sorted(tuning.OPTIONS))
def test_all_values_that_a_trial_may_draw_can_be_used(name: str) -> None:
    recipe = recipes.get("gpt-python" if name == "adamgrda" else "digits")
    knob = trials.contestant(name).knob
    for values in itertools.product(*tuning.OPTIONS[name].values()):
        made = enter(recipe, name, 0.9, dict(zip(tuning.OPTIONS[name], values, strict=True)))
        assert made.pruner.name == name
        assert knob is not None
        made.but(**({"exempt": ("bias",)} if name == "adamgrda" else {})).optimizer.make(
            nn.Linear(4, 2), TrainingPlan(10, EXAMPLE)
        )


def test_a_row_repeats_its_run_without_its_folder(compared: Path, tmp_path: Path) -> None:
    comparison.write(read(compared), tmp_path, [Level(0.5)])
    known = {row.run: row for row in read_rows(tmp_path / "comparison.csv", Row)}
    trust.allow(SHORT.model)
    result = call("rerun", tmp_path, "rigl-sparsity0.5-s1", "--out", tmp_path / "again", "--device", "cpu", "--json")
    then, now = objects(result)
    assert then["run"] == "rigl-sparsity0.5-s1"
    same = [name for name in then if name not in ("run", "seconds", "commit", "device")]
    assert {name: now[name] for name in same} == {name: then[name] for name in same}
    assert runs.load(tmp_path / "again").recipe == runs.load(compared / "runs" / "rigl-sparsity0.5-s1").recipe
    assert now["test_accuracy"] == known["rigl-sparsity0.5-s1"].test_accuracy
    refused = call("rerun", tmp_path, "rigl-sparsity0.5-s9")
    assert "no run 'rigl-sparsity0.5-s9'" in refused.stderr


def test_a_row_of_somebody_else_executes_nothing_and_leaves_its_folder_alone(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_ALLOWED", set())
    row = next(each.row for each in read(compared) if each.row.run.startswith("rigl"))
    settings = json.loads(row.settings)

    def rerun(**changes: Any) -> Result:
        write_rows(tmp_path / "comparison.csv", Row, [replace(row, **changes)])
        return call("rerun", tmp_path, changes.get("run", row.run), "--device", "cpu")

    for spec in ("antigravity:fly", "sys:exit"):
        refused = rerun(settings=json.dumps(settings | {"model": spec}))
        assert refused.exit_code == 1
        assert f"{spec!r} is code that a file names, and nothing of it was executed; add --trust" in refused.stderr
    assert "antigravity" not in sys.modules
    for odd in ("[]", "3", "null", "{", '{"task": 3}', '{"optimizer": {"name": "x"}}', '{"epochs": -1}', "[" * 100_000):
        assert f"the row of {row.run} holds no settings of a run" in rerun(settings=odd).stderr
    known = recipes.get("digits-short").but(epochs=1, batch_size=512, optimizer="sgd")
    assert rerun(run="../../up", settings=as_text(known), recipe="digits-short", method="sgd").exit_code == 0
    assert not (tmp_path.parent / "up").exists()
    assert (tmp_path / "runs" / "up" / "outcome.json").exists()


@pytest.mark.parametrize("settings", ['{"model": "sys:exit"}', "[]", "{", "[" * 100_000])
def test_trials_of_somebody_else_choose_no_other_options(settings: str) -> None:
    trial = tuning.Trial("rigl", 0, 0.9, settings, 90.0, 1, 1.0, "")
    with pytest.raises(ValueError, match=r"tuning.csv has settings=.* for trial 0 of rigl, which are no options that"):
        tuning.chosen([trial], Images.measure)


def test_rows_from_before_settings_were_noted_are_repeated_where_they_tell_them() -> None:
    recorded = Path(__file__).parent.parent / "results" / "compare-digits"
    row = next(each.row for each in read(recorded) if each.row.run == "grda-c0.016-s2")
    assert rows_of_runs.recipe_of(row) == recipes.get("digits").but(seed=2)
    with pytest.raises(ValueError, match=r"does not hold the settings of its run \(digits epochs=3\)"):
        rows_of_runs.recipe_of(replace(row, recipe="digits epochs=3"))


@pytest.mark.usefixtures("undrawn")
def test_controls_stand_beside_the_runs_whose_zeros_they_have(tmp_path: Path) -> None:
    """A shuffled mask takes the zeros of gRDA's layers, once they are known; a narrow network has as many weights."""
    out = tmp_path / "out"
    words = ("compare", "digits-short", "--epochs", 1, "--device", "cpu", "--json", "--sparsity", 0.9, "--seeds", 2)
    rows = objects(call(*words, "--methods", "shuffled,random,narrow,grda-target", "--out", out))
    assert {row["run"] for row in rows if "run" in row} == {
        f"{name}-sparsity0.9-s{seed}" for name in ("shuffled", "random", "narrow", "grda-target") for seed in (0, 1)
    }
    found = {each.row.run: each for each in read(out)}
    for seed in (0, 1):
        mask, run = (found[f"{name}-sparsity0.9-s{seed}"] for name in ("shuffled", "grda-target"))
        assert [bar.sparsity for bar in mask.layers] == pytest.approx([bar.sparsity for bar in run.layers])
        weights = [runs.weights_of(runs.load(out / "runs" / each.row.run))[1] for each in (mask, run)]
        assert any(not torch.equal(w == 0, weights[1][name] == 0) for name, w in weights[0].items() if w.dim() > 1)
        narrow = found[f"narrow-sparsity0.9-s{seed}"]
        whole, small = (
            models.size(models.build(name, 10)) for name in ("small", rows_of_runs.recipe_of(narrow.row).model)
        )
        assert narrow.row.sparsity == pytest.approx(1 - small / whole)
        assert narrow.row.macs_left == pytest.approx(multiplications(4) / multiplications(16))
        assert narrow.layers == ()
        assert narrow.row.recipe == run.row.recipe
    with pytest.raises(ValueError, match="shuffled takes its masks from grda-target or adamgrda"):
        trials_of(methods=("shuffled", "rigl"))
    with pytest.raises(ValueError, match="narrow needs a network and data of the lab, not test_compare:tiny on digits"):
        trials_of(methods=("narrow",))


def multiplications(width: int) -> int:
    """Return those of `SmallNet`: maps of 8×8, 8×8 and 4×4 pixels, then two linear layers."""
    w = width
    return 9 * (64 * w + 64 * w * 2 * w + 16 * 2 * w * 4 * w) + 4 * 4 * w * 4 * w + 4 * w * 10


def test_losses_are_ranked_with_the_least_first() -> None:
    known = [*points("a", s90=1.5), *points("b", s90=1.4), *points("c", s50=1.0)]
    assert [each.method for each in rank(known, [0.9], LOSS)] == ["b", "a", "c"]
    assert [each.method for each in rank(known, [0.9], ACCURACY)] == ["a", "b", "c"]


def test_a_language_model_is_compared_by_its_loss_and_tables_are_no_weights(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    recipe = recipes.get("gpt-python").but(model="gpt16x1", epochs=1, windows=64, context=16)
    planned = plan(recipe, methods=("adamw", "adamgrda", "magnitude-scored", "narrow"), sparsities=(0.8,), batches=4)
    run(planned, tmp_path / "out", root=text)
    found = read(tmp_path / "out")
    by_name = {each.row.method: each for each in found}
    for name in ("adamgrda", "magnitude-scored"):
        assert by_name[name].row.sparsity == pytest.approx(0.8, abs=1e-3)
        assert [bar.layer for bar in by_name[name].layers][:1] == ["blocks.0.qkv"]
    ranked = comparison.ranking(found, [Level(0.8)])
    dense = next(row for row in ranked if row.method == "adamw")
    assert (dense.score, dense.measured) == (by_name["adamw"].row.test_loss, "test_loss")
    for row in ranked[1:]:
        assert row.gap == pytest.approx(row.score - dense.score)
    assert {"test loss (nats a byte)"} <= ranked[0].cells().keys()
    figure = comparison.figures(found, [Level(0.8)])["tradeoff"]()
    assert figure.axes[0].get_ylabel() == "test loss (nats a byte)"


def test_differences_are_those_of_a_paired_t_test_between_every_two_methods(compared: Path) -> None:
    found = read(compared)
    pairs = {(pair.method, pair.other): pair for pair in comparison.pairs(found, [Level(0.5)])}
    scores = {name: [each.row.test_accuracy for each in found if each.row.method == name] for name in ("sgd", "rigl")}
    expected = ttest_rel(scores["sgd"], scores["rigl"]).confidence_interval(0.95)
    pair, back = pairs["sgd", "rigl"], pairs["rigl", "sgd"]
    assert (pair.difference - pair.margin, pair.difference + pair.margin) == pytest.approx(expected)
    assert (back.difference, back.margin, back.seeds) == (-pair.difference, pair.margin, 2)
    for measured, verdicts in (("test_accuracy", ("better", "worse")), ("test_loss", ("worse", "better"))):
        clear = [replace(pair, difference=sign * 2.0, margin=1.0, measured=measured) for sign in (1, -1)]
        assert tuple(each.verdict for each in clear) == verdicts
    assert replace(pair, difference=0.5, margin=1.0).verdict == replace(pair, margin=math.nan).verdict == "open"


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_saves_the_running_trial_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compare.compare

    def interrupted(*arguments: Any, **options: Any) -> Iterator[compare.ComparisonStep]:
        for step in plain(*arguments, **options):
            if step.epoch == 1:
                signal.raise_signal(signal.SIGINT)
            yield step

    words = command("--methods", "str", "--sweep", "str:decay=0.3", "--sparsity", 0.5, "--epochs", 4)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "compare", interrupted)
        stopped = call(*words, "--out", tmp_path / "out")
    assert stopped.exit_code == 130
    assert "Stopping after this epoch" in stopped.stderr
    folder = Path("runs") / "str-decay0.3-s0"
    assert checkpoint.epochs(tmp_path / "out" / folder / "checkpoints") == [0, 2]  # epoch 2 had begun and was completed
    for out in ("out", "whole"):
        objects(call(*words, "--out", tmp_path / out))
    one, other = (runs.load(tmp_path / out / folder).records() for out in ("out", "whole"))
    assert numbers(one) == numbers(other)


def test_the_table_can_be_read_at_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a row for every method, and the columns that a GPU and several seeds add."""
    names = [name for name in trials.CONTESTANTS if name != "sgd"]
    rows = [
        comparison.RankRow(
            *(asked, place, name, asked, "test_accuracy", 98.76 - place, 10.12, -10.34 - place, 10.56),
            *(3, "decay=0.0515 – 0.103 (79.2–88.1%)", 7300.0, 10240.0, 0.123, 0.456, 0.789, "abcdef0"),
        )
        for asked in (0.8, 0.9)
        for place, name in enumerate(names)
    ]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(rows_of_runs, "read", lambda _: [ended(enter(SHORT, "rigl", 0.9), 0.9)])
    monkeypatch.setattr(comparison, "ranking", lambda *_: rows)
    monkeypatch.setattr(comparison, "pairs", lambda *_: [])
    monkeypatch.setattr(comparison, "notes", lambda _: [])
    monkeypatch.setattr(comparison, "write", lambda *_: [])
    lines = call("compare", "--no-train", "--sparsity", "0.8,0.9,0.9", "--out", tmp_path).stdout.splitlines()[:-1]
    assert max(map(len, lines)) <= 80
    for number in ("± 10.12", "± 10.56"):
        # One line per row; the sparsity that is given twice is shown once.
        assert sum(number in line for line in lines) == len(rows), number


def test_published_numbers_are_drawn_without_a_run(tmp_path: Path) -> None:
    result = call("compare", "--published", "resnet50-imagenet", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.png", "tradeoff.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare"], "RECIPE is missing"),
        (["compare", "--published", "vgg16"], "give resnet50-imagenet"),
        (command("--sparsity", "90"), "write fractions between 0 and 1"),
        (command("--sparsity", "a"), "is not a list of shares"),
        (command("--methods", "rigel"), "Did you mean 'rigl'"),
        (command("--methods", ""), "--methods is empty; give a value, or leave it out"),
        (command("--methods", " , "), "choose from grda, grda-target, grda-macs, sgd, rda"),
        (command("--minutes", 0), "--minutes 0 leaves no time to train; give more than 0"),
        (command("--minutes=-1"), "--minutes -1 leaves no time"),
        (command("--minutes", "nan"), "--minutes nan leaves no time"),
    ],
)
def test_what_the_command_cannot_do_it_says(words: list[object], message: str, tmp_path: Path) -> None:
    result = call(*words, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_run_there_is_nothing_to_show(tmp_path: Path) -> None:
    result = call("compare", "--no-train", "--out", tmp_path)
    assert result.exit_code == 1
    assert "holds no comparison" in result.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    begun = call("compare", "--no-train", "--out", tmp_path)
    assert begun.exit_code == 0
    assert "has ended yet" in begun.stderr


@GPU
@pytest.mark.parametrize("fast", [Execution(capture=True), FAST], ids=["captured", "compiled"])
def test_captured_trials_go_on_as_if_nothing_had_happened(fast: Execution, tmp_path: Path) -> None:
    recipe = replace(SHORT, cuda=fast)
    cuda = torch.device("cuda")
    planned = plan(recipe, sparsities=(0.8,), batches=4, sweeps=ONE_EACH)
    list(compare.compare(planned, tmp_path / "whole", Surroundings(cuda)))
    for _ in range(2 * len(planned)):
        list(compare.compare(planned, tmp_path / "pieces", Surroundings(cuda, stopping=after(3))))
    whole, pieces = (read(tmp_path / name) for name in ("whole", "pieces"))
    assert len(whole) == len(pieces) == len(planned)
    for one, other in zip(whole, pieces, strict=True):
        assert one.row.run == other.row.run
        assert one.row.test_loss == pytest.approx(other.row.test_loss, rel=0.02, abs=0.02)
        assert one.row.sparsity == pytest.approx(other.row.sparsity, abs=0.02)
        assert one.row.peak_memory_mib > 0
