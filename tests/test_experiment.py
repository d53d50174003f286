"""Whole runs that were stopped, killed, damaged or diverged, and resumed, compared with undisturbed runs."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import Breaking, numbers
from torch import nn

from dirprune import sparsity
from dirprune.lab import trust
from dirprune.lab.data.loader import Loader
from dirprune.lab.methods import MethodSpec
from dirprune.lab.records import checkpoint
from dirprune.lab.records.checkpoint import CheckpointWarning, CorruptCheckpoint
from dirprune.lab.records.files import InUse
from dirprune.lab.training import experiment, recipes, runs
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.experiment import Diverged, LostRecords, assemble, conduct
from dirprune.lab.training.loop import EpochRecord, evaluate
from dirprune.lab.training.recipe import Recipe, changed
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
# Four steps per epoch, the last one with a smaller batch.
SHORT = recipes.get("digits").but(epochs=4, batch_size=400, c=0.05, seed=3)
NOISY = replace(SHORT, model="test_train:noisy")  # a network with dropout and BatchNorm
trust.allow(NOISY.model)
# Each method acts more than once in the sixteen steps; AMC first at the end of the second epoch.
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"sparsity": 0.8, "allocation": "global", "every": 3},
    "rigl": {"sparsity": 0.8, "every": 3},
    "amc": {"sparsity": 0.8, "warmup": 2, "episodes": 2},
    "str": {"decay": 0.5, "start": -4.0},
    "variational-dropout": {"start": -5.0, "pace": 1.0},
}
RECIPES = {
    "small-grda": SHORT,
    "noisy-grda": NOISY,
    "noisy-sgd": NOISY.but(optimizer="sgd", momentum=0.9),
    "noisy-target": NOISY.but(optimizer="grda-target", sparsity=0.8, momentum=0.9),
    "noisy-rda": NOISY.but(optimizer="rda", lam=0.01),
    **{
        f"noisy-{name}": NOISY.but(optimizer="sgd", momentum=0.9, method=MethodSpec.of(name, **options))
        for name, options in METHODS.items()
    },
    "noisy-exempt": NOISY.but(exempt=("bias", "norm"), momentum=0.9, nesterov=True, weight_decay=1e-3),
}


def finish(run: Run, **options: Any) -> list[EpochRecord]:
    return list(conduct(run, Surroundings(CPU, **options)))


def uninterrupted(folder: Path, recipe: Recipe = SHORT) -> Run:
    run = runs.create(folder, recipe)
    finish(run)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return a function that trains a recipe without an interruption, once in all tests."""
    return cache(lambda recipe=SHORT: uninterrupted(tmp_path_factory.mktemp("whole") / "run", recipe))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of three epochs, with a checkpoint of each."""
    run = runs.create(tmp_path_factory.mktemp("begun") / "run", replace(SHORT, epochs=3))
    finish(run, save_every=1, stopping=after(2))
    return run.folder


def assert_equal(run: Run, other: Run) -> None:
    """Assert that both ended with the same weights, optimizer state and metrics, bit for bit."""
    assert [record.epoch for record in run.records()] == list(range(1, run.recipe.epochs + 1))
    assert numbers(run.records()) == numbers(other.records())
    (epoch, ours), (other_epoch, theirs) = (checkpoint.latest(each.checkpoints) or (0, {}) for each in (run, other))
    assert epoch == other_epoch == run.recipe.epochs
    assert ours.keys() == theirs.keys()
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    assert ours["recipe"] == theirs["recipe"]
    assert ours["parameters"] == theirs["parameters"]
    for state in ours, theirs:
        del (
            state["optimizer"]["param_groups"],
            state["recipe"],
            state["parameters"],
        )  # assert_close cannot compare strings
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def after(epoch: int) -> Callable[[], bool]:
    """Return a stopping condition that becomes True after the given number of epochs."""
    asked = itertools.count(1)
    return lambda: next(asked) >= epoch


@pytest.mark.parametrize("name", RECIPES)
def test_two_epochs_and_two_more_equal_four(name: str, tmp_path: Path, whole: Callable[..., Run]) -> None:
    run = runs.create(tmp_path / "run", RECIPES[name])
    first = finish(run, stopping=after(2))
    assert [record.epoch for record in first] == [1, 2]
    assert checkpoint.epochs(run.checkpoints) == [0, 2]
    second = finish(runs.load(run.folder))
    assert [record.epoch for record in second] == [3, 4]
    assert first + second == run.records()
    assert_equal(run, whole(RECIPES[name]))
    assert len(json.loads((run.folder / "environment.json").read_text())) == 2

    assert finish(run) == []  # a finished run stays as it is
    assert first + second == run.records()


@pytest.mark.parametrize("name", METHODS)
def test_every_checkpoint_of_a_method_holds_the_plain_network_that_was_tested(name: str, tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", RECIPES[f"noisy-{name}"])
    records = finish(run, save_every=1)
    parts = assemble(run.recipe, device=CPU, root=None)
    for epoch in checkpoint.epochs(run.checkpoints):
        parts.model.load_state_dict(runs.weights_of(run, epoch)[1])
        record = records[epoch - 1]
        assert evaluate(parts.model, parts.loaders.test).loss == record.test_loss
        assert sparsity(parts.model).weight_fraction == record.weight_sparsity
    assert records[-1].weight_sparsity > 0.1


def test_an_outcome_says_what_is_left_of_every_layer(tmp_path: Path) -> None:
    run = uninterrupted(tmp_path / "run", RECIPES["noisy-rigl"])
    outcome = runs.load(run.folder).outcome()
    assert outcome is not None
    assert outcome.zeros is not None
    assert (outcome.diverged, outcome.peak_memory_mib) == ("", None)  # memory is measured on a GPU only
    parts = assemble(run.recipe, device=CPU, root=None)
    parts.model.load_state_dict(runs.weights_of(run)[1])
    expected = {name: (tuple(p.shape), int((p == 0).sum())) for name, p in parts.model.named_parameters()}
    assert {layer.name: (layer.shape, layer.zeros) for layer in outcome.zeros.layers} == expected
    (run.folder / "outcome.json").unlink()  # as if the run had been killed just before writing it
    finish(run)
    assert run.outcome() == outcome


def test_a_run_that_goes_on_has_no_outcome_until_it_ends(tmp_path: Path) -> None:
    run = uninterrupted(tmp_path / "run")
    truncate(run.checkpoints / "epoch-0004.pt")
    records = conduct(run, Surroundings(CPU))
    with pytest.warns(CheckpointWarning):
        next(records)
    assert run.recipe.epochs > 1
    assert run.outcome() is None
    records.close()


def test_a_checkpoint_from_before_methods_goes_on(tmp_path: Path, whole: Callable[..., Run]) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    finish(run, stopping=after(2))
    state = checkpoint.load(run.checkpoints / "epoch-0002.pt")
    del state["method"], state["recipe"]["method"]
    checkpoint.save(run.checkpoints, 2, state)
    finish(run)
    assert_equal(run, whole())


def test_methods_that_draw_do_so_by_the_seed_of_the_run() -> None:
    method = RECIPES["noisy-rigl"].method
    assert method is not None
    assert [vars(method.make(seed=seed, reward=len))["seed"] for seed in (4, 5)] == [4, 5]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_newest_checkpoint_costs_an_epoch_and_no_more(
    damage: Callable[[Path], None], tmp_path: Path, whole: Callable[..., Run]
) -> None:
    run = runs.create(tmp_path / "run", NOISY)
    finish(run, save_every=1, stopping=after(3))
    damage(run.checkpoints / "epoch-0003.pt")
    with pytest.warns(CheckpointWarning, match=r"epoch-0002.pt, the newest checkpoint that is whole:.*epoch-0003.pt"):
        again = finish(run)
    assert [record.epoch for record in again] == [3, 4]
    assert_equal(run, whole(NOISY))


def test_a_full_disk_loses_nothing_already_saved(
    tmp_path: Path, whole: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.create(tmp_path / "run", NOISY)
    write = checkpoint._write

    def full(path: Path, content: bytes | memoryview) -> None:
        if path.name.startswith("epoch-0003.pt."):
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        with pytest.raises(OSError, match=r"epoch 3 was not saved \(No space left on device\)"):
            finish(run, save_every=1)
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    assert found[0] == 2
    finish(run)
    assert_equal(run, whole(NOISY))


def breaking() -> nn.Module:
    return Breaking(step=10, value=math.nan)  # the second of the four steps of epoch 3


DIVERGING = SHORT.but(model="test_experiment:breaking", lr=0.01)


def test_divergence_says_where_and_what_to_do(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", DIVERGING)
    with pytest.raises(Diverged, match="loss became nan in step 2 of epoch 3") as caught:
        finish(run, save_every=1)
    message = str(caught.value)
    path = run.checkpoints / "epoch-0002.pt"
    assert f"last good checkpoint is {path}." in message
    options = run.recipe.values()
    assert f"--lr (now {options['lr']}), --c (now {options['c']}), --mu (now {options['mu']})" in message
    state = checkpoint.load(path)
    assert state["epoch"] == 2
    assert all(value.isfinite().all() for value in state["model"].values())
    assert [record.epoch for record in run.records()] == [1, 2]
    outcome = run.outcome()
    assert outcome is not None
    assert (outcome.zeros, outcome.diverged) == (None, "the training loss became nan in step 2 of epoch 3")


def test_divergence_never_names_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", DIVERGING)
    finish(run, save_every=1, stopping=after(2))
    truncate(run.checkpoints / "epoch-0002.pt")
    with (
        pytest.warns(CheckpointWarning, match="epoch-0001.pt, the newest"),
        # The resumed run has a new model, which counts its steps from epoch 2 on and breaks in epoch 4.
        pytest.raises(Diverged, match=r"epoch 4. The last good checkpoint is .*epoch-0001.pt"),
    ):
        finish(run, save_every=10)


def test_divergence_never_names_weights_that_are_broken_already(tmp_path: Path) -> None:
    """With one step per epoch at an enormous rate, the first training loss is finite, but the next weights are not."""
    run = runs.create(tmp_path / "run", SHORT.but(optimizer="sgd", batch_size=1438, lr=1e38))
    with pytest.raises(Diverged, match=r"The last good checkpoint is .*epoch-0000.pt"):
        finish(run, save_every=1)
    assert checkpoint.epochs(run.checkpoints) == [0]


def test_checkpoints_that_the_recipe_keeps_are_made_and_stay(tmp_path: Path) -> None:
    every = runs.create(tmp_path / "every", replace(NOISY, epochs=6, keep=(0, 2)))
    finish(every, save_every=1)
    assert checkpoint.epochs(every.checkpoints) == [0, 2, 5, 6]
    rare = runs.create(tmp_path / "rare", replace(NOISY, epochs=6, keep=(1, 2, 3)))
    finish(rare, save_every=100)
    assert checkpoint.epochs(rare.checkpoints) == [1, 2, 3, 6]


def test_checkpoints_come_by_the_epoch_or_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def note(folder: Path, epoch: int, state: dict[str, Any]) -> None:
        saved.append(epoch)

    monkeypatch.setattr(checkpoint, "save", note)
    monkeypatch.setattr(checkpoint, "prune", lambda folder, keep: None)
    finish(runs.create(tmp_path / "epochs", replace(NOISY, epochs=7)), save_every=3)
    assert saved == [0, 3, 6, 7]
    saved.clear()
    minutes = itertools.count()
    monkeypatch.setattr(experiment.time, "monotonic", lambda: 31.0 * next(minutes))  # called once or twice per epoch
    finish(runs.create(tmp_path / "clock", replace(NOISY, epochs=6)))
    assert saved == [0, 2, 4, 6]


def test_both_optimizers_start_from_the_same_weights_and_see_the_same_batches() -> None:
    state = torch.get_rng_state()
    parts = [assemble(NOISY.but(optimizer=name), device=CPU, root=None) for name in ("grda", "sgd")]
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(parts[0].model.state_dict(), parts[1].model.state_dict(), rtol=0, atol=0)
    for ours, theirs in zip(*(each.loaders.train.epoch(2) for each in parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    first, other = (
        assemble(replace(SHORT, seed=seed), device=CPU, root=None).model.get_parameter("conv1.weight")
        for seed in (1, 2)
    )
    assert not torch.equal(first, other)


def test_held_out_data_are_what_choices_see(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", NOISY.but(validation=0.3, epochs=1))
    [record] = finish(run)
    parts = assemble(run.recipe, device=CPU, root=None)
    parts.model.load_state_dict(runs.weights_of(run)[1])
    assert parts.loaders.validation is not None
    assert record.test_loss == evaluate(parts.model, parts.loaders.validation).loss
    assert record.test_loss != evaluate(parts.model, parts.loaders.test).loss


class Watched:
    """A loader that counts its training batches."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.batches = 0
        self.examples, self.batch_size = loader.examples, loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def epoch(self, epoch: int) -> Iterator[Any]:
        for batch in self.loader.epoch(epoch):
            self.batches += 1
            yield batch


