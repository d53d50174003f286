"""The wheels: kernels come compiled, and a saved network runs beside numpy alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from test_runtime import Everything, thin

from dirprune import deploy
from dirprune.deploy import building

ROOT = Path(__file__).parent.parent
CHECK = Path(__file__).parent / "kernels_check.c"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (find_spec("hatchling") and find_spec("ziglang")), reason="`make soak` installs the builders"
    ),
]


def wheel(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"DIRPRUNE_TARGET": target}, check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved network, an input, and what the network makes of it."""
    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    runtime = deploy.compile(thin(Everything(), 0.3), torch.zeros(1, 3, 40, 44))
    x = np.random.default_rng(0).standard_normal((3, 3, 40, 44), np.float32)
    runtime.save(folder / "net.safetensors")
    np.savez(folder / "x.npz", x)
    np.savez(folder / "y.npz", *runtime(x))
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the wheels' targets are named for Linux here")
def test_a_saved_network_runs_from_the_wheel_beside_numpy_alone(network: Path, tmp_path: Path) -> None:
    built = wheel(f"linux-{building.architecture()}", tmp_path)
    assert "manylinux2014" in built.name
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, f"numpy=={np.__version__}", str(built)], check=True)
    code = """if True:
        import numpy as np
        from dirprune import deploy
        for threads in (1, 2):
            found = deploy.load("net.safetensors", threads=threads)(*np.load("x.npz").values())
            for ours, wanted in zip(found, np.load("y.npz").values(), strict=True):
                np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    """
    bare = {"PATH": "", "HOME": str(tmp_path)}  # no compiler is found, and no cache
    subprocess.run([str(python), "-c", code], cwd=network, env=bare, check=True)
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("target", ["linux-x86_64", "linux-aarch64", "darwin-x86_64", "darwin-aarch64"])
def test_every_wheel_brings_all_instruction_sets_and_all_of_the_source(target: str, tmp_path: Path) -> None:
    names = ZipFile(wheel(target, tmp_path)).namelist()
    system, _, architecture = target.partition("-")
    for variant in building.VARIANTS[architecture]:
        assert f"dirprune/deploy/kernels/lib/{system}-{variant}.so" in names
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.removeprefix("src/") for name in tracked.split()} <= set(names)


@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-user, a package of Debian")
def test_the_arm_kernels_compute_what_plain_loops_do(tmp_path: Path) -> None:
    program = tmp_path / "check"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static"]
    options = [flag for flag in building.flags("aarch64", zig=True) if flag not in ("-shared", "-fPIC")]
    sources = [str(path) for path in (CHECK, *building.sources())]
    subprocess.run([*compiler, *options, f"-I{building.KERNELS}", "-o", str(program), *sources], check=True)
    said = subprocess.run(["qemu-aarch64", str(program)], capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "ok"
