"""Which ranks the others waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.test_diagnose import failed, newest
from trainkit.run.files import write_json

STORE = "Timed out after 6 seconds waiting for clients. {}/8 clients joined."


@pytest.mark.parametrize(
    ("message", "silent", "cause"),
    [
        ("3 of 8 ranks did not start within 0:30:00: rank 5, 6, 7", (), "ranks 5-7 on node02 did not"),
        (STORE.format(1), (), "ranks 1-7 on node01, node02 did not connect"),
        (STORE.format(6), (3, 4), "ranks 3-4 on node01, node02 did not connect"),
        (STORE.format(6), (3,), "the ranks did not all connect to rank 0 in time"),
    ],
)
def test_the_ranks_that_did_not_reach_rank_0(
    tmp_path: Path, message: str, silent: tuple[int, ...], cause: str
) -> None:
    run = failed(tmp_path, b"starts\n", message, "DistStoreError")
    attempt = run.attempt(1)
    write_json(attempt.plan_file, {"num_nodes": 2, "workers_per_node": 4})
    write_json(attempt.rendezvous_file, {"hosts": ["node01", "node02"]})
    for rank in range(1, 8):
        attempt.rank_log(rank).write_text("" if rank in silent else "starts\n")
    found = newest(run)
    assert found.name == "rendezvous"
    assert found.cause.startswith(cause)
    first_missing = {"ranks 5": 5, "ranks 1": 1, "ranks 3": 3, "the ran": 0}
    assert found.rank == first_missing[cause[:7]]
