"""Small files of sparse networks: every bit comes back, other tools can open them, and damage is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from dirprune.deploy import InvalidFile, container, load_sparse, save_sparse
from dirprune.deploy.packing import Packed, pack

DTYPES = [name for name in container.DTYPES if hasattr(torch, name)]
DENSITIES = (0.0, 0.001, 0.05, 0.3, 1.0)


def sparse(*shape: int, density: float = 0.05, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.where(torch.rand(shape) < density, torch.randn(shape), 0.0)


def bits(tensor: Tensor) -> list[int]:
    """Return a tensor's elements as bytes, so that −0.0 and NaNs count as what they are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def reloaded(state: nn.Module | dict[str, Tensor], folder: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    save_sparse(state, folder / "net.safetensors", dtype)
    return load_sparse(folder / "net.safetensors")


def by_the_page(path: Path) -> dict[str, Tensor]:
    """Read a file as its format is described, element by element, through the safetensors library."""
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["dirprune"])
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found: dict[str, Tensor] = {}
    for name, record in told["tensors"].items():
        if "same_as" in record:
            found[name] = found[record["same_as"]]
            continue
        stored = getattr(torch, record.get("stored", record["dtype"]))
        values = parts[name if record["coding"] == "dense" else f"{name}.nonzero"].flatten()
        values = values.view(stored) if values.dtype == torch.uint8 else values
        flat = torch.zeros(int(np.prod(record["shape"])), dtype=stored)
        places = range(len(flat))
        if record["coding"] == "mask":
            mask = parts[f"{name}.mask"].tolist()
            places = [place for place in places if mask[place // 8] >> place % 8 & 1]
        elif record["coding"] == "deltas":
            steps = parts[f"{name}.deltas"].tolist()
            places = [sum(steps[: i + 1]) + i - steps[:i].count(255) for i, step in enumerate(steps) if step < 255]
        for place, value in zip(places, values, strict=True):
            flat[place] = value
        found[name] = flat.to(getattr(torch, record["dtype"])).reshape(record["shape"])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Random bytes are numbers of every kind: −0.0, subnormals, infinities, NaNs with payloads."""
    kind = getattr(torch, dtype)
    top = 2 if kind is torch.bool else 256
    state = {}
    for density in DENSITIES:
        raw = torch.randint(0, top, (40, 48 * kind.itemsize), dtype=torch.uint8)
        kept = (torch.rand(40, 48) < density).repeat_interleave(kind.itemsize, dim=1)
        state[f"density {density}"] = (raw * kept).view(kind)
    loaded = reloaded(state, tmp_path)
    assert list(loaded) == list(state)
    assert all(same(loaded[name], tensor) for name, tensor in state.items())


SHAPES: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "zero": lambda: torch.tensor(0.0),
    "empty": lambda: torch.zeros(0),
    "no rows": lambda: torch.zeros(0, 7),
    "no columns": lambda: torch.zeros(7, 0, 3),
    "all zero": lambda: torch.zeros(1000, 300),
    "negative zeros": lambda: -torch.zeros(100, 100),
    "one value at the end": lambda: torch.arange(10_000) // 9_999 * 1.0,
    **{f"{size} zeros": lambda size=size: torch.zeros(size) for size in (253, 254, 255, 256, 508, 509, 510)},
    **{
        f"a value, {size} zeros": lambda size=size: torch.arange(size + 1).eq(0).float()
        for size in (253, 254, 255, 509, 510)
    },
    "odd": lambda: sparse(37, 41, density=0.4),
    "a skip and a value": lambda: torch.cat([torch.zeros(2550), torch.ones(1), torch.zeros(254), torch.ones(1)]),
    "transposed": lambda: sparse(60, 50).T,
    "every second": lambda: sparse(60, 50)[:, ::2],
    "expanded": lambda: torch.ones(1, 1).expand(30, 40),
    "channels last": lambda: sparse(8, 8, 5, 5).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.complex(sparse(30, 40), sparse(30, 40, seed=1)).conj(),
    "negated": lambda: torch.complex(sparse(30, 40), sparse(30, 40)).conj().imag,
    "parameter": lambda: nn.Parameter(sparse(30, 40)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape_comes_back(case: str, tmp_path: Path) -> None:
    tensor = SHAPES[case]()
    loaded = reloaded({'a name with ünicode, "quotes" and .dots': tensor}, tmp_path)
    (found,) = loaded.values()
    assert same(found, tensor.detach().resolve_conj().resolve_neg())
    assert found.is_contiguous()
    found.add_(1)  # the caller owns it


@pytest.mark.parametrize("density", [*DENSITIES, 0.12])
def test_the_smallest_form_is_taken(density: float) -> None:
    """The sizes are counted in loops, as the format is described."""
    array = sparse(5000, density=density).numpy().view(np.uint32)
    steps, gap = 0, 0
    for value in array:
        gap = gap + 1 if value == 0 else 0
        steps += (value != 0) or (gap > 0 and gap % 255 == 0)
    kept = sum(value != 0 for value in array)
    sizes = {"dense": 4 * 5000, "mask": 4 * kept + 625, "deltas": 4 * kept + steps}
    packed = pack(array)
    used = packed.values.nbytes + (0 if packed.places is None else packed.places.nbytes)
    assert used == sizes[packed.coding] == min(sizes.values())
    kept_places = range(5000) if packed.coding == "dense" else np.flatnonzero(array)
    assert packed.positions().tolist() == list(kept_places)


def test_the_safetensors_library_opens_the_file_and_it_is_as_the_page_says(tmp_path: Path) -> None:
    state = {
        "mask": sparse(40, 50, density=0.4),
        "deltas": sparse(70, 90, density=0.01),
        "dense": torch.randn(5, 6),
        "count": torch.tensor(3),
    }
    path = tmp_path / "net.safetensors"
    save_sparse(state, path, metadata={"made by": "a test"})
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"mask.nonzero", "mask.mask", "deltas.nonzero", "deltas.deltas", "dense", "count"}
        assert file.metadata()["made by"] == "a test"
        assert file.get_slice("dense").get_shape() == [5, 6]
    assert container.read(path, holds="weights").metadata["made by"] == "a test"
    found = by_the_page(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("dtype", "times"), [(None, 12), (torch.float16, 20), (torch.bfloat16, 20)])
def test_a_network_with_95_percent_zeros_is_small(dtype: torch.dtype | None, times: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    channels = (64, 128, 256, 512)
    layers = [
        [nn.Conv2d(a, b, 3, bias=False), nn.BatchNorm2d(b)] for a, b in zip((3, *channels), channels, strict=False)
    ]
    net = nn.Sequential(*[layer for pair in layers for layer in pair], nn.Linear(512, 10))
    for p in net.parameters():
        if p.dim() > 1:
            p.data.copy_(sparse(*p.shape))
    safetensors.torch.save_file(net.state_dict(), tmp_path / "dense.safetensors")
    save_sparse(net, tmp_path / "sparse.safetensors", dtype)
    dense, small = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("dense", "sparse"))
    assert dense > times * small


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 30)
            self.head = nn.Linear(30, 100, bias=False)
            self.head.weight = self.embedding.weight

    net = Tied()
    net.after = nn.Linear(30, 30)
    net.embedding.weight.data.copy_(sparse(100, 30))
    loaded = reloaded(net, tmp_path)
    assert loaded["head.weight"] is loaded["embedding.weight"]
    assert same(loaded["head.weight"], net.head.weight)
    assert same(loaded["after.weight"], net.after.weight)
    assert (tmp_path / "net.safetensors").read_bytes().count(b"deltas") == 2  # its coding, and its entry


def test_views_of_one_storage_are_not_taken_for_shared(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "whole": base,
        "row": base[0],
        "transposed": base[:, :3].T,
        "square": base[:, :3],
        "bits": base.view(torch.int32),
    }
    loaded = reloaded(state, tmp_path)
    assert all(same(loaded[name], tensor) for name, tensor in state.items())
    assert len({id(tensor) for tensor in loaded.values()}) == len(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_torchs_own_and_leaves_vectors_and_other_dtypes_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        "weight": sparse(50, 60, density=0.2),
        "dense": torch.randn(50, 60),
        "wide": torch.randn(50, 60, dtype=torch.float64),
        "infinite": torch.full((3, 4), float("-inf")),
        "bias": torch.randn(60),
        "scale": torch.tensor(1 / 3),
        "index": torch.arange(12).reshape(3, 4),
        "half": torch.randn(20, 30).half(),
    }
    loaded = reloaded(state, tmp_path, dtype)
    for name, tensor in state.items():
        rounded = name in ("weight", "dense", "wide")
        assert same(loaded[name], tensor.to(dtype).to(tensor.dtype) if rounded else tensor), name


def test_a_network_continues_as_it_was(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    net, inputs = network(), torch.randn(4, 3, 8, 8)
    net(inputs)  # moves BatchNorm's statistics
    other = network()
    other.load_state_dict(reloaded(net, tmp_path))
    assert torch.equal(other.eval()(inputs), net.eval()(inputs))


def test_equal_networks_give_equal_files(tmp_path: Path) -> None:
    state = {"b": sparse(40, 50), "a": torch.randn(3)}
    for name in ("one", "two"):
        save_sparse(state, tmp_path / name, metadata={"x": "1", "y": "2"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    save_sparse({"a": torch.ones(3)}, path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_sparse({"a": torch.zeros(3)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    state = {"a": sparse(40, 50), "b": torch.randn(7)}
    save_sparse(state, tmp_path / "net.safetensors")
    code = (
        "import sys, pathlib; from dirprune.deploy import container\n"
        "found = container.read(pathlib.Path(sys.argv[1]), holds='weights').tensors\n"
        "print(*(float(t.packed.unpacked().view('f4').sum(dtype='f8')) for t in found.values()))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "net.safetensors"], capture_output=True, text=True, check=True
    )
    assert [float(word) for word in done.stdout.split()] == [float(t.double().sum()) for t in state.values()]


REFUSED: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "another object": ({"extra": {"a": 1}}, {}, "'extra' is a dict and no tensor; leave it out"),
    "a sparse layout": ({"w": sparse(9, 9).to_sparse()}, {}, "'w' is no plain tensor .*sparse_coo"),
    "without values": ({"w": torch.ones(3, device="meta")}, {}, "'w' is no plain tensor .*on meta"),
    "a taken name": ({"w": torch.zeros(9, 99), "w.deltas": torch.ones(3)}, {}, "name .* is taken in .*; rename it"),
    "metadata's name": ({"__metadata__": torch.ones(3)}, {}, "name of the tensor '__metadata__' is taken"),
    "a dtype": ({}, {"dtype": torch.int8}, "dtype=torch.int8 is not offered; give torch.float16"),
    "half a character": ({"\ud800": torch.ones(3)}, {}, "surrogates not allowed"),
    "overflow": (
        {"w": torch.full((2, 2), 1e5)},
        {"dtype": torch.float16},
        "'w' has values beyond the range of torch.float16",
    ),
    "reserved metadata": ({}, {"metadata": {"sha256": "1"}}, "'sha256', which the file itself uses"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_named_and_leaves_no_file(case: str, tmp_path: Path) -> None:
    state, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        save_sparse(state, tmp_path / "net.safetensors", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_record_cannot_claim_more_than_255_elements_a_byte() -> None:
    nothing, steps = np.zeros(0, np.uint32), np.full(4, 255, np.uint8)
    assert len(Packed("deltas", 4 * 255 + 254, nothing, steps).unpacked()) == 1274
    for size in (4 * 255 - 1, 4 * 255 + 255, 2**48):
        with pytest.raises(ValueError, match="do not fit"):
            Packed("deltas", size, nothing, steps)
    for size in (24, 33, 2**48):
        with pytest.raises(ValueError, match="do not fit"):
            Packed("mask", size, nothing, np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        Packed("mask", 29, np.zeros(1, np.uint32), np.uint8([0, 0, 0, 1 << 5]))  # a bit after the end


FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello, this is no network at all" * 9,
    "pickle": b"\x80\x04cos\nsystem\n(S'touch marker'\ntR.",
    "another tool's": safetensors.torch.save({"a": torch.ones(3)}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_files_of_others_are_named(case: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(FOREIGN[case])
    with pytest.raises(InvalidFile, match=r"net\.safetensors is no file of packed tensors"):
        load_sparse(path)


def test_a_file_that_holds_something_else_is_not_loaded_as_weights(tmp_path: Path) -> None:
    container.write(tmp_path / "other", {}, holds="a cake")
    with pytest.raises(InvalidFile, match="holds 'a cake', not 'weights'"):
        load_sparse(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="missing"):
        load_sparse(tmp_path / "missing")
