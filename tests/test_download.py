"""Download archives from a local server that disconnects or sends something else."""

import hashlib
import io
import random
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dirprune.lab.data.download import Archive, DownloadError, Fetched, File, fetch

CONTENT = {"train.bin": random.Random(0).randbytes(300_000), "test.bin": random.Random(1).randbytes(50_000)}
FILES = {name: File(len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENT.items()}


def member(name: str, data: bytes = b"", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, data


def tar(*extra: tuple[tarfile.TarInfo, bytes], content: dict[str, bytes] = CONTENT) -> bytes:
    """Pack the good archive (a folder, an unwanted readme, the files), with `extra` members before the files."""
    packed = io.BytesIO()
    files = [member(f"set/{name}", data) for name, data in content.items()]
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for info, data in (member("set", type=tarfile.DIRTYPE), member("set/readme.html", b"hello"), *extra, *files):
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


@dataclass
class Server:
    """What the server sends, at most `limit` bytes of it, and the number of requests it got."""

    body: bytes
    limit: int | None = None
    asked: int = 0
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server(tar())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            self.wfile.write(state.body[: state.limit])

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Log nothing, to keep the output of the tests short."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_address[1]}/set.tar.gz"
        yield state
        http.shutdown()
        thread.join()


def get(server: Server, to: Path, **options: object) -> Fetched:
    archive = Archive(url=server.url, filename="set.tar.gz", folder="set", files=FILES)
    return fetch("set", to, archives={"set": archive}, **options)  # type: ignore[arg-type]


def assert_complete(to: Path, *others: str) -> None:
    """Assert that the set is present, byte for byte, and nothing else: no archive, no part, no temporary folder."""
    assert {path.name for path in to.iterdir()} == {"set", *others}
    assert {path.name: path.read_bytes() for path in (to / "set").iterdir()} == CONTENT


def test_download_unpacks_what_is_expected(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert get(server, tmp_path / "new") == Fetched(tmp_path / "new" / "set", "download")
    assert_complete(tmp_path / "new")
    assert capsys.readouterr() == ("", "")  # the bar is drawn at a terminal only


def test_present_and_verified_is_left_alone(server: Server, tmp_path: Path) -> None:
    get(server, tmp_path)
    assert get(server, tmp_path).source == "present"
    assert server.asked == 1


def test_damaged_set_is_mended_and_other_files_are_kept(server: Server, tmp_path: Path) -> None:
    get(server, tmp_path)
    (tmp_path / "set" / "train.bin").write_bytes(bytes(300_000))
    (tmp_path / "set" / "test.bin").unlink()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    assert get(server, tmp_path).source == "download"
    assert (tmp_path / "set" / "mine.txt").read_text() == "mine"
    (tmp_path / "set" / "mine.txt").unlink()
    assert_complete(tmp_path)


def test_a_broken_download_is_refused_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.limit = 100_000
    with pytest.raises(DownloadError, match=r"deleted, run the command again|cannot download") as error:
        get(server, tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [0.0001, 0.5, 0.999])
def test_truncated_archive_is_refused_and_deleted(server: Server, tmp_path: Path, cut: float) -> None:
    server.body = server.body[: int(cut * len(server.body))]
    with pytest.raises(DownloadError, match=r"damaged or cut short.*deleted, run the command again"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_flipped_bit_is_refused(server: Server, tmp_path: Path) -> None:
    broken = bytearray(server.body)
    broken[len(broken) // 2] ^= 1
    server.body = bytes(broken)
    with pytest.raises(DownloadError, match=r"wrong SHA-256|damaged"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**CONTENT, "test.bin": bytes(50_000)}, "test.bin has the wrong SHA-256"),
        ({**CONTENT, "test.bin": bytes(50_001)}, "test.bin has 50001 bytes"),
        ({"train.bin": CONTENT["train.bin"]}, "test.bin is missing"),
    ],
)
def test_sound_archive_of_other_content_is_refused(
    server: Server, tmp_path: Path, content: dict[str, bytes], message: str
) -> None:
    server.body = tar(content=content)
    with pytest.raises(DownloadError, match=f"not the official archive: {message}"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "evil",
    [
        member("../outside.txt", b"evil"),
        member("set/../../outside.txt", b"evil"),
        member("/tmp/dirprune-outside.txt", b"evil"),
        member("set/train.bin", type=tarfile.SYMTYPE, linkname="../../outside.txt"),
        member("set/link", type=tarfile.SYMTYPE, linkname="/etc"),
        member("set/test.bin", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member("set/null", type=tarfile.CHRTYPE),
        member("set/pipe", type=tarfile.FIFOTYPE),
    ],
    ids=lambda pair: f"{pair[0].name}-{pair[0].type.decode()}",
)
def test_malicious_archive_is_refused(server: Server, tmp_path: Path, evil: tuple[tarfile.TarInfo, bytes]) -> None:
    server.body = tar(evil)
    to = tmp_path / "deep" / "target"
    with pytest.raises(DownloadError, match="is refused"):
        get(server, to)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert not Path("/tmp/dirprune-outside.txt").exists()


def test_an_archive_costs_no_more_memory_than_the_official_one(server: Server, tmp_path: Path) -> None:
    long = member("././@LongLink", bytes(2**20), type=tarfile.GNUTYPE_LONGNAME)
    pax = member("header", bytes(2**20), type=tarfile.XHDTYPE)
    for evil, message in (([long], "1048576 bytes"), ([pax], "1048576 bytes"), ([member("set/a")] * 1000, "members")):
        server.body = tar(*evil)
        with pytest.raises(DownloadError, match=message):
            get(server, tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_archive_placed_by_hand_is_used_and_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(server.body)
    assert get(server, tmp_path).source == "archive"
    assert not server.asked
    assert_complete(tmp_path, "set.tar.gz")


def test_damaged_archive_placed_by_hand_is_named_and_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(DownloadError, match=r"replace or remove .*set\.tar\.gz"):
        get(server, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar.gz"]


def test_without_network_one_line_says_which_file_to_put_where(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as error:
        get(server, tmp_path, url="http://127.0.0.1:1/set.tar.gz")
    message = str(error.value)
    assert f"put set.tar.gz into {tmp_path} by hand" in message
    assert "http://127.0.0.1:1/set.tar.gz" in message
    assert "\n" not in message


def test_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name='mnist'.*cifar10, cifar100"):
        fetch("mnist", tmp_path)
