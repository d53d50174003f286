"""Train several runs at once on one machine, each in a process of its own."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dirprune.lab import trust
from dirprune.lab.training.series import Planned, Step, series
from dirprune.lab.training.surroundings import Surroundings

PRELOAD = [__name__, "sklearn.datasets", "torch._dynamo"]
"""What every process needs and would take seconds to import by itself."""
POLL = 0.2
"""Seconds between two looks at whether to stop."""


class Died(RuntimeError):
    """The process of a run ended without a word: it was killed, or ran out of memory."""


@dataclass(frozen=True)
class _Worker:
    """The process that trains run ``number``."""

    number: int
    plan: Planned
    process: Any


def trained(planned: Sequence[Planned], here: Surroundings) -> Iterator[Step]:
    """Train the runs one after the other, or as many at once as ``here`` says; the results are the same."""
    return at_once(planned, here, here.at_once) if here.at_once > 1 else series(planned, here)


def at_once(planned: Sequence[Planned], here: Surroundings, count: int) -> Iterator[Step]:
    """Train the runs, ``count`` at a time, and yield their steps as they come, but their ends in the order of the plan.

    On a CPU every run has one thread; its results are those of the same run alone with one thread. If one fails, the
    others are saved and stopped.

    Raises:
        ValueError: a folder holds another run, or a run cannot be trained.
        Died: a process ended without a word.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    stop = context.Event()
    waiting, working = list(enumerate(planned, start=1)), dict[Connection, _Worker]()
    ended, following, failure = dict[int, Step](), 1, None
    try:
        while waiting or working:
            if failure or here.stopping():
                stop.set()
                waiting.clear()
            while waiting and len(working) < count:
                number, plan = waiting.pop(0)
                if (plan.folder / "outcome.json").exists():  # nothing to train
                    ended[number] = replace(next(series([plan], here)), number=number)
                    continue
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, stop, plan, here.device, here.root, here.save_every, trust.allowed())
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                working[ours] = _Worker(number, plan, process)
            for step in _heard(working):
                if isinstance(step, Exception):
                    failure = failure or step
                elif not step.ended:
                    yield step
                else:
                    ended[step.number] = step
            while following in ended:
                yield ended.pop(following)
                following += 1
        yield from (ended[number] for number in sorted(ended))  # those after a run that was stopped or failed
        if failure:
            raise failure
    finally:
        for worker in working.values():
            worker.process.terminate()


def _heard(working: dict[Connection, _Worker]) -> Iterable[Step | Exception]:
    """Return what the workers have said; one that is done leaves ``working``."""
    said: list[Step | Exception] = []
    for pipe in wait(list(working), timeout=POLL):
        assert isinstance(pipe, Connection)
        try:
            message = pipe.recv()
            said.append(replace(message, number=working[pipe].number) if isinstance(message, Step) else message)
        except EOFError:
            worker = working.pop(pipe)
            worker.process.join()
            if code := worker.process.exitcode:
                said.append(
                    Died(
                        f"the process of {worker.plan.folder} ended with code {code}: it was killed, or memory ran "
                        "out; the same command continues, perhaps with fewer at once"
                    )
                )
    return said


def _work(
    pipe: Connection, stop: Any, plan: Planned, device: torch.device, root: Any, save_every: int | None, code: set[str]
) -> None:
    """Train a run in this process, and send its steps, or the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that the user sees decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for spec in code:
        trust.allow(spec)
    try:
        for step in series([plan], Surroundings(device, root, save_every=save_every, stopping=stop.is_set)):
            pipe.send(step)
    except (ValueError, OSError) as error:
        pipe.send(ValueError(f"{plan.folder}: {error}"))
    except Exception:
        pipe.send(RuntimeError(f"{plan.folder} failed:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
