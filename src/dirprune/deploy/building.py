"""Builds the C kernels: by the compiler of the machine at first use, or by zig for every target of the wheels."""

from __future__ import annotations

# What only a compilation needs is imported there: a saved network loads faster than those modules.
import functools
import hashlib
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
COMMON = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
WIDE = ("-mprefer-vector-width=512",)
VARIANTS = {"x86_64": ("x86_64_v4", "x86_64_v3", "x86_64_v1"), "aarch64": ("aarch64",)}
"""For each architecture the instruction sets that kernels are built for, the fastest first."""
_NEEDED = {
    "x86_64_v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86_64_v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}


class NoKernels(RuntimeError):
    """The kernels are neither installed nor can they be built here."""


def architecture() -> str:
    """Return this machine's architecture, by one name on every system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def variant() -> str:
    """Return the fastest instruction set that this CPU has; DIRPRUNE_KERNELS overrides it."""
    offered = VARIANTS.get(architecture())
    if offered is None:
        raise NoKernels(f"dirprune.deploy has no kernels for {platform.machine()}; they exist for x86-64 and aarch64")
    wanted = os.environ.get("DIRPRUNE_KERNELS")
    if wanted and wanted not in offered:
        raise NoKernels(f"DIRPRUNE_KERNELS={wanted} is unknown here; give one of {', '.join(offered)}")
    flags = _flags()
    return wanted or next(name for name in offered if _NEEDED.get(name, set()) <= flags)


def _flags() -> set[str]:
    """Return what the CPU says it can do; nothing where the system does not tell."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return set(next((line for line in lines if line.startswith("flags")), "").split())
    if sys.platform == "darwin" and architecture() == "x86_64":
        import subprocess

        told = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"],
            capture_output=True,
            text=True,
            check=False,
        )
        named = told.stdout.lower().split()
        return {{"avx2.0": "avx2"}.get(name, name) for name in named}
    return set()


def sources() -> list[Path]:
    """Return the C files, in order."""
    return sorted(KERNELS.glob("*.c"))


def compilers() -> list[list[str]]:
    """Return the compilers that are here: $CC, the system's, and zig of the package ziglang."""
    import shlex
    import shutil

    found = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found += [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    if find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def flags(name: str, *, zig: bool = False, checked: bool = False) -> list[str]:
    """Return the flags for one instruction set; ``checked`` builds compare every access with its bounds."""
    own = name.removesuffix("_v1")
    if name == "aarch64":
        target = ["-mcpu=generic"] if zig else []
    else:
        target = [f"-mcpu={own}" if zig else f"-march={own.replace('_', '-')}"]
    wide = WIDE if name == "x86_64_v4" else ()
    return [*COMMON, *target, *wide, *(["-DCHECKED"] if checked else [])]


def built(name: str, *, checked: bool = False) -> Path:
    """Return the library for one instruction set: installed with the package, built before, or built now.

    Raises:
        NoKernels: no compiler is here, or none of them builds it; the message says what to install.
    """
    installed = KERNELS / "lib" / f"{sys.platform}-{name}.so"
    if installed.is_file() and not checked:
        return installed
    text = b"".join(path.read_bytes() for path in (*sources(), *sorted(KERNELS.glob("*.h"))))
    stamp = hashlib.sha256(text + repr((COMMON, WIDE)).encode()).hexdigest()[:16]
    kept = _cache() / f"{stamp}-{name}{'-checked' if checked else ''}.so"
    if not kept.is_file():
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _build(name, kept, checked)
    return kept


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dirprune" / "kernels"


def _build(name: str, target: Path, checked: bool) -> None:
    """Compile into place, completely or not at all, by the first compiler that succeeds."""
    import shlex
    import subprocess
    import tempfile

    said = "no C compiler was found"
    for compiler in compilers():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            options = flags(name, zig=compiler[-2:] == ["ziglang", "cc"], checked=checked)
            ran = subprocess.run(
                [*compiler, *options, "-o", str(made), *map(str, sources())],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode == 0:
                made.replace(target)
                return
            said = f"{shlex.join(compiler)} failed: {ran.stderr.strip()[-500:]}"
    raise NoKernels(
        f"dirprune.deploy could not build its kernels ({said}); install a C compiler "
        "(Debian, Ubuntu: apt install gcc), or the package ziglang by pip; the rest of dirprune works without"
    )
