"""What the files of a run may hold: anything else is refused by name, and changes no table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from test_cli import call
from test_runs import record as epoch_record

from dirprune import sparsity
from dirprune.lab.models import small
from dirprune.lab.records.columns import Amount, Column, Count, Fraction, record
from dirprune.lab.studies.reproduction import ledger
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.runs import Outcome, Run


@dataclass(frozen=True)
class Inner:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    count: Count
    share: Fraction
    known: Amount | None
    word: Annotated[str, Column(valid=("yes", "no"))]
    sure: bool
    parts: tuple[Inner, ...] = ()


GOOD: dict[str, Any] = {"count": 3, "share": 1, "known": None, "word": "yes", "sure": True}


def test_a_record_is_read_as_its_fields_declare() -> None:
    made = record(Outer, {**GOOD, "parts": [{"name": "μ\n", "shape": [2, 3]}]})
    assert made == Outer(3, 1.0, None, "yes", True, (Inner("μ\n", (2, 3)),))
    assert type(made.share) is float
    assert math.isnan(record(Outer, {**GOOD, "share": None}).share)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"count": -1}, r"count=-1 is not in \[0, inf\]"),
        ({"count": True}, "count is true or false, not an integer"),
        ({"count": 3.0}, "count is a number, not an integer"),
        ({"count": None}, "count is null, not an integer"),
        ({"share": "1"}, "share is a text, not a number"),
        ({"share": 1.001}, r"share=1.001 is not in \[0, 1\]"),
        ({"share": 10**400}, "share is too large"),
        ({"known": -0.5}, r"known=-0.5 is not in"),
        ({"word": "maybe"}, "word='maybe' is none of yes, no"),
        ({"word": ["yes"]}, "word is a list, not a text"),
        ({"sure": 1}, "sure is an integer, not true or false"),
        ({"parts": {}}, "parts is an object, not a list"),
        ({"parts": [{"name": "a", "shape": [1.5]}]}, r"parts\[0\]: shape\[0\] is a number, not an integer"),
        ({"parts": [{"name": "\x1b[2J", "shape": []}]}, r"parts\[0\]: name has the control character"),
        ({"parts": [{"shape": []}]}, r"parts\[0\]: it has no name"),
        ({"more": 1}, "it has 'more', which this version"),
    ],
)
def test_what_a_field_cannot_hold_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        record(Outer, GOOD | change)


@pytest.mark.parametrize("values", [None, 1, "a", [], [GOOD], {}])
def test_what_is_no_record_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"it is .*, not an object|it has no count"):
        record(Outer, values)


# The files of a run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A finished run of two epochs, and a ledger that holds another one."""
    monkeypatch.chdir(tmp_path)
    digits = replace(recipes.get("digits"), epochs=2)
    made = [runs.create(Path(name), replace(digits, seed=seed)) for seed, name in enumerate(["other", "run"])]
    for each in made:
        for epoch in (1, 2):
            each.append(epoch_record(epoch))
        each.conclude(Outcome(sparsity(small(10))))
    ledger.collect([made[0].folder], Path("results"))
    return made[1]


def metrics(**change: Any) -> Callable[[Run], None]:
    """Return a function that changes the last line of a run's metrics."""

    def spoil(run: Run) -> None:
        lines = [epoch_record(epoch).to_dict() for epoch in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in (lines[0], lines[1] | change))
        (run.folder / "metrics.jsonl").write_text(text)

    return spoil


def content(name: str, text: str) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        (run.folder / name).write_text(text)

    return spoil


def outcome(**change: Any) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        path = run.folder / "outcome.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return spoil