def test_a_watched_loader_is_the_one_trained_on(tmp_path: Path, whole: Callable[..., Run]) -> None:
    watched: list[Watched] = []

    def watch(loader: Loader) -> Loader:
        watched.append(Watched(loader))
        return watched[0]

    run = runs.create(tmp_path / "run", NOISY)
    finish(run, watch=watch)
    assert [each.batches for each in watched] == [4 * 4]
    assert_equal(run, whole(NOISY))


@pytest.mark.usefixtures("two_threads")
def test_digits_have_the_same_numbers_on_any_number_of_cores(tmp_path: Path, whole: Callable[..., Run]) -> None:
    two = runs.create(tmp_path / "two", replace(recipes.get("digits"), epochs=1))
    finish(two)
    assert torch.get_num_threads() == 2
    assert two.sessions()[0].threads == 1
    torch.set_num_threads(1)
    assert_equal(two, whole(two.recipe))


@pytest.mark.usefixtures("two_threads")
def test_a_run_that_is_left_or_fails_leaves_the_threads_as_they_were(tmp_path: Path) -> None:
    recipe = replace(recipes.get("digits"), epochs=2)
    records = conduct(runs.create(tmp_path / "left", recipe), Surroundings(CPU))
    next(records)
    assert torch.get_num_threads() == 1
    records.close()
    assert torch.get_num_threads() == 2
    with pytest.raises(Diverged):
        finish(runs.create(tmp_path / "diverged", recipe.but(optimizer="sgd", lr=1e18)))
    assert torch.get_num_threads() == 2
    free = runs.create(tmp_path / "free", replace(recipe, cpu=Execution()))  # does not set the threads
    finish(free)
    assert free.sessions()[0].threads == 2
    with pytest.raises(ValueError, match="threads=-1"):
        Execution(threads=-1)


