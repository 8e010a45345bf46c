"""What is made of Slurm's words about hosts."""

from __future__ import annotations

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.hosts import hosts_of_job, is_unavailable, node_states


@pytest.mark.parametrize(
    ("state", "out"),
    [
        ("idle", False),
        ("allocated", False),
        ("mixed-", False),
        ("draining", False),
        ("drained", False),
        ("completing", False),
        ("", False),
        ("allocated*", True),
        ("draining*", True),
        ("down", True),
        ("down*", True),
        ("fail", True),
        ("failing", True),
        ("error", True),
        ("unknown", True),
    ],
)
def test_states(state: str, out: bool) -> None:
    assert is_unavailable(state) is out


def test_a_host_in_two_partitions_is_one(fake: FakeSlurm) -> None:
    fake.add("sinfo", r"printf 'h1\037allocated\036\nh1\037allocated\036\nh2\037down*\036\n'")
    assert node_states(["h1", "h2", "h9"]) == {"h1": "allocated", "h2": "down*"}
    assert "--nodes=h1,h2,h9" in fake.calls[0]


def test_the_hosts_that_a_job_has_left(fake: FakeSlurm) -> None:
    fake.add("squeue", "echo 'node[1,3]'")
    assert hosts_of_job("7_2") == ["node1", "node3"]
    assert fake.calls[0][-1] == "--jobs=7_2"
    fake.add("squeue")
    assert hosts_of_job("8") == []


def test_no_answer_is_no_state(fake: FakeSlurm) -> None:
    fake.add(
        "sinfo",
        "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2; exit 1",
    )
    with pytest.raises(SlurmUnreachable):
        node_states(["h1"])
