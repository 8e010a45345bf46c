"""Tests that `trainkit doctor --nodes` finds a problem of one host on a real cluster."""

import errno
import glob
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.broken_cases import changed_host, hidden
from tests.on_slurm.login import TRAINKIT, Login, wait_for
from tests.on_slurm.shared_disk import shared_small_disk
from tests.support.disks import fill
from tests.support.programs import missing
from tools.slurm_cluster.hosts import signal_slurmd

pytestmark = pytest.mark.slow
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
INTERFACE = (
    "ip link add fast0 type veth peer name fast1 && ip addr add 10.77.0.{index}/24 dev fast0"
    " && ip link set fast0 {state} && ip link set fast1 {state}"
)


def checks(login: Login, *args: str, code: int) -> list[dict[str, Any]]:
    """Return the checks of `trainkit doctor`, which must end with this exit code."""
    done = login.trainkit("doctor", "--set", "device=cpu", "--json", *args)
    assert done.returncode == code, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return found


def failures(found: list[dict[str, Any]]) -> dict[tuple[str | None, str], str]:
    """Map the host and name of each failed check to its error."""
    return {(item["host"], item["name"]): item["value"] for item in found if item["state"] == "failure"}


@contextmanager
def changed_file(login: Login, index: int, target: Path, text: str, folder: Path) -> Iterator[None]:
    """Let one host see this text in a file, while the other hosts see the original."""
    own = folder / f"{target.name}-{index}"
    own.write_text(text)
    made = not target.exists()
    target.touch()
    bind, undo = ["mount", "--bind", str(own), str(target)], ["umount", "--lazy", str(target)]
    try:
        with changed_host(login, index, bind, undo):
            yield
    finally:
        if made:
            target.unlink()


def test_healthy_nodes_pass_and_their_bandwidth_is_measured(login):
    found = checks(login, "--nodes", "2", code=0)
    hosts = login.cluster.hosts[:2]
    by_name = {item["name"]: item for item in found}
    assert failures(found) == {}
    assert by_name["nodes"]["value"] == f"2 of 2 nodes reported: {','.join(hosts)}"
    assert by_name["packages"]["value"].endswith(" on 2 nodes")
    assert re.match(r"[\d.]+ Gbit/s .* 2 ranks \(gloo, 32 MiB\)", by_name["all-reduce"]["value"])
    assert "slowest of 2; median" in by_name["point to point"]["value"]
    assert by_name["Slurm"]["value"].endswith(f"cluster {login.cluster.name}")
    assert by_name["port"]["value"].startswith("64 of 64 ")


def test_inside_an_allocation_all_its_nodes_are_checked(login):
    argv = ["salloc", "--nodes=2", "--quiet", sys.executable, "-m", "trainkit", "doctor", "--quick", "--json"]
    done = login.run([*argv, "--set", "device=cpu"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 nodes reported" in done.stdout


def test_what_differs_on_one_host_is_found_there(login, tmp_path):
    """Host 2 has another package, clock and interface. Host 3 cannot resolve host 1 or see the run folder."""
    library = glob.glob(FAKETIME)  # noqa: PTH207
    if not library:
        missing("faketime")
    cluster, runs = login.cluster, tmp_path / "runs"
    runs.mkdir()
    one, two, three = cluster.hosts[:3]
    package = Path(str(metadata.distribution("pydantic").locate_file("")))
    info = next(package.glob("pydantic-*.dist-info")) / "METADATA"
    version = metadata.version("pydantic")
    hosts_file = Path("/etc/hosts")
    known = cluster.run(["cat", str(hosts_file)], host=3, check=True).stdout
    without = "".join(line for line in known.splitlines(keepends=True) if one not in line.split())
    with ExitStack() as stack:
        other = info.read_text().replace(f"Version: {version}", "Version: 2.0.1", 1)
        stack.enter_context(changed_file(login, 2, info, other, tmp_path))
        stack.enter_context(changed_file(login, 2, Path("/etc/faketimerc"), "+600s\n", tmp_path))
        stack.enter_context(changed_file(login, 2, Path("/etc/ld.so.preload"), f"{library[0]}\n", tmp_path))
        for index, state in enumerate(("up", "down", "up"), 1):
            made = INTERFACE.format(index=index, state=state)
            stack.enter_context(
                changed_host(login, index, ["sh", "-c", made], ["ip", "link", "del", "fast0"])
            )
        stack.enter_context(changed_file(login, 3, hosts_file, without, tmp_path))
        stack.enter_context(hidden(login, 3, runs))
        options = ("--quick", "--nodes", "3", "--set", "launch.network=fast0", "--run-dir", str(runs))
        found = checks(login, *options, code=1)
    wrong = {(item["host"], item["name"]): item for item in found if item["host"] and item["state"] != "ok"}
    assert wrong[two, "packages"]["value"] == f"pydantic is 2.0.1, but {version} on 2 of 3 nodes"
    assert wrong[three, "name"]["value"] == f"{one} cannot be resolved"
    assert f"the NodeAddr {cluster.address(1)}" in wrong[three, "name"]["hint"]
    assert "00 s ahead of" in wrong[two, "clock"]["value"]
    assert wrong[two, "interface"]["value"] == "fast0 is down"
    named = {(two, "packages"), (two, "clock"), (two, "interface"), (three, "name"), (three, "shared")}
    assert {key for key in wrong if key[1] in {name for _, name in named}} == named
    assert failures(found).keys() <= named
    assert list(runs.iterdir()) == []


def test_full_disk_and_one_that_a_host_can_only_read_are_found(login, tmp_path):
    with shared_small_disk(login.cluster, tmp_path / "disk", "4m") as disk:
        runs = disk / "runs"
        runs.mkdir()
        login.cluster.run(["mount", "-o", "remount,bind,ro", str(disk)], host=2, check=True)
        fill(disk)
        found = failures(checks(login, "--quick", "--nodes", "2", "--run-dir", str(runs), code=1))
    assert found[login.cluster.hosts[0], "disk"].endswith(os.strerror(errno.ENOSPC))
    assert found[login.cluster.hosts[1], "disk"].endswith(os.strerror(errno.EROFS))


def test_host_without_the_environment_is_missed(login):
    with hidden(login, 2, Path(sys.prefix)):
        found = checks(login, "--quick", "--nodes", "2", code=1)
    text = failures(found)[None, "nodes"]
    assert re.match(rf"1 of 2 .* \({login.cluster.hosts[1]}\): .*execve", text, re.DOTALL)


def test_node_that_does_not_answer_is_named(login):
    signal_slurmd(login.cluster.state, 2, signal.SIGSTOP)
    try:
        found = checks(login, "--quick", "--nodes", "2", code=1)
    finally:
        signal_slurmd(login.cluster.state, 2, signal.SIGCONT)
    assert login.cluster.hosts[1] in failures(found)[None, "nodes"]
    login.wait_until_idle()


def test_interrupted_doctor_leaves_no_step_and_no_file(login, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    options = ("--nodes", "2", "--set", "device=cpu", "--run-dir", str(runs))
    doctor = login.start([*TRAINKIT, "doctor", *options])
    wait_for(lambda: list(runs.iterdir()) and login.jobs(), "the step")
    doctor.send_signal(signal.SIGINT)
    doctor.communicate(timeout=60)
    assert doctor.returncode == 130
    login.wait_until_idle()
    assert list(runs.iterdir()) == []
