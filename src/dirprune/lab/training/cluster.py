"""Start jobs on a Ray cluster that the user has started: Ray chooses the machine, and says when it is lost."""

from __future__ import annotations

import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import dirprune
from dirprune.lab import trust
from dirprune.lab.records.files import write_text
from dirprune.lab.training.at_once import POLL, End, Failed, RemoteJob, elsewhere, work
from dirprune.lab.training.surroundings import Surroundings

START = "start one with: ray get-auth-token --generate; ray start --head"
ANSWER = 5.0
"""Seconds in which the head of a cluster has to accept a connection."""
COUNT_EVERY = 10.0
"""Seconds after which machines that have joined are noticed."""
RESULTS = ("config.json", "environment.json", "metrics.jsonl", "outcome.json")
"""The files of a run that all tables are made of; the rest are checkpoints, which are large."""


class NotShared(UserWarning):
    """A machine of the cluster does not see the folder of the runs."""


@dataclass(frozen=True)
class Files:
    """The results of a job on a machine that does not share its folder: texts by name."""

    texts: dict[str, str]


@dataclass(frozen=True)
class Home:
    """What a worker has to know of the process that the user sees."""

    here: Surroundings
    command: tuple[str, ...]
    trusted: frozenset[str]
    cwd: str = field(default_factory=os.getcwd)
    version: str = dirprune.__version__


def connect(address: str, device: str = "auto") -> torch.device:
    """Join the cluster at ``address``, and return what its runs train on.

    Args:
        address: host:port of its head, or "auto" for $RAY_ADDRESS or else the one that this user started here last.
        device: "cpu", "cuda", or "auto" for GPUs if it has any.

    Raises:
        ValueError: Ray is not installed, nothing answers, or the cluster has no such device.
    """
    where = _resolve(address)
    if where.rpartition(":")[0] in ("127.0.0.1", "localhost"):  # or Ray would look at another address of this machine
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ValueError("--cluster needs Ray, which is not installed: pip install 'dirprune[cluster]'") from None
    if not ray.is_initialized():
        _check_guarded(where)
        try:
            with elsewhere():
                ray.init(where, log_to_driver=False, logging_level="critical")
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise ValueError(f"--cluster {address}: {_sentence(error)}") from error
        # When a machine is lost, Ray prints the end of its log, among our results; the driver says it in a line.
        vars(ray._private.worker)["print_to_stdstream"] = lambda *_, **__: None
    there = ray.cluster_resources()
    gpus = there.get("GPU", 0) >= 1
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} cannot be asked of a cluster; give cpu, cuda or auto")
    if device == "cuda" and not gpus:
        raise ValueError(f"--device cuda: the cluster at {where} has no GPU; give --device cpu")
    return torch.device("cuda" if gpus and device != "cpu" else "cpu")


def _resolve(address: str) -> str:
    """Return host:port. What "auto" finds must be the user's own: whatever answers there can run code here."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        note = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
        if not address:
            if not note.exists():
                raise ValueError(f"--cluster auto: no cluster was started here; {START}")
            if note.stat().st_uid != os.getuid():
                raise ValueError(f"--cluster auto: {note} was written by another user; give the address of your own")
            address = note.read_text().strip()
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ValueError(
            f"--cluster {address!r} is not host:port or auto; on a machine of the cluster, give the address that "
            "`ray start --head` printed"
        )
    return address


def _check_guarded(where: str) -> None:
    """Raise unless the head of a cluster refuses a request without a token.

    Without one, whoever reaches its ports could join it, and send programs to its machines and to this one as pickles.
    """
    import grpc

    if os.environ.get("RAY_USE_TLS", "0") not in ("0", "", "false"):  # certificates guard it
        return
    try:
        with grpc.insecure_channel(where) as channel:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=ANSWER)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return
        raise ValueError(f"--cluster {where}: no cluster answers there ({error.code().name}); {START}") from None
    raise ValueError(
        f"--cluster {where} asks for no token, so that whoever reaches its ports can run programs as you, there and "
        "here; end it (ray stop), make a token (ray get-auth-token --generate), copy ~/.ray/auth_token to its "
        "machines, and start it again"
    )


def _sentence(error: BaseException) -> str:
    """Return the first sentence of one of Ray's messages, which may have fifty."""
    return str(error).strip().partition("\n")[0].partition(". ")[0]


