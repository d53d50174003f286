"""Do several jobs, one after the other or at once: the driver, and how it starts each in a process of its own here."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from dirprune.lab import trust
from dirprune.lab.records.files import InUse
from dirprune.lab.training.series import Planned, RunStep
from dirprune.lab.training.surroundings import Surroundings

PRELOAD = [__name__, "sklearn.datasets", "torch._dynamo"]
"""What every process needs and would take seconds to import by itself."""
POLL = 0.2
"""Seconds between two looks at whether to stop."""
STARTS = 3
"""How often a job is started whose worker is lost every time."""
PATIENCE = 120.0
"""Seconds to wait for the lock of a lost worker on its folder; NFS releases it after 90."""


class Failed(RuntimeError):
    """Jobs failed, and the others were done."""


class Lost(UserWarning):
    """A worker ended without a word; its job is started again."""


class FailedSoFar(UserWarning):
    """A job failed; the others go on."""


@dataclass(frozen=True)
class End:
    """The last that is heard of a worker; ``lost`` says what happened to one that ended before its job."""

    lost: str = ""


class RemoteJob(Protocol):
    """Work for one process on any machine. It can be pickled, and what it yields, too."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path | None:
        """Where it keeps its results and checkpoints."""

    @property
    def weights(self) -> bool:
        """Whether its network is read from that folder later."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do but to yield the result."""

    def steps(self, here: Surroundings) -> Iterator[Any]:
        """Do the job; the last step that is yielded has ``ended``, unless ``here`` asked to stop."""


class Workers(Protocol):
    """A way to start jobs."""

    def room(self) -> int:
        """Return how many jobs to start unless the user says it."""

    def start(self, number: int, job: RemoteJob, *, again: bool) -> None: ...
    def heard(self) -> Iterable[tuple[int, Any]]:
        """Return what jobs have yielded, with their numbers, their warnings and errors, and `End`."""

    def stop(self) -> None:
        """Ask all jobs to save and end."""

    def close(self) -> None:
        """End all jobs immediately."""


def trained(planned: Sequence[Planned], here: Surroundings) -> Iterator[RunStep]:
    """Train the runs one after the other, or several at once if ``here`` says so; the results are the same."""
    with closing(together(planned, here)) as steps:
        for number, step in steps:
            yield replace(step, number=number)


def together(jobs: Sequence[RemoteJob], here: Surroundings) -> Generator[tuple[int, Any]]:
    """Do jobs in this process one after the other, or several at once if ``here`` says so."""
    return at_once(jobs, here) if here.several else one_by_one(jobs, here)


def one_by_one(jobs: Sequence[RemoteJob], here: Surroundings) -> Generator[tuple[int, Any]]:
    """Do jobs in this process; yield their numbers and steps. One that fails does not stop the others.

    Raises:
        Failed: jobs failed; all others were done. The error of a job that is alone is raised as it is.
    """
    failed: dict[int, str] = {}
    for number, job in enumerate(jobs, start=1):
        ended = False
        try:
            for step in job.steps(here):
                ended = step.ended
                yield number, step
        except Exception as error:
            if len(jobs) == 1:
                raise
            failed[number] = _reason(error)
            warnings.warn(_others_go_on(job, failed[number]), FailedSoFar, stacklevel=2)
        else:
            if not ended:  # ``here`` asked to stop
                break
    if failed:
        raise Failed(_account(failed, jobs))


def at_once(jobs: Sequence[RemoteJob], here: Surroundings) -> Generator[tuple[int, Any]]:
    """Do several jobs at a time; yield their numbers and steps as they come, but ends in the order of the jobs.

    On a CPU every job has one thread; its results are those of the same job alone with one thread. A job whose worker
    is lost is started again, and continues from its checkpoint. One that fails does not stop the others.

    Raises:
        Failed: jobs failed, or lost their workers `STARTS` times; all others were done.
    """
    waiting, working = list(range(1, len(jobs) + 1)), set[int]()
    starts, ended, failed = Counter[int](), dict[int, Any](), dict[int, str]()
    following, stopped = 1, False
    workers = _workers(here)
    try:
        while waiting or working:
            if not stopped and here.stopping():
                stopped = True
                waiting.clear()
                workers.stop()
            while waiting and len(working) < (here.at_once or workers.room()):
                number = waiting.pop(0)
                if jobs[number - 1].over:
                    ended[number] = next(jobs[number - 1].steps(here))
                    continue
                workers.start(number, jobs[number - 1], again=starts[number] > 0)
                starts[number] += 1
                working.add(number)
            for number, said in workers.heard() if working else ():
                if isinstance(said, End):
                    working.discard(number)
                    if said.lost and not stopped:
                        if starts[number] < STARTS:
                            waiting.insert(0, number)
                            again = f"{jobs[number - 1].name}: {said.lost}; it is started again"
                            warnings.warn(again, Lost, stacklevel=2)
                        else:
                            failed[number] = f"{said.lost}, {STARTS} times; perhaps fewer at once leave it more memory"
                elif isinstance(said, Warning):
                    warnings.warn(said, stacklevel=2)
                elif isinstance(said, Failed):
                    failed[number] = str(said)
                    if len(jobs) > 1:
                        warnings.warn(_others_go_on(jobs[number - 1], str(said)), FailedSoFar, stacklevel=2)
                elif said.ended:
                    ended[number] = said
                else:
                    yield number, said
            while following in ended or following in failed:
                if following in ended:
                    yield following, ended.pop(following)
                following += 1
        yield from ((number, ended[number]) for number in sorted(ended))  # those after one that was stopped
    finally:
        workers.close()
    if failed:
        raise Failed(_account(failed, jobs))


