"""Compare two gloo processes, started as torchrun starts them, with one."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_train import Breaking
from torch import nn
from torch.multiprocessing.spawn import start_processes

from dirprune.__main__ import main
from dirprune.lab.records import checkpoint
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import Diverged, conduct
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.processes import Process, joined
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
WORLD = 2
# 1438 examples in batches of 479: the processes get 240 and 239, and of the last batch, 1 and 0.
RECIPE = recipes.get("digits").but(epochs=4, batch_size=479, c=0.03)

# Import these once: otherwise, every training process would spend seconds on them.
multiprocessing.set_forkserver_preload(
    ["dirprune.lab.training.experiment", "sklearn.datasets", "torch._dynamo", "pytest"]
)


def breaking() -> nn.Module:
    """Return a model that diverges in the second process only, in the second of four steps of epoch 2."""
    return Breaking(step=6 if dist.get_rank() == 1 else -1, value=math.nan)


def forbid_writing(folder: Path) -> None:
    """Make this process fail if it opens a file in ``folder`` for writing, or renames, removes or makes one there."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir") or (event == "open" and arguments[2] & os.O_ACCMODE)
        if changes and str(arguments[0]).startswith(str(folder)):
            raise PermissionError(f"{event}{arguments} in a process that is not the first")

    sys.addaudithook(refuse)


def write_slowly(epoch: int) -> None:
    """Slow down the saving of an epoch's checkpoint in this process, so that the others are ahead of it."""
    usual = checkpoint.save

    def save(folder: Path, number: int, state: checkpoint.State) -> Any:
        time.sleep(2.0 if number == epoch else 0.0)
        return usual(folder, number, state)

    checkpoint.save = save  # type: ignore[assignment]


def train_together(rank: int, port: int, folder: Path) -> None:
    """Run in each process: two epochs, the other two, then a run that diverges in one of the processes."""
    torch.set_num_threads(1)
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": WORLD,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({key: str(value) for key, value in rendezvous.items()})
    outcome: dict[str, Any] = {}
    if rank:
        forbid_writing(folder / "runs")
    else:
        write_slowly(epoch=2)
    with joined(CPU) as (process, device):
        outcome["process"] = [process.rank, process.world_size, process.is_first, str(device)]
        outcome["sum"] = process.sum(torch.tensor([1.0, rank])).tolist()
        outcome["told"] = process.tell(f"said by {rank}")
        outcome["agree"] = [process.agree(False), process.agree(rank == 1)]
        run = runs.load(folder / "runs" / "good")
        asked = itertools.count(1)
        stopping: Callable[[], bool] = lambda: rank == 1 and next(asked) == 2  # noqa: E731 - one process stops all
        outcome["first"] = [r.to_dict() for r in conduct(run, Surroundings(device, process=process, stopping=stopping))]
        outcome["second"] = [r.to_dict() for r in conduct(run, Surroundings(device, process=process))]
        try:
            list(
                conduct(
                    runs.load(folder / "runs" / "bad", trusted=True),
                    Surroundings(device, process=process, save_every=1),
                )
            )
        except Diverged as error:
            outcome["diverged"] = str(error)
    outcome["left"] = not dist.is_initialized()
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two processes, with the outcome of each."""
    folder = tmp_path_factory.mktemp("together")
    runs.create(folder / "runs" / "good", RECIPE)
    runs.create(folder / "runs" / "bad", replace(RECIPE, model="test_processes:breaking"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(train_together, (port, folder), nprocs=WORLD, start_method="forkserver")
    return folder


def outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(WORLD)]


def test_processes_know_their_place_and_each_other(together: Path) -> None:
    first, second = outcomes(together)
    assert first["process"] == [0, 2, True, "cpu"]
    assert second["process"] == [1, 2, False, "cpu"]
    for outcome in (first, second):
        assert outcome["sum"] == [2.0, 1.0]
        assert outcome["told"] == "said by 0"
        assert outcome["agree"] == [False, True]
        assert outcome["left"]


def test_two_processes_train_as_one(together: Path, tmp_path: Path) -> None:
    alone = runs.create(tmp_path / "alone", RECIPE)
    records = list(conduct(alone, Surroundings(CPU)))
    run = runs.load(together / "runs" / "good")
    for record, expected in zip(run.records(), records, strict=True):
        assert record.epoch == expected.epoch
        assert record.lr == expected.lr
        for name in ("train_loss", "test_loss", "norm_ratio"):
            assert getattr(record, name) == pytest.approx(getattr(expected, name), rel=1e-4)
        # A weight at the threshold, or an example between two classes, may fall to the other side.
        for name in ("sparsity", "weight_sparsity"):
            assert getattr(record, name) == pytest.approx(getattr(expected, name), abs=1e-4)
        for name in ("train_accuracy", "test_accuracy"):
            assert getattr(record, name) == pytest.approx(getattr(expected, name), abs=0.3)
    assert records[-1].sparsity > 0.05  # the thresholds are large enough to matter
    states = [checkpoint.load(each.checkpoints / "epoch-0004.pt") for each in (run, alone)]
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=1e-3, atol=1e-4)
    state, expected_state = (each["optimizer"]["state"] for each in states)
    torch.testing.assert_close(state, expected_state, rtol=1e-3, atol=1e-4)


def test_a_run_of_two_processes_stops_and_goes_on_together(together: Path) -> None:
    """The second process writes nothing: `forbid_writing` would have made it fail."""
    written = [record.to_dict() for record in runs.load(together / "runs" / "good").records()]
    assert len(written) == 4
    seconds = [name for name in EpochRecord.__dataclass_fields__ if name.endswith("_seconds")]
    first, second = outcomes(together)
    assert first["first"] + first["second"] == written
    for outcome in (first, second):
        assert len(outcome["first"]) == len(outcome["second"]) == 2
    seen = second["first"] + second["second"]
    assert [r | dict.fromkeys(seconds) for r in seen] == [r | dict.fromkeys(seconds) for r in written]
    sessions = json.loads((together / "runs" / "good" / "environment.json").read_text())
    assert [session["processes"] for session in sessions] == [2, 2]
    assert checkpoint.epochs(together / "runs" / "good" / "checkpoints") == [2, 4]


def test_divergence_in_one_process_stops_all_at_the_same_step(together: Path) -> None:
    messages = [outcome["diverged"] for outcome in outcomes(together)]
    assert messages[0] == messages[1]
    assert "became nan in step 2 of epoch 2" in messages[0]
    assert f"{together / 'runs' / 'bad' / 'checkpoints' / 'epoch-0001.pt'}." in messages[0]


def test_a_process_alone_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(CPU) as (process, device):
        assert (process, device) == (Process(rank=0, world_size=1), CPU)
        assert not dist.is_initialized()
    model = nn.Linear(1, 1)
    assert process.parallel(model, CPU) is model
    process.wait()
    assert process.tell("a word") == "a word"
    assert process.agree(True)
    assert not process.agree(False)
    tensor = torch.ones(2)
    assert process.sum(tensor) is tensor


@pytest.mark.parametrize(("words", "code"), [(["recipes"], 0), (["train", "no-such-recipe"], 1)])
@pytest.mark.parametrize("world_size", ["1", "2"])
def test_one_of_several_processes_ends_without_waiting_for_threads_of_torch(
    words: list[str], code: int, world_size: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(sys, "argv", ["dirprune", *words])
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert ended == ([code] if world_size == "2" else [])
    assert any(capfd.readouterr())
