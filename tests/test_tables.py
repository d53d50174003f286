"""Tables of rows: they are read back as written, written atomically, and never mix rows of two settings."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from dirprune.lab.records.files import InUse, locked
from dirprune.lab.records.provenance import Session
from dirprune.lab.records.tables import OtherSettings, merge_rows, read_rows, settle, write_rows


@dataclass(frozen=True)
class Point:
    name: str
    count: int
    value: float
    good: bool


POINTS = [Point("a, b", 3, 0.1 + 0.2, True), Point("μ", -1, math.inf, False), Point("", 0, 1e-300, True)]


def test_rows_come_back_exactly_and_the_file_is_plain_csv(tmp_path: Path) -> None:
    path = tmp_path / "new" / "points.csv"
    write_rows(path, Point, POINTS)
    assert read_rows(path, Point) == POINTS
    with path.open(newline="") as file:
        plain = list(csv.DictReader(file))
    assert [row["name"] for row in plain] == ["a, b", "μ", ""]
    assert list(plain[0]) == ["name", "count", "value", "good"]
    write_rows(path, Point, [Point("nan", 0, math.nan, True)])
    assert math.isnan(read_rows(path, Point)[0].value)


def test_no_cell_is_a_formula_to_a_spreadsheet_and_every_text_comes_back(tmp_path: Path) -> None:
    dangerous = "=+-@\t\r\n＝＋－＠"
    texts = [quotes + first + "1+A1" for quotes in ("", "'", "''") for first in dangerous]
    harmless = ["", "'", "'a", "a=1", "-1.5", "+1e-5", "-inf", "μ", "5-4"]
    rows = [Point(text, -3, -0.5, True) for text in (*texts, *harmless)]
    write_rows(tmp_path / "points.csv", Point, rows)
    assert read_rows(tmp_path / "points.csv", Point) == rows
    with (tmp_path / "points.csv").open(newline="") as file:
        written = list(csv.reader(file))[1:]
    assert not [row for row in written if row[0].startswith(tuple(dangerous)) and row[0] not in harmless]
    assert [row[0] for row in written[len(texts) :]] == harmless
    assert {tuple(row[1:]) for row in written} == {("-3", "-0.5", "True")}


def test_merged_rows_take_the_place_of_their_like_and_leave_the_others(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    merge_rows(path, Point, POINTS, key=["name"])
    new = [replace(POINTS[1], value=0.0), replace(POINTS[1], value=1.0), Point("new", 1, 2.0, True)]
    merge_rows(path, Point, new, key=["name", "count"])
    assert read_rows(path, Point) == [POINTS[0], POINTS[2], *new]
    merge_rows(path, Point, [Point("", 7, 2.0, True)], key=["name", "count"])
    assert read_rows(path, Point)[:2] == [POINTS[0], POINTS[2]]


def test_no_file_is_no_row_and_an_empty_table_has_its_head(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.csv", Point) == []
    write_rows(tmp_path / "empty.csv", Point, [])
    assert (tmp_path / "empty.csv").read_text() == "name,count,value,good\n"


def test_a_failed_write_leaves_the_table_it_had(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    write_rows(path, Point, POINTS)

    def broken() -> object:
        yield POINTS[0]
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_rows(path, Point, broken())
    assert read_rows(path, Point) == POINTS


def test_what_a_spreadsheet_makes_of_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    write_rows(path, Point, POINTS)
    text = path.read_text().replace("True", "TRUE").replace("False", "FALSE").replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_rows(path, Point) == POINTS


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("b,1,2.x,True", "line 3 has value='2.x'"),
        ("b,1,2.0,yes", "line 3 has good='yes': it is neither True nor False"),
        ("b,1,2.0", "line 3 ends before its column good"),
        ("b,1,2,0,True", "line 3 has more cells than there are columns"),
    ],
)
def test_a_bad_cell_is_named_with_its_place(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(f"name,count,value,good\na,1,2.0,True\n{line}\n")
    with pytest.raises(ValueError, match=rf"points\.csv .*{re.escape(told)}.*correct it, or restore it from a copy"):
        read_rows(path, Point)


@pytest.mark.parametrize(
    "text",
    ["", 200_000 * "\0", "date,amount\n", "name,count,value\na,1,2.0\n", "name,count,value,good\na,one,2.0,True\n"],
)
def test_another_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(ValueError, match=r"points\.csv cannot be read as a table of Point"):
        read_rows(tmp_path / "points.csv", Point)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", "\\", "{}", '{"settings": {"k": 1}}', '{"settings": 1, "sessions": []}']
)
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(ValueError, match=r"settings\.json .*give another --out"):
        settle(tmp_path, {"k": 1}, Session(), table="rows.csv")


def test_rows_without_their_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    settle(tmp_path, {"k": 1}, Session(), table="rows.csv")  # other files do not count as measurements
    (tmp_path / "rows.csv").touch()
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"settings\.json is gone, .*rows\.csv were measured; restore it from a copy"):
        settle(tmp_path, {"k": 1}, Session(), table="rows.csv")


def test_a_lock_is_nothing_measured(tmp_path: Path) -> None:
    settle(tmp_path, {"k": 1}, Session(), table="rows.csv")
    with locked(tmp_path):
        settle(tmp_path, {"k": 2}, Session(), table="rows.csv")
        with (
            pytest.raises(
                InUse,
                match=f"written by process {os.getpid()} on .*; wait for it, or stop it with `kill {os.getpid()}`",
            ),
            locked(tmp_path),
        ):
            pass
    with locked(tmp_path):
        pass


def test_a_folder_is_held_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with locked(tmp_path), pytest.raises(InUse, match=r"by another process; wait for it$"), locked(tmp_path):
        pass


def test_a_stop_while_a_table_is_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path / "points.csv", Point, POINTS)
    assert not list(tmp_path.iterdir())


def test_settings_are_noted_once_and_sessions_each_time(tmp_path: Path) -> None:
    settle(tmp_path, {"k": 99}, Session(device="cpu"), table="rows.csv")  # may still change: there are no rows
    settle(tmp_path, {"k": 10, "epochs": (1, 2), "examples": None}, Session(device="cpu"), table="rows.csv")
    (tmp_path / "products-0010").mkdir()  # kept products fix the settings just as rows do
    with pytest.raises(OtherSettings, match="k=10, not k=11"):
        settle(tmp_path, {"k": 11, "epochs": (1, 2), "examples": None}, Session(device="cpu"), table="rows.csv")
    write_rows(tmp_path / "rows.csv", Point, POINTS)
    settle(tmp_path, {"k": 10, "epochs": (1, 2), "examples": None}, Session(device="gpu"), table="rows.csv")
    noted = json.loads((tmp_path / "settings.json").read_text())
    assert noted["settings"] == {"k": 10, "epochs": [1, 2], "examples": None}
    assert [session["device"] for session in noted["sessions"]] == ["cpu", "gpu"]
    with pytest.raises(OtherSettings, match="examples=None, not examples=5"):
        settle(tmp_path, {"k": 10, "epochs": (1, 2), "examples": 5}, Session(), table="rows.csv")
    with pytest.raises(OtherSettings, match="k=10, not k=None"):  # a setting of an older version
        settle(tmp_path, {"epochs": (1, 2)}, Session(), table="rows.csv")
    settle(tmp_path, {"k": 10, "epochs": (1, 2), "new": None}, Session(device="cpu"), table="rows.csv")
    noted["sessions"].append(asdict(Session(device="cpu")))
    assert json.loads((tmp_path / "settings.json").read_text()) == noted


def test_other_folders_are_refused(tmp_path: Path) -> None:
    settle(tmp_path, {"k": 1}, Session(), table="rows.csv")
    (tmp_path / "rows.csv").touch()
    with pytest.raises(OtherSettings, match="holds other measurements; give another --out"):
        settle(tmp_path, {"points": 5}, Session(), table="others.csv")
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="is a run directory; give another --out"):
        settle(tmp_path, {"k": 1}, Session(), table="rows.csv")


def test_more_files_may_join_but_none_may_change(tmp_path: Path) -> None:
    for files in ({"a": "1"}, {"a": "1", "b": "2"}, {"b": "2"}):
        settle(tmp_path, {"k": 1}, Session(), table="rows.csv", files=files)
        (tmp_path / "rows.csv").touch()
    with pytest.raises(OtherSettings, match="started with another file as b: a run of the same name, or trained again"):
        settle(tmp_path, {"k": 1}, Session(), table="rows.csv", files={"a": "1", "b": "3"})
    settle(tmp_path, {"k": 1}, Session(), table="rows.csv", files={"a": "1"})


def test_a_column_with_a_default_may_be_missing(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Old:
        name: str

    @dataclass(frozen=True)
    class New:
        name: str
        share: float | None = None

    write_rows(tmp_path / "rows.csv", Old, [Old("a")])
    assert read_rows(tmp_path / "rows.csv", New) == [New("a")]
    write_rows(tmp_path / "rows.csv", New, [New("a", 0.5), New("b")])
    assert read_rows(tmp_path / "rows.csv", New) == [New("a", 0.5), New("b")]
