"""Fixtures for all tests: one thread, so that sums have a fixed order and two workers can share two cores."""

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
    """Use two threads, as on a user's machine, for tests that depend on it."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
