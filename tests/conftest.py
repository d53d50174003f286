"""What every test needs: one thread, so that sums are added in one order and two workers share two cores."""

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
    """As on a user's machine, where a test is about that."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
