"""Runs on a cluster: what a worker does, what the driver makes of it, and (`make soak`) two real nodes of Ray."""

from __future__ import annotations

import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from test_cli import call
from test_train import numbers

from dirprune.lab.training import cluster, recipes, runs
from dirprune.lab.training.at_once import Failed, FailedSoFar, Lost, trained
from dirprune.lab.training.cluster import Files, Home, NotShared, connect
from dirprune.lab.training.series import Planned, RunStep
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
QUICK = recipes.get("digits").but(epochs=2, batch_size=700)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Put back what a job does to its process."""
    handler, argv = signal.getsignal(signal.SIGINT), sys.argv
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGINT, handler)
    sys.argv = argv


# The worker


def home(cwd: Path, **changes: Any) -> Home:
    return replace(Home(Surroundings(CPU), ("dirprune", "compare"), frozenset(), str(cwd)), **changes)


def test_a_worker_that_does_not_share_the_folder_sends_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Planned(Path("runs/run"), QUICK)
    said = list(cluster._in_task(plan, home(tmp_path / "there"), Path("marker"), False, False))
    assert isinstance(said[0], NotShared)
    (files,) = [each for each in said if isinstance(each, Files)]
    assert isinstance(said[-1], RunStep)
    assert said[-1].ended
    monkeypatch.chdir(tmp_path)
    cluster.receive(plan, Files({**files.texts, "../elsewhere": "x"}))
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run"]
    here, there = (runs.load(tmp_path / where / "runs" / "run").read() for where in (".", "there"))
    assert replace(here, folder=there.folder) == there
    assert there.outcome is not None
    assert there.sessions[0].command == "dirprune compare"
    assert plan.over


def test_a_worker_that_does_not_see_what_was_begun_or_will_be_read_refuses(tmp_path: Path) -> None:
    plan = Planned(tmp_path / "run", QUICK)
    read = replace(plan, weights=True)
    for job, begun, why in ((plan, True, "where this run was begun"), (read, False, "from where its network is read")):
        (failed,) = cluster._in_task(job, home(tmp_path), tmp_path / "marker", begun, False)
        assert isinstance(failed, Failed)
        assert f"does not share {tmp_path}, {why}" in str(failed)
        assert not plan.folder.exists()


def test_a_worker_with_another_version_refuses(tmp_path: Path) -> None:
    (failed,) = cluster._in_task(Planned(tmp_path, QUICK), home(tmp_path, version="0.0.1"), None, False, False)
    assert "not 0.0.1; install the same" in str(failed)


def test_a_worker_that_is_asked_to_stop_saves(tmp_path: Path) -> None:
    plan = Planned(tmp_path / "run", QUICK.but(epochs=50))
    steps = cluster._in_task(plan, home(Path.cwd()), None, False, False)
    for step in steps:
        if step.epoch == 2:
            signal.raise_signal(signal.SIGINT)
    assert 2 <= runs.load(plan.folder).saved <= 3


# The driver, with a stand-in for Ray


class RayError(Exception):
    pass


class WorkerCrashedError(RayError):
    pass


class TaskCancelledError(RayError):
    pass


class RayTaskError(RayError):
    cause: BaseException = ModuleNotFoundError("No module named 'dirprune'")


class Ray(types.ModuleType):
    """Does what the driver asks of Ray in this process, a step of every task at a time."""

    exceptions = types.SimpleNamespace(
        RayError=RayError,
        WorkerCrashedError=WorkerCrashedError,
        TaskCancelledError=TaskCancelledError,
        RayTaskError=RayTaskError,
    )

    def __init__(self) -> None:
        super().__init__("ray")
        self.tasks: list[Task] = []
        self.crash: Callable[[Any], BaseException | None] = lambda said: None
        self.needs: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": 1.0}

    def remote(self, **needs: Any) -> Callable[[Any], Any]:
        self.needs = needs
        return lambda function: types.SimpleNamespace(remote=lambda *args: Task(self, function(*args)))

    def wait(self, tasks: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, item: Any) -> Any:
        return item

    def cancel(self, task: Task, force: bool = False) -> None:
        task.cancelled = True


class Task:
    def __init__(self, ray: Ray, steps: Iterator[Any]) -> None:
        self.ray, self.steps, self.cancelled = ray, steps, False

    def __next__(self) -> Any:
        if self.cancelled:
            self.steps.close()  # type: ignore[attr-defined]
            raise TaskCancelledError
        said = next(self.steps)
        if error := self.ray.crash(said):
            self.steps.close()  # type: ignore[attr-defined]
            raise error
        return said


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


HERE = Surroundings(CPU, cluster="127.0.0.1:6379", save_every=1)


def plans(folder: Path, count: int = 2) -> list[Planned]:
    """Return runs of different lengths, the longest first."""
    return [Planned(folder / f"run{i}", QUICK.but(seed=i, epochs=count - i + 1)) for i in range(count)]


def test_a_lost_worker_is_told_in_a_sentence_and_its_run_continues(tmp_path: Path, ray: Ray) -> None:
    crashes = [WorkerCrashedError("The worker died unexpectedly. Check python-core-worker-*.log\nand more")]
    ray.crash = lambda said: crashes.pop() if crashes and said.epoch == 2 else None
    with pytest.warns(Lost, match=r"run0: WorkerCrashedError: The worker died unexpectedly; it is started again$"):
        steps = list(trained(plans(tmp_path), HERE))
    assert [step.number for step in steps if step.ended] == [1, 2]
    assert [step.epoch for step in steps if step.number == 1] == [0, 1, 2, 3, 3]
    assert ray.needs == {"max_retries": 0, "num_cpus": 1, "num_gpus": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run0", "run1"]  # no marker is left


def test_workers_without_dirprune_fail_in_one_line(tmp_path: Path, ray: Ray) -> None:
    ray.crash = lambda said: RayTaskError()
    with pytest.warns(FailedSoFar), pytest.raises(Failed, match=r"run0, .*run1: No module named 'dirprune'$"):
        list(trained(plans(tmp_path, 2), HERE))


def test_what_is_stopped_is_cancelled_and_continues_without_the_cluster(tmp_path: Path, ray: Ray) -> None:
    started: list[RunStep] = []
    started.extend(trained(plans(tmp_path), replace(HERE, stopping=lambda: len(started) > 2)))
    assert not any(step.ended for step in started)
    assert [step.ended for step in trained(plans(tmp_path), Surroundings(CPU))][-1]
    assert all(plan.over for plan in plans(tmp_path))


# Joining


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = call("compare", "digits-short", "--cluster", "127.0.0.1:1", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "--cluster needs Ray, which is not installed: pip install 'dirprune[cluster]'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_device_is_what_the_cluster_has(ray: Ray) -> None:
    assert [str(connect("127.0.0.1:6379", device)) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    ray.cluster_resources = lambda: {"CPU": 2.0}  # type: ignore[method-assign]
    assert connect("127.0.0.1:6379", "auto") == CPU
    with pytest.raises(ValueError, match=r"--device cuda: the cluster at .* has no GPU; give --device cpu"):
        connect("127.0.0.1:6379", "cuda")


def test_a_head_that_does_not_answer_is_named(ray: Ray) -> None:
    ray.is_initialized = lambda: False  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"--cluster 127\.0\.0\.1:1: no cluster answers there \(UNAVAILABLE\); start one with"
    ):
        connect("127.0.0.1:1")


class Unguarded(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every request, whoever asks."""

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


