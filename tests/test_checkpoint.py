from __future__ import annotations

import errno
import hashlib
import os
import pickle
import resource
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dirprune.lab.records.checkpoint import (
    CheckpointWarning,
    CorruptCheckpoint,
    checksum,
    epochs,
    latest,
    load,
    path_of,
    prune,
    save,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def files_of(*saved: int) -> list[str]:
    return [f"epoch-{epoch:04d}.pt{suffix}" for epoch in saved for suffix in ("", ".sha256")]


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def drop_sidecar(path: Path) -> None:
    Path(f"{path}.sha256").unlink()


def garble_sidecar(path: Path) -> None:
    Path(f"{path}.sha256").write_bytes(b"\xff\xfe\x00")


DAMAGES = [flip_byte, truncate, empty, drop_sidecar, garble_sidecar]


def test_every_value_comes_back_bit_for_bit(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    tensors = {str(dtype): torch.randn(5, 7, generator=generator).to(dtype) for dtype in dtypes}
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors["random state"] = torch.get_rng_state()
    tensors["scalar"] = torch.tensor(3)
    plain = {"epoch": 4, "lr": 0.1, "name": "digits", "history": [1, 2.5, None, True], "nested": {"betas": (0.9, 0.99)}}

    restored = load(save(folder, 4, {"tensors": OrderedDict(tensors), **plain}))

    loaded = restored.pop("tensors")
    assert restored == plain
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_a_part_of_a_tensor_is_saved_without_the_rest(folder: Path) -> None:
    large = torch.randn(1000, 100)
    state = {"column": large[:, 3], "parts": [large[7], (large[8:10], 1)], "tied": {"a": large, "b": large}}
    path = save(folder, 1, state)
    assert path.stat().st_size < 1.1 * large.nbytes  # the tensor that two names share is stored once
    found = load(path)
    assert torch.equal(found["column"], large[:, 3])
    assert torch.equal(found["parts"][0], large[7])
    assert torch.equal(found["parts"][1][0], large[8:10])
    assert found["tied"]["a"].data_ptr() == found["tied"]["b"].data_ptr()
    assert save(folder, 2, {"column": large[:, 3]}).stat().st_size < 0.1 * large.nbytes
    half, counts = large[:500], Counter({30: 1, 60: 2})
    path = save(folder, 3, {"a": half, "b": half, "counts": counts})
    assert path.stat().st_size < 0.6 * large.nbytes
    assert load(path)["counts"] == counts


def test_an_optimizer_goes_on_as_if_never_stopped(folder: Path) -> None:
    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        weight.grad = weight.detach() ** 2
        optimizer.step()

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    step(weight, optimizer)
    state = load(save(folder, 1, {"weight": weight.detach(), "optimizer": optimizer.state_dict()}))
    step(weight, optimizer)

    resumed = torch.nn.Parameter(state["weight"])
    second = torch.optim.SGD([resumed], lr=0.1, momentum=0.9)
    second.load_state_dict(state["optimizer"])
    step(resumed, second)
    assert resumed.equal(weight)


def test_map_location_places_the_tensors(folder: Path) -> None:
    path = save(folder, 1, {"weight": torch.ones(2)})
    assert load(path, map_location="meta")["weight"].is_meta
    found = latest(folder, map_location=torch.device("meta"))
    assert found is not None
    assert found[1]["weight"].is_meta


def test_files_are_plain_torch_and_sha256sum(folder: Path) -> None:
    path = save(folder, 4, {"weight": torch.ones(2)})
    assert path == folder / "epoch-0004.pt"
    assert names(folder) == files_of(4)
    assert torch.load(path, weights_only=True)["weight"].equal(torch.ones(2))
    check = subprocess.run(["sha256sum", "-c", f"{path.name}.sha256"], cwd=folder, capture_output=True, text=True)
    assert (check.returncode, check.stdout) == (0, "epoch-0004.pt: OK\n")


def test_epochs_are_sorted_as_numbers_and_foreign_files_ignored(folder: Path) -> None:
    assert epochs(folder) == []
    for epoch in (10000, 2, 999):
        save(folder, epoch, {})
    for foreign in ("epoch-5.pt", "best.pt", "epoch-0007.pt.tmp", "epoch-0008.pt.sha256", "epoch-0009.pth"):
        (folder / foreign).touch()
    assert epochs(folder) == [2, 999, 10000]


def test_saving_an_epoch_again_replaces_it(folder: Path) -> None:
    for value in (1, 2):
        save(folder, 3, {"value": value})
    assert latest(folder) == (3, {"value": 2})
    assert names(folder) == files_of(3)


def test_latest_of_nothing_is_none(folder: Path) -> None:
    assert latest(folder) is None
    folder.mkdir()
    assert latest(folder) is None


def test_latest_is_the_newest_and_says_nothing_when_all_is_well(folder: Path) -> None:
    for epoch in (1, 2, 3):
        save(folder, epoch, {"epoch": epoch})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(folder) == (3, {"epoch": 3})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(folder: Path, damage: Any) -> None:
    path = save(folder, 1, {"weight": torch.arange(1000.0)})
    damage(path)
    with pytest.raises(
        CorruptCheckpoint,
        match=r"epoch-0001\.pt (is corrupt|has no checksum|cannot be verified).*; restore it from a copy",
    ):
        load(path)


def test_the_error_gives_both_checksums(folder: Path) -> None:
    path = save(folder, 1, {"weight": torch.arange(1000.0)})
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    flip_byte(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(CorruptCheckpoint, match=f"its sha256 is {found[:8]}…, and should be {expected[:8]}…"):
        load(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_latest_falls_back_past_damage_and_warns(folder: Path, damage: Any) -> None:
    for epoch in (1, 2, 3):
        save(folder, epoch, {"weight": torch.full((100,), float(epoch))})
    damage(folder / "epoch-0003.pt")
    with pytest.warns(CheckpointWarning, match=r"going back to .*epoch-0002\.pt.*epoch-0003\.pt"):
        found = latest(folder)
    assert found is not None
    assert found[0] == 2
    assert found[1]["weight"].equal(torch.full((100,), 2.0))


def test_latest_raises_when_none_is_good(folder: Path) -> None:
    for epoch in (1, 2):
        flip_byte(save(folder, epoch, {"epoch": epoch}))
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint in .*epoch-0002\.pt.*epoch-0001\.pt"):
        latest(folder)


def test_a_sidecar_without_its_file_is_no_checkpoint(folder: Path) -> None:
    save(folder, 1, {"epoch": 1})
    path = save(folder, 2, {"epoch": 2})
    path.unlink()
    assert latest(folder) == (1, {"epoch": 1})
    with pytest.raises(FileNotFoundError, match=r"epoch-0002\.pt"):
        load(path)


class Touch:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_pickle_is_refused_and_not_executed(folder: Path, tmp_path: Path, as_zip: bool) -> None:
    victim = tmp_path / "executed"
    path = save(folder, 1, {})
    with path.open("wb") as file:
        if as_zip:
            torch.save({"payload": Touch(victim)}, file)
        else:
            pickle.dump({"payload": Touch(victim)}, file, protocol=2)  # the protocol of torch's own files
    Path(f"{path}.sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")

    with pytest.raises(CorruptCheckpoint, match=r"epoch-0001\.pt holds more than tensors"):
        load(path)
    assert not victim.exists()
    torch.load(path, weights_only=False) if as_zip else pickle.loads(path.read_bytes())
    assert victim.exists(), "the payload would have run"


@pytest.mark.parametrize("value", [Path("x"), Touch(Path("x"))])
def test_a_state_that_could_not_be_loaded_is_refused_before_anything_is_written(folder: Path, value: object) -> None:
    save(folder, 1, {"epoch": 1})
    with pytest.raises(ValueError, match=r"state holds .*(Path|touch|getattr).*keep to tensors"):
        save(folder, 2, {"value": value})
    assert names(folder) == files_of(1)


@pytest.mark.parametrize("epoch", [-1, -100])
def test_a_negative_epoch_is_refused(folder: Path, epoch: int) -> None:
    with pytest.raises(ValueError, match=f"epoch={epoch} must be at least 0"):
        save(folder, epoch, {})


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("epoch", [2, 3])
def test_a_full_disk_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, epoch: int) -> None:
    for earlier in (1, 2):
        save(folder, earlier, {"epoch": earlier})
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(
            OSError, match=f"epoch {epoch} was not saved .No space left.*intact.*continue; not written"
        ) as caught:
            save(folder, epoch, {"epoch": "new"})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(folder / f"epoch-{epoch:04d}.pt")
    assert names(folder) == files_of(1, 2)
    assert latest(folder) == (2, {"epoch": 2})


def test_a_write_that_the_system_cuts_short_loses_nothing(folder: Path) -> None:
    for earlier in (1, 2):
        save(folder, earlier, {"epoch": earlier})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="epoch 2 was not saved") as caught:
            save(folder, 2, {"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert names(folder) == files_of(1, 2)
    assert latest(folder) == (2, {"epoch": 2})


def test_a_kill_between_the_two_renames_keeps_the_previous_checkpoint(folder: Path) -> None:
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from dirprune.lab.records.checkpoint import save

        folder, rename, renamed = Path(sys.argv[1]), os.replace, []

        def killed_the_fourth_time(source, target):
            if len(renamed) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)
            renamed.append(target)

        os.replace = killed_the_fourth_time
        save(folder, 1, {"epoch": 1})
        save(folder, 2, {"epoch": 2})
    """)
    process = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert process.returncode == -9
    assert names(folder) == [*files_of(1), "epoch-0002.pt.sha256", "epoch-0002.pt.tmp"]
    assert latest(folder) == (1, {"epoch": 1})

    prune(folder, keep=[])
    assert names(folder) == files_of(1)
    save(folder, 2, {"epoch": 2})
    assert latest(folder) == (2, {"epoch": 2})


def test_the_data_reach_the_disk_before_the_names_and_the_checksum_comes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def recording_replace(source: Path, target: Path) -> None:
        replace(source, target)
        events.append(f"rename {target.name}")

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    save(folder, 1, {})
    assert events == [
        "fsync epoch-0001.pt.sha256.tmp",
        "fsync epoch-0001.pt.tmp",
        "rename epoch-0001.pt.sha256",
        "rename epoch-0001.pt",
        "fsync checkpoints",
    ]


@pytest.mark.parametrize(
    ("keep", "last", "kept"),
    [([], 2, [4, 5]), ([1, 3], 2, [1, 3, 4, 5]), ([5, 99], 1, [5]), ([2], 10, [1, 2, 3, 4, 5])],
)
def test_prune_keeps_the_newest_and_the_asked_for(folder: Path, keep: list[int], last: int, kept: list[int]) -> None:
    for epoch in range(1, 6):
        save(folder, epoch, {"epoch": epoch})
    prune(folder, keep, last)
    assert names(folder) == files_of(*kept)
    assert [load(folder / f"epoch-{epoch:04d}.pt")["epoch"] for epoch in kept] == kept


def test_prune_never_deletes_the_last_good_checkpoint(folder: Path) -> None:
    for epoch in range(1, 6):
        save(folder, epoch, {"epoch": epoch})
    for epoch in (4, 5):
        truncate(folder / f"epoch-{epoch:04d}.pt")
    prune(folder, keep=[])
    assert epochs(folder) == [3, 4, 5]
    with pytest.warns(CheckpointWarning, match="going back"):
        assert latest(folder) == (3, {"epoch": 3})


def test_prune_leaves_foreign_files_and_a_missing_folder_alone(folder: Path) -> None:
    prune(folder, keep=[])
    assert not folder.exists()
    save(folder, 1, {})
    (folder / "notes.tmp").touch()
    (folder / "epoch-0000.pt.tmp").touch()
    prune(folder, keep=[])
    assert names(folder) == [*files_of(1), "notes.tmp"]


def test_prune_refuses_to_keep_nothing(folder: Path) -> None:
    with pytest.raises(ValueError, match="last=0 must be at least 1"):
        prune(folder, keep=[], last=0)


@pytest.mark.parametrize("content", [b"", b"\x80\x81", b"0123  epoch-0001.pt\n"])
def test_a_checksum_that_is_none_is_told_from_a_damaged_checkpoint(folder: Path, content: bytes) -> None:
    path = save(folder, 1, {"epoch": 1})
    path.with_name(path.name + ".sha256").write_bytes(content)
    assert len(checksum(folder, 1)) < 64  # reading the sidecar alone raises no error
    with pytest.raises(CorruptCheckpoint, match=r"cannot be verified: epoch-0001\.pt\.sha256 holds no checksum"):
        load(path)


def scripted(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-60])


def saved_as(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "epoch-0002.pt is no file of torch.save: "),
        (lambda path: path.write_bytes(b""), "epoch-0002.pt is no file of torch.save: EOFError"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "epoch-0002.pt is no file of torch.save: "),
        (lambda path: path.write_text("hello"), "epoch-0002.pt "),
        (scripted, "epoch-0002.pt holds more than tensors and plain values, none of which was executed"),
        (saved_as([1, 2]), "epoch-0002.pt holds a list"),
        (saved_as(torch.ones(2)), "epoch-0002.pt holds a Tensor"),
    ],
)
def test_what_is_no_checkpoint_is_passed_over_and_said(
    spoil: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    for epoch in (1, 2):
        save(tmp_path, epoch, {"epoch": epoch})
    path = path_of(tmp_path, 2)
    spoil(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")

    def fault(state: Any) -> str:
        return "" if isinstance(state, dict) else f"holds a {type(state).__name__}"

    with pytest.warns(CheckpointWarning, match=f"going back to .*epoch-0001.pt.*: .*{said}"):
        assert latest(tmp_path, fault=fault) == (1, {"epoch": 1})
    with pytest.raises(CorruptCheckpoint, match=f"{said}.*; restore it from a copy"):
        load(path, fault=fault)
