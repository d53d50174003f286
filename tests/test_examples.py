"""The scripts in examples/ run, and do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def main(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_training_ends_with_the_zeros_that_were_asked_for() -> None:
    accuracy, report = main("train")(epochs=6)
    weights = [layer for layer in report.layers if layer.is_weight]
    assert report.zeros == round(0.9 * sum(layer.total for layer in weights))
    assert accuracy > 0.9


def test_finetuning_keeps_the_accuracy_in_a_small_file(tmp_path: Path) -> None:
    dense, sparse = main("finetune")(tmp_path)
    assert dense > 0.9
    assert sparse > dense - 0.02
    assert (tmp_path / "sparse.safetensors").stat().st_size < (tmp_path / "dense.pt").stat().st_size / 10


def test_the_gates_that_are_left_are_the_pairs_that_were_planted() -> None:
    example = runpy.run_path(str(EXAMPLES / "gates.py"))
    assert example["main"]() == example["PLANTED"]


def test_a_gpt_runs_without_torch_as_with_it() -> None:
    assert main("transformer")("gpt32x1") < 1e-5


def test_two_processes_end_with_the_same_zeros() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(EXAMPLES / "ddp.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"\[(\d+), (\d+)\]", done.stdout)[0]
    assert first == second == str(round(0.9 * (64 * 128 + 128 * 10)))
