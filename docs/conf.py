"""The site: `make site` builds it from the pages of the repository, which stay plain Markdown, and from docstrings.

Sphinx reads from the root of the repository, so that all links lead where they do there. What it needs besides, it gets
here: the table of contents is that of docs/README.md, and a page for each module of the library is written to docs/api.
"""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import dirprune

ROOT = Path(__file__).parent.parent
MADE = ROOT / "docs" / "api"
MODULES = {
    "dirprune.optim": ("GRDA", "AdamGRDA", "prunable_groups"),
    "dirprune.zeros": ("sparsity", "SparsityReport"),
    "dirprune.cost": ("macs",),
    "dirprune.deploy": None,
    "dirprune.direction": dirprune._HOMES["direction"],
    "dirprune.curvature": None,
    "dirprune.connect": None,
    "dirprune.weights": ("take", "put", "flatten", "unflatten", "combine"),
}
"""The modules of the library with their public names; None for those that a module lists itself."""
CLASS = (
    "   :members:",
    "   :exclude-members: PER_ELEMENT",
    "   :inherited-members: Optimizer, Module, BaseException, tuple, Protocol",
)
"""What is told of a class: also what it inherits from ours, but not from these."""

project = "dirprune"
version = release = dirprune.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/api/*.rst", "src/dirprune/lab/published/README.md"]
exclude_patterns = [".venv", "build", "dist", "runs", "results", "tests"]
nitpicky = True
default_role = "py:obj"

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"dirprune {version}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"


def contents() -> list[tuple[str, list[str]]]:
    """Return the parts of the table of contents: headings in bold in docs/README.md, and the pages linked below."""
    page = ROOT / "docs" / "README.md"
    parts = [("", ["docs/README"])]
    for line in page.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\*\*(.+)\*\*", line):
            parts.append((heading[1], []))
        linked = re.findall(r"\]\(([^)#]+)\.md\)", line)
        parts[-1][1].extend(str((page.parent / each).resolve().relative_to(ROOT)) for each in linked)
    made = ["docs/api/examples", *(f"docs/api/{module}" for module in MODULES)]
    return [*parts[:2], ("The library", made), *parts[2:]]


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents to the first page, where readers of the repository need none; mend other pages."""
    source[0] = source[0].replace("](../examples)", "](api/examples.rst)")
    if name == root_doc:
        app.env.note_dependency(ROOT / "docs" / "README.md", docname=name)
        for caption, pages in contents():
            lines = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages, "```"]
            source[0] += "\n\n" + "\n".join(lines)
    elif name.startswith("src/"):  # reached from one page only
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def write_pages(app: Sphinx) -> None:
    """Write a page for each module, in which a name that `dirprune` has is called so, and one of the examples."""
    MADE.mkdir(exist_ok=True)
    for module, names in MODULES.items():
        home = import_module(module)
        lines = [*_heading(module), f".. automodule:: {module}", ""]
        listed = [f"dirprune.{name}" if name in dirprune.__all__ else name for name in names or home.__all__]
        lines += [".. autosummary::", "   :nosignatures:", "", *(f"   ~{name}" for name in listed), ""]
        for name in listed:
            value = getattr(home, name.removeprefix("dirprune."))
            kind, options = ("class", CLASS) if isinstance(value, type) else ("function", ())
            lines += [f".. auto{kind}:: {name}", *options, ""]
        if module == "dirprune.optim":
            lines += [*_heading("A target", "-"), ".. automodule:: dirprune.optim.target", ""]
        _write(f"{module}.rst", lines)
    lines = _heading("Examples")
    for script in sorted((ROOT / "examples").glob("*.py")):
        lines += [*_heading(script.name, "-"), f".. literalinclude:: ../../examples/{script.name}", ""]
    _write("examples.rst", lines)


def _heading(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


def _write(name: str, lines: list[str]) -> None:
    """Write a page, unless it is there already: Sphinx reads pages again whose time is new."""
    page, text = MADE / name, "\n".join(lines)
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def find_name(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Node) -> nodes.Node | None:
    """Resolve a name in backticks: lead to what a page tells of it, or show it, if torch or our source has it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    told = {name for name in env.domains.python_domain.objects if name.endswith(f".{target}")}
    if len({name.rpartition(".")[0] for name in told}) == 1 or f"dirprune.{target}" in told:
        return env.domains.python_domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", min(told, key=len), node, shown
        )
    return shown if told or _exists(target) else None


def _exists(target: str) -> bool:
    """Return whether torch has a name, or a module of ours."""
    for home in ("torch", *(name for name in sorted(sys.modules) if name.startswith("dirprune"))):
        with suppress(ImportError, AttributeError, ValueError):
            resolve_name(f"{home}.{target.removeprefix('torch.')}")
            return True
    return False


def write_formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show by themselves."""
    block = isinstance(node, nodes.math_block)
    for formula in re.split(r"\n\s*\n", node.astext()):
        written = tex2mathml(formula, as_block=block)
        translator.body.append(f'<div style="overflow-x: auto">{written}</div>' if block else written)
    raise nodes.SkipNode


def complete(app: Sphinx, error: Exception | None) -> None:
    """Let the first page be found as index.html too, with the images that it places by HTML."""
    if error is None:
        out = Path(app.outdir)
        shutil.copy(out / "README.html", out / "index.html")
        for image in re.findall(r'<img src="(docs/[^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8")):
            (out / image).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / image, out / image)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_contents)
    app.connect("missing-reference", find_name)
    app.connect("build-finished", complete)
    app.add_html_math_renderer("mathml", inline_renderers=(write_formula, None), block_renderers=(write_formula, None))
