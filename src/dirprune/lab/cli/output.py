"""What a command prints on stdout: tables and paths for people, or one JSON object per line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from dirprune.lab.cli.console import say, wrapped
from dirprune.lab.records.files import to_json
from dirprune.lab.text import NOTHING, printable

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of tables.")]
HtmlOption = Annotated[
    bool, typer.Option("--html", help="Write a page too: one file with everything, to open or send.")
]
_WORDS = 20  # minimum width of a text column, as long as another column can be narrowed instead


@dataclass(frozen=True)
class Output:
    """The results of a command on stdout, as text or as JSON; messages go to stderr, with `say`."""

    as_json: bool = False

    def record(self, values: Mapping[str, Any]) -> None:
        """Print a result as a line of JSON, if that is wanted."""
        if self.as_json:
            _print(to_json(values))

    def tell(self, text: str) -> None:
        """Print what belongs to the tables, such as a note or a path, unless JSON is wanted."""
        if not self.as_json:
            text = printable(text)
            _print(wrapped(text) if sys.stdout.isatty() else text)

    def rows(self, title: str, cells: Sequence[Mapping[str, str]], *, left: int = 1, spare: Sequence[str] = ()) -> None:
        """Print a table of rows, each of them as text by column; see `table`."""
        if cells:
            self.table(title, list(cells[0]), [list(row.values()) for row in cells], left=left, spare=spare)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        left: int = 1,
        spare: Sequence[str] = (),
    ) -> None:
        """Print a table without its empty columns, unless JSON is wanted.

        If it is too wide for the terminal, or for 80 columns where there is none, it takes the first shape that fits.

        Args:
            title: printed above the table.
            columns: the headers.
            rows: the cells; `NOTHING` stands for no value.
            left: number of leading columns that hold text; the others hold numbers.
            spare: columns that may be dropped if there is too little room, in the order of dropping.
        """
        if self.as_json:
            return
        told = sys.stdout.isatty() or None
        console = Console(file=(text := io.StringIO()), force_terminal=told, markup=False, emoji=False)
        title, lines = printable(title), zip(*(map(printable, line) for line in (columns, *rows)), strict=True)
        every = [_Column(header, cells, number < left) for number, (header, *cells) in enumerate(lines)]
        filled = [column for number, column in enumerate(every) if number == 0 or set(column.cells) != {NOTHING}]
        width = partial(_least_width, console)
        table = min(_shapes(title, filled, spare), key=lambda shape: max(width(shape), console.width))
        console.width = max(console.width, width(table))  # lines that wrap are better than numbers that are cut
        console.print(table)
        _print(text.getvalue().removesuffix("\n"))


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:  # the work continues even if nobody reads its results
        if not isinstance(error, BrokenPipeError):  # a closed pipe needs no message
            say(f"dirprune: cannot write to stdout ({error.strerror}); continuing without it")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@dataclass(frozen=True)
class _Column:
    header: str
    cells: Sequence[str]
    words: bool

    @property
    def longest(self) -> int:
        return max((len(line) for cell in self.cells for line in cell.split("\n")), default=0)

    @property
    def same(self) -> bool:
        """Whether there are several rows and all have the same value."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def _shapes(title: str, columns: Sequence[_Column], spare: Sequence[str]) -> Iterator[Table]:
    """Yield the table in all its shapes, the best first.

    The shapes are: complete; with headers of two lines; transposed; without the columns that are the same in all rows,
    which move to a caption; without more and more of the ``spare`` columns; and all again with less room for texts,
    then for headers.
    """
    first, *others = zip(*((column.header, *column.cells) for column in columns), strict=True)
    turned = [_Column(line[0], line[1:], words=False) for line in others]
    same = [column for column in columns if column.same]
    yield _table(title, columns)
    for words, header in ((_WORDS, _halved), (0, _halved), (0, _longest_word)):
        yield _table(title, columns, words, header)
        yield _table(title, [_Column(first[0], first[1:], words=True), *turned], words, header)
        for count in range(len(spare) + 1):
            gone = [column for column in columns if column.header in spare[:count] and not column.same]
            kept = [column for column in columns if column not in same + gone] or columns[:1]
            yield _table(title, kept, words, header, _caption(same, gone))


def _halved(header: str) -> int:
    """Return the least width at which a header takes two lines at most."""
    words = header.split()
    cuts = range(1, max(2, len(words)))
    return min(max(len(" ".join(part)) for part in (words[:cut], words[cut:])) for cut in cuts)


def _longest_word(header: str) -> int:
    return max(map(len, header.split()), default=0)


def _caption(same: Sequence[_Column], gone: Sequence[_Column]) -> str:
    sentences = {
        "The same in all rows": [f"{column.header} {column.cells[0]}" for column in same],
        "With --json only": [column.header for column in gone],
    }
    return " ".join(f"{what}: {', '.join(items)}." for what, items in sentences.items() if items)


def _table(
    title: str,
    columns: Sequence[_Column],
    words: int | None = None,
    narrowest: Callable[[str], int] = len,
    caption: str = "",
) -> Table:
    """Return a table. If ``words`` is given, text columns wider than that may wrap, but not numbers.

    The first column never wraps, because it identifies the rows. ``narrowest`` is the least width of a header.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", show_edge=False)
    table.caption, table.caption_justify, table.caption_style = caption or None, "left", "none"
    for number, column in enumerate(columns):
        header = column.header
        whole = max(column.longest, narrowest(header))
        if column.words:
            named = number == 0
            least = whole if words is None or named else min(whole, words)
            table.add_column(header, min_width=least, overflow="fold", no_wrap=named)
        else:
            table.add_column(header, width=whole, justify="right")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _least_width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum
