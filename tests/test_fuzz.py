"""Whatever the bytes of a file are, reading it gives what was written, or an error of ours that names the file."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from fuzz import damaged, edited, fuzz
from hypothesis import strategies as st
from test_packing import by_the_page, same, sparse
from torch import Tensor

from dirprune.deploy import InvalidFile, load_sparse, save_sparse
from dirprune.lab.records import checkpoint
from dirprune.lab.studies.report import report
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.surroundings import Surroundings

Check = Callable[[Any], None]
soak = [pytest.mark.soak, pytest.mark.timeout(3600)]
MANY = pytest.mark.parametrize("examples", [300, pytest.param(30_000, marks=soak)], ids=["short", "long"])
SLOWER = pytest.mark.parametrize("examples", [60, pytest.param(5_000, marks=soak)], ids=["short", "long"])

STATE = {
    "deltas": sparse(9, 90),
    "mask": sparse(16, 16, density=0.4),
    "dense": torch.randn(3, 4),
    "count": torch.tensor(7),
    "empty": torch.zeros(2, 0),
    "bytes": torch.arange(5).to(torch.complex64),
}
STATE["tied"] = STATE["deltas"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_sparse(STATE, tmp_path / "net.safetensors", metadata={"from": "a test"})
    return tmp_path / "net.safetensors"


def sealed(data: bytes) -> bytes:
    """Return a file with the checksum of its content, as an attacker would make it."""
    start = data.find(b'"sha256":"') + len('"sha256":"')
    digest = hashlib.sha256(data[:start] + data[start + 64 :]).hexdigest()
    return data[:start] + digest.encode() + data[start + 64 :]


def rebuilt(version: tuple[dict[str, Any], Any, bytes]) -> bytes:
    """Return a file with this header, this record of its tensors in it, and this data."""
    header, told, data = version
    if isinstance(notes := header.get("__metadata__"), dict):
        header = header | {"__metadata__": notes | {"dirprune": json.dumps(told)}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sealed(len(text).to_bytes(8, "little") + text + data)


def parts(data: bytes) -> tuple[dict[str, Any], Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"].pop("dirprune")), data[end:]


def loaded(path: Path, data: bytes) -> dict[str, Tensor] | None:
    """Return what the bytes load as, or None if they are refused by the error that is ours and names the file."""
    path.write_bytes(data)
    try:
        return load_sparse(path)
    except InvalidFile as error:
        said = str(error)
    assert said.startswith(str(path))
    return None


MOST = 2**48
# Where in the header or, after "told", in its record; the value put there, or ... to remove it; what the error says.
FORGED: dict[str, tuple[str, Any, str]] = {
    "metadata of numbers": ("/__metadata__/from", 7, "has no str where \"its metadata 'from'\" needs one"),
    "half a character": ("/__metadata__/from", "\ud800", "surrogates not allowed"),
    "another format": ("told/format", 2, "is of format 2, and this version of dirprune reads 1"),
    "another kind": ("told/holds", "cakes", "holds 'cakes', not 'weights'"),
    "no tensors": ("told/tensors", [], "has no dict where 'its metadata' needs one"),
    "no record of a tensor": ("told/tensors/dense", 3, "has no dict where 'dense' needs one"),
    "an unknown twin": ("told/tensors/tied/same_as", "later", "has 'tied', which is the same as an unknown tensor"),
    "a twin by number": ("told/tensors/tied/same_as", 0, "has no str where 'tied' needs one"),
    "a tensor too many": ("told/tensors/dense", ..., "holds 'dense', which is part of no tensor"),
    "a tensor too few": ("told/tensors/more", {"dtype": "bool", "shape": [], "coding": "dense"}, "lacks a part of the"),
    "dtype by number": ("told/tensors/dense/dtype", 4, "has no str where 'dense' needs one"),
    "unknown dtype": ("told/tensors/dense/dtype", "F32", "has 'dense' in an unknown dtype or coding"),
    "unknown storage": ("told/tensors/dense/stored", "x", "has 'dense' in an unknown dtype or coding"),
    "storage that widens": ("told/tensors/dense/stored", "float64", "has 'dense' in an unknown dtype or coding"),
    "storage by number": ("told/tensors/dense/stored", 4, "has no str where 'dense' needs one"),
    "unknown coding": ("told/tensors/dense/coding", "zip", "has 'dense' in an unknown dtype or coding"),
    "no shape": ("told/tensors/dense/shape", ..., "has no list where 'dense' needs one"),
    "too many dimensions": ("told/tensors/dense/shape", [1] * 65, "has an impossible shape or place of 'dense'"),
    "a negative length": ("told/tensors/dense/shape", [-3, -4], "has an impossible shape or place of 'dense'"),
    "half a length": ("told/tensors/dense/shape", [1.5, 8], "has an impossible shape or place of 'dense'"),
    "a length that is a bool": ("told/tensors/count/shape", [True], "has an impossible shape or place of 'count'"),
    "too long": ("told/tensors/empty/shape", [0, MOST + 1], "has an impossible shape or place of 'empty'"),
    "too large": ("told/tensors/empty/shape", [0, MOST, 2], "has 'empty' in an impossible shape"),
    "another size": ("told/tensors/dense/shape", [3, 5], "has 'dense' damaged: 12 values do not fit"),
    "another shape": ("told/tensors/dense/shape", [4, 3], "has 'dense' in another dtype or shape than it says"),
    "another dtype": ("told/tensors/dense/dtype", "int32", "has 'dense' in another dtype or shape than it says"),
    "a larger mask": ("told/tensors/mask/shape", [16, 17], "has 'mask' damaged"),
    "larger steps": ("told/tensors/deltas/shape", [MOST], "has 'deltas' damaged"),
    "no place": ("/dense/data_offsets", ..., "has no list where 'dense' needs one"),
    "a gap": ("/dense/data_offsets", [616, 664], "does not hold the tensor 'dense' where its header says"),
    "beyond the end": ("/bytes/data_offsets", [734, MOST], "does not hold the tensor 'bytes' where its header says"),
    "another width": ("/dense/dtype", "F64", "does not hold the tensor 'dense' where its header says"),
    "an unknown width": ("/dense/dtype", "F33", "does not hold the tensor 'dense' where its header says"),
    "a width by number": ("/dense/dtype", 7, "has no str where 'dense' needs one"),
    "no entry": ("/dense", 7, "has no dict where 'dense' needs one"),
    "an entry without its shape": ("/dense/shape", ..., "has no list where 'dense' needs one"),
    "data that nobody has": ("/bytes", ..., "bytes, and its header tells of"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_refused_by_what_is_wrong_in_it(packed: Path, case: str) -> None:
    path, value, message = FORGED[case]
    header, told, data = parts(packed.read_bytes())
    assert [header["dense"]["data_offsets"], header["bytes"]["data_offsets"]] == [[612, 660], [734, 774]]
    first, *way, last = path.split("/")
    holder = reduce(getitem, way, told if first == "told" else header)
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    packed.write_bytes(rebuilt((header, told, data)))
    with pytest.raises(InvalidFile, match=re.escape(message)) as refused:
        load_sparse(packed)
    assert str(refused.value).startswith(str(packed))


def test_a_file_without_our_record_is_refused(packed: Path) -> None:
    packed.write_bytes(sealed(packed.read_bytes().replace(b'"dirprune":', b'"dirplums":')))
    with pytest.raises(InvalidFile, match="has no str where 'its metadata' needs one"):
        load_sparse(packed)


def test_the_header_ends_in_the_file_where_data_is_aligned(packed: Path) -> None:
    good = packed.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for wrong in (length - 1, length + 1, 2**40, 2**63):
        packed.write_bytes(sealed(wrong.to_bytes(8, "little") + good[8:]))
        with pytest.raises(InvalidFile, match=f"has a header that ends at byte {wrong + 8} of {len(good)}"):
            load_sparse(packed)
    packed.write_bytes(good[:-9] + b"x" + good[-8:])
    with pytest.raises(InvalidFile, match="is damaged: its content does not have the checksum that it should"):
        load_sparse(packed)


@MANY
def test_accidents_to_packed_weights_are_noticed(packed: Path, examples: int) -> None:
    good = packed.read_bytes()

    def check(data: bytes) -> None:
        found = loaded(packed, data)
        assert (found is not None) == (data == good)

    print(f"packed weights with accidents: {fuzz(damaged(good), check, examples):,} tried")


@MANY
def test_packed_weights_with_a_forged_checksum_are_read_as_the_format_says_or_refused(
    packed: Path, examples: int
) -> None:
    header, told, data = parts(packed.read_bytes())
    accepted = 0

    def check(version: tuple[dict[str, Any], Any, bytes]) -> None:
        nonlocal accepted
        content = rebuilt(version)
        found = loaded(packed, content)
        if found is None:
            return
        accepted += 1
        assert sum(tensor.nbytes for tensor in found.values()) <= 2040 * len(content)
        safetensors.deserialize(content)  # another reader accepts it too
        page = by_the_page(packed)
        assert all(same(found[name], tensor) for name, tensor in page.items())

    kept = st.just(header), st.just(told), st.just(data)
    versions = st.one_of(
        st.tuples(edited(header), kept[1], kept[2]),
        st.tuples(kept[0], edited(told), kept[2]),
        st.tuples(kept[0], kept[1], damaged(data)),
        st.tuples(edited(header), edited(told), damaged(data)),
    )
    tried = fuzz(versions, check, examples)
    print(f"forged packed weights: {tried:,} tried, {accepted:,} of them accepted, rightly")
    assert accepted > examples / 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs."""
    recipe = replace(recipes.get("digits-short"), epochs=2, batch_size=512)
    run = runs.create(tmp_path_factory.mktemp("runs") / "run", recipe)
    list(conduct(run, Surroundings(torch.device("cpu"))))
    return run.folder


