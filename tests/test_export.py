"""`dirprune export`: the file holds the network of the run, and the numbers beside it are true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import call, objects

from dirprune import sparsity
from dirprune.deploy import load_sparse
from dirprune.lab import models
from dirprune.lab.methods import MethodSpec
from dirprune.lab.records import checkpoint
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.surroundings import Surroundings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of a method whose masks leave −0.0, with all checkpoints."""
    digits = recipes.get("digits-short").but(optimizer="sgd", epochs=2, batch_size=512, keep=(0, 1, 2))
    recipe = replace(digits, method=MethodSpec("magnitude", (("sparsity", 0.9), ("end", 0.5))))
    run = runs.create(tmp_path_factory.mktemp("runs") / "run", recipe)
    list(conduct(run, Surroundings(torch.device("cpu"))))
    return run.folder


def saved(run: Path, epoch: int) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint.load(checkpoint.path_of(run / "checkpoints", epoch))["model"]
    return model


@pytest.mark.parametrize("epoch", [None, 1])
def test_the_file_holds_the_network_and_the_numbers_are_those_of_the_run(
    trained: Path, tmp_path: Path, epoch: int | None
) -> None:
    file = tmp_path / "new" / "net.safetensors"
    (told,) = objects(call("export", trained, "--to", file, *(() if epoch is None else ("--epoch", epoch)), "--json"))
    expected, loaded = saved(trained, epoch or 2), load_sparse(file)
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    model = models.build("small", classes=10)
    model.load_state_dict(loaded)
    record = runs.load(trained).records()[(epoch or 2) - 1]
    assert told == {
        "file": str(file),
        "recipe": "digits-short",
        "network": "small",
        "epoch": epoch or 2,
        "dtype": "float32",
        "sparsity": sparsity(model).fraction,
        "weight_sparsity": sparsity(model).weight_fraction,
        "accuracy": record.test_accuracy,
        "tested_on": "test",
        "dense_bytes": sum(tensor.nbytes for tensor in expected.values()),
        "file_bytes": file.stat().st_size,
    }


def test_negative_zeros_of_masked_methods_take_no_space(trained: Path, tmp_path: Path) -> None:
    weights = [tensor for tensor in saved(trained, 2).values() if tensor.dim() > 1]
    assert any(torch.signbit(w[w == 0]).any() for w in weights)
    (told,) = objects(call("export", trained, "--to", tmp_path / "net", "--json"))
    kept = sum(int((w != 0).sum()) for w in weights)
    vectors = told["dense_bytes"] - sum(w.nbytes for w in weights)
    assert told["file_bytes"] < 5.5 * kept + vectors + 4096  # four bytes a value and one for its place, and the header


def test_rounding_is_offered_and_told(trained: Path, tmp_path: Path) -> None:
    (exact,) = objects(call("export", trained, "--to", tmp_path / "exact", "--json"))
    (half,) = objects(call("export", trained, "--to", tmp_path / "half", "--dtype", "float16", "--json"))
    assert half["dtype"] == "float16"
    assert half["file_bytes"] < exact["file_bytes"]
    for name, tensor in saved(trained, 2).items():
        rounded = tensor.half().float() if tensor.dim() > 1 else tensor
        assert torch.equal(load_sparse(tmp_path / "half")[name], rounded)


def test_a_file_that_exists_is_replaced_only_by_force(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "net"
    file.write_text("precious")
    refused = call("export", trained, "--to", file)
    assert refused.exit_code == 1
    assert f"{file} exists; give --force to replace it, or another --to" in refused.stderr
    assert file.read_text() == "precious"
    assert "is a folder; name a file in it" in call("export", trained, "--to", tmp_path, "--force").stderr
    assert call("export", trained, "--to", file, "--force").exit_code == 0
    assert load_sparse(file)


def test_at_a_terminal_it_shows_a_table(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = call("export", trained, "--to", tmp_path / "net", "--dtype", "bfloat16").stdout
    accuracy = runs.load(trained).records()[-1].test_accuracy
    assert "test accuracy (%) before rounding to bfloat16" in shown
    assert f"{accuracy:.2f}" in shown
    assert "times smaller" in shown
