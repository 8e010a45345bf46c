"""Tests that ranks below a wrapper save, lose no step and get one signal (`benchmarks.wrappers`)."""

from __future__ import annotations

import pytest

from benchmarks.wrappers import disturb, prepare


@pytest.mark.parametrize("nodes", [1, 2])
def test_no_step_is_lost_below_a_wrapper(login, nodes):
    prepare(login.folder, uv=None)
    names = ["tee", "nested sh", "check_call", "trap that forwards"]
    cells = disturb(login, names, ["preempted", "cancel"], nodes)
    assert {key: cell.text for key, cell in cells.items()} == dict.fromkeys(cells, "1 / 0")
    assert len(cells) == 2 * len(names)
