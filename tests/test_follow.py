"""Training with a progress display: the bar, Ctrl-C, and several processes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_cli import call

from dirprune.lab.cli import follow
from dirprune.lab.records import checkpoint
from dirprune.lab.training import experiment, recipes, runs
from dirprune.lab.training.processes import Process
from dirprune.lab.training.recipe import changed

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
MODULE = """
import signal
from torch import nn

class Interrupting(nn.Sequential):
    "Presses Ctrl-C in the given training steps."

    def __init__(self, num_classes, *steps):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
        self.steps, self.done = steps, 0

    def forward(self, inputs):
        if self.training:
            self.done += 1
            for _ in range(self.steps.count(self.done)):
                signal.raise_signal(signal.SIGINT)
        return super().forward(inputs)

def quiet(num_classes):
    return Interrupting(num_classes)

def once(num_classes):
    return Interrupting(num_classes, 8)

def twice(num_classes):
    return Interrupting(num_classes, 8, 9)

def late(num_classes):
    return Interrupting(num_classes, 24)

def at_once(num_classes):
    return Interrupting(num_classes, 4, 4)

def early(num_classes):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
"""
# 1438 examples in batches of 256: 6 steps per epoch.
SHORT = ("train", "digits", "--batch-size", 256, "--epochs", 4, "--out", "run", "--json")


def state(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    return dict(runs.weights_of(runs.load(folder), epoch)[1])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "follow_networks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    sys.modules.pop("follow_networks", None)


def test_the_first_ctrl_c_finishes_the_epoch_and_saves() -> None:
    result = call(*SHORT, "--model", "follow_networks:once")
    assert result.exit_code == 130
    assert [json.loads(line)["epoch"] for line in result.stdout.splitlines()] == [1, 2]
    assert result.stderr.splitlines() == [
        "Stopping after this epoch; press Ctrl-C again to stop immediately.",
        "Stopped; saved up to epoch 2 of 4. Continue with:",
        "    dirprune resume run --trust",
    ]
    assert checkpoint.epochs(Path("run/checkpoints"))[-1] == 2


def test_the_second_ctrl_c_stops_at_once() -> None:
    result = call(*SHORT, "--model", "follow_networks:twice", "--save-every", 1)
    assert result.exit_code == 130
    assert [json.loads(line)["epoch"] for line in result.stdout.splitlines()] == [1]
    assert result.stderr.splitlines()[1:] == [
        "Stopped; saved up to epoch 1 of 4. Continue with:",
        "    dirprune resume run --trust",
    ]


def test_ctrl_c_in_the_last_epoch_changes_nothing() -> None:
    result = call(*SHORT, "--model", "follow_networks:late")
    assert result.exit_code == 0
    assert [json.loads(line)["epoch"] for line in result.stdout.splitlines()] == [1, 2, 3, 4]
    assert "resume" not in result.stderr


def test_ctrl_c_before_the_first_epoch_keeps_nothing_and_says_so() -> None:
    result = call(*SHORT, "--model", "follow_networks:early")
    assert result.exit_code == 130
    assert "nothing is kept" in result.stderr
    assert "resume" not in result.stderr
    assert not Path("run").exists()


def test_ctrl_c_in_the_first_epoch_of_a_new_run_keeps_nothing_and_of_an_old_one_what_there_was() -> None:
    words = ("--model", "follow_networks:at_once", "--tensorboard")
    result = call(*SHORT, *words)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[1:] == ["Stopped before the end of the first epoch; nothing is kept."]
    assert not Path("run").exists()
    runs.create(Path("run"), changed(recipes.get("digits"), batch_size=256, model=words[1]))
    assert call("resume", "run").stderr.splitlines()[1:] == [
        "Stopped; saved up to epoch 0 of 60. Continue with:",
        "    dirprune resume run --trust",
    ]
    assert Path("run/checkpoints/epoch-0000.pt").exists()


def test_the_end_of_the_time_finishes_the_epoch_and_saves() -> None:
    result = call(*SHORT, "--model", "follow_networks:quiet", "--minutes", 1e-9)
    assert result.exit_code == 0  # running out of time is not an error
    assert [json.loads(line)["epoch"] for line in result.stdout.splitlines()] == [1]
    assert result.stderr.splitlines() == [
        "Stopped; saved up to epoch 1 of 4. Continue with:",
        "    dirprune resume run --trust",
    ]
    assert call("resume", "run", "--minutes", 1e-9).stderr.splitlines()[0].startswith("Stopped; saved up to epoch 2")
    assert "epoch 4 of 4" in call("resume", "run", "--minutes", 9).stdout


def test_no_time_at_all_is_refused_before_anything_is_made() -> None:
    result = call(*SHORT, "--minutes", 0)
    assert result.exit_code == 1
    assert "--minutes 0 leaves no time to train; give more than 0" in result.stderr
    assert not Path("run").exists()


def test_a_folder_with_a_space_is_named_so_that_the_shell_reads_it() -> None:
    result = call(*SHORT, "--out", "my run", "--model", "follow_networks:once")
    assert result.stderr.splitlines()[-1] == "    dirprune resume 'my run' --trust"


@pytest.mark.parametrize(
    ("processes", "on_this_node", "advice"),
    [
        (1, 1, ["Continue with:", "    dirprune resume run"]),
        (4, 4, ["Continue with:", "    torchrun --nproc-per-node 4 -m dirprune resume run"]),
        (
            4,
            2,
            [
                "Continue on every node, with torchrun's options as before:",
                "    torchrun … -m dirprune resume run",
            ],
        ),
    ],
)
def test_how_to_go_on_depends_on_the_processes_there_were(
    processes: int,
    on_this_node: int,
    advice: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runs.create(Path("run"), recipes.get("digits"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    assert not follow._conclude(run, output=None, is_new=False, process=Process(0, processes))
    first, second = capsys.readouterr().err.splitlines()
    assert [first.removeprefix("Stopped; saved up to epoch 0 of 60. "), second] == advice


def test_a_run_that_diverges_stays_and_says_what_to_do() -> None:
    result = call(*SHORT, "--model", "follow_networks:quiet", "--lr", 1e38, "--optimizer", "sgd")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "epoch-0000.pt" in line
    assert "--lr (now 1e+38)" in line
    assert runs.load(Path("run")).records() == []


def test_a_failure_before_the_first_epoch_leaves_the_name_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Iterator[None]:
        raise ValueError("after the initial weights were saved")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "train", failing)
        assert call(*SHORT, "--model", "follow_networks:quiet", "--tensorboard").exit_code == 1
    assert not Path("run").exists()
    assert call(*SHORT, "--model", "follow_networks:quiet").exit_code == 0


def test_event_files_hold_what_earlier_sessions_saved_without_them() -> None:
    """So they do after a session that was killed between saving an epoch's checkpoint and writing its event."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert call(*SHORT, "--model", "follow_networks:quiet", "--out", "run").exit_code == 0
    for _ in range(2):
        assert call("resume", "run", "--tensorboard").exit_code == 0
    events = accumulator.EventAccumulator("run/tensorboard")
    events.Reload()
    records = runs.load(Path("run")).records()
    assert [(event.step, event.value) for event in events.Scalars("test_loss")] == [
        (record.epoch, pytest.approx(record.test_loss)) for record in records
    ]


