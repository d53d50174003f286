"""How long Lanczos must look for eigenvalues that one starting vector shows as one: equal ones, or nearly so.

    python benchmarks/clusters.py [--out results/clusters.csv]

The spectra have 300 eigenvalues: −40; 20; a cluster around 10; 8, 7, … 2; and a bulk of four kinds within ±1. "At the
edge": 1.2; a cluster around 1.1; 1.08; 1.06; and such a bulk. A run misses an eigenvalue if a value that it returns is
off by more than the tolerance, which is relative to the largest magnitude. The table counts the runs that miss one, by
the products of a check; dirprune's is half of those that the first search took, at least 8 and at most 64. A check of
one product is next to none. Takes three minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from dirprune import lanczos
from dirprune.lab.runs import environment
from dirprune.lab.tables import write_rows

SIZE = 300
TOLERANCES = (1e-2, 1e-3, 1e-4)
SEEDS = range(2)
RULES: dict[str, Callable[[int], int]] = {
    "1": lambda _: 1,
    "8": lambda _: 8,
    "a third": lambda spent: max(8, spent // 3),
    "half": lanczos.check_products,
}
"""Products of a check, given those that the first search took."""
BULKS: dict[str, Callable[[int], Tensor]] = {
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
    "uniform": lambda n: torch.linspace(-1, 1, n, dtype=torch.float64),
    "decaying": lambda n: torch.arange(1, n + 1, dtype=torch.float64) ** -1.0,
    "arcsine": lambda n: torch.linspace(0, torch.pi, n, dtype=torch.float64).cos(),
}


@dataclass(frozen=True)
class Case:
    """A request for k eigenvalues of a spectrum with ``members`` eigenvalues in a cluster, each ``gap`` from the next.

    The cluster is far from the bulk or, with ``edge``, at its edge, where gaps are a tenth of ``gap``.
    """

    k: int
    members: int
    gap: float
    edge: bool = False


EDGE = "at the edge"
GAPS = (1e-1, 1e-2, 1e-3, 1e-4, 0.0)
GROUPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "two": (range(2, 11), (2,)),
    "three": (range(2, 11), (3,)),
    "four": (range(2, 11), (4,)),
    "five": (range(2, 11), (5,)),
    "ten": ((10, 15), (10,)),
    "two to five, k = 20": ((20,), range(2, 6)),
    EDGE: ((3, 4, 5), (2, 3)),
}
"""Values of k, and sizes of the cluster."""


@dataclass(frozen=True)
class Row:
    """A row of the CSV file: the runs of a group, and how many of them missed an eigenvalue under a rule."""

    cluster: str
    gap: float
    bulk: str
    tolerance: float
    rule: str
    runs: int
    missed: int
    products: float
    hardware: str
    torch: str
    commit: str


class Diagonal:
    """An operator with these eigenvalues; it may be diagonal because the first vector is random."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.size, self.dtype, self.device = values, len(values), values.dtype, values.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.values * vector


def spectrum(case: Case, bulk: str) -> Tensor:
    """Return the eigenvalues, greatest first.

    >>> spectrum(Case(k=2, members=2, gap=0.1), "zero")[:4].tolist(), len(spectrum(Case(2, 5, 0.1), "uniform"))
    ([20.0, 10.1, 10.0, 8.0], 300)
    """
    if case.edge:
        leading = [1.2, *(1.1 + case.gap / 10 * i for i in range(case.members)), 1.08, 1.06]
    else:
        leading = [20.0, *(10 + case.gap * i for i in range(case.members)), *range(2, 9), -40.0]
    outside = torch.tensor(leading, dtype=torch.float64)
    return torch.cat([outside, BULKS[bulk](SIZE - len(outside))]).sort(descending=True).values


def attempts(case: Case, bulk: str, tolerance: float, seed: int) -> Iterator[tuple[str, bool, int]]:
    """Yield each rule, whether its run missed an eigenvalue, and its number of products."""
    values = spectrum(case, bulk)
    for name, check in RULES.items():
        with patch.object(lanczos, "check_products", check):
            *_, step = lanczos.lanczos_steps(Diagonal(values), case.k, tolerance=tolerance, seed=seed)
        off = float((step.values - values[: case.k]).abs().max())
        yield name, off > tolerance * float(values.abs().max()), step.iterations


def measure(group: str, gap: float, bulk: str, tolerance: float, here: tuple[str, str, str]) -> list[Row]:
    missed: Counter[str] = Counter()
    products: Counter[str] = Counter()
    runs = list(product(*GROUPS[group], SEEDS))
    for k, members, seed in runs:
        for rule, miss, count in attempts(Case(k, members, gap, group == EDGE), bulk, tolerance, seed):
            missed[rule] += miss
            products[rule] += count
    return [Row(group, gap, bulk, tolerance, r, len(runs), missed[r], products[r] / len(runs), *here) for r in RULES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file")
    options = parser.parse_args()
    where = environment(torch.device("cpu"))
    here = (where["device"], where["torch"], where["commit"])
    print(f"{'in the cluster':26} {'runs':>5}  missed (products on average), by the products of a check")
    print(f"{'':32}  {''.join(f'{rule:>14}' for rule in RULES)}")
    rows: list[Row] = []
    for group, equal in product(GROUPS, (False, True)):
        gaps = [gap for gap in GAPS if (gap == 0) == equal]
        own = [row for each in product(gaps, BULKS, TOLERANCES) for row in measure(group, *each, here)]
        rows += own
        cells = []
        for rule in RULES:
            ruled = [row for row in own if row.rule == rule]
            mean = sum(row.products for row in ruled) / len(ruled)
            cells.append(f"{sum(row.missed for row in ruled)} ({mean:.1f})")
        runs = sum(row.runs for row in own) // len(RULES)
        print(f"{group + ', equal' * equal:26} {runs:5}  {''.join(f'{cell:>14}' for cell in cells)}", flush=True)
    if options.out:
        write_rows(options.out, Row, rows)


if __name__ == "__main__":
    main()
