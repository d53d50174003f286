"""Set-up of all tests: torch has one thread, so that sums have a fixed order and two workers can share two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Give torch two threads, as on a user's machine, for tests of what happens to the number of threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
