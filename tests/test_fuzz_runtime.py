"""A saved runtime that has been tampered with is refused, or computes what its layers say and stays in its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import edited, fuzz
from test_fuzz import MANY, sealed
from test_runtime import Everything, assert_close, thin

from dirprune import deploy
from dirprune.deploy import InvalidFile, Runtime, building, saving
from dirprune.lab.studies.deployment.peers import Twin

pytestmark = pytest.mark.skipif(not building.compilers(), reason="no C compiler")
_SMALL = 300_000  # elements of a value of a network that is worth running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    deploy.compile(thin(Everything(), 0.3), torch.zeros(1, 3, 40, 44)).save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def forged(data: bytes, told: Any) -> bytes:
    """Return a file with other layers and the checksum that belongs to them."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["network"] = json.dumps(told)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sealed(len(text).to_bytes(8, "little") + text + data[end:])


def loaded(file: Path) -> Runtime | None:
    """Return a checked runtime, or None if the file is refused by the error that is ours and names it."""
    try:
        return deploy.load(file, threads=2, checked=True)
    except InvalidFile as error:
        said = str(error)
    assert said.startswith(str(file))
    return None


def several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run_tests(*options: str, **changes: str) -> None:
    """Run tests of the runtime in an environment with changes."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"{here}/test_runtime.py",
        *options,
    ]
    ran = subprocess.run(
        command, env=os.environ | changes, cwd=here.parent, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]


@MANY
def test_forged_layers_are_refused_or_computed_within_bounds(file: Path, examples: int) -> None:
    good = file.read_bytes()
    told = json.loads(json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]["network"])
    accepted = 0

    def check(version: Any) -> None:
        nonlocal accepted
        file.write_bytes(forged(good, version))
        if (runtime := loaded(file)) is None:
            return
        accepted += 1
        network = saving.read(file)
        if max(value.size for value in network.values) > _SMALL:
            return
        xs = [np.random.default_rng(0).standard_normal((2, *value.shape), np.float32) for value in network.inputs]
        found = runtime(*xs)
        with torch.no_grad():
            wanted = Twin(network)(*map(torch.from_numpy, xs))
        if all(bool(each.isfinite().all()) for each in several(wanted)):  # what overflows has no right answer
            for ours, theirs in zip(several(found), several(wanted), strict=True):
                assert_close(ours, theirs)

    tried = fuzz(edited(told), check, examples)
    print(f"forged layers: {tried:,} tried, {accepted:,} of them accepted, rightly")
    assert accepted > examples / 100


def test_an_activation_beyond_float32_is_refused(file: Path) -> None:
    good = file.read_bytes()
    told = json.loads(json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]["network"])
    for activation in ([float("inf"), None, 0.0], [1e308, 6.0, 0.0], [0.0, float("nan"), 0.0], [0.0, None, 1e39]):
        told["layers"][0]["activation"] = activation
        file.write_bytes(forged(good, told))
        assert loaded(file) is None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the sanitizer as gcc does on Linux")
def test_kernels_stay_in_their_memory_under_address_sanitizer(tmp_path: Path) -> None:
    libraries = [  # the second one, so that the first finds how C++ throws, as libraries of other packages do
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    changes = {
        "CC": "gcc -g -fsanitize=address --param asan-instrumentation-with-call-threshold=0",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    build = "from dirprune.deploy import building as b; [b.built(b.variant(), checked=c) for c in (False, True)]"
    subprocess.run([sys.executable, "-c", build], env=os.environ | changes, check=True)  # the compiler itself leaks
    said = tmp_path / "said"
    sanitized = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": f"detect_leaks=0:log_path={said}"}
    run_tests(__file__, "-k", "not without", **changes, **sanitized)
    assert not list(tmp_path.glob("said*"))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="has the thread sanitizer as gcc brings it on Linux")
def test_threads_pass_the_thread_sanitizer(tmp_path: Path) -> None:
    program, check = tmp_path / "check", Path(__file__).parent / "kernels_check.c"
    options = [flag for flag in building.flags(building.variant()) if flag not in ("-shared", "-fPIC", "-O3")]
    sources = [str(path) for path in (check, *building.sources())]
    compiler = ["gcc", "-O1", "-g", "-fsanitize=thread", *options, f"-I{building.KERNELS}"]
    subprocess.run([*compiler, "-o", str(program), *sources, "-lm"], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "ok", (ran.stdout + ran.stderr)[-5000:]
    assert "WARNING" not in ran.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", building.VARIANTS.get(building.architecture(), ()))
def test_every_instruction_set_computes_the_same(variant: str) -> None:
    run_tests(DIRPRUNE_KERNELS=variant)
