"""Training that starts from trained weights, and on data of a user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from test_cli import call
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dirprune.deploy import save_sparse
from dirprune.lab import data, models, trust
from dirprune.lab.records import checkpoint
from dirprune.lab.tasks import Images
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import assemble, conduct
from dirprune.lab.training.optimizers import Sgd
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.start import NotThere, start_from
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
HERE = Surroundings(CPU)
SHORT = recipes.get("digits").but(epochs=1, batch_size=500)


def trained(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of a run, and its weights."""
    run = runs.create(folder, SHORT)
    list(conduct(run, HERE))
    return folder, runs.weights_of(run)[1]


def begun(folder: Path, source: Path) -> dict[str, Tensor]:
    """Return the initial weights of a run that starts from ``source``."""
    run = runs.create(folder, SHORT.but(seed=5, keep=(0,), start=str(source)))
    list(conduct(run, HERE))
    return runs.weights_of(run, 0)[1]


@pytest.mark.parametrize("kind", ["run", "packed", "safetensors", "torch", "nested", "wrapped"])
def test_a_run_starts_from_trained_weights(kind: str, tmp_path: Path) -> None:
    source, weights = trained(tmp_path / "run")
    if kind == "packed":
        save_sparse(weights, source := tmp_path / "net.safetensors")
    elif kind == "safetensors":
        save_file(weights, source := tmp_path / "net.safetensors")
    elif kind != "run":
        prefix = "module._orig_mod." if kind == "wrapped" else ""
        state: Any = {prefix + name: tensor for name, tensor in weights.items()}
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested" else state, source := tmp_path / "net.pt")
    torch.testing.assert_close(begun(tmp_path / "next", source), weights, rtol=0, atol=0)


def test_grda_continues_from_trained_weights_and_not_from_its_own(tmp_path: Path) -> None:
    source, weights = trained(tmp_path / "run")
    run = runs.create(tmp_path / "still", SHORT.but(lr=1e-30, c=0.0, start=str(source)))
    list(conduct(run, HERE))
    torch.testing.assert_close(runs.weights_of(run)[1], weights, rtol=0, atol=1e-12)


def test_a_run_that_goes_on_needs_its_source_no_more(tmp_path: Path) -> None:
    _, weights = trained(tmp_path / "run")
    torch.save(weights, tmp_path / "net.pt")
    run = runs.create(tmp_path / "next", SHORT.but(epochs=2, start=str(tmp_path / "net.pt")))
    next(conduct(run, replace(HERE, save_every=1)))
    (tmp_path / "net.pt").unlink()
    assert [record.epoch for record in conduct(run, HERE)] == [2]


def test_a_head_of_another_size_starts_anew_and_is_told() -> None:
    torch.manual_seed(0)
    model, other = models.build("small", 10), models.build("small", 7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = Path("other.pt")
    torch.save(other.state_dict(), path)
    with pytest.warns(NotThere, match=r"2 of 10 tensors start as without other.pt.*: fc2.weight, fc2.bias$"):
        start_from(model, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("fc2") else other.state_dict()[name])


class Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "does not exist; name a run"),
        (lambda path: path.write_bytes(b"abc"), "is no file of torch.save"),
        (lambda path: torch.save([1], path), "it holds a list"),
        (
            lambda path: torch.save({"weights": Hostile()}, path),
            "more than tensors and plain values, none of which was",
        ),
        (lambda path: torch.save({7: torch.zeros(3)}, path), "no weight that fits this network"),
        (
            lambda path: torch.save({"conv1.weight": torch.zeros(16, 1, 3, 3, device="meta")}, path),
            "no weight that fits this network",
        ),
        (
            lambda path: torch.save({"other.weight": torch.zeros(3)}, path),
            "no weight that fits this network.*other.weight",
        ),
    ],
)
def test_what_cannot_be_started_from_is_refused_and_leaves_nothing(write: Any, words: str) -> None:
    write(Path("net.pt"))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        start_from(models.build("small", 10), Path("net.pt"))
    result = call("train", "digits", "--from", "net.pt", "--out", "run")
    assert result.exit_code == 1
    assert not Path("run").exists()
    assert not Path("executed").exists()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_ALLOWED", set())


# Data of a user's own