class Cluster:
    """Starts every job as a task of a Ray cluster."""

    def __init__(self, here: Surroundings) -> None:
        connect(here.cluster, here.device.type)
        import ray

        self._ray, self._here = ray, here
        needs = {"num_cpus": 1, "num_gpus": 1 if here.device.type == "cuda" else 0}
        # A task that Ray repeats would have to yield the same again, and ours continues: the driver starts it anew.
        self._task = ray.remote(max_retries=0, **needs)(_in_task)
        self._working: dict[Any, tuple[int, RemoteJob]] = {}
        self._markers: dict[Path, Any] = {}
        self._room, self._counted = 1, -math.inf

    def room(self) -> int:
        """Return how many jobs to hand to Ray: those that can run, and as many that wait for a place."""
        if time.monotonic() > self._counted + COUNT_EVERY:
            place = "GPU" if self._here.device.type == "cuda" else "CPU"
            self._room = max(1, 2 * int(self._ray.cluster_resources().get(place, 0)))
            self._counted = time.monotonic()
        return self._room

    def start(self, number: int, job: RemoteJob, *, again: bool) -> None:
        begun = job.folder is not None and (job.folder / "config.json").exists()
        home = Home(self._here.of_worker(), tuple(sys.argv), frozenset(trust.allowed()))
        self._working[self._task.remote(job, home, self._marker(job), begun, again)] = number, job

    def _marker(self, job: RemoteJob) -> Path | None:
        """Return a file beside the folder of a job, which the machines that share the folder see."""
        if job.folder is None:
            return None
        beside = job.folder.parent
        if beside not in self._markers:
            beside.mkdir(parents=True, exist_ok=True)
            self._markers[beside] = tempfile.NamedTemporaryFile(dir=beside, prefix=".cluster-")  # noqa: SIM115
        return Path(self._markers[beside].name)

    def heard(self) -> Iterable[tuple[int, Any]]:
        self._ray.wait(list(self._working), num_returns=1, timeout=POLL)
        ready, _ = self._ray.wait(list(self._working), num_returns=len(self._working), timeout=0)
        said = []
        for task in ready:
            number, job = self._working[task]
            for each in self._next(task):
                if isinstance(each, Files):
                    receive(job, each)
                    continue
                if isinstance(each, End):
                    del self._working[task]
                said.append((number, each))
        return said

    def _next(self, task: Any) -> list[Any]:
        """Return the next that a task has yielded, or its end, as Ray reports it."""
        errors = self._ray.exceptions
        try:
            return [self._ray.get(next(task))]
        except (StopIteration, errors.TaskCancelledError):
            return [End()]
        except errors.RayTaskError as error:  # what a job raises is caught there: it could not be loaded
            return [Failed(_sentence(error.cause)), End()]
        except errors.RayError as error:  # the process, its machine or its memory
            return [End(f"{type(error).__name__}: {_sentence(error)}")]

    def stop(self) -> None:
        for task in self._working:
            self._ray.cancel(task)

    def close(self) -> None:
        for task in self._working:
            self._ray.cancel(task, force=True)
        for marker in self._markers.values():
            marker.close()


def receive(job: RemoteJob, files: Files) -> None:
    """Write the results of a job that has no folder here yet."""
    assert job.folder is not None
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:  # and nothing else, whatever the other machine sent
        if name in files.texts:
            write_text(job.folder / name, files.texts[name])


def _in_task(job: RemoteJob, home: Home, marker: Path | None, begun: bool, again: bool) -> Iterator[Any]:
    """Do a job in this process of the cluster. `ray.cancel` arrives as a Ctrl-C: the job saves and ends."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    if home.version != dirprune.__version__:
        yield Failed(f"{platform.node()} has dirprune {dirprune.__version__}, not {home.version}; install the same")
        return
    sys.argv = list(home.command)  # which is recorded with every run
    os.makedirs(home.cwd, exist_ok=True)
    os.chdir(home.cwd)
    here = replace(home.here, stopping=lambda: bool(asked))
    shared = marker is None or marker.exists()
    if not shared:
        what = f"{platform.node()} does not share {job.folder and job.folder.parent}"
        if begun or job.weights:
            why = "where this run was begun" if begun else "from where its network is read afterwards"
            yield Failed(f"{what}, {why}; put it where all machines see it, or omit --cluster")
            return
        yield NotShared(f"{what}: a run that is lost there starts again, and its checkpoints stay there")
    for said in work(job, here, set(home.trusted), again=again):
        if not shared and getattr(said, "ended", False):
            yield results(job)
        yield said


def results(job: RemoteJob) -> Files:
    """Return the results of a job that has ended here."""
    assert job.folder is not None
    paths = [job.folder / name for name in RESULTS]
    return Files({path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()})
