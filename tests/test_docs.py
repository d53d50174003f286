"""The documentation is correct: its code runs, its links work, its commands exist, its reference is complete.

The fence of a block says how it is tested. ``python`` is executed; the blocks of a page share a namespace and an empty
folder. ``python no-run`` is only compiled, because it needs a GPU or several processes. The commands of ``sh run`` are
executed too, in the same folder; those of ``sh`` are only checked against the command-line interface.
"""

from __future__ import annotations

import inspect
import re
import shlex
import socket
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import dirprune
from dirprune.lab.cli.app import app
from dirprune.lab.training import recipes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = ROOT / "docs" / "reference.md"
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PUBLIC = {
    *("GRDA", "sparsity", "SparsityReport", "prunable_groups", "HessianOperator", "top_eigenpairs", "Eigenpairs"),
    *("directional_score", "directional_prune", "BezierCurve", "fit_curve", "curve_profile", "Plane", "plane_profile"),
}
REGISTRY = re.compile(r"https?://\S*(pypi|pythonhosted|conda|npmjs|crates\.|download\.pytorch|docker)", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its words after the fence, its text, and the line of the page where the text begins."""

    kind: str
    text: str
    line: int


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text()
    return tuple(
        Block(found[2].strip(), textwrap.dedent(found[3]), text.count("\n", 0, found.start(3)) + 1)
        for found in FENCE.finditer(text)
    )


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs(block: Block) -> bool:
    return block.kind in ("python", "sh run")


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set what torchrun sets for a single process, and leave no process group behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(key, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(runs, blocks(page)))], ids=name)
@pytest.mark.usefixtures("_one_process")
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recipes, "_RECIPES", dict(recipes._RECIPES))  # a page may register recipes
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in filter(runs, blocks(page)):
        if block.kind == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\.")  # torch's warnings about its own code
                exec(code, namespace)
        else:
            for words in commands(block.text):
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{page}:{block.line}: dirprune {shlex.join(words)}: {result.output}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_of_a_known_kind_and_python_compiles(page: Path) -> None:
    for block in blocks(page):
        assert block.kind in ("", "python", "python no-run", "sh", "sh run", "text"), f"{page}:{block.line}"
        if block.kind == "python no-run":
            compile(block.text, f"{page}:{block.line}", "exec")


def test_few_blocks_are_not_run() -> None:
    kinds = [block.kind for page in PAGES for block in blocks(page)]
    assert kinds.count("python no-run") <= 2 < kinds.count("python")


def commands(text: str) -> list[list[str]]:
    """Return the words after `dirprune` in each line that calls it, itself or as `python -m dirprune`."""
    joined = text.replace("\\\n", " ")
    head = r"^(?:\w+=\S* +)*(?:(?:python|torchrun) .*?-m +)?(?:\S*/)?"
    found = re.findall(head + r"dirprune[ \t]+(.+)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def named_commands(page: Path) -> list[list[str]]:
    """Return the commands in the page's shell blocks and in its prose between backticks."""
    shell = [block.text for block in blocks(page) if not block.kind.startswith("python")]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", prose(page))]
    return [words for text in (*shell, *spans) for words in commands(text) if words]


@cache
def verbs() -> dict[str, set[str]]:
    """Return the verbs of the command line interface and the long options of each."""
    group: Any = typer.main.get_command(app)
    return {
        verb: {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("--") and option != "--help"
        }
        for verb, command in group.commands.items()
    }


def test_commands_are_found_in_text() -> None:
    text = "torchrun --nproc-per-node 2 -m dirprune train digits \\\n  --c 1  # a remark\nls\nA=1 bin/dirprune demo\n"
    assert commands(text) == [["train", "digits", "--c", "1"], ["demo"]]
    assert commands("from dirprune import GRDA") == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_named_exists(page: Path) -> None:
    for verb, *words in named_commands(page):
        if verb in ("--help", "--version", "VERB"):
            continue
        assert verb in verbs(), f"{name(page)} names `dirprune {verb}`; there are {', '.join(verbs())}"
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - verbs()[verb] - {"--help"}
        assert not unknown, f"{name(page)}: `dirprune {verb}` has no {', '.join(sorted(unknown))}"


def sections(page: Path) -> dict[str, str]:
    """Return the text under each heading, up to the next one, by the heading without its backticks."""
    pieces = re.split(r"^#+ +(.+)$", prose(page), flags=re.MULTILINE)[1:]
    return {head.replace("`", ""): body for head, body in zip(pieces[::2], pieces[1::2], strict=True)}


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_the_reference_has_every_option_of_a_verb(verb: str) -> None:
    body = sections(REFERENCE).get(f"dirprune {verb}")
    assert body is not None, f"docs/reference.md has no section `dirprune {verb}`"
    rows = re.findall(r"^\|(.+?)\|", body, re.MULTILINE)
    listed = {option for row in rows for option in re.findall(r"--[a-z][a-z-]*", row)}
    assert listed | {"--json"} == verbs()[verb]  # which every verb has, as the page says once


def test_the_reference_has_the_signatures_of_the_source() -> None:
    """A section that says where its name is imported from must give the name's arguments, kinds and defaults."""
    documented = set()
    for head, body in sections(REFERENCE).items():
        home = re.match(r"\s*`from (dirprune[.\w]*) import (\w+)`", body)
        if home is None:
            continue
        given = re.search(rf"`{head}\((.*?)\)`", body, re.DOTALL)
        assert home[2] == head, f"the section {head} imports {home[2]}"
        assert given is not None, f"{head}: no signature"
        scope: dict[str, Any] = {"cross_entropy": cross_entropy}
        exec(f"def written({given[1]}): ...", scope)
        source = inspect.signature(getattr(import_module(home[1]), head))
        assert arguments(inspect.signature(scope["written"])) == arguments(source), head
        documented.add(head)
    assert documented >= {*dirprune.__all__, *PUBLIC}


def arguments(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    """Return what can be given: without a *name, which is there only to refuse what was given by place."""
    given = (p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL)
    return [(p.name, p.kind, p.default) for p in given]


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(other), f"{name(page)} links to {target}; {sorted(anchors(other))}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_names_a_package_registry(page: Path) -> None:
    assert REGISTRY.search(page.read_text()) is None
