"""Language modelling: the text, its windows, the small GPT, and runs from the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from dirprune.lab import models
from dirprune.lab.cli import app as cli
from dirprune.lab.data.loader import Batching
from dirprune.lab.data.text import WindowLoader, corpus, fingerprint, read_parts
from dirprune.lab.methods import Magnitude, Method, Pat
from dirprune.lab.models.weights import prunable
from dirprune.lab.tasks import Text
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.execution import Execution, PlainScoring
from dirprune.lab.training.loop import evaluate
from dirprune.lab.training.optimizers import optimizer
from dirprune.zeros import sparsity


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of sixty files whose bytes tell their number."""
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    for number in range(60):
        name = f"inner/{number}.txt" if number % 2 else f"{number}.txt"
        (tmp_path / "texts" / name).write_bytes(bytes([number]) * 200)
    return tmp_path / "texts"


def test_whole_files_are_held_out_whatever_else_is_there(texts: Path) -> None:
    parts = read_parts(corpus(texts), 0.3)
    members = {part: set(text.tolist()) for part, text in parts.items()}
    assert sorted(number for part in members.values() for number in part) == list(range(60))
    assert 1 <= len(members["test"]) <= 14
    assert 8 <= len(members["validation"]) <= 28
    (texts / "another.txt").write_bytes(b"x" * 500)
    again = {part: set(text.tolist()) - {ord("x")} for part, text in read_parts(corpus(texts), 0.3).items()}
    assert again == members
    without = read_parts(corpus(texts), 0.0)
    assert set(without["test"].tolist()) - {ord("x")} == members["test"]
    assert "validation" not in without
    assert fingerprint(parts) != fingerprint(without)


