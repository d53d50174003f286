"""benchmarks/speed.py: its networks have the densities that it claims, and the one that ships is small and runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import speed as benchmark
import torch

from dirprune import deploy
from dirprune.deploy import building
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.deployment import speed as study
from dirprune.lab.studies.deployment.peers import OURS

pytestmark = pytest.mark.skipif(not building.compilers(), reason="no C compiler")


def test_the_trained_network_ships_small_and_runs() -> None:
    file = benchmark.TRAINED / "resnet18-cifar10.safetensors"
    share, multiplications, kept = benchmark.left(file)
    assert file.stat().st_size < 5e6
    assert multiplications == 555_422_720
    assert share < kept < 0.157
    runtime = deploy.load(file)
    assert runtime.nbytes < 1.5 * file.stat().st_size
    made = runtime(np.zeros((2, 3, 32, 32), np.float32))
    assert made.shape == (2, 10)
    assert np.isfinite(made).all()


def test_masks_have_the_recorded_densities() -> None:
    densities = benchmark.recorded("compare-resnet18-cifar10", "grda-c0.00016-s0")
    model, _ = benchmark.NETWORKS["resnet18"]()
    left = {name: float((m.weight != 0).float().mean()) for name, m in model.named_modules() if name in densities}
    assert left.keys() == densities.keys()
    for name, density in densities.items():
        assert left[name] == pytest.approx(density, abs=4 / model.get_submodule(name).weight.numel() ** 0.5)


def test_a_row_tells_network_machine_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(file: Path, batch: int, threads: int, **_: object) -> Iterator[study.Latency]:
        for name, factor in ((OURS, 1.0), ("torch", 3.0)):
            yield study.Latency(name, batch, threads, 2 * factor, 4 * factor, factor, 500 / factor, factor, 10)

    out = tmp_path / "speed.csv"
    monkeypatch.setattr(study, "speed", turns)
    monkeypatch.setattr(benchmark, "loading", lambda file: 40.0)
    monkeypatch.setattr(
        "sys.argv", ["speed.py", "resnet18-cifar10", "--batch", "1,16", "--runtimes", "torch", "--out", str(out)]
    )
    benchmark.main()
    benchmark.main()  # replaces the rows of the same machine
    rows = read_rows(out, benchmark.Row)
    assert [(row.runtime, row.batch, row.times_ours) for row in rows] == [
        (OURS, 1, 1), ("torch", 1, 3), (OURS, 16, 1), ("torch", 16, 3)
    ]  # fmt: skip
    assert rows[0].weights_left == benchmark.left(benchmark.TRAINED / "resnet18-cifar10.safetensors")[0]
    assert rows[0].command == f"python speed.py resnet18-cifar10 --batch 1,16 --runtimes torch --out {out}"
    assert f"torch {torch.__version__}" in rows[0].versions


def test_a_network_that_is_unknown_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["speed.py", "resnet19"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "no network 'resnet19'" in capsys.readouterr().err
