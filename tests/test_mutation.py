"""Small mistakes in the code do not pass its tests; `make soak` tries them where a mistake would cost most."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mutation import SOURCE, TESTS, mutants, mutated

SCRIPT = Path(__file__).parent / "mutation.py"
EXAMPLE = '''
def share(xs: list[int] = None) -> float:
    """Not mutated."""
    total = -1 + max(xs, default=0)
    if not xs and total < 3:
        raise ValueError("not mutated")
    xs.append(total)
    return {"a": total, "b": True}["a"]
'''
MISTAKES = [
    *("Add → Sub", "without its sign or not", "1 → 2", "without default", "min", "0 → 1"),
    *("condition negated", "And → Or", "without its sign or not", "Lt → LtE", "3 → 4"),
    *("without xs.append(total)", "first two values swapped", "'a' → 'a_'", "'b' → 'b_'", "True → False", "'a' → 'a_'"),
]


def test_every_mistake_is_made_once_and_at_its_place() -> None:
    assert [mutated(EXAMPLE, each)[1].partition("  [")[2].rstrip("]") for each in mutants(EXAMPLE)] == MISTAKES


def slowly_packed(bits: np.ndarray[Any, Any]) -> tuple[str, list[int]]:
    """Return the form that takes the fewest bytes, and the bytes of its places, as the page on the format says."""
    mask, deltas, zeros = [0] * -(-len(bits) // 8), [], 0
    for place, value in enumerate(bits.tolist()):
        if value:
            mask[place // 8] |= 1 << place % 8
            deltas, zeros = [*deltas, zeros], 0
        elif zeros == 254:
            deltas, zeros = [*deltas, 255], 0
        else:
            zeros += 1
    places = min(mask, deltas, key=len)
    if np.count_nonzero(bits) * bits.itemsize + len(places) + 128 >= bits.nbytes:
        return "dense", []
    return ("mask" if places is mask else "deltas"), places


def arrays() -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(0)
    made = [np.zeros(size, np.uint32) for size in (0, 1, 254, 255, 256, 765, 766, 5000)]
    for size, kind, kept in (
        *((800, np.uint8, 571), (800, np.uint8, 572), (800, np.uint8, 573)),  # a mask saves a byte, or none
        *((800, np.uint32, 97), (800, np.uint32, 98), (800, np.uint32, 99)),  # deltas are as long as the mask
        *((size, np.uint32, 1) for size in (255, 256, 257)),  # 254 to 256 zeros after the last value
    ):
        made.append(np.zeros(size, kind))
        made[-1][:kept] = 7
    made.append(np.zeros(801, np.uint32))
    made[-1][[*range(0, 800, 5), 800]] = 7  # the last byte of the mask has one bit
    for size, density in ((2000, 0.01), (2000, 0.1), (2001, 0.12), (2007, 0.3), (60, 0.5), (3000, 0.002), (4000, 0.9)):
        values = chance.integers(1, 2**16, size, dtype=np.uint16) * (chance.random(size) < density)
        made += [values.astype(kind) for kind in (np.uint16, np.uint32)]
    return made


def packs_as_the_page_says(packing: Any, cases: list[tuple[np.ndarray[Any, Any], tuple[str, list[int]]]]) -> bool:
    """Return whether arrays come back, in the form that is expected, and what does not fit is refused."""
    if packing.CODINGS != ("dense", "mask", "deltas"):
        return False
    for bits, (coding, places) in cases:
        packed = packing.pack(bits)
        told = [] if packed.places is None else packed.places.tolist()
        same = packed.unpacked().dtype == bits.dtype and np.array_equal(packed.unpacked(), bits)
        if (packed.coding, told) != (coding, places) or not same or packed.size != len(bits):
            return False
        last = int(np.flatnonzero(bits)[-1]) if bits.any() else 0
        kept = packed.values
        for size, values in ((len(bits) + 2048, kept), (last, kept), (len(bits), kept[:-1])):
            if len(kept):
                with pytest.raises(ValueError, match=r"\d+ values do not fit the places of \d+ in \d+ elements"):
                    packing.Packed(coding, size, values, packed.places)
    return True


def test_mistakes_in_packing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = SOURCE / "deploy" / "packing.py"
    text = path.read_text()
    cases = [(bits, slowly_packed(bits)) for bits in arrays()]
    every = mutants(text)
    left = []
    for mutant in [None, *every]:
        tree, said = mutated(text, mutant or every[0])
        module = ModuleType("mutant")
        monkeypatch.setitem(sys.modules, "mutant", module)
        try:
            exec(compile(text if mutant is None else tree, str(path), "exec", dont_inherit=True), vars(module))
            right = packs_as_the_page_says(module, cases)
        except BaseException:  # pytest.fail's too
            right = False
        assert right or mutant is not None, "the code that nobody changed is found wrong"
        left += [said] if right and mutant else []
    print(f"{len(every)} mutants of packing, {len(left)} survived:", *left, sep="\n")
    same = "Coding = ", "little_", "without dtype"  # a type; numpy reads the first letter; sums are 64 bits wide anyway
    assert [said for said in left if not any(words in said for words in same)] == []
    assert len(left) == 8


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", TESTS)
def test_few_mutants_survive(file: str) -> None:
    """The script names those that do: most of them compute the same, more slowly or in another type."""
    words = [sys.executable, str(SCRIPT), file, "--count", "100", "--cases", "2"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    print(said)
    ((tried, left),) = re.findall(r"(\d+) mutants, (\d+) survived", said)
    assert int(left) <= 0.15 * int(tried)
