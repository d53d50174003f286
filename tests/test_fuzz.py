"""Whatever the bytes of a file are, reading it gives what was written, or an error of ours that names the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
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

Check = Callable[[Any], None]
soak = [pytest.mark.soak, pytest.mark.timeout(3600)]
MANY = pytest.mark.parametrize("examples", [300, pytest.param(30_000, marks=soak)], ids=["short", "long"])

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
