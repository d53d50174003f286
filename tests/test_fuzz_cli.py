"""Command lines that make no sense: whatever is typed, the answer is a result or a message, never a traceback."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from test_cli import call

from dirprune.lab.cli import console
from dirprune.lab.cli.app import app

NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "1000000000000000000000000000000",
    "0.5",
    "nan",
    "inf",
    "1e300",
    "-1e-300",
    "1e23",
    "abc",
)
TEXTS = (
    "",
    ":",
    "a:b",
    "sys:exit",
    "/proc/foo",
    "../..",
    "é\U0001f600",
    "-",
    "1,2",
    "0,-1",
    "x" * 300,
    "none",
    "=",
    "a=b",
)
NEVER = ("--at-once", "--help", "--device", "--data", "--force")
"""Options that start processes, or decide only where."""
NETWORK = """
from torch import nn

def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
LINES = {
    "train": "digits-short --model fuzz_net:linear --batch-size 1000 --epochs 1",
    "resume": "run",
    "report": "run",
    "tune": "digits-short --model fuzz_net:linear --batch-size 1000 --epochs 1 --trials 1",
    "recipes": "digits",
    "export": "run --to net.safetensors",
    "speed": "run --alone --seconds 0.1",
    "compare": "digits-short --model fuzz_net:linear --epochs 1 --methods sgd,grda",
    "connect": "run run --epochs 1 --points 3 --grid 3",
    "project": "run run --k 1 --examples 50 --max-iterations 20",
    "score": "run --k 0 --examples 50 --samples 2",
    "reproduce": "",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a network and a run, where every command stops at the first place where it can be interrupted."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "fuzz_net.py").write_text(NETWORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DIRPRUNE_DATA", str(folder / "none"))
        patch.delenv("DIRPRUNE_TRACEBACK", raising=False)
        words = LINES["train"].split()
        assert call("train", *words, "--optimizer", "sgd", "--out", "run").exit_code == 0
        patch.setattr(console.Interruption, "__call__", lambda self: True)
        yield folder


def line(chance: random.Random, verb: str, options: list[Any]) -> list[str]:
    """Return a command line that makes sense but for one to three options or words."""
    words = LINES[verb].split()
    for _ in range(chance.randint(1, 3)):
        nasty = chance.choice(chance.choice((NUMBERS, TEXTS)))
        if words and chance.random() < 0.25:
            words[chance.randrange(len(words))] = nasty
        else:
            option = chance.choice(options)
            name = chance.choice([*option.opts, *option.secondary_opts])
            words += [name] if getattr(option, "is_flag", False) else [f"{name}={nasty}"]
    return [verb, *words]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "count", [30, pytest.param(4000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])], ids=["short", "long"]
)
def test_no_command_line_ends_in_a_traceback(here: Path, count: int) -> None:
    group: Any = typer.main.get_command(app)
    chance, ends = random.Random(0), dict[int, int]()
    for number in range(count):
        verb = chance.choice(list(LINES))
        every = [each for each in group.commands[verb].params if each.opts[0].startswith("--")]
        words = line(chance, verb, [each for each in every if each.opts[0] not in NEVER])
        try:
            result = call(*words)
        except BaseException as error:
            raise AssertionError(f"line {number}: {words} raised {type(error).__name__}: {error}") from error
        assert result.exit_code in (0, 1, 2, 130), words
        assert result.exit_code == 0 or result.stderr.strip(), words
        ends[result.exit_code] = ends.get(result.exit_code, 0) + 1
        for path in here.iterdir():
            if path.name not in ("run", "fuzz_net.py", "__pycache__"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(f"{count:,} command lines: {ends}")
    assert min(ends.get(0, 0), ends.get(1, 0), ends.get(2, 0)) > count / 20
