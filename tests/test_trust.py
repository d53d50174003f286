"""Reading a run that somebody else wrote executes nothing that it names."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import call

from dirprune.lab import trust
from dirprune.lab.records import checkpoint
from dirprune.lab.records.files import LeadsElsewhere, write_text
from dirprune.lab.studies.comparison.work import compare
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.surroundings import Surroundings

CODE = """
from pathlib import Path

from dirprune.lab.models import small

Path("executed").touch()

def net(num_classes):
    return small(num_classes)
"""
RECIPE = replace(recipes.get("digits-short"), epochs=1, batch_size=512, keep=(0, 1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of SGD and one of gRDA, one epoch each."""
    folder = tmp_path_factory.mktemp("trained")
    for optimizer in ("sgd", "grda"):
        list(
            conduct(runs.create(folder / optimizer, RECIPE.but(optimizer=optimizer)), Surroundings(torch.device("cpu")))
        )
    return folder


@pytest.fixture
def hostile(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such runs in the current folder, whose config.json and checkpoints name a module that lies beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_ALLOWED", set())
    for module in ("shared", "shared.evil"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    folder = Path("shared")
    shutil.copytree(trained, folder)
    (folder / "evil.py").write_text(CODE)
    for run in (folder / "sgd", folder / "grda"):
        name(run, f"{folder}.evil:net")
    return folder


def name(run: Path, model: str) -> None:
    """Write the name of a network into a run, as if it had been trained with it."""
    values = json.loads((run / "config.json").read_text()) | {"model": model}
    (run / "config.json").write_text(json.dumps(values))
    for epoch in checkpoint.epochs(run / "checkpoints"):
        state = checkpoint.load(checkpoint.path_of(run / "checkpoints", epoch))
        checkpoint.save(run / "checkpoints", epoch, {**state, "recipe": values})


RESEARCH = ("--examples", 20, "--max-iterations", 3, "--out", "out")
BUILDING = [
    ("resume", "shared/grda"),
    ("score", "shared/sgd", "--k", 0, "--samples", 1, *RESEARCH),
    ("project", "shared/sgd", "shared/grda", "--k", 1, *RESEARCH),
    ("speed", "shared/grda", "--alone", "--seconds", 0.1, "--out", "out"),
    ("connect", "shared/sgd", "shared/grda", "--no-fit", "--points", 2, "--out", "out"),
]
READING = [
    ("report", "shared/sgd", "shared/grda", "--out", "out"),
    ("export", "shared/grda", "--to", "net.safetensors"),
    ("reproduce", "shared/sgd", "--results", "out"),
    ("compare", "--no-train", "--out", "shared"),
]


@pytest.mark.parametrize("words", BUILDING, ids=lambda words: words[0])
def test_code_that_a_run_names_is_refused_before_it_is_imported(words: tuple[object, ...], hostile: Path) -> None:
    result = call(*words)
    assert result.exit_code == 1
    assert "'shared.evil:net' is code that a file names, and nothing of it was executed; add --trust" in result.stderr
    assert not Path("executed").exists()


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_reading_needs_no_code(words: tuple[object, ...], hostile: Path) -> None:
    if words[0] == "compare":
        (hostile / "runs").mkdir()
        for run in ("sgd", "grda"):
            (hostile / run).rename(hostile / "runs" / run)
    result = call(*words)
    assert result.exit_code == 0, result.stderr
    assert not Path("executed").exists()


@pytest.mark.parametrize("words", BUILDING, ids=lambda words: words[0])
def test_code_that_the_command_trusts_is_run(words: tuple[object, ...], hostile: Path) -> None:
    for run in ("sgd", "grda"):
        (hostile / run / "outcome.json").unlink()
    assert call(*words, "--trust").exit_code == 0
    assert Path("executed").exists()


def test_trust_extends_to_what_the_run_was_trained_with_alone(hostile: Path) -> None:
    name(hostile / "grda", "small")
    config = hostile / "grda" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model": "shared.evil:net"}))
    result = call("resume", hostile / "grda", "--trust")
    assert result.exit_code == 1
    assert "says model='shared.evil:net', but this run was trained with 'small'" in result.stderr
    assert not Path("executed").exists()


def test_a_network_that_exits_is_an_error(hostile: Path) -> None:
    name(hostile / "grda", "sys:exit")
    result = call("resume", hostile / "grda", "--trust")
    assert result.exit_code == 1
    assert "model='sys:exit' raised SystemExit" in result.stderr


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "figures"])
def test_a_run_with_a_link_is_not_written(name: str, trained: Path, tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(trained / "grda", run)
    (run / "outcome.json").unlink()
    if (run / name).exists():
        (run / name).rename(kept)
    else:
        kept.mkdir()
    (run / name).symlink_to(kept)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = call("report" if name == "figures" else "resume", run)
    assert result.exit_code == 1
    assert f"{run / name} is a link, and what is written to its folder could land elsewhere" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_comparison_with_a_link_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path)
    with pytest.raises(LeadsElsewhere, match="runs is a link"):
        next(compare([RECIPE], tmp_path, Surroundings(torch.device("cpu"))))


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.write_text("kept")
    folder.mkdir()
    for temporary in ("a.tmp.txt", "epoch-0001.pt.tmp", "epoch-0001.pt.sha256.tmp"):
        (folder / temporary).symlink_to(kept)
    write_text(folder / "a.txt", "new")
    checkpoint.save(folder, 1, {"new": 1})
    assert kept.read_text() == "kept"
    assert (folder / "a.txt").read_text() == "new"
    assert checkpoint.load(folder / "epoch-0001.pt") == {"new": 1}
