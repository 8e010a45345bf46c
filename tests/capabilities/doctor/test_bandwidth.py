"""Tests the measurement of the bandwidth and its findings."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.runs import free_port, wait_until
from tests.support.said import said
from trainkit.capabilities.doctor import NodeReport, Request, bandwidth, node, nodes
from trainkit.capabilities.doctor.bandwidth import (
    Bandwidth,
    Layout,
    bandwidth_checks,
    link_gbit_s,
    ring_rounds,
)
from trainkit.capabilities.doctor.environment import num_gpus
from trainkit.launch.packages import NoAnswer, ask
from trainkit.run.process import own_host

TWO = Layout(("a", "b"), (1, 1), "a", 1)
THREE = Layout(("a", "b", "c"), (1, 1, 1), "a", 1)


@pytest.mark.parametrize("num", range(2, 9))
def test_rounds_of_a_ring_use_no_point_twice(num):
    rounds = list(ring_rounds(num))
    assert sorted(link for links in rounds for link in links) == [(i, (i + 1) % num) for i in range(num)]
    for links in rounds:
        if num > 2:
            points = [point for link in links for point in link]
            assert len(points) == len(set(points))


def test_speed_of_links_is_read_from_the_kernel(tmp_path, monkeypatch):
    for name, speed in (("eth0", "25000"), ("veth0", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        folder = tmp_path / "ib/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
    monkeypatch.setattr(bandwidth, "NET", tmp_path)
    monkeypatch.setattr(bandwidth, "INFINIBAND", tmp_path / "ib")
    assert link_gbit_s("eth0") == {"ethernet": 25.0, "infiniband": 200.0}
    assert link_gbit_s("veth0") == {"infiniband": 200.0}
    assert link_gbit_s(None) == {"infiniband": 200.0}


def measured(reduced: float, *speeds: float, backend: str = "gloo") -> Bandwidth:
    hosts = "abc"[: len(speeds)]
    links = [(host, hosts[(index + 1) % len(hosts)], speeds[index]) for index, host in enumerate(hosts)]
    return Bandwidth("", backend, 32, reduced, links)


FAST = [{"ethernet": 100.0, "infiniband": 400.0}] * 2
SLOWEST = (
    "9.0 Gbit/s from a to b, the slowest of 2; median 9.2; the nominal speed of the network interface is 10"
)


@pytest.mark.parametrize(
    ("speeds", "links", "state", "value"),
    [
        (measured(8.0, 9.0, 9.5), [{"ethernet": 10.0}, {"ethernet": 25.0}], "ok", SLOWEST),
        (measured(0.9, 0.9, 0.9), [{"ethernet": 10.0}] * 2, "warning", "0.9 Gbit/s"),
        # gloo is not expected to use the whole speed of a fast link
        (measured(6.0, 8.0, 8.0), FAST, "ok", "8.0 Gbit/s"),
        (measured(6.0, 8.0, 8.0, backend="nccl"), FAST, "warning", "8.0 Gbit/s"),
    ],
)
def test_bandwidth_is_compared_with_what_the_link_gives(speeds, links, state, value):
    reduced, slowest = bandwidth_checks(TWO, speeds, links)
    assert (reduced.state, slowest.state) == (state, state)
    assert slowest.value.startswith(value)


def test_a_slow_link_and_a_failed_measurement():
    *_, found = bandwidth_checks(THREE, measured(5.0, 9.0, 2.0, 9.0), [{}, {}, {}])
    assert found.state == "warning"
    said(found.hint)
    (found,) = bandwidth_checks(TWO, Bandwidth("rank 1 on b: Connection refused"), [{}, {}])
    assert found.state == "failure"
    said(found.value)


FAKE_TORCH = """
import json, os, sys
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
torch = {"version": "2.11.0", "cuda": "13.0", "gpus": len(gpus), "nccl": "2.28.9", "distributed": True}
measured = {"backend": " ".join(gpus)}
print("node1:1:1 NCCL INFO cudaDriverVersion 12040\\n" * 4000)
print(sys.argv[3], json.dumps(measured if "bandwidth" in sys.argv[2] else torch))
print("node1:1:1 NCCL INFO comm destroyed")
"""


def test_the_gpus_that_this_task_sees_are_measured(tmp_path, monkeypatch):
    """The torch of the ranks counts the GPUs, and NCCL_DEBUG=INFO prints a lot."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    request = Request(tmp_path, python=(sys.executable, str(tmp_path / "torch.py")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert num_gpus(request) == 2
    assert node.measure(request, Layout((own_host(),), (2,), "127.0.0.1", 1)).backend == "2 0"


@pytest.mark.slow
def test_gpus_of_this_host_are_measured(tmp_path, monkeypatch):
    report = NodeReport(own_host(), num_gpus=2, port=free_port())
    monkeypatch.setattr(nodes, "node_report", lambda _: report)
    found = list(nodes.local_bandwidth(Request(tmp_path)))
    assert [check.state for check in found] == ["ok", "ok"]
    assert "2 ranks (gloo, 32 MiB)" in found[0].value
    assert re.search(r"Gbit/s from GPU [01] to GPU [01], the slowest of 2", found[1].value)


@pytest.mark.slow
def test_the_rank_that_fails_is_named():
    from torch.distributed import TCPStore

    of_rank_0 = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    layout = Layout(("there", "here"), (1, 1), "127.0.0.1", of_rank_0.port)
    found = bandwidth.run_ranks(layout, "here", {"GLOO_SOCKET_IFNAME": "nope0"}, (sys.executable,))
    assert re.match("here: rank 1: .*nope0", found.error), found


def test_ranks_that_take_too_long_end_with_their_parent(tmp_path):
    script = "import pathlib, subprocess, sys; rank = subprocess.Popen(['sleep', '600'])\n"
    script += "pathlib.Path(sys.argv[2]).write_text(str(rank.pid)); rank.wait()"
    with pytest.raises(NoAnswer, match="did not finish within 3 s"):
        ask((sys.executable,), script, (str(tmp_path / "pid"),), {}, timeout_s=3.0)
    cmdline = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    wait_until(lambda: not cmdline.exists() or not cmdline.read_bytes())
