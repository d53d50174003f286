"""What a result was made with: versions, hardware, commit and command of every session that worked in a folder."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

import dirprune
from dirprune.lab.records.columns import Count, Number, record
from dirprune.lab.records.files import read_json, write_json
from dirprune.lab.text import printable


@dataclass(frozen=True)
class Session:
    """The circumstances of a session; what an old one did not record is empty.

    ``data`` is the folder of the data sets, ``examples`` the number of training examples. ``fingerprint`` is a checksum
    of data that are not the same everywhere.
    """

    time: str = ""
    command: str = ""
    commit: str = ""
    dirprune: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""
    device: str = ""
    threads: Number | None = None
    processes: Number | None = None
    data: str = ""
    examples: Count | None = None
    fingerprint: str = ""


class DamagedSessions(UserWarning):
    """An environment.json could not be read, and was kept under another name."""


def sessions(folder: Path) -> list[Session]:
    """Return the sessions that worked in a folder, the first first."""
    path, remedy = folder / "environment.json", "correct it, or, if you can do without it, delete it"
    if not path.exists():
        return []
    try:
        return [record(Session, values) for values in read_json(path, list, remedy)]
    except ValueError as error:
        raise (
            error if str(path) in str(error) else ValueError(f"{path} holds no sessions: {error}; {remedy}")
        ) from error


def note_session(folder: Path, session: Session) -> None:
    """Append a session to the folder's environment.json; a damaged one does not prevent a run from continuing."""
    path = folder / "environment.json"
    try:
        earlier = sessions(folder)
    except ValueError as error:
        kept, earlier = path.with_suffix(".damaged.json"), []
        path.replace(kept)
        warnings.warn(f"{error}. It is kept as {kept.name}, and a new one is begun", DamagedSessions, stacklevel=2)
    write_json(path, [asdict(each) for each in (*earlier, session)])


def environment(device: torch.device, world_size: int = 1) -> Session:
    """Return versions, hardware, commit and command: what is needed to repeat a result."""
    cuda = device.type == "cuda"
    return Session(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=printable(shlex.join(["dirprune", *sys.argv[1:]])),
        commit=commit(),
        dirprune=dirprune.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if cuda else _processor(),
        threads=torch.get_num_threads(),
        processes=world_size,
    )


@cache
def commit() -> str:
    """Return the commit of the running source, with a + if there are uncommitted changes; "" outside a repository.

    The result is cached, because a process keeps running the source that it imported. $DIRPRUNE_COMMIT takes
    precedence, for machines that have the source without its repository, or on top of an older commit.
    """
    if told := os.environ.get("DIRPRUNE_COMMIT"):
        return told
    here = Path(dirprune.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(here / "__init__.py"))  # fails if this is somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    """Return the name and cores of the CPU if the system reports them, otherwise the architecture."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{names[0]}, {len(names)} cores" if names else f"{platform.machine()} CPU"
