"""Check the rules of the code's layout by reading its imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dirprune"
MODULES = sorted(path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py"))

# The library modules that each library module may import; a module that is not listed may import none.
LIBRARY = {
    "state": {"options"},
    "_fused": {"graphs", "state"},
    "optim": {"graphs", "options", "state", "update", "_fused"},
    "batchnorm": {"batches"},
    "lanczos": {"basis", "operators"},
    "curvature": {"batches", "lanczos", "modes", "operators", "products", "weights"},
    "products": {"batches", "weights"},
    "direction": {"basis", "lanczos", "operators", "weights"},
    "landscape": {"batches", "batchnorm", "graphs", "weights"},
    "connect": {"batches", "batchnorm", "graphs", "landscape", "modes", "options", "weights"},
    "theory": {"curvature", "direction", "operators", "weights"},
    "limit_law": {"theory"},
}
# The levels of the lab, top first: a module may import from its own level and from lower ones.
LAB_FLOORS = [
    {"cli", "cli_research", "cli_compare", "cli_reproduce"},
    {
        "follow",
        "tune",
        "report",
        "bench",
        "connectivity",
        "projection",
        "scoring",
        "theory_report",
        "reproduction_page",
        "direction_plots",
        "compare",
        "series",
        "comparison",
        "ranking",
        "trials",
    },
    {"connectivity_files", "connectivity_plots", "comparison_plots", "theory_plots", "reproduction_plots", "reproduce"},
    {"spectrum", "trajectory", "valley"},
    {"experiment"},
    {"recipes", "runs", "plots", "ledger", "published"},
    {"reward"},
    {"train", "checkpoint", "baselines", "execution", "lean", "processes", "schedules"},
    {"data", "models", "download"},
    {"imagefolder", "resident", "cifar"},
    {"loader", "tables", "console", "files", "names", "progress", "tradeoff"},
]
NEEDS = {"_fused": {"torch", "triton"}}
"""What modules of the library import besides the standard library; the others import torch alone."""


def imports(module: Path) -> set[str]:
    """Return all modules that a file imports anywhere, as dotted names."""
    tree = ast.parse((SOURCE / module.with_suffix(".py")).read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            if node.module in ("dirprune", "dirprune.lab"):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                names.add(str(node.module))
    return names


def floor(name: str) -> int:
    for index, members in enumerate(LAB_FLOORS):
        if name in members:
            return index
    raise AssertionError(f"dirprune.lab.{name} stands on no floor: add it to LAB_FLOORS")


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.parts[0] != "lab" and m.name not in ("__init__", "__main__")]
)
def test_the_library_needs_torch_alone_and_points_one_way(module: Path) -> None:
    import sys

    for name in imports(module):
        head, _, rest = name.partition(".")
        if head == "dirprune":
            assert rest.split(".")[0] in LIBRARY.get(module.name, set()), f"{module} imports {name}"
        else:
            allowed = NEEDS.get(module.name, {"torch"}) | sys.stdlib_module_names
            assert head in allowed, f"{module} imports {name}"


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.parts[0] == "lab" and len(m.parts) > 1 and m != Path("lab/__init__")]
)
def test_the_lab_points_one_way(module: Path) -> None:
    own = module.parts[1]
    for name in imports(module):
        if name.startswith("dirprune.lab."):
            other = name.split(".")[2]
            assert floor(own) <= floor(other), f"{module} imports {name}, which stands above it"


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, dirprune; assert 'torch' not in sys.modules; from dirprune import GRDA, sparsity; GRDA; sparsity"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    import dirprune

    assert all(getattr(dirprune, name) is not None for name in dirprune.__all__)
    assert sorted(name for names in dirprune._HOMES.values() for name in names) == sorted(dirprune.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'GRDAA'"):
        dirprune.GRDAA  # noqa: B018