def told(folder: Path) -> runs.History | None:
    """Return what the run tells, after reporting on it, or None if an error of ours refuses it and names a file."""
    try:
        found = report.report([folder])
        found.to_dict()
        for group in found.groups:
            for history in group.runs:
                report.layerwise(history)
        return runs.load(folder).read()
    except (ValueError, OSError, checkpoint.CorruptCheckpoint) as error:
        said = str(error)
    assert str(folder) in said
    return None


def numbers(content: Any) -> Any:
    """Return JSON content in which NaN, which equals nothing, is the text "nan"."""
    return json.loads(json.dumps(content), parse_constant=lambda word: word)


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "outcome.json", "environment.json"])
@SLOWER
def test_records_of_a_run_say_what_is_in_them_or_are_refused(
    finished: Path, tmp_path: Path, file: str, examples: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    path, good = folder / file, (folder / file).read_bytes()
    in_lines = file.endswith("l")
    content = [json.loads(line) for line in good.splitlines()] if in_lines else json.loads(good)
    accepted = 0

    def check(version: Any) -> None:
        nonlocal accepted
        if isinstance(version, bytes):
            path.write_bytes(version)
        elif in_lines:
            path.write_text("".join(json.dumps(line) + "\n" for line in version))
        else:
            path.write_text(json.dumps(version))
        history = told(folder)
        if history is None:
            return
        accepted += 1
        if file == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text(errors="replace").splitlines()[: len(history.records)]]
            for line, record in zip(lines, history.records, strict=True):
                assert all(line.get(name) in (value, None) for name, value in record.to_dict().items())
                assert 0 <= record.test_accuracy <= 100 or math.isnan(record.test_accuracy)
            assert [record.epoch for record in history.records] == sorted({record.epoch for record in history.records})
        elif file == "outcome.json" and history.outcome and history.outcome.zeros:
            assert [layer["zeros"] for layer in json.loads(path.read_bytes())["layers"]] == [
                layer.zeros for layer in history.outcome.zeros.layers
            ]
            assert all(0 <= layer.zeros <= layer.total for layer in history.outcome.zeros.layers)

    tried = fuzz(st.one_of(damaged(good), edited(content)), check, examples)
    print(f"{file}: {tried:,} tried, {accepted:,} accepted")


@SLOWER
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.filterwarnings("ignore::dirprune.lab.records.checkpoint.CheckpointWarning")
def test_checkpoints_with_a_forged_checksum_are_networks_or_refused(
    finished: Path, tmp_path: Path, examples: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "outcome.json").unlink()  # so that the report has to count in the checkpoint
    for epoch in checkpoint.epochs(folder / "checkpoints")[:-1]:
        checkpoint.path_of(folder / "checkpoints", epoch).unlink()  # so that there is nothing to go back to
    path = checkpoint.path_of(folder / "checkpoints", 2)
    good = path.read_bytes()
    state = checkpoint.load(path)
    content = {key: state[key] for key in ("epoch", "model", "parameters", "recipe")}
    accepted = 0

    def check(version: Any) -> None:
        nonlocal accepted
        if isinstance(version, bytes):
            path.write_bytes(version)
        else:
            torch.save(version, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")
        accepted += told(folder) is not None

    tried = fuzz(st.one_of(damaged(good), edited(content)), check, examples)
    print(f"checkpoints: {tried:,} tried, {accepted:,} accepted")