def test_a_cluster_that_asks_for_no_token_is_refused(ray: Ray) -> None:
    ray.is_initialized = lambda: False  # type: ignore[method-assign]
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Unguarded()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ValueError, match=r"asks for no token, so that .*ray get-auth-token --generate"):
            connect(f"127.0.0.1:{port}")
    finally:
        server.stop(None)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:six", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port or auto"):
        connect(address)


def test_auto_joins_only_what_this_user_has_started(tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"--cluster auto: no cluster was started here; start one with: ray get-auth"):
        connect("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379\n")
    assert cluster._resolve("auto") == "127.0.0.1:6379"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match=r"was written by another user; give the address of your own"):
        connect("auto")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert cluster._resolve("auto") == "head:6379"


# Two nodes of Ray

NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "include_log_monitor": False,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Start a cluster of two local processes on the loopback interface, with a token, and end it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # 127.0.0.1 means 127.0.0.1
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "100")
        patch.setenv("RAY_memory_usage_threshold", f"{_memory_in_use() + HEADROOM:.4f}")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'dirprune[cluster]'")
        from ray.cluster_utils import Cluster as Nodes

        found = Nodes(initialize_head=True, head_node_args=NODE)
        try:
            found.second = found.add_node(**NODE)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


HEADROOM = 0.2
"""The fraction of this machine's memory that a worker may take before Ray ends it."""


KILLED = "(OutOfMemory|WorkerCrashed)Error"
"""What Ray calls a worker that it ended, depending on which of its processes hears of it first."""


