"""Check the rules of the code's layout by reading its imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dirprune"
MODULES = sorted(path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py"))
LIBRARY = [m for m in MODULES if m.parts[0] not in ("lab", "__init__", "__main__")]
LAB = [m for m in MODULES if m.parts[0] == "lab" and m != Path("lab/__init__")]

# What each room or module of the library may import of the others; `_support` is open to all.
MAY_IMPORT = {
    "connect": {"weights"},
    "curvature": {"weights"},
    "direction": {"curvature", "weights"},
}
# The rooms of the lab, top first; a module may import from its own room and from those below.
FLOORS = [
    {"app"},
    {"verb"},
    {"cli"},
    {"studies"},
    {"pages"},
    {"plots"},
    {"training"},
    {"methods", "tasks"},
    {"data", "models", "published"},
    {"records"},
    {"names", "own", "progress", "ranges", "stats", "text", "trust"},
]
STUDIES_THAT_READ_ANOTHER = {("reproduction", "bench")}
BESIDES_TORCH = {"optim": {"triton"}, "deploy": {"numpy"}}
"""What modules of the library import besides torch and the standard library."""


@cache
def parsed(module: Path) -> ast.Module:
    return ast.parse((SOURCE / module.with_suffix(".py")).read_text())


@cache
def imports(module: Path) -> set[str]:
    """Return all modules that a file imports anywhere, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def floor(parts: tuple[str, ...]) -> int:
    """Return the floor of a module of the lab, given as the parts of its name after ``dirprune.lab``."""
    room = parts[0]
    if room == "studies" and "verb" in parts:
        room = "verb"
    elif room == "cli" and "app" in parts:
        room = "app"
    for index, rooms in enumerate(FLOORS):
        if room in rooms:
            return index
    raise AssertionError(f"dirprune.lab.{room} stands on no floor: add it to FLOORS")


@pytest.mark.parametrize("module", LIBRARY, ids=str)
def test_the_library_needs_torch_alone_and_points_one_way(module: Path) -> None:
    own = module.parts[0]
    for name in imports(module):
        head, _, rest = name.partition(".")
        if head == "dirprune":
            allowed = {own, "_support"} | MAY_IMPORT.get(own, set())
            assert rest.split(".")[0] in allowed, f"{module} imports {name}"
        else:
            needs = {"torch"} | BESIDES_TORCH.get(own, set()) | sys.stdlib_module_names
            assert head in needs, f"{module} imports {name}"


@pytest.mark.parametrize("module", LAB, ids=str)
def test_the_lab_points_one_way(module: Path) -> None:
    own = module.parts[1:]
    for name in imports(module):
        if not name.startswith("dirprune.lab."):
            continue
        other = tuple(name.split(".")[2:])
        assert floor(own) <= floor(other), f"{module} imports {name}, which stands above it"
        if own[0] == other[0] == "studies" and own[1] != other[1]:
            assert (own[1], other[1]) in STUDIES_THAT_READ_ANOTHER, f"{module} imports {name} of another study"


@pytest.mark.parametrize("module", LAB, ids=str)
def test_only_commands_talk_to_the_terminal(module: Path) -> None:
    if module.parts[1] != "cli" and module.name != "verb":
        assert not {name.split(".")[0] for name in imports(module)} & {"typer", "rich"}


def test_a_class_of_one_name_is_one_thing() -> None:
    homes: dict[str, list[Path]] = {}
    for module in MODULES:
        for node in parsed(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_work_draws_nothing() -> None:
    drawing = {"figures", "verb", "page", "tables"}
    work = [m for m in LAB if m.parts[1] in ("studies", "training", "records") and m.name not in drawing]
    for module in work:
        names = imports(module)
        assert not [
            name for name in names if name.startswith(("matplotlib", "dirprune.lab.plots")) or ".figures" in name
        ]


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, dirprune; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    import dirprune

    assert all(getattr(dirprune, name) is not None for name in dirprune.__all__)
    assert sorted(name for names in dirprune._HOMES.values() for name in names) == sorted(dirprune.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'GRDAA'"):
        dirprune.GRDAA  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("connect", "BezierCurve CurveProfile FitRecord Plane curve_profile fit_curve plane_profile"),
        ("curvature", "Eigenpairs HessianOperator hessian_diagonal top_eigenpairs"),
        ("direction", "directional_path directional_prune directional_score eigenspace_share lam_for_sparsity"),
        ("direction", "nonflat_basis null_projection"),
        ("optim", "GRDA prunable_groups"),
        ("weights", "Weights combine flatten put take unflatten"),
        ("zeros", "SparsityReport sparsity"),
    ],
)
def test_imports_that_users_have_written_keep_working(module: str, names: str) -> None:
    for name in names.split():
        exec(f"from dirprune.{module} import {name}")
