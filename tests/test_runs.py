"""Run directories."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dirprune
from dirprune import sparsity
from dirprune.lab.methods import MethodSpec
from dirprune.lab.records import checkpoint, provenance
from dirprune.lab.records.provenance import Session
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.runs import Outcome, Run, RunExists

CPU = torch.device("cpu")


def record(epoch: int, **values: float) -> EpochRecord:
    """Return the record of an epoch; its training loss, 1/3, has no exact decimal representation."""
    given = {
        "lr": 0.1,
        "train_loss": 1 / 3,
        "train_accuracy": 90.0,
        "test_loss": 0.5,
        "test_accuracy": 87.0,
        "sparsity": 0.4,
        "weight_sparsity": 0.41,
        "norm_ratio": 4e-4,
        "train_seconds": 1.0,
        "test_seconds": 0.1,
    }
    return EpochRecord(epoch=epoch, **{**given, **values})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of three epochs."""
    run = runs.create(tmp_path / "deep" / "run", recipes.get("digits"))
    for epoch in (1, 2, 3):
        run.append(record(epoch))
    return run


@pytest.mark.parametrize("name", recipes.names())
def test_config_comes_back(name: str, tmp_path: Path) -> None:
    recipe = replace(recipes.get(name), seed=3, keep=(1, 5))
    created = runs.create(tmp_path / "run", recipe)
    assert runs.load(tmp_path / "run") == created == Run(tmp_path / "run", recipe)


def test_an_outcome_comes_back(run: Run) -> None:
    assert run.outcome() is None
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.nn.init.zeros_(model[0].weight)
    for outcome in (Outcome(sparsity(model), peak_memory_mib=12.5), Outcome(diverged="the loss became nan")):
        run.conclude(outcome)
        found = run.outcome()
        assert found is not None
        assert (found.diverged, found.peak_memory_mib) == (outcome.diverged, outcome.peak_memory_mib)
        if outcome.zeros is None:
            assert found.zeros is None
            continue
        assert found.zeros is not None
        assert (found.zeros.zeros, found.zeros.total) == (8, 12)  # six weights, and two biases of the norm
        assert [layer.name for layer in found.zeros.layers] == [name for name, _ in model.named_parameters()]
        assert [layer.shape for layer in found.zeros.layers] == [p.shape for p in model.parameters()]
    (run.folder / "outcome.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as an outcome"):
        run.outcome()


def test_a_name_tells_the_method_and_its_options() -> None:
    recipe = recipes.get("digits").but(optimizer="sgd", method=MethodSpec.of("rigl", sparsity=0.9))
    assert runs.default_name(recipe) == "digits-rigl-sparsity0.9-s0"


def test_an_existing_folder_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(
        RunExists, match=r"never overwritten; continue it with `dirprune resume .*run`, or give another --out"
    ):
        runs.create(run.folder, recipes.get("digits-short"))
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before

    file = tmp_path / "file"
    file.write_text("notes")
    with pytest.raises(RunExists):
        runs.create(file, recipes.get("digits"))
    assert file.read_text() == "notes"


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    assert runs.create(tmp_path, recipes.get("digits")).records() == []


def test_what_a_stop_left_of_the_first_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.tmp.json").write_text('{"name": "dig')
    assert runs.create(tmp_path, recipes.get("digits")).recipe == runs.load(tmp_path).recipe
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.tmp.json").write_text("{}")
    with pytest.raises(RunExists):
        runs.create(tmp_path / "other", recipes.get("digits"))


def test_a_default_name_tells_settings_apart_and_is_never_taken_twice(tmp_path: Path) -> None:
    recipe = recipes.get("vgg16-cifar10")
    others = [
        replace(recipe, seed=1),
        recipe.but(c=1e-3),
        recipe.but(mu=0.7),
        recipe.but(optimizer="sgd"),
    ]
    assert len({runs.default_name(each) for each in (recipe, *others)}) == 5
    assert runs.default_name(recipe) == "vgg16-cifar10-grda-c0.0005-mu0.6-s0"
    made = [runs.create(runs.unused(tmp_path / "v1.5"), recipe).folder.name for _ in range(3)]
    assert made == ["v1.5", "v1.5-2", "v1.5-3"]


