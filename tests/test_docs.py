"""The documentation is correct: its code runs, its links work, its commands exist, its reference lists every name.

The fence of a block says how it is tested. ``python`` is executed; the blocks of a page share a namespace and an empty
folder. ``python needs PACKAGE`` is executed by itself, where that package is installed. The commands of ``sh run`` are
executed too, in the page's folder; those of ``sh`` are only checked against the command-line interface.
"""

from __future__ import annotations

import re
import shlex
import socket
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import dirprune
import dirprune.deploy
from dirprune.lab.cli.app import app
from dirprune.lab.training import recipes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = ROOT / "docs" / "reference.md"
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"python needs \w+")
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
            execute(page, block, namespace)
        else:
            for words in commands(block.text):
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{page}:{block.line}: dirprune {shlex.join(words)}: {result.output}"


def execute(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """Run a block of Python; a traceback names the page and its line."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module=r"(torch|transformers|lightning|accelerate|timm)\b"
        )  # about themselves
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_of_a_known_kind_and_python_compiles(page: Path) -> None:
    for block in blocks(page):
        known = block.kind in ("", "python", "sh", "sh run", "text") or NEEDS.fullmatch(block.kind)
        assert known, f"{page}:{block.line}: {block.kind}"
        if block.kind.startswith("python"):
            compile(block.text, f"{page}:{block.line}", "exec")


NEEDING = [(page, block) for page in PAGES for block in blocks(page) if NEEDS.fullmatch(block.kind)]


@pytest.mark.parametrize(("page", "block"), NEEDING, ids=[f"{name(page)}:{block.kind}" for page, block in NEEDING])
def test_a_block_that_needs_a_package_runs(
    page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(block.kind.rpartition(" ")[2], reason="run it with the package installed, or on PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    execute(page, block, {"__name__": "page"})


def test_few_blocks_need_a_package_that_the_tests_do_not_bring() -> None:
    assert len(NEEDING) <= 3 < sum(block.kind == "python" for page in PAGES for block in blocks(page))


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


def section(page: Path, head: str) -> str:
    """Return the text under a heading, up to the next one of its rank or above."""
    rank = len(head) - len(head.lstrip("#"))
    _, _, body = page.read_text().partition(f"\n{head}\n")
    return re.split(rf"^#{{1,{rank}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def words_in_code(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_reference_lists_every_public_name_and_every_command() -> None:
    public = {*dirprune.__all__, *dirprune.deploy.__all__}
    assert public <= words_in_code(section(REFERENCE, "## Names"))
    commands_listed, *_ = section(REFERENCE, "## Commands").partition("Results go to stdout")
    assert words_in_code(commands_listed) == set(verbs())


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_help_explains_every_option(verb: str) -> None:
    """The reference leaves options to --help, so nothing may be missing there."""
    group: Any = typer.main.get_command(app)
    unexplained = [parameter.name for parameter in group.commands[verb].params if not getattr(parameter, "help", None)]
    assert not unexplained, f"dirprune {verb} --help does not explain {', '.join(map(str, unexplained))}"


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