def _reason(error: Exception) -> str:
    """Return why a job failed; the traceback of an error that no user can mend."""
    plain = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("dirprune.")
    return str(error) if plain else "".join(traceback.format_exception(error))


def _others_go_on(job: RemoteJob, reason: str) -> str:
    return f"{job.name}: {reason}. The others go on."


def _account(failed: dict[int, str], jobs: Sequence[RemoteJob]) -> str:
    """Return what failed and why; jobs that failed for the same reason share a line."""
    names: dict[str, list[str]] = {}
    for number, reason in sorted(failed.items()):
        names.setdefault(reason, []).append(jobs[number - 1].name)
    lines = [f"{', '.join(who)}: {reason}" for reason, who in names.items()]
    if len(jobs) == 1:
        return lines[0]
    return "\n".join([f"{len(failed)} of {len(jobs)} failed; the same command tries them again", *lines])


def _workers(here: Surroundings) -> Workers:
    if not here.cluster:
        return Processes(here)
    from dirprune.lab.training.cluster import Cluster

    return Cluster(here)


def work(job: RemoteJob, here: Surroundings, trusted: set[str], *, again: bool) -> Iterator[Any]:
    """Do a job in this process, and yield its steps, its warnings, and the error that ended it as `Failed`."""
    torch.set_num_threads(1)
    for spec in trusted:
        trust.allow(spec)
    told: list[Warning | str] = []
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            ours = category.__module__.startswith("dirprune.")
            told.append(message) if ours else usual(message, category, *where, **more)

        warnings.showwarning = tell
        try:
            for step in _once_free(job, here, PATIENCE if again else 0.0):
                yield from told
                told.clear()
                yield step
            yield from told
        except Exception as error:
            yield Failed(_reason(error))


def _once_free(job: RemoteJob, here: Surroundings, patience: float) -> Iterator[Any]:
    """Do a job. If a lost worker still holds the lock on its folder, wait for that."""
    until = time.monotonic() + patience
    while True:
        try:
            yield from job.steps(here)
            return
        except InUse:
            if here.stopping() or time.monotonic() > until:
                raise
        time.sleep(POLL)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Be in another folder while Python is started: it would take its modules first from the current one.

    There, among files of others, may be a signal.py. It finds its modules where this process does.
    """
    here, path = os.getcwd(), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(here)
        del os.environ["PYTHONPATH"]
        os.environ |= {} if path is None else {"PYTHONPATH": path}


class Processes:
    """Starts every job in a process of its own on this machine."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        with elsewhere():
            self._stop = self._context.Event()
        self._working: dict[Connection, tuple[int, Any]] = {}

    def room(self) -> int:
        return 1

    def start(self, number: int, job: RemoteJob, *, again: bool) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (theirs, self._stop, job, self._here.of_worker(), trust.allowed(), again)
        process = self._context.Process(target=_in_process, args=arguments, daemon=True)
        with elsewhere():
            process.start()
        theirs.close()
        self._working[ours] = number, process

    def heard(self) -> Iterable[tuple[int, Any]]:
        said: list[tuple[int, Any]] = []
        for pipe in wait(list(self._working), timeout=POLL):
            assert isinstance(pipe, Connection)
            number, process = self._working[pipe]
            try:
                said.append((number, pipe.recv()))
            except EOFError:
                del self._working[pipe]
                process.join()
                code = process.exitcode
                lost = f"its process ended with code {code}: it was killed, or memory ran out" if code else ""
                said.append((number, End(lost)))
        return said

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        for _, process in self._working.values():
            process.terminate()


def _in_process(
    pipe: Connection, stop: Any, job: RemoteJob, here: Surroundings, trusted: set[str], again: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that the user sees decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for said in work(job, replace(here, stopping=stop.is_set), trusted, again=again):
        pipe.send(said)
    pipe.close()
