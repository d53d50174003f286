"""From a folder of pictures to an exported file and a table of speed, with a recipe and a network of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import call, objects

from dirprune.deploy import load_sparse

NETWORK = """
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 7, num_classes))
"""
RECIPE = """
from dirprune.lab.tasks import Images
from dirprune.lab.training.optimizers import TargetGrda
from dirprune.lab.training.recipe import Recipe

def recipe():
    optimizer = TargetGrda(lr=0.05, momentum=0.9, sparsity=0.8)
    task = Images("folder", size=16, augment=False)
    return Recipe(name="pictures", task=task, model="walk_net:net", epochs=6, batch_size=8, optimizer=optimizer)
"""


def take_pictures(folder: Path) -> None:
    """Write pictures of two classes, of different sizes: dark ones and bright ones."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 6)):
        for name, brightness in (("dark", 40), ("bright", 200)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(brightness - 40, brightness + 40, (20 + number, 24, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


@pytest.mark.soak  # docs/images.md, which the tests run, takes the same steps
def test_a_folder_of_pictures_becomes_a_small_fast_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    take_pictures(Path("pictures"))
    Path("walk_net.py").write_text(NETWORK)
    Path("my_recipe.py").write_text(RECIPE)
    *_, last = objects(call("train", "my_recipe.py", "--data", "pictures", "--out", "runs/mine", "--json"))
    assert last["test_accuracy"] > 90
    assert last["weight_sparsity"] == pytest.approx(0.8, abs=0.002)
    (exported,) = objects(call("export", "runs/mine", "--to", "net.safetensors", "--json"))
    weights = [p for p in load_sparse(Path("net.safetensors")).values() if p.dim() > 1]
    zeros = sum(int((p == 0).sum()) for p in weights)
    assert zeros / sum(p.numel() for p in weights) == pytest.approx(last["weight_sparsity"])
    assert exported["file_bytes"] == Path("net.safetensors").stat().st_size
    timed = call("speed", "runs/mine", "--trust", "--alone", "--seconds", 0.1, "--json")
    if "compiler" in timed.stderr:
        pytest.skip("no C compiler here, so nothing can be timed")
    (latency,) = (json.loads(line) for line in timed.stdout.splitlines())
    assert latency["runtime"] == "dirprune"
    assert 0 < latency["fastest"] < 100