class Noisy(Dataset[tuple[Tensor, int]]):
    """Examples of class i mod 3, whose first pixel is the class, with random noise in the second."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = torch.full((1, 4, 4), float(i % 3))
        image[0, 0, 1] = torch.rand(())
        return image, i % 3


def noisy() -> tuple[Dataset[Any], Dataset[Any]]:
    return Noisy(31), Noisy(9)


def without_images() -> tuple[Dataset[Any], Dataset[Any]]:
    return TensorDataset(torch.zeros(4), torch.arange(4)), Noisy(9)


def one() -> Dataset[Any]:
    return Noisy(9)


def test_datasets_of_ones_own_are_trained_on(tmp_path: Path) -> None:
    recipe = Recipe("mine", Images("test_start:noisy", validation=0.2), "small", 2, optimizer=Sgd(), batch_size=8)
    runs.create(tmp_path / "run", recipe)  # the recipe of a run that one creates is trusted
    loaders = assemble(recipe, device=CPU, root=None).loaders
    assert (loaders.classes, loaders.shape, loaders.train.examples) == (3, (1, 4, 4), 25)
    seen = [targets for _, targets in loaders.train.epoch(1)]
    assert [len(targets) for targets in seen] == [8, 8, 8, 1]
    assert torch.cat(seen).tolist() != torch.cat([targets for _, targets in loaders.train.epoch(2)]).tolist()
    assert all(torch.equal(inputs[:, 0, 0, 0], targets.float()) for inputs, targets in loaders.test)


def test_two_processes_share_the_batches_of_ones_own_data() -> None:
    trust.allow("test_start:noisy")
    whole, *halves = (
        [
            targets
            for _, targets in data.load("test_start:noisy", batch_size=8, seed=0, rank=r, world_size=w).train.epoch(1)
        ]
        for r, w in ((0, 1), (0, 2), (1, 2))
    )
    for batch, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(batch[0::2], first)
        assert torch.equal(batch[1::2], second)


@pytest.mark.parametrize(
    ("name", "words"),
    [("one", "returned a Noisy; name a callable that takes no argument"), ("without_images", "pairs of an image")],
)
def test_data_that_cannot_be_trained_on_are_refused(name: str, words: str) -> None:
    trust.allow(f"test_start:{name}")
    with pytest.raises(ValueError, match=words):
        data.load(f"test_start:{name}", batch_size=8, seed=0)


def test_data_that_a_run_names_are_not_imported_without_trust(tmp_path: Path) -> None:
    recipe = Recipe("mine", Images("test_start:noisy"), "test_start:net", 2, optimizer=Sgd(), batch_size=8)
    run = runs.create(tmp_path / "run", recipe)
    next(conduct(run, replace(HERE, save_every=1)))
    trust._ALLOWED.clear()
    assert "--trust" in call("resume", run.folder).stderr
    assert checkpoint.epochs(run.checkpoints)[-1] == 1
    result = call("resume", run.folder, "--trust")
    assert result.exit_code == 0, result.stderr
    assert runs.load(run.folder).records()[-1].epoch == 2


def net(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))


def test_a_folder_of_pictures_of_any_size_is_trained_on() -> None:
    shades = {"dark": 40, "light": 210}
    for part, count in (("train", 6), ("val", 3)):
        for name, shade in shades.items():
            folder = Path("pictures") / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (50 + i, 40), (shade, shade, shade + i)).save(folder / f"{i}.png")
    words = ("--dataset", "folder", "--data", "pictures", "--image-size", 32, "--model", "wrn10x1", "--epochs", 1)
    result = call("train", "wrn10x1-cifar10-short", *words, "--batch-size", 4, "--out", "run", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    loaders = data.load("folder", batch_size=4, seed=0, root=Path("pictures"), size=16, workers=0)
    assert (loaders.classes, loaders.shape) == (2, (3, 16, 16))
    inputs, targets = next(iter(loaders.test))
    assert inputs.shape == (4, 3, 16, 16)
    shades_seen = (inputs[:, 0].mean((1, 2)) * 0.229 + 0.485) * 255  # the inverse of ImageNet's normalisation
    assert shades_seen.round().tolist() == [list(shades.values())[target] for target in targets.tolist()]
    assert "--image-size 16: only the images of" in call("train", "digits", "--image-size", 16).stderr
