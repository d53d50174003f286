"""`dirprune speed`: every runtime computes the same, and what is measured is written."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import call, objects
from test_runtime import Everything, thin

from dirprune import deploy
from dirprune.deploy import building, saving
from dirprune.lab.records import checkpoint, provenance
from dirprune.lab.studies.deployment import speed
from dirprune.lab.studies.deployment.peers import OURS, Peer, Twin
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.surroundings import Surroundings

pytestmark = pytest.mark.skipif(not building.compilers(), reason="no C compiler")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    deploy.compile(thin(Everything(), 0.3), torch.zeros(1, 3, 40, 44)).save(path)
    return path


def test_the_twin_computes_what_the_runtime_does(file: Path) -> None:
    x = torch.randn(2, 3, 40, 44)
    with torch.no_grad():
        for wanted, found in zip(Twin(saving.read(file))(x), deploy.load(file)(x), strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)


def test_a_run_is_measured_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.create(tmp_path / "run", recipes.get("digits-short").but(epochs=1, batch_size=512))
    list(conduct(run, Surroundings(torch.device("cpu"))))
    monkeypatch.setattr(speed, "others", lambda told: ["torch"])
    told = objects(call("speed", run.folder, "--seconds", 0.1, "--json"))
    assert [row["runtime"] for row in told] == [OURS, "torch"]
    assert told[0]["ratio"] == 1
    assert all(0 < row["fastest"] <= row["milliseconds"] <= row["p95"] for row in told)
    with (run.folder / "speed" / "layers.csv").open() as lines:
        layers = {row["layer"] for row in csv.DictReader(lines)}
    assert {"conv1", "conv2", "conv3", "fc1", "fc2"} <= layers
    assert (run.folder / "speed" / "speed.png").stat().st_size > 1000
    assert provenance.sessions(run.folder / "speed")[0].device


def test_a_run_whose_network_is_not_the_one_of_its_configuration_is_refused(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run", recipes.get("digits-short"))
    for weights, said in (
        ({"fc.weight": torch.ones(10, 4)}, "has no convolutional network"),
        ({"conv1.weight": torch.ones(16, 1, 3, 3)}, "is in the network of config.json but not in .*run: these are"),
    ):
        checkpoint.save(run.checkpoints, 1, {"model": weights})
        with pytest.raises(ValueError, match=said):
            speed.saved(run.folder, tmp_path / "net.safetensors", trusted=False)


def test_a_runtime_that_fails_is_left_out_and_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(peer: Peer, inputs: object) -> list[np.ndarray]:
        if peer.name == OURS:
            return [np.zeros(1)]
        raise RuntimeError("has no such operation")

    monkeypatch.setattr(Peer, "__init__", lambda peer, name, file, threads: setattr(peer, "name", name))
    monkeypatch.setattr(Peer, "__exit__", lambda *_: None)
    monkeypatch.setattr(Peer, "ready", refuse)
    monkeypatch.setattr(Peer, "time", lambda peer, repeats: [0.1] * repeats)
    said: list[str] = []
    rows = list(speed.speed(file, 1, 1, runtimes=["torch"], seconds=0.1, failed=said.append))
    assert [row.runtime for row in rows] == [OURS]
    assert said == ["torch is left out: has no such operation"]
