"""What a result was made with: versions, hardware, commit and command of every session that worked in a folder."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

import dirprune
from dirprune.lab.records.files import write_json


def sessions(folder: Path) -> list[dict[str, Any]]:
    """Return the environment of each session that worked in a folder; what cannot be read is ignored.

    A damaged environment.json should not prevent a run from continuing.
    """
    path = folder / "environment.json"
    try:
        found = json.loads(path.read_text()) if path.exists() else []
    except ValueError:
        return []
    return [session for session in found if isinstance(session, dict)] if isinstance(found, list) else []


def note_session(folder: Path, session: dict[str, Any]) -> None:
    """Append the environment of a session to the folder's environment.json."""
    write_json(folder / "environment.json", [*sessions(folder), session])


def environment(device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """Return versions, hardware, commit and command: what is needed to repeat a result."""
    cuda = device.type == "cuda"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["dirprune", *sys.argv[1:]]),
        "commit": commit(),
        "dirprune": dirprune.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": world_size,
    }


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