def _memory_in_use() -> float:
    """Return the fraction of the memory that is taken."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(told[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return 1 - free / total


def hungry(num_classes: int) -> torch.nn.Module:
    """Return a network that takes memory until Ray ends its process."""
    taken = []
    while True:
        taken.append(torch.ones(2**24))  # 64 MiB


pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_results_on_two_nodes_are_those_of_this_machine(nodes: Any, tmp_path: Path) -> None:
    here = Surroundings(CPU, cluster=nodes.address)
    steps = list(trained(plans(tmp_path / "cluster"), here))
    assert [step.number for step in steps if step.ended] == [1, 2]
    list(trained(plans(tmp_path / "alone"), Surroundings(CPU)))
    for plan in plans(tmp_path / "cluster"):
        there, alone = (runs.load(tmp_path / where / plan.folder.name) for where in ("cluster", "alone"))
        assert numbers(there.records()) == numbers(alone.records())
        torch.testing.assert_close(runs.weights_of(there), runs.weights_of(alone), rtol=0, atol=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_commands_write_the_same_tables(nodes: Any, tmp_path: Path) -> None:
    common = "--epochs 1 --device cpu --json --out"
    compare = f"compare digits-short --methods sgd,rigl --sparsity 0.5 {common}".split()
    search = f"tune digits-short --rule paper --mu 0.6 --tolerance 0 --batch-size 700 {common}".split()
    for words, table in ((compare, "layers.csv"), (search, "trials.csv")):
        there = call(*words, tmp_path / words[0] / "cluster", "--cluster", nodes.address)
        alone = call(*words, tmp_path / words[0] / "alone")
        assert there.exit_code == alone.exit_code, there.stderr
        ours, theirs = (tmp_path / words[0] / where / table for where in ("cluster", "alone"))
        assert ours.read_bytes() == theirs.read_bytes()
        assert len(there.stdout.splitlines()) == len(alone.stdout.splitlines())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_stop_saves_and_the_same_runs_continue_without_the_cluster(nodes: Any, tmp_path: Path) -> None:
    long = [Planned(tmp_path / f"run{i}", QUICK.but(seed=i, epochs=500)) for i in range(3)]
    started: list[RunStep] = []
    stopping = Surroundings(CPU, cluster=nodes.address, stopping=lambda: any(step.epoch > 2 for step in started))
    started.extend(trained(long, stopping))
    assert not any(step.ended for step in started)
    reached = max(runs.load(plan.folder).saved for plan in long if plan.folder.exists())
    assert 2 < reached < 500
    begun = next(plan for plan in long if plan.folder.exists() and runs.load(plan.folder).saved == reached)
    again = trained([begun], Surroundings(CPU))
    assert [next(again).epoch for _ in range(2)] == [reached, reached + 1]
    again.close()  # type: ignore[attr-defined]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_that_takes_all_memory_is_given_up_and_the_others_go_on(nodes: Any, tmp_path: Path) -> None:
    good, hog = plans(tmp_path, 2)
    hog = Planned(tmp_path / "hog", QUICK.but(model="test_cluster:hungry"))
    runs.create(hog.folder, hog.recipe)  # which trusts its network
    with (
        pytest.warns(Lost, match=KILLED) as told,
        pytest.raises(Failed, match=rf"hog: {KILLED}: .*, 3 times"),
    ):
        list(trained([hog, good], Surroundings(CPU, cluster=nodes.address)))
    assert len([each for each in told if "hog" in str(each.message) and each.category is Lost]) == 2
    assert good.over


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_on_a_node_that_is_killed_continues_on_the_other(nodes: Any, tmp_path: Path) -> None:
    both = [Planned(tmp_path / f"run{i}", QUICK.but(optimizer="sgd", seed=i, epochs=100)) for i in range(2)]
    epochs: dict[int, list[int]] = {1: [], 2: []}

    def killing(step: RunStep) -> int:
        epochs[step.number].append(step.epoch)
        if nodes.second and all(len(each) > 3 for each in epochs.values()):
            nodes.remove_node(nodes.second, allow_graceful=False)
            nodes.second = None
        return step.ended

    with pytest.warns(Lost, match=r"run[01]: NodeDiedError: Task failed because the node .*; it is started again"):
        assert sum(map(killing, trained(both, Surroundings(CPU, cluster=nodes.address, save_every=1)))) == 2
    assert [each.count(0) for each in epochs.values()] == [1, 1]  # none started again from the beginning
    for plan in both:
        assert [record.epoch for record in runs.load(plan.folder).records()] == list(range(1, 101))