def test_a_run_goes_on_on_another_kind_of_machine(tmp_path: Path, whole: Callable[..., Run]) -> None:
    """Captured steps use a learning rate in a tensor and fused SGD; neither may come back from a checkpoint."""
    recipe = RECIPES["noisy-sgd"]
    run = runs.create(tmp_path / "run", recipe)
    finish(run, stopping=after(2))
    state = checkpoint.load(run.checkpoints / "epoch-0002.pt")
    for group in state["optimizer"]["param_groups"]:
        group.update(lr=torch.tensor(group["lr"]), fused=True)
    checkpoint.save(run.checkpoints, 2, state)
    finish(run)
    assert_equal(run, whole(recipe))


def test_a_configuration_that_was_changed_is_refused(tmp_path: Path) -> None:
    run = uninterrupted(tmp_path / "run")
    for change, words in [
        ({"c": 0.5}, "c=0.5, but this run was trained with"),
        ({"seed": 7}, "seed=7"),
        ({"epochs": 9}, "epochs=9"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
    ]:
        with pytest.raises(ValueError, match=words):
            finish(Run(run.folder, run.recipe.but(**change)))
    assert finish(Run(run.folder, replace(run.recipe, keep=(1,)))) == []  # `keep` changes no result


def test_a_network_that_does_not_fit_the_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for model, words in [("vgg16", r"shape \(1, 8, 8\)"), ("wrn10x1", "does not fit data='digits'")]:
        run = runs.create(tmp_path / model, replace(SHORT, model=model))
        with pytest.raises(ValueError, match=words):
            finish(run)
        assert checkpoint.epochs(run.checkpoints) == []


class Pair(nn.Linear):
    """A user's network that returns more than its logits."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs.flatten(1)), inputs


def pair(num_classes: int) -> nn.Module:
    return Pair(64, num_classes)


def narrow(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes - 1))


class Faulty(nn.Module):
    """A user's network with a bug that shows only in training mode, or only in eval mode."""

    def __init__(self, num_classes: int, *, trains: bool) -> None:
        super().__init__()
        self.linear, self.trains = nn.Linear(64, num_classes), trains

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.training == self.trains:
            raise KeyError("no such layer")
        return self.linear(inputs.flatten(1))


def faulty(num_classes: int) -> nn.Module:
    return Faulty(num_classes, trains=False)


def faulty_in_training(num_classes: int) -> nn.Module:
    return Faulty(num_classes, trains=True)


class Detached(Faulty):
    def forward(self, inputs: torch.Tensor) -> Any:
        return self.linear(inputs.flatten(1)).detach()


def detached(num_classes: int) -> nn.Module:
    return Detached(num_classes, trains=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("pair", r"it gives tuple for two examples, not a tensor of shape \(2, 10\)"),
        ("narrow", r"it gives \(2, 9\) for two examples"),
        ("faulty", "KeyError: 'no such layer'"),
        ("faulty_in_training", "KeyError: 'no such layer'"),
        ("detached", "RuntimeError: element 0 of tensors does not require grad"),
    ],
)
def test_a_slip_in_a_users_network_is_named_before_anything_is_written(model: str, words: str, tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", replace(SHORT, model=f"test_experiment:{model}"))
    with pytest.raises(
        ValueError, match=rf"model='test_experiment:{model}' does not fit .* \(1, 8, 8\): .*{words}.*TRACEBACK=1"
    ):
        finish(run)
    assert not run.begun
    assert not run.checkpoints.exists()


def test_trying_the_network_out_changes_nothing() -> None:
    parts = experiment.assemble(NOISY, device=torch.device("cpu"), root=None)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    numbers = torch.get_rng_state()
    experiment.check_fit(NOISY, parts, torch.device("cpu"))
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    assert all(p.grad is None for p in parts.model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers)


class Counting(nn.Module):
    """A network that counts its passes, in training and in evaluation."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        logits: torch.Tensor = self.layer(images.flatten(1))
        return logits


def test_trying_the_network_out_leaves_what_it_notes_in_evaluation() -> None:
    recipe = changed(recipes.get("digits-short"), model="test_experiment:Counting")
    parts = experiment.assemble(recipe, device=torch.device("cpu"), root=None)
    experiment.check_fit(recipe, parts, torch.device("cpu"))
    assert float(parts.model.passes) == 0


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "AcceleratorError"])
@pytest.mark.parametrize("model", ["small", "test_experiment:Counting"])
def test_a_device_that_is_full_or_broken_is_not_blamed_on_the_network(
    model: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = getattr(torch, kind, torch.OutOfMemoryError)  # torch 2.6 has no AcceleratorError
    recipe = changed(recipes.get("digits-short"), model=model)
    parts = experiment.assemble(recipe, device=torch.device("cpu"), root=None)

    def fail(images: torch.Tensor) -> torch.Tensor:
        raise error("CUDA error")

    monkeypatch.setattr(parts.model, "forward", fail)
    with pytest.raises(error):
        experiment.check_fit(recipe, parts, torch.device("cpu"))


def test_a_batch_of_more_than_all_is_told(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", replace(SHORT, batch_size=2000, epochs=1))
    with pytest.warns(experiment.OneBatch, match="--batch-size 2000 is more than the 1,438 training examples"):
        finish(run)


def test_a_run_whose_checkpoints_are_gone_keeps_its_records(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    records = finish(run)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(
        ValueError, match="4 recorded epochs and no checkpoint to continue from; restore its checkpoints"
    ):
        finish(run)
    assert run.records() == records
    assert run.outcome() is not None


def test_a_run_whose_records_are_gone_says_so_and_goes_on(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    finish(run, stopping=after(2))
    (run.folder / "metrics.jsonl").unlink()
    with pytest.warns(LostRecords, match=r"metrics.jsonl ends at epoch 0, but the newest checkpoint is of epoch 2"):
        assert [record.epoch for record in finish(run)] == [3, 4]


def test_a_run_is_trained_by_one_job_at_a_time(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    first = conduct(run, Surroundings(CPU))
    next(first)
    with pytest.raises(InUse, match=f"process {os.getpid()}"):
        finish(run)
    first.close()
    assert [record.epoch for record in finish(run)][-1] == SHORT.epochs


def test_checkpoints_that_cannot_be_trusted_are_set_aside(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    finish(run, save_every=1)
    newest = run.checkpoints / f"epoch-{SHORT.epochs:04d}.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    records = conduct(run, Surroundings(CPU))
    with pytest.warns(checkpoint.CheckpointWarning):
        next(records)
    assert newest.with_name(newest.name + ".corrupt").exists()
    assert checkpoint.epochs(run.checkpoints)[-1] == SHORT.epochs  # trained and saved again
    records.close()
    assert checkpoint.latest(run.checkpoints) is not None


def test_a_recipe_made_of_lists_goes_on_as_one_of_tuples(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT.but(epochs=2, exempt=["bias"]))  # type: ignore[arg-type]
    next(conduct(run, Surroundings(CPU, save_every=1)))
    assert [record.epoch for record in conduct(run, Surroundings(CPU))] == [2]


def without(*path: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function that removes a part of a checkpoint's state."""

    def spoil(state: dict[str, Any]) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return state

    return spoil


def having(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, name: value}


def reshaped(state: dict[str, Any]) -> Any:
    return {**state, "model": {**state["model"], "conv1.weight": torch.zeros(3)}}


STRANGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda state: list(state), "holds a list, not the state of a run"),
    "no weights": (without("model"), "holds no model of a run"),
    "weights in a list": (having("model", []), "holds no model of a run, but a list"),
    "a number for a name": (having("model", {7: torch.zeros(3)}), "holds a tensor called 7"),
    "a name for the terminal": (having("model", {"\x1b[2J": torch.zeros(3)}), r"holds a tensor called '\\x1b\[2J'"),
    "a tensor without values": (
        having("model", {"conv1.weight": torch.zeros(3, device="meta")}),
        "holds no dense tensor as 'conv1.weight'",
    ),
    "training in a list": (having("training", []), "holds no training of a run, but a list"),
    "a method in a list": (having("method", [1]), "holds no method of a run, but a list"),
    "a text for a tensor": (having("model", {"conv1.weight": "zeros"}), "holds no dense tensor as 'conv1.weight'"),
    "no optimizer": (without("optimizer"), "holds no optimizer of a run"),
    "no recipe": (without("recipe"), "holds no recipe of a run"),
    "half a recipe": (without("recipe", "optimizer"), "holds a recipe that cannot be read: 'optimizer'"),
    "a tensor less": (without("model", "conv1.bias"), "names a parameter 'conv1.bias', but does not hold it"),
    "another shape": (reshaped, r"holds 'conv1.weight' as a tensor of shape \(3,\), and the network a tensor of shape"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_dense_one() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3)])
    assert runs.fault_of({"model": {"w": nested}}) == "holds no dense tensor as 'w'"