def test_one_file_is_cut_by_position(tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(bytes(range(200)))
    parts = read_parts(corpus(tmp_path / "book"), 0.5)
    assert {part: (int(text[0]), int(text[-1])) for part, text in parts.items()} == {
        "train": (0, 89),
        "validation": (90, 179),
        "test": (180, 199),
    }


def test_the_default_text_is_the_source_of_the_standard_library() -> None:
    files = corpus(None)
    assert {"argparse.py", "decoder.py", "dataclasses.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert fingerprint(read_parts(files, 0.1)) == fingerprint(read_parts(files, 0.1))


def test_text_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is no text file and no folder"):
        corpus(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no files"):
        corpus(tmp_path)
    with (tmp_path / "bomb").open("wb") as file:
        file.truncate(2**40)  # it takes no room on the disk
    with pytest.raises(ValueError, match=r"the text of .*bomb, … has 1,100 GB and would lie in memory; give less"):
        read_parts(corpus(tmp_path), 0.1)
    (tmp_path / "bomb").unlink()
    (tmp_path / "book").write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, and a window needs 65"):
        Text().load(Batching(2, seed=0), device=torch.device("cpu"), root=tmp_path / "book")


@pytest.mark.parametrize("world_size", [1, 3])
def test_processes_share_the_windows_of_every_batch(world_size: int) -> None:
    text = torch.arange(250, dtype=torch.uint8)
    shares = [
        list(WindowLoader(text, 8, 20, Batching(6, seed=1, rank=rank, world_size=world_size)).epoch(2))
        for rank in range(world_size)
    ]
    whole = list(WindowLoader(text, 8, 20, Batching(6, seed=1)).epoch(2))
    for number, (inputs, targets) in enumerate(whole):
        assert torch.equal(inputs + 1, targets)
        for rank, share in enumerate(shares):
            assert torch.equal(share[number][0], inputs[rank::world_size])
    assert not torch.equal(whole[0][0], next(iter(WindowLoader(text, 8, 20, Batching(6, seed=1)).epoch(3)))[0])


def test_the_gpt_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = models.build("gpt32x2", 50).eval()
    tokens = torch.randint(50, (2, 12))
    later = tokens.clone()
    later[:, 7:] = (later[:, 7:] + 1) % 50
    before, after = model(tokens), model(later)
    torch.testing.assert_close(before[:, :, :7], after[:, :, :7])
    assert not torch.allclose(before[:, :, 7:], after[:, :, 7:])
    with pytest.raises(ValueError, match="300 tokens is longer than the 256"):
        model(torch.zeros(1, 300, dtype=torch.int64))
    with pytest.raises(ValueError, match="width=31"):
        models.build("gpt31x2", 50)


def test_losses_are_in_nats_a_byte_and_accuracies_of_bytes() -> None:
    text = torch.randint(256, (3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    loader = WindowLoader(text, 16, 30, Batching(8, seed=0))
    torch.manual_seed(0)
    model = models.build("gpt32x1", 256)
    score = evaluate(model, loader)
    inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    logits = model.eval()(inputs).transpose(1, 2).reshape(-1, 256)
    assert score.loss == pytest.approx(cross_entropy(logits, targets.reshape(-1)).item(), rel=1e-5)
    assert score.loss == pytest.approx(math.log(256), rel=0.02)
    right = float((logits.argmax(1) == targets.reshape(-1)).float().mean())
    assert score.accuracy == pytest.approx(100 * right)
    assert PlainScoring(model, Execution())(inputs[:0], targets[:0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [lambda: Magnitude(sparsity=0.8), lambda: Pat(sparsity=0.8)])
def test_methods_leave_embeddings_dense(make: Callable[[], Method]) -> None:
    model = models.build("gpt32x1", 64)
    method, made = make(), optimizer("adamw", lr=0.01).make(model)
    method.attach(model, made, steps=10, examples=10)
    for step in range(10):
        made.zero_grad()
        model(torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))).logsumexp(1).sum().backward()
        made.step()
        method.after_step(step + 1)
    zeros = {layer.name: layer.zeros for layer in sparsity(model).layers}
    assert zeros["tokens.weight"] == zeros["positions.weight"] == 0
    assert sum(zeros.values()) == pytest.approx(0.8 * sum(w.parameter.numel() for w in prunable(model).values()), abs=1)


def test_gradients_are_clipped_before_the_step() -> None:
    model = nn.Linear(4, 1)
    made = optimizer("adamw", clip=0.5).make(model)
    (1000 * model(torch.ones(2, 4)).sum()).backward()
    made.step()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.5)


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book").write_bytes(b"The quick brown fox jumps over the lazy dog. " * 100)
    Path("short.py").write_text(
        "from dirprune.lab.training.recipes import get\n\n\ndef recipe():\n"
        "    return get('gpt-python').but(name='short', model='gpt16x1', context=16, windows=160, epochs=3)\n"
    )
    words = ["train", "short.py", "--data", "book", "--out", "run", "--sparsity", "0.75"]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = runs.load(Path("run"))
    assert run.recipe.task == Text(context=16, windows=160)
    assert run.recipe.optimizer.name == "adamgrda"
    losses = [record.test_loss for record in run.records()]
    assert max(losses) < math.log(256)
    outcome = run.outcome()
    assert outcome is not None
    assert outcome.zeros is not None
    names = [f"blocks.0.{part}.weight" for part in ("qkv", "out", "up", "down")] + ["head.weight"]
    pruned = [layer for layer in outcome.zeros.layers if layer.name in names]
    assert sum(layer.zeros for layer in pruned) == round(0.75 * sum(layer.total for layer in pruned))
    assert sum(layer.zeros for layer in pruned) == outcome.zeros.zeros
    for given, shape, power in (([], "hard", 0.5), (["--shape", "soft", "--power", "0"], "soft", 0.0)):
        words = ["train", "short.py", "--data", "book", "--from", "run", "--sparsity", "0.9", "--out", shape, *given]
        assert CliRunner().invoke(cli.app, words, catch_exceptions=False).exit_code == 0
        tuned = vars(runs.load(Path(shape)).recipe.optimizer)
        assert (tuned["shape"], tuned["power"], tuned["prune_until"]) == (shape, power, 0.5)
    for verb in (["report", "run"], ["resume", "run"]):
        result = CliRunner().invoke(cli.app, verb, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    Path("book").write_bytes(b"To be, or not to be. " * 200)
    refused = CliRunner().invoke(cli.app, ["resume", "run"])
    assert refused.exit_code == 1
    assert "run was trained on another text" in refused.stderr


def test_the_recipes_name_their_parts() -> None:
    small, large = recipes.get("gpt-python"), recipes.get("gpt-python-10m")
    assert small.optimizer.dense == large.optimizer.dense == "adamw"
    with torch.device("meta"):
        model = models.build(large.model, 256)
    count = sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks"))
    assert 10_000_000 < count < 12_000_000
