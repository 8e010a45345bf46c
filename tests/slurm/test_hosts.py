"""Tests host lists, counts and states of hosts. test_on_cluster.py compares them with scontrol."""

import pytest

from trainkit.errors import UsageError
from trainkit.scheduler import expand_hosts
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.hosts import hosts_of_job, is_unavailable, node_states, tasks_per_node

HOST_LISTS = {
    "node1": ["node1"],
    "a,b,a": ["a", "b", "a"],
    "node[18-19,1-2]": ["node18", "node19", "node1", "node2"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "r[2,1]n[3-4]": ["r2n3", "r2n4", "r1n3", "r1n4"],
    "r[1-2]c[01-02]s[0,7]": [f"r{r}c0{c}s{s}" for c in (1, 2) for r in (1, 2) for s in (0, 7)],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "a[1-2].x.org,b": ["a1.x.org", "a2.x.org", "b"],
    "login,n[1,3],gpu-[1-2]": ["login", "n1", "n3", "gpu-1", "gpu-2"],
    "n[5]": ["n5"],
    "[1-3]": ["1", "2", "3"],
}


@pytest.mark.parametrize("text", HOST_LISTS)
def test_expand(text):
    assert expand_hosts(text) == HOST_LISTS[text]


NO_LISTS = """
-n --all n[ n] n[1- n[] n[a-b] n[1-2 n1-2] n[[1]] a,,b ,a a, n[3-1] n[1-2-3] n[-1] n[1-9999999]
n[1-2000]m[1-2000] n[²] n[0-99999999999999999999]
"""


@pytest.mark.parametrize("text", ["", " ", "a b", "a\nb", "n[1, 2]", *NO_LISTS.split()])
def test_no_host_list(text):
    with pytest.raises(UsageError) as caught:
        expand_hosts(text)
    assert repr(text.strip()) in caught.value.message


def test_tasks_per_node():
    counts = {"4": [4], "2(x3),1": [2, 2, 2, 1], "8(x2)": [8, 8], "1,2,1": [1, 2, 1], " 2(x1) ": [2]}
    assert {text: tasks_per_node(text) for text in counts} == counts
    for text in ("", "a", "2(x)", "2(3)", "2,", "-1", "2(x3", "2 (x3)"):
        with pytest.raises(UsageError, match="not a Slurm list of counts"):
            tasks_per_node(text)


def test_states_of_hosts():
    inside = ("", "idle", "allocated", "mixed-", "draining", "drained", "completing")
    assert not any(map(is_unavailable, inside))
    out = ("allocated*", "draining*", "down", "down*", "fail", "failing", "error", "unknown")
    assert all(map(is_unavailable, out))


def test_a_host_in_two_partitions_is_one(fake):
    fake.add("sinfo", r"printf 'h1\037allocated\036\nh1\037allocated\036\nh2\037down*\036\n'")
    assert node_states(["h1", "h2", "h9"]) == {"h1": "allocated", "h2": "down*"}
    assert "--nodes=h1,h2,h9" in fake.calls[0]
    fake.add("sinfo", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        node_states(["h1"])


def test_the_hosts_that_a_job_has_left(fake):
    fake.add("squeue", "echo 'node[1,3]'")
    assert hosts_of_job("7_2") == ["node1", "node3"]
    assert fake.calls[0][-1] == "--jobs=7_2"
    fake.add("squeue")
    assert hosts_of_job("8") == []
