"""Mutants of a source file: small mistakes, each put into the code by itself, that the tests must notice.

    PYTHONPATH=src python tests/mutation.py [--count N] [--seed S] [FILE under src/dirprune ...]

prints every mutant that the file's tests let through, and how many there were. Nothing on disk changes: a process that
has loaded torch and pytest forks for every mutant, and the child imports the mutated code in place of the file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.machinery
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "dirprune"
TESTS = {
    "optim/update.py": ("test_target.py", "test_optim.py", "test_relatives.py"),
    "optim/threshold.py": ("test_target.py", "test_optim.py", "test_adam.py"),
    "optim/target.py": ("test_target.py", "test_adam.py"),
    "optim/selection.py": ("test_target.py", "test_adam.py"),
    "optim/following.py": ("test_target.py", "test_adam.py"),
    "optim/grda.py": ("test_optim.py", "test_target.py"),
    "optim/adam.py": ("test_adam.py",),
    "lab/methods/magnitude.py": ("test_baselines_masks.py", "test_baselines_weights.py"),
    "lab/methods/__init__.py": ("test_compare.py",),
    "deploy/packing.py": ("test_packing.py", "test_fuzz.py"),
}
"""The tests that must notice a mistake in a file, the quickest to notice first."""
SLOW = "compiled or long or example or spoilt"
PRELOADED = (
    "pytest",
    "hypothesis",
    "numpy",
    "scipy.stats",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "triton",
)
"""What tests import besides dirprune: loaded once, before the forks."""
LIMIT = 120  # seconds of computing; a mutant that needs more has an endless loop

Swap = dict[type[Any], type[Any]]
COMPARED: Swap = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: Swap = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMED = {"min": "max", "any": "all", "add": "sub", "mul": "div", "floor": "ceil", "add_": "sub_", "mul_": "div_"}
NAMED |= {there: here for here, there in NAMED.items()}
Change = Callable[[Any], str]
"""Changes a node in place, and says how."""


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the mistakes that can be made at a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield lambda n: _swapped(n.ops, 0, COMPARED)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED:
        yield lambda n: _swapped(vars(n), "op", COMPUTED)
    if isinstance(node, ast.BoolOp):
        yield lambda n: _swapped(vars(n), "op", {ast.And: ast.Or, ast.Or: ast.And})
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield _without_its_operator
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare):
        yield lambda n: _put(n, "test", ast.UnaryOp(ast.Not(), n.test), "condition negated")
    if isinstance(node, ast.Constant) and not isinstance(node.value, type(None) | type(...)):
        yield _other_constant
    if isinstance(node, ast.Attribute | ast.Name) and _name(node) in NAMED:
        yield lambda n: _put(n, "attr" if isinstance(n, ast.Attribute) else "id", NAMED[_name(n)], NAMED[_name(n)])
    if isinstance(node, ast.Call) and node.keywords:
        yield lambda n: f"without {n.keywords.pop().arg}"
    if isinstance(node, ast.Dict) and len(node.values) > 1:
        yield _first_two_values_swapped
    if isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(getattr(node, "value", None), ast.Constant):
        yield _deleted


def _swapped(holder: Any, key: Any, table: Swap) -> str:
    before, after = holder[key], table[type(holder[key])]()
    holder[key] = after
    return f"{type(before).__name__} → {type(after).__name__}"


def _put(node: Any, field: str, value: Any, said: str) -> str:
    setattr(node, field, value)
    return said


def _without_its_operator(node: ast.UnaryOp) -> str:
    if isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
    else:
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    return "without its sign or not"


def _other_constant(node: ast.Constant) -> str:
    before = node.value
    node.value = (
        (not before) if isinstance(before, bool) else before + "_" if isinstance(before, str) else before + 1  # type: ignore[operator]
    )
    return f"{before!r} → {node.value!r}"


def _first_two_values_swapped(node: ast.Dict) -> str:
    node.values[:2] = node.values[1::-1]
    return "first two values swapped"


def _deleted(node: Any) -> str:
    said = f"without {ast.unparse(node)[:60]}"
    node.__class__, node.__dict__ = ast.Pass, {k: v for k, v in vars(node).items() if "line" in k or "col" in k}
    return said


def _name(node: Any) -> str:
    return str(node.attr if isinstance(node, ast.Attribute) else node.id)


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotations, texts of errors, docstrings, imports or formatted texts."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield child
            yield from places(child)


def mutants(text: str) -> list[tuple[int, int]]:
    """Return all mutants of a source: the number of a node, and that of a change at it."""
    return [(i, j) for i, node in enumerate(places(ast.parse(text))) for j, _ in enumerate(changes(node))]


def mutated(text: str, mutant: tuple[int, int]) -> tuple[ast.Module, str]:
    """Return the tree of a mutant, and its line with what is wrong in it."""
    tree = ast.parse(text)
    node: Any = list(places(tree))[mutant[0]]
    line = node.lineno if hasattr(node, "lineno") else 0
    said = list(changes(copy.copy(node)))[mutant[1]](node)
    return ast.fix_missing_locations(tree), f"{line}: {text.splitlines()[line - 1].strip()}  [{said}]"


class First:
    """A pytest plugin that runs the tests first that noticed the most mutants so far, and tells which one fails.

    Of every parametrised test, it takes at most so many cases, chosen evenly.
    """

    def __init__(self, noticed: Counter[str], cases: int, tell: int) -> None:
        self.noticed, self.cases, self.tell = noticed, cases, tell

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_test: dict[str, list[Any]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        taken = [each[:: -(-len(each) // self.cases)] for each in by_test.values()]
        items[:] = sorted(chain.from_iterable(taken), key=lambda item: -self.noticed[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.tell, report.nodeid.encode())


def noticing(path: Path, tree: ast.Module, tests: Sequence[str], noticed: Counter[str], cases: int) -> str:
    """Return the test that fails with this code in place of the file's, in a child process; "" if all pass."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _test(path, tree, tests, First(noticed, cases, tell))
    os.close(tell)
    with os.fdopen(hear) as said:
        test = said.read()
    _, status = os.waitpid(child, 0)
    return test or ("the limit of time, or the import" if os.waitstatus_to_exitcode(status) else "")


