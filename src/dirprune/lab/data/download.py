"""Download the official CIFAR archives: verified file by file, and unpacked safely and atomically."""

import gzip
import hashlib
import http.client
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from torch.hub import download_url_to_file

BLOCK = 2**18
MEMBERS = 1000
"""The most members that an archive is searched for; the official ones have ten."""


class DownloadError(RuntimeError):
    """A download failed; the message says in one line why and what to do."""


@dataclass(frozen=True)
class File:
    """The expected size and checksum of an unpacked file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A gzipped tar that unpacks to `folder`; only `files` are extracted."""

    url: str
    filename: str
    folder: str
    files: Mapping[str, File]


@dataclass(frozen=True)
class Fetched:
    """The folder of a set and its source: already present, an archive placed by hand, or a download."""

    folder: Path
    source: Literal["present", "archive", "download"]


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
ARCHIVES: Mapping[str, Archive] = {
    "cifar10": Archive(
        url=f"{_CIFAR}cifar-10-binary.tar.gz",
        filename="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        files={
            "data_batch_1.bin": File(30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            "data_batch_2.bin": File(30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            "data_batch_3.bin": File(30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            "data_batch_4.bin": File(30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            "data_batch_5.bin": File(30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            "test_batch.bin": File(30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        },
    ),
    "cifar100": Archive(
        url=f"{_CIFAR}cifar-100-binary.tar.gz",
        filename="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        files={
            "train.bin": File(153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
            "test.bin": File(30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
        },
    ),
}


def fetch(
    name: str,
    to: Path,
    *,
    url: str | None = None,
    archives: Mapping[str, Archive] = ARCHIVES,
) -> Fetched:
    """Provide the data set `name` in the folder `to`, downloading it only if necessary.

    A set that is present with the right SHA-256 sums is left alone. An archive in `to` is used. Otherwise the archive
    is downloaded from `url` (by default the official address) and deleted after unpacking. If anything fails, no
    unverified files are left in the set's folder.

    Example: `fetch("cifar10", Path("data"))`
    """
    if name not in archives:
        raise ValueError(f"name={name!r}: nothing to download by that name; known are {', '.join(archives)}")
    archive = archives[name]
    folder, packed = to / archive.folder, to / archive.filename
    if not faults(folder, archive.files):
        return Fetched(folder, "present")
    to.mkdir(parents=True, exist_ok=True)
    placed = packed.exists()
    if not placed:
        _download(url or archive.url, packed)
    try:
        unpack(packed, archive, to)
    except DownloadError as error:
        if placed:
            raise DownloadError(f"{error}; replace or remove {packed} and run the command again") from error
        packed.unlink()
        raise DownloadError(f"{error}; the download was deleted, run the command again") from error
    if not placed:
        packed.unlink()
    return Fetched(folder, "archive" if placed else "download")


def faults(folder: Path, files: Mapping[str, File]) -> list[str]:
    """Return a phrase for each missing or wrong file of `folder`; [] if all are present with the right content."""
    found = []
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != file.size:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {file.size}")
        elif _sha256(path) != file.sha256:
            found.append(f"{name} has the wrong SHA-256")
    return found


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _download(url: str, target: Path) -> None:
    try:
        download_url_to_file(url, str(target), progress=sys.stderr.isatty())
    except (OSError, http.client.HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        raise DownloadError(
            f"cannot download {url} ({getattr(error, 'reason', error)}): check the network and run the command again, "
            f"or put {target.name} into {target.parent} by hand"
        ) from error


def unpack(packed: Path, archive: Archive, to: Path) -> None:
    """Unpack the expected files to a temporary folder, verify them, and move them to to/`archive.folder`."""
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{archive.folder}-") as scratch:
        fresh = Path(scratch) / archive.folder
        fresh.mkdir()
        _extract(packed, archive, fresh)
        wrong = faults(fresh, archive.files)
        if wrong:
            raise DownloadError(f"{packed} is not the official archive: {', '.join(wrong)}")
        folder = to / archive.folder
        if not folder.exists():
            fresh.rename(folder)
        else:  # a damaged set, perhaps with other files of the user: replace only the expected files
            for name in archive.files:
                (fresh / name).replace(folder / name)


class _Frugal(gzip.GzipFile):
    """A compressed tar, whose names and headers are read at once, and therefore may not be larger than a block."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= BLOCK:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def _extract(packed: Path, archive: Archive, into: Path) -> None:
    """Extract the expected members to into/NAME. The file names come from this module, never from the archive."""
    expected = {PurePosixPath(archive.folder, name): name for name in archive.files}
    try:
        with _Frugal(packed) as unzipped, tarfile.open(fileobj=unzipped, mode="r:") as tar:
            for number, member in enumerate(tar):
                if number == MEMBERS:
                    raise DownloadError(f"{packed} is refused: it has more than {MEMBERS} members")
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise DownloadError(f"{packed} is refused: {member.name!r} is a link or leaves its folder")
                if path not in expected or not member.isfile():
                    continue
                name = expected[path]
                if member.size != archive.files[name].size:  # check before writing: it might fill the disk
                    raise DownloadError(f"{packed} is not the official archive: {name} has {member.size} bytes")
                stream = tar.extractfile(member)
                assert stream is not None, "a regular file has content"
                with stream, (into / name).open("wb") as target:
                    shutil.copyfileobj(stream, target, BLOCK)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DownloadError(f"{packed} is damaged or cut short ({error})") from error
