from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runs import record
from torch import Tensor, nn

from dirprune import sparsity
from dirprune.lab import models, plots
from dirprune.lab.methods import MethodSpec
from dirprune.lab.records import checkpoint
from dirprune.lab.studies.report.figures import draw, signs_figure
from dirprune.lab.studies.report.report import layerwise, report, settings
from dirprune.lab.studies.report.signs import SignRow
from dirprune.lab.text import duration
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.runs import Outcome, Run
from dirprune.lab.training.schedules import Schedule
from dirprune.lab.training.surroundings import Surroundings

DIGITS = recipes.get("digits").but(epochs=3, c=0.01, mu=0.7)


def make_run(folder: Path, recipe: Recipe, accuracies: list[float]) -> Run:
    """Write a run as training would; an epoch takes 2 s of training and 1 s of testing, the first one 10 s and 1 s."""
    run = runs.create(folder, recipe)
    for i, accuracy in enumerate(accuracies):
        tested = {"test_loss": 1 / accuracy, "test_accuracy": accuracy}
        zeros = {"sparsity": accuracy / 200, "weight_sparsity": accuracy / 400}
        run.append(record(i + 1, **tested, **zeros, train_seconds=2.0 if i else 10.0, test_seconds=1.0))
    return run


def save_weights(run: Run, epoch: int) -> nn.Module:
    model = models.build(run.recipe.model, classes=10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) < 0.5)
    names = [name for name, _ in model.named_parameters()]
    checkpoint.save(run.checkpoints, epoch, {"epoch": epoch, "model": model.state_dict(), "parameters": names})
    return model


