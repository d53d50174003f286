"""From a folder of pictures to an exported file and on, with a recipe, a network and data of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import call, objects
from torch.nn.functional import conv2d, linear

from dirprune.deploy import load_sparse
from dirprune.lab import trust
from dirprune.lab.training import runs

OWN = """
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 7, num_classes))

def squares():
    read = lambda path: torch.from_numpy(np.array(Image.open(path).resize((16, 16)))).permute(2, 0, 1) / 255
    examples = [(read(path), path.parent.name == "dark") for path in sorted(Path("pictures").glob("*/*.png"))]
    return examples[::2], examples[1::2]
"""
RECIPE = """
from dirprune.lab.tasks import Images
from dirprune.lab.training.optimizers import TargetGrda
from dirprune.lab.training.recipe import Recipe

def recipe():
    optimizer = TargetGrda(lr=0.05, momentum=0.9, sparsity=0.8)
    task = Images("folder", size=16, augment=False)
    return Recipe(name="mine", task=task, model="walk_own:net", epochs=6, batch_size=8, optimizer=optimizer)
"""


@pytest.fixture
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of two classes, dark and bright ones, of different sizes, beside code of the user's own."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, brightness in (("dark", 40), ("bright", 200)):
        (Path("pictures") / name).mkdir(parents=True)
        for number in range(15):
            pixels = random.integers(brightness - 40, brightness + 40, (20 + number, 24, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(Path("pictures") / name / f"{number:02}.png")
    for file, text in {"walk_own": OWN, "my_recipe": RECIPE}.items():
        Path(f"{file}.py").write_text(text)


@pytest.mark.usefixtures("_pictures")
@pytest.mark.filterwarnings("default::dirprune.lab.data.HeldOut")
def test_a_folder_of_pictures_becomes_a_small_network_that_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = call("train", "my_recipe.py", "--data", "pictures", "--minutes", 1e-6, "--out", "runs/mine")
    assert "pictures has no train/ and val/: 6 of its 30 pictures are held out to test on" in begun.stderr
    assert "dirprune resume runs/mine --trust" in begun.stderr
    monkeypatch.setattr(trust, "_ALLOWED", set())  # as in the next command of a user
    refused = call("resume", "runs/mine")
    assert refused.exit_code == 1
    assert "add --trust" in refused.stderr
    *_, last = objects(call("resume", "runs/mine", "my_recipe.py", "--json"))
    assert (last["epoch"], last["test_accuracy"]) == (6, 100)
    weights = 4 * 3 * 9 + 2 * 4 * 49
    assert last["weight_sparsity"] == round(0.8 * weights) / weights

    (exported,) = objects(call("export", "runs/mine", "--to", "net.safetensors", "--json"))
    assert exported["file_bytes"] == Path("net.safetensors").stat().st_size
    small = load_sparse(Path("net.safetensors"))
    own = (
        "--dataset",
        "walk_own:squares",
        "--model",
        "walk_own:net",
        "--from",
        "net.safetensors",
        "--optimizer",
        "sgd",
    )
    still = ("--lr", 1e-30, "--batch-size", 5, "--epochs", 1, "--keep", 0, "--out", "runs/next", "--json")
    (tuned,) = objects(call("train", "pictures", *own, *still))
    start = runs.weights_of(runs.load(Path("runs/next")), 0)[1]
    torch.testing.assert_close(start, small, rtol=0, atol=0)
    right = 0
    for number, path in list(enumerate(sorted(Path("pictures").glob("*/*.png"))))[1::2]:
        pixels = np.asarray(Image.open(path).resize((16, 16)), dtype=np.float32).transpose(2, 0, 1) / 255
        hidden = conv2d(torch.from_numpy(pixels), small["0.weight"], small["0.bias"], stride=2).relu().flatten()
        right += int(linear(hidden, small["3.weight"], small["3.bias"]).argmax()) == (number >= 15)
    assert tuned["test_accuracy"] == pytest.approx(100 * right / 15)