@pytest.mark.parametrize("name", STRANGE)
def test_a_checkpoint_of_something_else_costs_an_epoch_and_no_more(name: str, two_epochs: Path, tmp_path: Path) -> None:
    spoil, said = STRANGE[name]
    run = runs.load(shutil.copytree(two_epochs, tmp_path / "run"))
    state = checkpoint.load(checkpoint.path_of(run.checkpoints, 2))
    checkpoint.save(run.checkpoints, 2, spoil(state))
    with pytest.warns(CheckpointWarning, match=rf"going back to .*epoch-0001.pt.*epoch-0002.pt {said}"):
        assert next(conduct(run, Surroundings(CPU))).epoch == 2


PARTLY: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an optimizer of nothing": (having("optimizer", {}), r"state_dict has the keys \[\]"),
    "training of another": (having("training", {"a": torch.zeros(3)}), r"Error\(s\) in loading state_dict"),
    "a method too many": (having("method", {"masks": torch.zeros(3)}), r"state has \['masks'\], and sgd needs \[\]"),
}


@pytest.mark.parametrize("name", PARTLY)
def test_a_checkpoint_that_cannot_be_continued_from_costs_an_epoch_and_the_only_one_is_kept(
    name: str, two_epochs: Path, tmp_path: Path
) -> None:
    spoil, said = PARTLY[name]
    run = runs.load(shutil.copytree(two_epochs, tmp_path / "run"))
    path = checkpoint.path_of(run.checkpoints, 2)
    checkpoint.save(run.checkpoints, 2, spoil(checkpoint.load(path)))
    with pytest.warns(
        CheckpointWarning, match=rf"epoch-0002.pt cannot be continued from: {said}.*; going back to epoch 1"
    ):
        assert [record.epoch for record in conduct(run, Surroundings(CPU, stopping=after(1)))] == [2]
    path = checkpoint.path_of(run.checkpoints, 1)
    checkpoint.save(run.checkpoints, 1, spoil(checkpoint.load(path)))
    checkpoint.path_of(run.checkpoints, 2).unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"epoch-0001.pt cannot be continued from: {said}.*; restore it"):
        next(conduct(run, Surroundings(CPU)))
    assert len(run.records()) == 2


def test_a_configuration_that_does_not_say_how_it_prunes_is_not_continued(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    config = run.folder / "config.json"
    values = json.loads(config.read_text())
    del values["optimizer"]["c"]
    config.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config.json does not say c; restore it"):
        next(conduct(runs.load(run.folder), Surroundings(CPU)))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start has the control character"):
        runs.create(tmp_path / "run", replace(SHORT, start="\x1b[2J"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", ["x" * 5000, "\ud800"])
def test_a_folder_of_data_that_cannot_be_is_none(data: str, tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", SHORT)
    (run.folder / "environment.json").write_text(json.dumps([{"data": data}]))
    assert run.last_root() is None