class WithBuffer(nn.Module):
    """A user's model that reads values of a tensor in its constructor, and has a buffer of zeros."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = int(torch.linspace(1, 4, 2)[1].item())
        self.linear = nn.Linear(width, 2)
        self.register_buffer("mask", torch.zeros(100))


def test_seeds_become_one_row_with_mean_and_sample_deviation(tmp_path: Path) -> None:
    finals = [90.0, 92.0, 97.0]
    for seed, final in enumerate(finals):
        make_run(tmp_path / f"g{seed}", replace(DIGITS, seed=seed), [50.0, 80.0, final])
    make_run(tmp_path / "s", DIGITS.but(optimizer="sgd"), [50.0, 80.0, 91.0])
    made = report([tmp_path / name for name in ("g2", "s", "g0", "g1")])
    grda, sgd = made.rows
    assert (grda.recipe, grda.optimizer, grda.c, grda.mu) == ("digits", "grda", 0.01, 0.7)
    assert (grda.epoch, grda.epochs, grda.seeds) == (3, 3, (0, 1, 2))
    assert grda.test_accuracy is not None
    assert grda.test_accuracy.mean == pytest.approx(statistics.mean(finals))
    assert grda.test_accuracy.std == pytest.approx(statistics.stdev(finals))
    assert grda.sparsity is not None
    assert grda.sparsity.std == pytest.approx(statistics.stdev(finals) / 200)
    assert (grda.epoch_seconds, grda.total_seconds) == (2.0, 17.0)
    assert (sgd.c, sgd.mu, sgd.seeds) == (None, None, (0,))
    assert sgd.test_accuracy is not None
    assert sgd.test_accuracy.std is None
    assert made.notes == ()


def test_a_row_prints_percent(tmp_path: Path) -> None:
    for seed, final in enumerate([90.0, 92.0]):
        make_run(tmp_path / str(seed), replace(DIGITS, seed=seed), [50.0, 80.0, final])
    [row] = report([tmp_path / "0", tmp_path / "1"]).rows
    cells = row.cells()
    assert cells["setting"] == "gRDA c=0.01 μ=0.7"
    assert cells["epochs"] == "3/3"
    assert cells["test accuracy (%)"] == "91.00 ± 1.41"
    assert cells["sparsity (%)"] == "45.50 ± 0.71"
    assert cells["weight sparsity (%)"] == "22.75 ± 0.35"
    assert (cells["s/epoch"], cells["total"]) == ("2", "17.0 s")


def test_what_does_not_change_the_numbers_does_not_split_a_group(tmp_path: Path) -> None:
    dense = DIGITS.but(optimizer="sgd")
    make_run(tmp_path / "a", dense, [50.0])
    make_run(tmp_path / "b", dense.but(seed=1, keep=(1,), about="other words"), [60.0])
    assert [row.seeds for row in report([tmp_path / "a", tmp_path / "b"]).rows] == [(0, 1)]


def test_anything_else_does(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"c": 0.02}, {"mu": 0.6}, {"lr": 0.2}, {"epochs": 4}, {"augment": False}]
    for i, change in enumerate(changes):
        make_run(tmp_path / str(i), DIGITS.but(seed=i, **change), [50.0])
    made = report([tmp_path / str(i) for i in range(len(changes))])
    assert len(made.rows) == len({group.label for group in made.groups}) == len(changes)


def test_settings_say_what_differs_and_no_more() -> None:
    sgd = DIGITS.but(optimizer="sgd")
    assert settings([sgd, DIGITS]) == ["SGD", "gRDA c=0.01 μ=0.7"]
    assert settings([sgd, replace(sgd, schedule=Schedule("drop", after=(1, 2)))]) == [
        "SGD, schedule=constant-linear-constant",
        "SGD, schedule=drop/1+2",
    ]
    assert settings([sgd, sgd.but(nesterov=True, momentum=0.9)]) == [
        "SGD, momentum=0.0",
        "SGD, momentum=0.9",
    ]
    fast = replace(sgd, cpu=replace(sgd.cpu, precision="bfloat16", compile=True))
    assert settings([sgd, fast]) == ["SGD, cpu=float32/threads=1", "SGD, cpu=bfloat16/compile/threads=1"]
    assert settings([DIGITS, DIGITS.but(exempt=("bias",))])[0].endswith("exempt=none")
    rigl = replace(sgd, method=MethodSpec.of("rigl", sparsity=0.9))
    assert settings([sgd, rigl]) == ["SGD", "rigl sparsity=0.9"]


def test_recipes_of_different_names_stand_side_by_side(tmp_path: Path) -> None:
    wide = recipes.get("wrn10x1-cifar10-short").but(optimizer="sgd")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, recipe in zip(folders, [DIGITS.but(optimizer="sgd"), wide], strict=True):
        save_weights(make_run(folder, recipe, [50.0, 60.0]), 2)
    made = report(folders)
    assert [group.label for group in made.groups] == ["digits: SGD", "wrn10x1-cifar10-short: SGD"]
    paths = draw(made, tmp_path / "out")
    assert [path.name for path in paths] == ["curves.png", "layers-small.png", "layers-wrn10x1.png"]
    assert all(path.stat().st_size > 0 for path in paths)


def test_unfinished_seeds_are_compared_at_the_last_epoch_they_share(tmp_path: Path) -> None:
    make_run(tmp_path / "done", DIGITS, [50.0, 60.0, 70.0])
    make_run(tmp_path / "half", replace(DIGITS, seed=1), [52.0, 64.0])
    make_run(tmp_path / "new", replace(DIGITS, seed=2), [])
    made = report([tmp_path / "done", tmp_path / "half", tmp_path / "new"])
    [row] = made.rows
    assert (row.epoch, row.seeds) == (2, (0, 1))
    assert row.test_accuracy is not None
    assert row.test_accuracy.mean == 62.0
    half, new, shared = made.notes
    assert "2 of 3 epochs" in half
    assert f"dirprune resume {tmp_path / 'half'}" in half
    assert f"{tmp_path / 'new'} has no finished epoch" in new
    assert "compared at epoch 2" in shared


def test_a_run_without_an_epoch_gives_a_row_a_note_and_no_figure(tmp_path: Path) -> None:
    save_weights(make_run(tmp_path / "new", DIGITS, []), 0)  # the initial weights
    made = report([tmp_path / "new"])
    [row] = made.rows
    assert (row.epoch, row.seeds, row.test_accuracy) == (0, (), None)
    assert row.cells()["test accuracy (%)"] == "–"
    assert "no finished epoch" in made.notes[0]
    assert draw(made) == []
    assert not (tmp_path / "new" / "figures").exists()


def test_notes_say_why_a_run_has_not_all_its_epochs(tmp_path: Path) -> None:
    for name, outcome in {"nan": Outcome(diverged="the loss became nan"), "cut": Outcome(), "short": None}.items():
        run = make_run(tmp_path / name, DIGITS.but(lr=0.1 + len(name)), [50.0])
        if outcome:
            run.conclude(outcome)
    notes = report([tmp_path / name for name in ("nan", "cut", "short")]).notes
    for words in ("nan diverged: the loss became nan; train again", "cut has ended, but", "dirprune resume"):
        assert sum(words in note for note in notes) == 1


def test_seeds_are_compared_at_an_epoch_and_not_at_a_line(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", DIGITS, [50.0, 60.0, 70.0])
    cut = make_run(tmp_path / "cut", replace(DIGITS, seed=1), [52.0, 62.0, 72.0])
    lines = (cut.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut.folder / "metrics.jsonl").write_text("".join(lines[1:]))
    [row] = report([whole.folder, cut.folder]).rows
    assert row.epoch == 3
    assert row.test_accuracy is not None
    assert row.test_accuracy.mean == 71.0


def test_layers_of_a_run_without_its_checkpoints_are_those_it_ended_with(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(DIGITS, model="gone:net"), [50.0, 60.0, 70.0])
    zeros = sparsity({"weight": torch.eye(4)})
    run.conclude(Outcome(zeros))
    epoch, found = layerwise(run.read())
    assert (epoch, found.layers[0].zeros) == (3, 12)
    assert [path.name for path in draw(report([run.folder]))] == ["curves.png", "layers.png"]


def test_a_damaged_last_checkpoint_does_not_bring_back_earlier_zeros(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DIGITS, [50.0, 60.0, 70.0])
    save_weights(run, 0)
    ended = sparsity(save_weights(run, 3))
    run.conclude(Outcome(ended))
    checkpoint.path_of(run.checkpoints, 3).write_bytes(b"")
    epoch, found = layerwise(run.read())  # without a warning about going back to epoch 0, because it does not
    assert (epoch, found.zeros) == (3, ended.zeros)


def test_a_run_whose_only_whole_checkpoint_is_its_start_has_no_layers_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DIGITS, [50.0])
    for epoch in (0, 1):
        save_weights(run, epoch)
    checkpoint.path_of(run.checkpoints, 1).write_bytes(b"")
    made = report([run.folder])
    with pytest.warns(checkpoint.CheckpointWarning, match=r"going back to .*epoch-0000"):
        assert [path.name for path in draw(made)] == ["curves.png"]
    assert made.layers == {}  # without a second warning, which would be an error


def test_columns_and_figures_say_what_was_tested_on(tmp_path: Path) -> None:
    make_run(tmp_path / "test", DIGITS, [50.0])
    make_run(tmp_path / "held-out", DIGITS.but(validation=0.1), [50.0])
    held_out, either = report([tmp_path / "held-out"]), report([tmp_path / "test", tmp_path / "held-out"])
    assert report([tmp_path / "test"]).tested_on == "test"
    assert {"validation accuracy (%)", "validation loss"} < set(held_out.cells[0])
    assert all({"test or validation accuracy (%)", "test or validation loss"} < set(row) for row in either.cells)
    figure = plots.training_curves({"a": held_out.groups[0].records}, held_out.tested_on)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["validation accuracy (%)", "sparsity (% of all parameters)", "train loss", "validation loss"]


def test_notes_warn_of_repeated_seeds_and_of_validation(tmp_path: Path) -> None:
    held_out = DIGITS.but(validation=0.1, epochs=1)
    for name in "ab":
        make_run(tmp_path / name, held_out, [50.0])
    repeated, validation = report([tmp_path / "a", tmp_path / "b"]).notes
    assert "seed 0 occurs more than once" in repeated
    assert "10% held out of train" in validation


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a", DIGITS, [50.0])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert report([tmp_path / "a", tmp_path / "link"]).rows[0].seeds == (0,)


def test_machines_read_it(tmp_path: Path) -> None:
    make_run(tmp_path / "a", DIGITS, [50.0, 80.0, float("nan")])
    made = report([tmp_path / "a"])
    [row] = json.loads(json.dumps(made.to_dict(), allow_nan=False))["rows"]
    assert row["test_accuracy"] == {"mean": None, "std": None}
    assert row["total_seconds"] == 17.0
    assert row["runs"] == [str(tmp_path / "a")]


def test_layers_count_parameters_and_no_buffers(tmp_path: Path) -> None:
    recipe = replace(DIGITS, model="wrn10x1")
    run = make_run(tmp_path / "a", recipe, [50.0])
    model = save_weights(run, 1)
    before = torch.get_rng_state()
    epoch, zeros = layerwise(run.read())
    assert epoch == 1
    assert zeros.to_dict() == sparsity(model).to_dict()
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_a_users_own_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", replace(DIGITS, model="test_report:WithBuffer"), [50.0])
    save_weights(run, 1)
    _, zeros = layerwise(run.read())
    assert [layer.name for layer in zeros.layers] == ["linear.weight", "linear.bias"]
    assert [path.name for path in draw(report([run.folder]))] == ["curves.png", "layers.png"]


@pytest.mark.parametrize("name", models.NAMES)
def test_old_checkpoints_do_not_name_their_parameters(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", replace(DIGITS, model=name), [50.0])
    with torch.device("meta"):
        model = models.build(run.recipe.model, classes=10)
    tensors = {key: torch.ones([1] * tensor.dim(), dtype=tensor.dtype) for key, tensor in model.state_dict().items()}
    checkpoint.save(run.checkpoints, 1, {"epoch": 1, "model": tensors})
    assert [layer.name for layer in layerwise(run.read())[1].layers] == [key for key, _ in model.named_parameters()]


def test_a_run_that_ended_shows_the_multiplications_that_are_left(tmp_path: Path) -> None:
    """conv2 of the small network has 4,608 of its 40,208 weights and 16 of its positions: see the formula."""
    recipe, model = DIGITS.but(epochs=1), models.build("small", classes=10)
    nn.init.zeros_(model.conv2.weight)
    zeros = sparsity(model)
    positions = {"conv1": 64, "conv2": 64, "conv3": 16, "fc1": 1, "fc2": 1}
    uses = {name: positions[name] * getattr(model, name).weight.numel() for name in positions}
    expected = 1 - uses["conv2"] / sum(uses.values())
    noted = zeros.priced({"conv1.weight": 1.0, "conv2.weight": 1.0})
    unknown = replace(recipe, model="somebody.else:network")
    for name, made, ending, left in (
        ("noted by the run", unknown, noted, 144 / (144 + 4608)),
        ("of a network of the lab", recipe, zeros, expected),
        ("of another network", unknown, zeros, None),
    ):
        run = make_run(tmp_path / name, made, [50.0])
        run.conclude(Outcome(ending))
        (row,) = report([run.folder]).rows
        assert (row.macs_left and row.macs_left.mean) == (left and pytest.approx(left)), name
        assert ("cost left" in str(layerwise(run.read())[1])) == (left is not None)
    half = make_run(tmp_path / "half", DIGITS, [50.0])
    half.conclude(Outcome(zeros))
    assert report([half.folder]).rows[0].macs_left is None


def test_tied_weights_of_an_old_checkpoint_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", DIGITS, [50.0])
    tied = torch.eye(3)
    weights = {"in.weight": tied, "out.weight": tied, "n": torch.ones(1)}
    checkpoint.save(run.checkpoints, 1, {"epoch": 1, "model": weights})
    assert [(layer.name, layer.zeros) for layer in layerwise(run.read())[1].layers] == [("in.weight", 6), ("n", 0)]


def test_layers_say_of_which_epochs_they_are(tmp_path: Path) -> None:
    for seed, epoch in enumerate([3, 1, 0]):
        save_weights(make_run(tmp_path / str(seed), replace(DIGITS, seed=seed), [50.0] * epoch), epoch)
    networks = report([tmp_path / str(seed) for seed in range(3)]).layers
    assert list(networks) == ["small"]
    [(label, reports)] = networks["small"].items()
    assert label == "gRDA c=0.01 μ=0.7, epochs 1–3"
    assert len(reports) == 2


def test_a_real_run_end_to_end(tmp_path: Path) -> None:
    recipe = replace(recipes.get("digits-short"), epochs=2)
    for optimizer in ("sgd", "grda"):
        run = runs.create(tmp_path / optimizer, recipe.but(optimizer=optimizer))
        list(conduct(run, Surroundings(torch.device("cpu"))))
    made = report([tmp_path / "sgd", tmp_path / "grda"])
    [(_, [zeros])] = list(made.layers["small"].items())[1:]
    assert made.rows[1].sparsity is not None
    assert zeros.fraction == pytest.approx(made.rows[1].sparsity.mean)
    assert zeros.fraction > 0
    with pytest.raises(ValueError, match="out=None"):
        draw(made)
    both = [tmp_path / "both" / f"{name}.png" for name in ("curves", "signs", "layers")]  # it is its twin
    assert draw(made, tmp_path / "both") == both
    assert draw(report([tmp_path / "grda"]))[0] == tmp_path / "grda" / "figures" / "curves.png"


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run"):
        report([tmp_path])
    with pytest.raises(ValueError, match="folders is empty"):
        report([])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (3599.6, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def with_weights(run: Run, epoch: int, weights: list[float]) -> Run:
    state = {"epoch": epoch, "model": {"w": torch.tensor([weights])}, "parameters": ["w"]}
    checkpoint.save(run.checkpoints, epoch, state)
    return run


def test_signs_of_grda_are_held_against_those_of_its_twin(tmp_path: Path) -> None:
    sparse = make_run(tmp_path / "sparse", DIGITS.but(keep=(1,)), [50.0, 60.0])
    dense = make_run(tmp_path / "dense", DIGITS.but(optimizer="sgd"), [50.0, 60.0])
    other = make_run(tmp_path / "other", DIGITS.but(optimizer="sgd", seed=1), [50.0, 60.0])
    for epoch, ours, theirs in (
        (0, [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
        (1, [0.0, 1.0, -2.0, 0.5], [3.0, 1.0, 1.0, 0.5]),
        (2, [0.0, 0.0, 0.0, -1.0], [1.0, 1.0, 1.0, -1.0]),
    ):
        with_weights(sparse, epoch, ours)
        with_weights(dense, epoch, theirs)
        with_weights(other, epoch, theirs)
    with_weights(sparse, 3, [1.0] * 4)  # the twin has none of this epoch
    found = report([sparse.folder, dense.folder, other.folder])
    rows = [(row.grda, row.sgd, row.epoch, row.zeros, row.alike) for row in found.signs]
    assert rows == [("sparse", "dense", 1, 0.25, pytest.approx(2 / 3)), ("sparse", "dense", 2, 0.75, 1.0)]
    assert found.to_dict()["signs"][1]["alike"] == 1.0
    assert tmp_path / "signs.png" in draw(found, tmp_path)
    alone = report([sparse.folder, other.folder])
    assert alone.signs == []
    assert tmp_path / "signs.png" not in draw(alone, tmp_path)


def test_figure_of_signs_leaves_out_what_was_not_counted() -> None:
    curves = {
        "gRDA": [[record(1), record(2, signs_kept=0.9), record(3, signs_kept=1.0)]],
        "SGD": [[record(1)]],
    }
    rows = [SignRow("a", "b", epoch, 0.5, share) for epoch, share in ((1, 0.8), (3, 0.9))]
    changed, unlike = signs_figure(curves, rows).axes
    (line,) = changed.get_lines()
    assert line.get_xydata().tolist() == [[2, pytest.approx(10)], [3, 0.001]]
    assert "cut at 0.001" in changed.get_ylabel()
    assert unlike.get_lines()[0].get_ydata().tolist() == pytest.approx([20, 10])