def test_what_is_not_a_run_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing does not exist; name the folder of a run"):
        runs.load(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no config.json; `dirprune train` makes one"):
        runs.load(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=rf"is not a run: it has no config.json; it contains {run.folder}"):
        runs.load(run.folder.parent)
    config = run.folder / "config.json"
    values = json.loads(config.read_text())
    for text in ("{", "[]", json.dumps({"name": "digits"}), json.dumps(values | {"schedule": "constant"})):
        config.write_text(text)
        with pytest.raises(ValueError, match=r"config.json cannot be read as a recipe.*; restore it: every checkpoint"):
            runs.load(run.folder)
    config.write_text(json.dumps(values | {"optimizer": {"name": "grda", "mu": -1}}))
    with pytest.raises(ValueError, match=r"mu=-1\.0 cannot be used"):
        runs.load(run.folder)


def test_records_come_back_exactly(run: Run) -> None:
    assert run.records() == [record(1), record(2), record(3)]
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record(epoch).to_dict() for epoch in (1, 2, 3)]


def test_a_last_line_cut_anywhere_does_not_count(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert run.records() == [record(1), record(2)]
    path.write_bytes(whole[:-1])  # only the newline is missing: the record is whole
    assert run.records() == [record(1), record(2), record(3)]


def test_binary_damage_is_named(run: Run) -> None:
    for name, read in (("outcome.json", run.outcome), ("metrics.jsonl", run.records)):
        (run.folder / name).write_bytes(b"\xff\xfe\n{}\n")
        with pytest.raises(ValueError, match=name):
            read()


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(run: Run) -> None:
    for epoch in (0, 2):
        checkpoint.save(run.checkpoints, epoch, {"model": {}})
    with pytest.raises(FileNotFoundError, match="no checkpoint of epoch 1; it has 0, 2"):
        runs.weights_of(run, 1)


def test_a_damaged_line_before_the_last_is_an_error(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    for damage in ("{", '{"epoch": 1}'):
        path.write_text("\n".join([damage, *path.read_text().splitlines()[1:]]) + "\n")
        with pytest.raises(ValueError, match=r"line 1 of .*metrics.jsonl is not an epoch record"):
            run.records()


def test_rewinding_forgets_later_records_and_a_cut_line(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run.rewind(2)
    run.append(record(3))
    assert run.records() == [record(1), record(2), record(3)]
    run.rewind(1)
    assert run.records() == [record(1)]
    run.rewind(0)
    assert path.read_text() == ""
    assert sorted(entry.name for entry in run.folder.iterdir()) == ["config.json", "metrics.jsonl"]


def test_a_failed_rewind_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **options: str) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run.rewind(1)
    assert run.records() == [record(1), record(2), record(3)]


def test_environment_says_what_ran_where(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run.sessions() == []
    assert run.last_root() is None
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dirprune", "train", "digits", "--out", "my run"])
    (tmp_path / "data").mkdir()
    run.note_session(CPU, world_size=1, root=tmp_path / "sets" / ".." / "data", examples=7)
    assert run.last_root() == tmp_path.resolve() / "data"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dirprune", "resume", "my run"])
    run.note_session(CPU, world_size=2, root=None, examples=7)
    assert run.last_root() is None
    first, second = json.loads((run.folder / "environment.json").read_text())
    assert [Session(**first), Session(**second)] == run.sessions()
    assert first["command"] == "dirprune train digits --out 'my run'"
    assert second["command"] == "dirprune resume 'my run'"
    assert (first["processes"], second["processes"]) == (1, 2)
    versions = (dirprune.__version__, torch.__version__, platform.python_version())
    assert (first["dirprune"], first["torch"], first["python"]) == versions
    assert re.search(r"CPU|cores", first["device"])
    assert first["platform"] == platform.platform()
    assert first["threads"] == torch.get_num_threads()
    assert first["time"].endswith("Z")
    assert first["commit"] == provenance.commit()


def test_the_folder_of_the_data_is_noted_wherever_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.create(tmp_path / "run", recipes.get("vgg16-cifar10"))
    monkeypatch.setenv("DIRPRUNE_DATA", str(tmp_path / "data"))
    run.note_session(CPU, world_size=1, root=None, examples=7)
    assert run.last_root() is None  # the folder does not exist
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("DIRPRUNE_DATA", str(tmp_path))  # the run stays with the data it was trained on
    assert run.last_root() == tmp_path / "data"


def test_a_full_disk_leaves_no_empty_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(runs, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        runs.create(tmp_path / "a" / "b", recipes.get("digits"))
    assert list(tmp_path.iterdir()) == []


def test_commit_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(dirprune, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("DIRPRUNE_COMMIT", raising=False)
    commit = provenance.commit.__wrapped__  # without its cache
    assert commit() == ""  # not a repository
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "first")
    head = git("rev-parse", "--short", "HEAD")
    assert commit() == head
    (tmp_path / "notes").write_text("a file beside the source changes nothing")
    assert commit() == head
    source.write_text("changed = True\n")
    assert commit() == head + "+"
    monkeypatch.setenv("DIRPRUNE_COMMIT", "abc1234")
    assert commit() == "abc1234"


def test_a_process_goes_on_under_the_commit_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    before = provenance.commit()
    monkeypatch.setattr(dirprune, "__file__", "/elsewhere/__init__.py")
    assert provenance.commit() == before


@pytest.mark.parametrize("content", [b'{"a": 1}', b"[1]", b"\xff\xfe", b"", b'[{"examples": "7"}]'])
def test_where_a_run_came_from_is_worth_less_than_the_run(run: Run, content: bytes) -> None:
    path = run.folder / "environment.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"environment.json .*; correct it, or, if you can do without it, delete it"):
        run.sessions()
    assert run.last_root() is None
    with pytest.warns(provenance.DamagedSessions, match=r"It is kept as environment.damaged.json"):
        run.note_session(torch.device("cpu"), 1, None, 7)
    assert path.with_name("environment.damaged.json").read_bytes() == content
    assert run.sessions()[-1].torch == torch.__version__


def test_weights_of_the_newest_or_of_a_given_epoch(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint yet; `dirprune resume"):
        runs.weights_of(runs.create(tmp_path / "new", recipes.get("digits")))
    with pytest.raises(FileNotFoundError, match="are gone; train again"):
        runs.weights_of(run)
    for epoch in (1, 2):
        checkpoint.save(run.checkpoints, epoch, {"model": {"w": torch.full((2,), float(epoch))}})
    assert runs.weights_of(run)[0] == 2
    epoch, state = runs.weights_of(run, epoch=1)
    assert epoch == 1
    assert state["w"].tolist() == [1.0, 1.0]


def test_a_line_that_is_no_record_is_named(run: Run) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("[1, 2]\n")
    with pytest.raises(ValueError, match=r"line 4 of .*metrics\.jsonl is not an epoch record"):
        run.records()


def test_a_record_that_finds_no_room_names_its_file_and_leaves_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # an error of writing names no file

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"epoch 4 was not recorded \(No space left.*then continue; not written"
    ) as caught:
        run.append(record(4))
    assert caught.value.filename == str(run.folder / "metrics.jsonl")
    assert run.records()[:3] == [record(epoch) for epoch in (1, 2, 3)]


def test_a_run_that_another_job_trains_is_not_discarded(tmp_path: Path) -> None:
    """If two commands start at the same time, both may create the folder; the second is refused."""
    run = runs.create(tmp_path / "run", recipes.get("digits"))
    with run.locked():
        run.discard()
        assert runs.load(run.folder) == run
    run.discard()
    assert not run.folder.exists()


def test_a_run_without_its_configuration_is_told_where_a_copy_is(run: Run) -> None:
    checkpoint.save(run.checkpoints, 1, {"epoch": 1})
    (run.folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is gone; restore it: every checkpoint holds a copy"):
        runs.load(run.folder)


def test_a_command_that_is_advised_can_be_copied(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "my run", recipes.get("digits"))
    command = re.escape(f"dirprune resume '{run.folder}'")
    with pytest.raises(RunExists, match=command):
        runs.create(run.folder, run.recipe)
    with pytest.raises(FileNotFoundError, match=command):
        runs.weights_of(run)
