"""Puts compiled kernels into a wheel for the target that DIRPRUNE_TARGET names; without it a wheel has their source."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# For each target: its architecture, zig's name of it, and the wheel's.
TARGETS = {
    "linux-x86_64": ("x86_64", "x86_64-linux-gnu.2.17", "manylinux2014_x86_64"),
    "linux-aarch64": ("aarch64", "aarch64-linux-gnu.2.17", "manylinux2014_aarch64"),
    "darwin-x86_64": ("x86_64", "x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "darwin-aarch64": ("aarch64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
}


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles every instruction set of the target by zig, from the package ziglang."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = os.environ.get("DIRPRUNE_TARGET")
        if not target or version == "editable":
            return
        if target not in TARGETS:
            raise ValueError(f"DIRPRUNE_TARGET={target} is unknown; give one of {', '.join(TARGETS)}")
        building = _building(Path(self.root))
        architecture, zig, tag = TARGETS[target]
        system = target.partition("-")[0]
        for name in building.VARIANTS[architecture]:
            made = Path(self.root) / "build" / "kernels" / target / f"{system}-{name}.so"
            made.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "ziglang", "cc", "-target", zig, "-s", *building.flags(name, zig=True)]
            subprocess.run([*command, "-o", str(made), *map(str, building.sources())], check=True)
            build_data["force_include"][str(made)] = f"dirprune/deploy/kernels/lib/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"


def _building(root: Path) -> Any:
    """Return the module that knows the kernels' sources and flags, without importing the package."""
    spec = spec_from_file_location("building", root / "src" / "dirprune" / "deploy" / "building.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
