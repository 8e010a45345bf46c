"""Fixtures of the tests that type commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from steering import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A folder with a config, in which `trainkit` is typed; what is left running is killed."""
    desk = Desk(tmp_path)
    yield desk
    desk.tidy()
