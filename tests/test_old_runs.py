"""Runs written at commit daf7ace, held in tests/old_runs, still open, continue and report.

`interrupted` is a run of gRDA, stopped after one of three epochs; uninterrupted.jsonl has the records of all three.
`comparison` has a finished run of gRDA, the files of a finished run of SGD, and a run of STR, stopped after one of two
epochs; its tables have the rows of all three, finished.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_cli import call

OLD = Path(__file__).parent / "old_runs"
TIMES = {"train_seconds", "test_seconds", "seconds", "commit", "device"}
COMPARE = "compare digits-short --methods grda,sgd,str --sparsity 0.5 --sweep grda:c=0.02 --sweep str:decay=0.03"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old runs that may be changed."""
    return shutil.copytree(OLD, tmp_path / "old")


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table or of metrics.jsonl, numbers as numbers, without what depends on the machine."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            found: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: _number(value) for key, value in row.items() if key not in TIMES} for row in found]


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):  # null, or a text
        return value


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that rows are those of another machine: a test image more or less right, the rest to three digits."""
    for row, other in zip(found, expected, strict=True):
        for key, value in other.items():
            if isinstance(value, float):
                assert row[key] == pytest.approx(value, rel=1e-3, abs=0.3 if "accuracy" in key else 1e-5, nan_ok=True)
            else:
                assert row[key] == value, key


def test_an_old_run_continues_where_it_stopped(old: Path) -> None:
    call("resume", old / "interrupted", "--device", "cpu")
    assert_alike(rows(old / "interrupted" / "metrics.jsonl"), rows(old / "uninterrupted.jsonl"))


def test_an_old_comparison_continues_and_counts_the_runs_that_have_ended(old: Path) -> None:
    out = old / "comparison"
    expected = rows(out / "comparison.csv"), rows(out / "layers.csv")
    ended = {path: path.read_bytes() for path in out.glob("runs/[gs][rg]*/**/*") if path.is_file()}
    assert call(*COMPARE.split(), "--epochs", 2, "--device", "cpu", "--out", out).exit_code == 0
    assert_alike(rows(out / "comparison.csv"), expected[0])
    assert_alike(rows(out / "layers.csv"), expected[1])
    assert len(ended) == 10
    assert {path: path.read_bytes() for path in ended} == ended


def test_old_runs_are_reported(old: Path) -> None:
    runs = [path.parent for path in sorted(old.glob("comparison/runs/*/config.json"))]
    result = call("report", *runs, "--out", old / "report")
    assert result.exit_code == 0
    assert re.search(r"92\.4[78].*93\.31.*92\.2", result.stdout, re.DOTALL), result.stdout
    assert list((old / "report").glob("*.png"))
