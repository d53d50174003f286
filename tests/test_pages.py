"""Pages of `--html`: they say what the files say, contain nothing that others could smuggle in, and can be read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from test_cli import call
from test_report import DIGITS, make_run, save_weights

from dirprune import sparsity
from dirprune.lab.cli.page_of_runs import page_of_runs
from dirprune.lab.pages import svg
from dirprune.lab.pages.page import write
from dirprune.lab.plots import METHODS, PALETTE
from dirprune.lab.studies.report.report import report
from dirprune.lab.training.runs import Outcome

EVIL = [
    '"><script>fetch("http://evil.example/")</script>',
    "'><img src=http://evil.example/a.png onerror=alert(1)>",
    "</style></svg><svg onload=alert(1)><style>@import url(http://evil.example/b.css)",
    r"{{ 7 * 7 }} $\frac$ <!-- ]]> &lt;b&gt;",
    "javascript:alert(1)//<iframe srcdoc='<script>alert(1)</script>'>",
]
"""What somebody might write into files that others read."""


class Read(HTMLParser):
    """The elements, their attributes and the text of a page, as a browser understands them."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs in whose files every text is hostile."""
    folder = tmp_path_factory.mktemp("evil")
    folders = [folder / "a<b>&'", folder / "<script>x"]
    for seed, each in enumerate(folders):
        run = make_run(each, DIGITS.but(seed=seed), [50.0, 80.0, 90.0 + seed])
        zeros = sparsity(save_weights(run, 3)).layers
        run.conclude(Outcome())
        outcome = {"diverged": "", "peak_memory_mib": None, "layers": []}
        for number, layer in enumerate(zeros):
            name = layer.name if number else EVIL[0]
            outcome["layers"].append({**vars(layer), "name": f"{name}{EVIL[3] if number == 2 else ''}"})
        (each / "outcome.json").write_text(json.dumps(outcome))
        config = json.loads((each / "config.json").read_text())
        (each / "config.json").write_text(json.dumps(config | {"name": EVIL[1], "about": EVIL[2]}))
        session = dict.fromkeys(("command", "commit", "dirprune", "torch", "python", "platform", "time"), EVIL[2])
        session |= {"device": EVIL[0], "data": EVIL[4], "command": EVIL[3]}
        (each / "environment.json").write_text(json.dumps([session]))
    return write(page_of_runs(report(folders)), folder / "report.html")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison of an older version."""
    out = tmp_path_factory.mktemp("old") / "comparison"
    shutil.copytree(Path(__file__).parent / "old_runs" / "comparison", out)
    call("compare", "--no-train", "--sparsity", "0.5", "--html", "--out", out)
    return out / "comparison.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; Debian's package is called chromium")
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_what_others_wrote_stays_text(evil: Path) -> None:
    page = Read(evil)
    known = (
        "html head meta title style body header h1 h2 h3 p main section dl dt dd div figure figcaption details summary"
    )
    known += " table thead tbody tr th td svg g path use text tspan defs clippath rect"
    assert set(page.tags) <= set(known.split())
    assert page.tags.count("style") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcdoc", "style")]
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    for told in EVIL:
        assert told in page.text, f"{told} is not shown"
    assert "49" not in re.findall(r"\{\{ (.*?) \}\} \$", page.text)


def test_ids_are_unique_and_every_reference_is_one_of_them(evil: Path) -> None:
    attributes = Read(evil).attributes
    ids = [value for name, value in attributes if name == "id"]
    used = {value[1:] for name, value in attributes if name == "href"}
    used |= {found for _, value in attributes for found in re.findall(r"^url\(#(.*)\)$", value)}
    assert len(set(ids)) == len(ids)
    assert used
    assert used <= set(ids)


def test_the_command_writes_what_the_runs_say(tmp_path: Path) -> None:
    for seed, final in enumerate([90.0, 92.0]):
        run = make_run(tmp_path / str(seed), DIGITS.but(name=r"$\frac$", seed=seed), [50.0, 80.0, final])
        run.conclude(Outcome(sparsity(save_weights(run, 3))))
        call("export", run.folder, "--to", f"{run.folder}.safetensors")
    found = call("report", tmp_path / "0", tmp_path / "1", "--html", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.stderr
    assert f"page: {tmp_path / 'out' / 'report.html'}" in found.stdout
    text = Read(tmp_path / "out" / "report.html").text
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) / 2
    for told in (r"gRDA c=0.01 μ=0.7 on $\frac$", "91.00 ± 1.41", f"{size / 1e3:,.1f}", "conv2.weight", "32×16×3×3"):
        assert told in text


def test_the_page_of_a_comparison_ranks_and_lists_every_run(comparison: Path) -> None:
    text = Read(comparison).text
    for told in ("At 50% of the weights zero", "gRDA", "STR", "c=0.02", "decay=0.03", "SGD (dense)", "MACs left (%)"):
        assert told in text


@pytest.mark.parametrize("colour", sorted({*PALETTE[1:], *(shade for shade, _ in METHODS.values())} - {"#000000"}))
def test_a_colour_can_be_seen_in_the_dark(colour: str) -> None:
    assert svg.contrast(svg.in_the_dark(colour), svg.PAPER) >= 3
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", ["evil", "comparison"])
def test_a_browser_shows_the_page(
    chromium: Browser, request: pytest.FixtureRequest, name: str, width: int, dark: bool
) -> None:
    page = request.getfixturevalue(name)
    chromium.open(page, width=width, dark=dark)
    assert chromium.requests == [page.resolve().as_uri()]
    assert chromium.complaints == []
    assert chromium.ask("document.documentElement.scrollWidth <= window.innerWidth")
    paper = chromium.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)")
    ink = chromium.ask("getComputedStyle(document.querySelector('svg text')).fill")
    assert ink == chromium.ask("getComputedStyle(document.body).color") != paper
    sizes = chromium.ask("[...document.querySelectorAll('.phone, .wide')].map(e => [e.className, e.offsetWidth > 0])")
    assert sizes
    assert all(shown == (size == ("phone" if width < 600 else "wide")) for size, shown in sizes)
    chromium.ask("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert chromium.ask("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_browser_would_notice(chromium: Browser, tmp_path: Path) -> None:
    """A page that runs a script, asks for an image and is too wide fails every check above."""
    page = tmp_path / "bad.html"
    page.write_text("<script>nothing()</script><img src='file:///nowhere.png'><div style='width:2000px'>wide</div>")
    chromium.open(page, width=375)
    assert len(chromium.requests) == 2
    assert chromium.complaints
    assert not chromium.ask("document.documentElement.scrollWidth <= window.innerWidth")