def _test(path: Path, tree: ast.Module, tests: Sequence[str], first: First) -> None:
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 1))
    signal.alarm(10 * LIMIT)  # if it waits
    usual = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        same = Path(self.get_filename(name)) == path
        return compile(tree, str(path), "exec", dont_inherit=True) if same else usual(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
    words = ["-x", "-q", "--assert=plain", "-o", "addopts=", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    words += [f"-pno:{plugin}" for plugin in ("cacheprovider", "unraisableexception", "doctest", "xdist")]
    words += ["-m", "not soak", "-k", f"not ({SLOW})"]
    code = 1
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(BaseException),
    ):
        code = int(pytest.main([*words, *(str(HERE / test) for test in tests)], [first]))
    os._exit(code)


def run(name: str, count: int | None, seed: int, cases: int, tests: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Try mutants of a file, all or a random ``count``; return how many, and those that its tests let through."""
    path, chosen = SOURCE / name, tests or TESTS[name]
    text, noticed = path.read_text(), Counter[str]()
    test = noticing(path, ast.parse(text), chosen, noticed, cases)
    assert not test, f"{name} is not mutated, and {test} fails"
    every = mutants(text)
    tried = every if count is None else random.Random(seed).sample(every, min(count, len(every)))
    left = []
    for mutant in sorted(tried):
        tree, said = mutated(text, mutant)
        if test := noticing(path, tree, chosen, noticed, cases):
            noticed[test] += 1
        else:
            left.append(said)
            print(f"survived: {name}:{said}", flush=True)
    return len(tried), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help=f"of {', '.join(TESTS)}; all by default")
    parser.add_argument("--count", type=int, help="how many mutants of each file, chosen at random; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000, help="how many cases of each parametrised test to run")
    parser.add_argument("--tests", nargs="*", default=[], help="other tests, as pytest names them")
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(SOURCE.parent)]
    os.chdir(HERE.parent)
    for module in PRELOADED:
        importlib.import_module(module)
    for name in given.files or TESTS:
        began = time.monotonic()
        tried, left = run(name, given.count, given.seed, given.cases, given.tests)
        print(f"{name}: {tried} mutants, {len(left)} survived, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
