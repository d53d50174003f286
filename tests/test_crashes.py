"""Runs that are killed, stopped or damaged at any point end bit for bit as if nothing had happened, or say why."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_cli import call
from test_experiment import CPU, NOISY, assert_equal, finish, uninterrupted
from test_train import numbers

from dirprune.lab.records import checkpoint
from dirprune.lab.training import runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the children use one thread
soak = [pytest.mark.soak, pytest.mark.timeout(3600)]
RECIPE = replace(NOISY, epochs=3)
CHANGING = ("replace", "rename", "unlink", "mkdir", "rmdir")  # functions of os that change folders
TORN = 200  # bytes of an unfinished write that may be lost


def amount(short: int, long: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [short, pytest.param(long, marks=soak)], ids=["short", "long"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing disturbed; beside it stands how many points there are to be killed at."""
    folder = tmp_path_factory.mktemp("runs")
    whole = uninterrupted(folder / "whole", RECIPE)  # in this process, so that the children need not import so much
    assert child(partial(train_to, folder / "counted", 0)) == 0
    return whole


def child(work: Callable[[], Any], *, kill_after: tuple[float, signal.Signals] | None = None) -> int:
    """Return how a child process ends that does the work: 0, 1 if it fails, or minus the signal that killed it."""
    started = os.fork()
    if started == 0:
        code = 1
        with suppress(BaseException):
            warnings.simplefilter("ignore")
            code = int(work() or 0)
        os._exit(code)
    if kill_after:
        time.sleep(kill_after[0])
        with suppress(ProcessLookupError):
            os.kill(started, kill_after[1])
    return os.waitstatus_to_exitcode(os.waitpid(started, 0)[1])


def train(folder: Path) -> None:
    """Begin the run, or go on with it, to its end."""
    made = (folder / "config.json").exists()
    run = runs.load(folder, trusted=True) if made else runs.create(folder, RECIPE)
    list(conduct(run, Surroundings(CPU, save_every=1)))


def train_to(folder: Path, point: int, seed: int = 0) -> None:
    """Train, and be killed before the system's call number ``point`` that changes a folder or writes a file.

    A file that was about to be written to the disk loses some of its end.
    """
    calls, chance = itertools.count(1), random.Random(seed)

    def dying(usual: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
        def do(*given: Any, **options: Any) -> Any:
            if next(calls) == point:
                if writes and not os.path.isdir(f"/proc/self/fd/{given[0]}"):
                    os.truncate(given[0], max(0, os.fstat(given[0]).st_size - chance.randrange(TORN)))
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*given, **options)

        return do

    for name in CHANGING:
        setattr(os, name, dying(getattr(os, name), writes=False))
    os.fsync = dying(os.fsync, writes=True)
    train(folder)
    (folder.parent / "points").write_text(str(next(calls) - 1))


@amount(short=2, long=1000)
def test_a_run_that_is_killed_at_any_write_ends_as_if_nothing_had_happened(
    count: int, whole: Run, tmp_path: Path
) -> None:
    """Killed at two points each: one of the whole run, and one of what is left of it."""
    last = int((whole.folder.parent / "points").read_text())
    chance, folder, kills = random.Random(0), tmp_path / "run", 0
    chosen = list(range(1, last + 1)) if count >= last else chance.sample(range(1, last + 1), count)
    for point in chosen:
        for place in (point, chance.randrange(1, last)):
            kills += child(partial(train_to, folder, place, point)) == -signal.SIGKILL
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        assert child(partial(train, folder)) == 0, point
        assert_equal(runs.load(folder), whole)
        shutil.rmtree(folder)
    print(f"{kills} kills at {len(chosen)} of {last} points, every run as if nothing had happened")
    assert kills >= len(chosen)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_that_gets_signals_at_random_ends_as_if_nothing_had_happened(whole: Run, tmp_path: Path) -> None:
    """300 signals: Ctrl-C, a scheduler's warning, and kills that nothing can be done about."""
    chance, seen = random.Random(0), dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), 0)
    began = time.monotonic()
    assert child(partial(train, tmp_path / "timed")) == 0
    lasts = time.monotonic() - began
    while sum(seen.values()) < 300:
        folder, codes = tmp_path / f"run-{sum(seen.values())}", []
        runs.create(folder, RECIPE)
        while not codes or codes[-1] != 0:
            number = chance.choice(list(seen))
            delay = chance.uniform(0, 1.2 * lasts)
            words = ("resume", folder, "--trust", "--save-every", 1)
            codes.append(child(partial(exit_code, words), kill_after=(delay, number)))
            seen[number] += 1
            assert codes[-1] in (0, 1, 130, -number), codes  # 1: a signal between the imports and its handler
        assert_equal(runs.load(folder), whole)
        shutil.rmtree(folder)
    print(f"{sum(seen.values())} signals: {', '.join(f'{each.name} {times}' for each, times in seen.items())}")


def exit_code(words: tuple[object, ...]) -> int:
    return call(*words).exit_code


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def turned(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def zeroed(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :]


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, turned, zeroed, lambda data, chance: b"")


def damaged(folder: Path, chance: random.Random) -> Iterator[Path]:
    """Yield the files of a run, each after it was damaged in one way, removed, or made a copy of another."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    for path, damage in itertools.product(files, (*DAMAGE, None, "other")):
        kept = path.read_bytes()
        if damage == "other":
            path.write_bytes(chance.choice(files).read_bytes())
        elif damage is None:
            path.unlink()
        elif callable(damage):
            path.write_bytes(damage(kept, chance))
        yield path
        path.write_bytes(kept)


@amount(short=4, long=420)
def test_a_damaged_run_goes_on_as_if_nothing_had_happened_or_names_the_file(
    count: int, whole: Run, tmp_path: Path
) -> None:
    stopped = runs.create(tmp_path / "stopped", RECIPE)
    asked = itertools.count(1)
    finish(stopped, save_every=1, stopping=lambda: next(asked) >= 2)
    chance, went_on, refused = random.Random(0), 0, 0
    every = itertools.chain.from_iterable(damaged(stopped.folder, chance) for _ in itertools.count())
    for path in itertools.islice(every, 0, None if count > 100 else 9 * count, 1 if count > 100 else 9):
        folder = tmp_path / "run"
        shutil.copytree(stopped.folder, folder)
        result = call("resume", folder, "--trust", "--save-every", 1)
        if result.exit_code == 0:
            went_on += 1
            run = runs.load(folder)
            (_, ours), (_, theirs) = (checkpoint.latest(each.checkpoints) or (0, {}) for each in (run, whole))
            assert all((ours["model"][name] == tensor).all() for name, tensor in theirs["model"].items())
            assert numbers(run.records()[-1:]) == numbers(whole.records()[-1:])
        else:
            refused += 1
            assert result.exit_code == 1
            assert str(folder) in result.stderr, (path, result.stderr)
        shutil.rmtree(folder)
        if went_on + refused == count:
            break
    print(f"{count} damaged files: {went_on} runs went on bit for bit, {refused} named the file")
    assert went_on > count / 4