LAYER = {"name": "w", "shape": [2], "zeros": 1}
SPOILT = {
    "a text for a number": (metrics(test_loss="low"), "line 2 of run/metrics.jsonl .*test_loss is a text"),
    "an accuracy of 999": (metrics(test_accuracy=999), r"test_accuracy=999.0 is not in \[0, 100\]"),
    "a sparsity in percent": (metrics(sparsity=95), "sparsity=95.0"),
    "a repeated epoch": (metrics(epoch=1), "epoch 1 follows epoch 1"),
    "an epoch too many": (metrics(epoch=3), "epoch 3 is not one of the run's 2"),
    "an epoch before the first": (metrics(epoch=0), r"epoch=0 is not in \[1, inf\]"),
    "half an epoch": (metrics(epoch=1.5), "epoch is a number"),
    "another field": (metrics(extra=1), "it has 'extra'"),
    "a deep line": (content("metrics.jsonl", "[" * 100_000 + "\n" + "{}\n"), "line 1 of run/metrics.jsonl"),
    "environment: no sessions": (content("environment.json", "{}"), "run/environment.json holds no list"),
    "environment: a session of numbers": (
        content("environment.json", '[{"device": 7}]'),
        "run/environment.json .*device is an integer",
    ),
    "environment: a text for examples": (content("environment.json", '[{"examples": "7"}]'), "examples is a text"),
    "environment: a command to the terminal": (
        content("environment.json", '[{"command": "\\u001b]0;"}]'),
        "command has the control",
    ),
    "no outcome": (content("outcome.json", "[]"), "run/outcome.json holds no dict"),
    "a deep outcome": (content("outcome.json", "[" * 100_000), "run/outcome.json cannot be read as JSON"),
    "layers in words": (outcome(layers="all"), "layers is a text"),
    "a shape of texts": (outcome(layers=[LAYER | {"shape": ["2"]}]), r"shape\[0\] is a text"),
    "more zeros than weights": (outcome(layers=[LAYER | {"zeros": 3}]), "cannot have 3 zeros"),
    "a negative shape": (outcome(layers=[LAYER | {"shape": [-2, -2]}]), "cannot have 1 zeros"),
    "diverged, a number": (outcome(diverged=1), "diverged is an integer"),
    "memory below nothing": (outcome(peak_memory_mib=-1), "peak_memory_mib=-1.0"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_run_is_refused_by_name_and_changes_no_table(name: str, run: Run) -> None:
    spoil, problem = SPOILT[name]
    spoil(run)
    before = {path: path.read_bytes() for path in Path("results").glob("*.csv")}
    verbs = [["reproduce", "run", "--results", "results"], ["report", "run", "--out", "out"]]
    for words in verbs[: 1 if "environment" in name else 2]:  # a report needs no environment
        result = call(*words)
        assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True), result
        assert re.search(problem, result.stderr), result.stderr
    assert {path: path.read_bytes() for path in Path("results").glob("*.csv")} == before
    assert ledger.read(Path("results"))[0].entry.complete == "yes"


def test_a_table_that_could_not_be_read_back_replaces_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in Path("results").glob("*.csv")}
    monkeypatch.setattr(Run, "records", lambda self: [epoch_record(1, test_accuracy=101.0)])
    with pytest.raises(ValueError, match=r"trajectories.csv is not written: .*test_accuracy='101.0'"):
        ledger.collect([run.folder], Path("results"))
    assert {path: path.read_bytes() for path in Path("results").glob("*.csv")} == before


def test_an_option_that_config_does_not_tell_is_unknown(run: Run) -> None:
    config = run.folder / "config.json"
    values = json.loads(config.read_text())
    del values["optimizer"]["mu"]
    config.write_text(json.dumps(values))
    (row,) = json.loads(call("report", "run", "--out", "out", "--json").stdout)["rows"]
    assert row["setting"] == "gRDA c=0.016 μ=unknown"
    assert (row["c"], row["mu"]) == (0.016, None)
    for words in (["reproduce", "run", "--results", "results"], ["resume", "run"]):
        result = call(*words)
        assert result.exit_code == 1
        assert re.search(r"config.json (does not say mu|says mu=None)|mu=None", result.stderr), result.stderr


def test_a_configuration_of_odd_values_is_refused_by_name(run: Run) -> None:
    config = run.folder / "config.json"
    values = json.loads(config.read_text())
    refused = []
    for name in values:
        for odd in ("abc", "", [], [[]], {}, None, -1, 0.5, 10**400, True, math.inf):
            config.write_text(json.dumps(values | {name: odd}))
            try:
                runs.load(run.folder)
            except ValueError as error:
                refused.append(str(error))
    assert {text.partition(": ")[0] for text in refused} == {"run/config.json cannot be read as a recipe"}
    assert len(refused) > 110  # of 154
