"""The benchmarks that count or train: they measure what they say they do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import clusters
import departures
import next_steps
import pytest
from departures import CPU, trained

from dirprune.lab import recipes, runs
from dirprune.lab.comparison import Row
from dirprune.lab.experiment import conduct
from dirprune.lab.recipes import Recipe

TEST_IMAGES = 359
"""The number of test images of digits."""


def short(recipe: Recipe) -> Recipe:
    return replace(recipe, epochs=2)


@pytest.mark.parametrize("departure", ["dense-start", "masks-alone"])
def test_a_run_in_memory_is_the_run_that_a_comparison_makes(departure: str, tmp_path: Path) -> None:
    recipe = short(departures.departures()[departure][0])
    *_, last = conduct(runs.create(tmp_path / "run", recipe), device=CPU)
    found = trained(recipe)[-1]
    same = ("epoch", "train_loss", "test_loss", "test_accuracy", "weight_sparsity")
    assert [getattr(found, name) for name in same] == [getattr(last, name) for name in same]


@pytest.mark.parametrize("optimizer", ["grda", "sgd"])
def test_single_steps_from_a_checkpoint_are_those_of_training(optimizer: str, tmp_path: Path) -> None:
    recipe = replace(recipes.get("digits-modern"), optimizer=optimizer, epochs=3, batch_size=400)
    run = runs.create(tmp_path / "run", recipe)
    (first,) = conduct(run, device=CPU, stopping=lambda: True)
    rows = list(next_steps.measured(run, steps=99, examples=TEST_IMAGES, root=None, device=CPU))
    second, _ = conduct(run, device=CPU)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]  # 1,438 images in batches of 400 are four steps
    assert {row.examples for row in rows} == {TEST_IMAGES}
    assert rows[0].test_loss == pytest.approx(first.test_loss, rel=1e-6)
    assert rows[-1].test_loss == pytest.approx(second.test_loss, rel=1e-6)
    assert rows[1].test_loss != pytest.approx(rows[-1].test_loss, rel=1e-3)


def test_what_is_held_out_is_not_what_is_told() -> None:
    dense, *_ = departures.departures()["held-out"]
    row = departures.measure(short(dense))
    right = row.test_accuracy / 100 * TEST_IMAGES
    assert row.recipe == "digits epochs=2 validation=0.1"
    # The number of right answers; from an accuracy on the 144 held-out images, it would not be a whole number.
    assert right == pytest.approx(round(right), abs=1e-6)
    assert row.is_dense
    assert row.sparsity == 0


def row(method: str, seed: int, accuracy: float, value: float = 0.9, recipe: str = "digits") -> Row:
    knob = "sparsity" if not math.isnan(value) else ""
    numbers = (0.0 if math.isnan(value) else value, 0.0, accuracy, 0.1, 1.0, math.nan, 60)
    return Row(f"{method} {seed} {recipe}", method, knob, value, seed, *numbers, "", "", "", recipe)


def test_a_departure_is_held_against_dense_training_on_the_same_images(capsys: pytest.CaptureFixture[str]) -> None:
    dense, usual, other, held = [99.0, 98.0], [97.0, 97.0], [98.5, 97.5], [98.0, 97.0]
    compared = [row("sgd", i, a, math.nan) for i, a in enumerate(dense)] + [row("amc", *e) for e in enumerate(usual)]
    rows = [row("sgd", i, a, math.nan, "held") for i, a in enumerate(held)] + [row("amc", *e) for e in enumerate(other)]
    departures.tell("held-out", rows, compared)
    lines = capsys.readouterr().out.splitlines()
    assert "-1.00 ± 0.00" in lines[0]  # what the smaller training set costs dense training
    (at_90,) = (line for line in lines if "90.0% " in line)
    assert "98.00 ± 0.71" in at_90
    assert "+0.50 ± 0.00" in at_90  # the gap to dense training on as few images: 98.5 − 98 and 97.5 − 97
    assert "+2.00 ± 6.35" in at_90  # in the comparison the gap was −2 and −1, so it changed by 2.5 and 1.5


@pytest.mark.parametrize("gap", [1e-4, 0.0])
def test_a_cluster_is_missed_without_a_check_and_found_with_ours(gap: float) -> None:
    case = clusters.Case(k=6, members=5, gap=gap)
    spectrum = clusters.spectrum(case, "uniform")
    assert spectrum[:7].tolist() == pytest.approx([20, *(10 + gap * i for i in (4, 3, 2, 1, 0)), 8])
    assert (len(spectrum), float(spectrum[-1])) == (300, -40)
    found = {rule: (missed, products) for rule, missed, products in clusters.attempts(case, "uniform", 1e-2, seed=0)}
    assert found.keys() == clusters.RULES.keys()
    assert found["1"][0]
    missed, products = found["half"]
    assert not missed
    assert products > found["1"][1] + 8


def test_the_departures_are_those_that_their_names_say() -> None:
    known = departures.departures()
    assert {recipe.validation for recipe in known["held-out"]} == {0.1}
    options = {name: {key: value for r in known[name] for key, value in r.options} for name in known}
    assert options["dense-start"]["start"] == -3200
    assert options["one-stage"]["stages"] == 1
    assert options["masks-alone"]["rescale"] is False
    assert {recipe.name for each in known.values() for recipe in each} == {"digits"}