def test_event_files_that_find_no_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as TensorBoard raises it, without a file name

    monkeypatch.setattr(pytest.importorskip("torch.utils.tensorboard"), "SummaryWriter", full)
    refused = call(*SHORT, "--model", "follow_networks:quiet", "--tensorboard", "--out", "run")
    assert re.search("No space left on device: run/tensorboard; make room", refused.stderr)
    assert not Path("run").exists()


def test_the_bar_counts_whole_epochs_and_shows_accuracy_and_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat the stream as a terminal
    monkeypatch.setenv("COLUMNS", "80")
    result = call("train", "digits", "--batch-size", 48, "--epochs", 3, "--model", "follow_networks:quiet", "--json")
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr)
    last = json.loads(result.stdout.splitlines()[-1])
    assert "digits ━" in bar
    assert "3/3 epochs" in bar  # an epoch has 30 steps, and thirtieths do not add up to exactly 1
    assert f"accuracy {last['test_accuracy']:.2f}%, {last['sparsity']:.1%} zero" in bar
    assert re.search(r"\d:\d\d:\d\d left", bar)
    assert "…" not in bar


# Commands in processes of their own


@pytest.mark.parametrize(
    "asking",
    [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM],  # Ctrl-C, and a scheduler's warning
)
def test_a_real_signal_and_going_on_equal_an_uninterrupted_run(asking: signal.Signals) -> None:
    words = ["train", "digits", "--epochs", "6", "--seed", "5", "--json"]
    command = [sys.executable, "-m", "dirprune", *words, "--out", "stopped"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(asking)
        rest, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "    dirprune resume stopped" in messages.splitlines()
    printed = [json.loads(line)["epoch"] for line in [first, *rest.splitlines()]]
    assert printed[-1] < 6
    assert checkpoint.epochs(Path("stopped/checkpoints"))[-1] == printed[-1]

    resumed = call("resume", "stopped", "--json")
    assert [json.loads(line)["epoch"] for line in resumed.stdout.splitlines()] == list(range(printed[-1] + 1, 7))
    assert call(*words, "--out", "whole").exit_code == 0
    expected = state(Path("whole"), 6)
    assert all(torch.equal(value, expected[name]) for name, value in state(Path("stopped"), 6).items())
    numbers = [[(r.test_loss, r.sparsity) for r in runs.load(Path(name)).records()] for name in ("stopped", "whole")]
    assert numbers[0] == numbers[1]


@pytest.mark.soak
def test_sigterm_twice_to_a_whole_pipeline_still_saves_the_epoch() -> None:
    """Schedulers and `timeout` send it to every process of the group, and again to the one that they started."""
    command = f"exec {sys.executable} -m dirprune train digits --epochs 40 --json --out stopped 2> >(cat > /dev/null)"
    with subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert checkpoint.epochs(Path("stopped/checkpoints"))[-1] == 1 + len(rest.splitlines()) < 40


@pytest.mark.soak
def test_two_processes_equal_one_and_speak_with_one_voice() -> None:
    words = ["train", "digits-short", "--epochs", "2", "--model", "follow_networks:quiet", "--batch-size", "256"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    words += ["--minutes", "1e-9", "--lean"]
    pair = subprocess.run(
        [*torchrun, "dirprune", *words, "--out", "pair"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert pair.returncode == 0, pair.stderr
    assert call(*words, "--out", "alone").exit_code == 0
    assert pair.stderr.count("--lean has no effect") == 1
    assert "    torchrun --nproc-per-node 2 -m dirprune resume pair --trust" in pair.stderr.splitlines()
    assert call("resume", "alone").exit_code == 0
    pair = subprocess.run(
        [*torchrun, "dirprune", "resume", "pair", "--trust", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    records = [json.loads(line) for line in pair.stdout.splitlines()]
    assert [record["epoch"] for record in records] == [2]
    expected = state(Path("alone"), 2)
    for name, value in state(Path("pair"), 2).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    alone = runs.load(Path("alone")).records()[-1]
    assert records[-1]["test_accuracy"] == pytest.approx(alone.test_accuracy, abs=0.3)
    assert runs.load(Path("pair")).sessions()[0].processes == 2


def test_a_target_that_is_not_reached_yet_is_told_with_what_is(tmp_path: Path) -> None:
    words = "train digits-short --sparsity 0.8 --epochs 4 --batch-size 512 --device cpu --minutes 1e-9 --out"
    told = " ".join(call(*words.split(), tmp_path / "run").stderr.split())
    assert re.search(r"Stopped; saved up to epoch 1 of 4, \d+\.\d% of the weights zero so far \(target 80.0%\)\.", told)
