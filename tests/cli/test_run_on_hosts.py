"""`trainkit run` by hand on several hosts without Slurm; every host is a process on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from steering import LIMIT_S, Desk, wait_for

from tests.support.programs import is_running, ranks_of
from trainkit.cli.hosts import host_place
from trainkit.errors import UsageError
from trainkit.job.node.rendezvous import HostPlace, choose_port
from trainkit.job.step_run import announce
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

SHOWS_RANK = """
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""


class Hosts:
    """Processes that are started as hosts of one run; what is left of them is killed."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.port = choose_port()
        self.run = RunDir(desk.folder / "runs/small")
        self.address = "127.0.0.1"
        self.prefixes: list[list[str]] = []
        """What starts the command of each node rank; empty on this machine's own network."""
        self.started: list[subprocess.Popen[str]] = []

    def options(self, node_rank: int, nodes: int = 2) -> list[str]:
        where = ["--master-addr", self.address, "--master-port", str(self.port)]
        return ["--nodes", str(nodes), "--node-rank", str(node_rank), *where]

    def start(
        self, node_rank: int, *args: str, nodes: int = 2, command: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        typed = command or ("run", str(self.desk.config), "--set", "train.global_batch_size=12")
        return self.started_as(node_rank, self.desk.argv(*typed, *self.options(node_rank, nodes), *args))

    def started_as(self, node_rank: int, argv: list[str]) -> subprocess.Popen[str]:
        """A process on the host of a node rank."""
        process = subprocess.Popen(
            [*(self.prefixes[node_rank] if self.prefixes else ()), *argv],
            cwd=self.desk.folder,
            env=self.desk.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def start_both(self, *args: str) -> list[subprocess.Popen[str]]:
        """Both hosts of a run, whose ranks have started."""
        both = [self.start(node_rank, *args) for node_rank in (0, 1)]
        self.wait_for_rank(0)
        self.wait_for_rank(1)
        return both

    def wait_for_rank(self, rank: int, attempt: int = 1) -> None:
        self.desk.wait_for_log(self.run, f"attempt {attempt} rank {rank}", attempt, rank)

    def pid_of_rank(self, rank: int) -> int:
        return ranks_of(self.run)[rank]

    def wait_for_host(self, node_rank: int) -> None:
        """Wait until a host has joined."""
        file = self.run.attempt(1).host_file(node_rank)
        wait_for(lambda: file.exists() and file.read_text())

    def tidy(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=LIMIT_S)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a host, and what it printed to stderr."""
    _, words = process.communicate(timeout=LIMIT_S)
    return process.returncode, words


@pytest.fixture
def hosts(desk: Desk) -> Iterator[Hosts]:
    hosts = Hosts(desk)
    yield hosts
    hosts.tidy()


def test_every_host_starts_its_ranks(hosts: Hosts) -> None:
    hosts.desk.works(SHOWS_RANK)
    other = hosts.start(1, "--gpus-per-node", "2")
    first = hosts.start(0, "--gpus-per-node", "2")
    shown, words = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, words
    assert end_of(other)[0] == 0
    assert shown.splitlines()[0] == str(hosts.run.path)
    found = [json.loads(hosts.run.attempt(1).rank_log(rank).read_text().splitlines()[1]) for rank in range(4)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["NODE_RANK"]) for one in found] == [
        *(("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"))
    ]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in found} == {("4", "2")}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("127.0.0.1", str(hosts.port))}
    assert json.loads(shown.splitlines()[3]) == found[0]
    assert read_json(hosts.run.attempt(1).end_file)["state"] == "finished"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--node-rank", "1"],
            "error: --node-rank 1: --nodes, --master-addr, --master-port are missing\n\n"
            "hint: every host needs --nodes N --node-rank I --master-addr HOST --master-port PORT",
        ),
        (
            ["--nodes", "2", "--node-rank", "0", "--master-port", "29500"],
            "error: --nodes 2 --node-rank 0 --master-port 29500: --master-addr is missing",
        ),
        (
            ["--nodes", "2", "--node-rank", "2", "--master-addr", "h", "--master-port", "29500"],
            "error: --node-rank 2 is not one of 2 nodes\n\nhint: node ranks are numbered from 0 to 1",
        ),
        (["--nodes", "2"], "error: --nodes 2 asks for 2 nodes, but `trainkit run` uses one\n\nhint: "),
    ],
)
def test_options_that_do_not_name_a_place_are_refused(desk: Desk, options: list[str], words: str) -> None:
    done = desk.trainkit("run", str(desk.config), *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (desk.folder / "runs").exists()


def test_a_range_of_nodes_is_no_number_of_hosts() -> None:
    for nodes in ("2-4", "2,4"):
        with pytest.raises(UsageError, match=f"^--nodes {nodes} is not a number of hosts") as caught:
            host_place({"resources.nodes": (f"--nodes {nodes}", nodes)}, 0, "h", 2)
        assert caught.value.hint.startswith("every host needs --nodes N --node-rank I ")


def test_an_address_of_another_host_or_of_none_is_refused(hosts: Hosts) -> None:
    place = ["--nodes", "2", "--node-rank", "0", "--master-port", str(hosts.port), "--master-addr"]
    done = hosts.desk.trainkit("run", str(hosts.desk.config), *place, "192.0.2.1")
    assert done.returncode == 2
    assert "error: --master-addr 192.0.2.1 is not an address of this host, " in done.stderr
    done = hosts.desk.trainkit("run", str(hosts.desk.config), *place, "no-such-host.invalid")
    assert done.returncode == 2
    assert "error: --master-addr no-such-host.invalid does not resolve on " in done.stderr


def test_a_node_rank_that_is_taken_is_refused(hosts: Hosts) -> None:
    hosts.desk.works("")
    first, second = hosts.start(0, nodes=3), hosts.start(1, nodes=3)
    hosts.wait_for_host(1)
    code, words = end_of(hosts.start(1, "--set", "train.steps=11", nodes=3))
    assert code == 2
    assert "error: node rank 1 is taken: " in words
    assert f"held by process {second.pid} on " in words
    third = hosts.start(2, nodes=3)
    assert [end_of(process)[0] for process in (first, second, third)] == [0, 0, 0]


def test_a_port_in_use_is_refused(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", hosts.port)):
        code, words = end_of(hosts.start(0))
    assert code == 2
    assert f"error: rank 0 cannot listen at 127.0.0.1:{hosts.port}: Address already in use" in words
    assert not hosts.run.path.exists()


@pytest.mark.parametrize(
    ("options", "different"),
    [
        (["--set", "train.steps=11"], "train.steps is 11 there and 10 on node 0"),
        (["--gpus-per-node", "2"], "workers per node is 2 there and 1 on node 0"),
    ],
)
def test_hosts_with_different_configs_are_refused(hosts: Hosts, options: list[str], different: str) -> None:
    first = hosts.start(0)
    code, words = end_of(hosts.start(1, *options))
    assert code == 2
    assert "error: node 1 differs from node 0: " in words
    assert different in words
    code, words = end_of(first)
    assert code == 1
    assert different in words
    assert not hosts.run.attempt(1).rank_log(0).exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_stop_before_the_start_ends_all_hosts(
    hosts: Hosts, node_rank: int, number: signal.Signals, code: int
) -> None:
    both = [hosts.start(node_rank, nodes=3) for node_rank in (0, 1)]
    for joined in (0, 1):
        hosts.wait_for_host(joined)
    both[node_rank].send_signal(number)
    assert [end_of(process)[0] for process in both] == [code, code]
    assert read_json(hosts.run.attempt(1).end_file)["state"] == "stopped"
    assert not hosts.run.attempt(1).rank_log(0).exists()


def test_two_runs_that_start_at_once_in_one_folder(hosts: Hosts) -> None:
    """And of each the other host first, which finds what an earlier start has announced."""
    hosts.desk.works("")
    assert end_of(hosts.start(0, nodes=1))[0] == 0  # alone
    assert read_json(hosts.run.attempt(1).plan_file)["backend"] == "hosts"
    ports = [choose_port(), choose_port()]
    for port in ports:
        announce(hosts.run.path.parent, HostPlace(0, 2, hosts.address, port), hosts.run.attempt(1))
    started = []
    for node_rank in (1, 0):
        for port in ports:
            hosts.port = port
            started.append(hosts.start(node_rank, "--set", f"seed={port}"))
    assert [end_of(process)[0] for process in started] == [0, 0, 0, 0]
    runs = [RunDir(hosts.run.path.with_name(f"small-{number}")) for number in (2, 3)]
    assert {read_json(run.attempt(1).rendezvous_file)["port"] for run in runs} == {*ports}
    for run in runs:
        seed = read_json(run.attempt(1).rendezvous_file)["port"]
        assert f"seed: {seed}" in run.config_file.read_text()
        assert "attempt 1 rank 1" in run.attempt(1).rank_log(1).read_text()


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize(
    ("number", "received", "expected"),
    [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 0), (signal.SIGHUP, "SIGTERM", 0)],
)
def test_a_signal_on_one_host_saves_and_ends_all(
    hosts: Hosts, node_rank: int, number: signal.Signals, received: str, expected: int
) -> None:
    both = hosts.start_both()
    both[node_rank].send_signal(number)
    assert [end_of(process)[0] for process in both] == [expected, expected]
    end = read_json(hosts.run.attempt(1).end_file)
    assert (end["state"], end["reason"]) == ("stopped", f"saved after {received}")
    for rank in (0, 1):
        assert f"asked by {received}" in hosts.run.attempt(1).rank_log(rank).read_text()


def test_a_second_ctrl_c_ends_all_hosts_at_once(hosts: Hosts) -> None:
    hosts.desk.works(
        """
        while not asked: time.sleep(0.02)
        print("asked once", flush=True)
        while len(asked) < 2: time.sleep(0.02)
        sys.exit(130)
        """
    )
    both = hosts.start_both()
    for _ in range(2):
        both[1].send_signal(signal.SIGINT)
        for rank in (0, 1):
            hosts.desk.wait_for_log(hosts.run, "asked once", rank=rank)
    assert [end_of(process)[0] for process in both] == [130, 130]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_attempt_on_all_hosts(hosts: Hosts, rank: int) -> None:
    both = hosts.start_both()
    os.kill(hosts.pid_of_rank(rank), signal.SIGKILL)
    ends = [end_of(process) for process in both]
    assert [code for code, _ in ends] == [1, 1]
    assert all("failed: " in words for _, words in ends)
    verdict = read_json(hosts.run.attempt(1).end_file)["verdict"]
    assert (verdict["rank"], verdict["node_rank"]) == (rank, rank)
    assert verdict["message"] == "killed by SIGKILL"


def test_a_lost_host_ends_the_attempt_on_the_others(hosts: Hosts) -> None:
    first, other = hosts.start_both()
    rank = hosts.pid_of_rank(1)
    other.kill()
    code, words = end_of(first)
    assert code == 1
    assert "failed: " in words
    end = read_json(hosts.run.attempt(1).end_file)
    assert (end["verdict"]["type"], end["verdict"]["node_rank"] is None) == ("HostLost", False)
    assert end["cause"] == "node_fail"
    wait_for(lambda: not is_running(rank))


def test_the_loss_of_node_0_ends_the_other_hosts(hosts: Hosts) -> None:
    first, other = hosts.start_both()
    rank = hosts.pid_of_rank(1)
    first.kill()
    code, words = end_of(other)
    assert code == 1
    assert f"error: node 0 at 127.0.0.1:{hosts.port} is lost, so the attempt has ended here too" in words
    assert not is_running(rank)


def test_a_run_resumes_on_another_number_of_hosts(hosts: Hosts) -> None:
    both = hosts.start_both()
    both[0].send_signal(signal.SIGTERM)
    assert [end_of(process)[0] for process in both] == [0, 0]
    hosts.desk.works("")
    command = ("resume", "runs/small")
    three = [hosts.start(node_rank, nodes=3, command=command) for node_rank in (0, 1, 2)]
    assert [end_of(process)[0] for process in three] == [0, 0, 0]
    assert read_json(hosts.run.attempt(2).plan_file)["world_size"] == 3
    assert "attempt 2 rank 2" in hosts.run.attempt(2).rank_log(2).read_text()
    assert read_json(hosts.run.job_file)["attempts"][1]["reason"] == "resume"


UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
WITHOUT_RUNS = ("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True).returncode != 0,
    reason="this user cannot mount a folder",
)
def test_a_host_that_does_not_join_is_named(hosts: Hosts) -> None:
    """Here because it does not see the folder of the run."""
    desk = hosts.desk
    desk.environ["RENDEZVOUS_TIMEOUT_S"] = "4.0"
    runs = desk.folder / "runs"
    runs.mkdir()
    hosts.prefixes = [[], [*UNSHARE, *WITHOUT_RUNS, str(runs)]]
    code, words = end_of(hosts.start(1))
    assert code == 1
    assert f"error: node 0 at 127.0.0.1:{hosts.port} has not announced its run within 4 s" in words
    assert "hint: all must start in the same folder, shared by all nodes; " in words
    code, words = end_of(hosts.start(0, nodes=3))
    assert code == 1
    assert "node rank 1, 2 of 3 did not join within 4 s" in words


def test_run_is_listed_and_cancelled_like_any_other(hosts: Hosts) -> None:
    both = hosts.start_both()
    assert hosts.desk.status(hosts.run)["state"] == "running"
    done = hosts.desk.trainkit("cancel", str(hosts.run.path))
    assert done.returncode == 0, done.stderr
    assert [end_of(process)[0] for process in both] == [0, 0]
    assert read_json(hosts.run.attempt(1).end_file)["state"] == "cancelled"


class Namespaces:
    """Two network namespaces with an address each: hosts whose connection a test can cut."""

    def __init__(self, key: int) -> None:
        self.names = [f"tk{key}-{node_rank}" for node_rank in (0, 1)]
        self.devices = [f"tk{key}v{node_rank}" for node_rank in (0, 1)]

    def create(self) -> None:
        for name in self.names:
            self._ip("netns", "add", name)
        one, other = self.devices
        peer = ["peer", "name", other, "netns", self.names[1]]
        self._ip("link", "add", one, "netns", self.names[0], "type", "veth", *peer)
        for node_rank, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            self._ip("-n", name, "addr", "add", f"{self.address(node_rank)}/24", "dev", device)
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", device, "up")

    def address(self, node_rank: int) -> str:
        return f"10.213.0.{node_rank + 1}"

    def cut(self) -> None:
        self._ip("-n", self.names[1], "link", "set", self.devices[1], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)

    def _ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True, timeout=30)


@pytest.fixture
def apart(hosts: Hosts) -> Iterator[tuple[Hosts, Namespaces]]:
    """Hosts in network namespaces of their own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can create network namespaces")
    namespaces = Namespaces(os.getpid())
    hosts.address = namespaces.address(0)
    hosts.prefixes = [["ip", "netns", "exec", name] for name in namespaces.names]
    try:
        namespaces.create()
        yield hosts, namespaces
        hosts.tidy()
    finally:
        namespaces.remove()


@pytest.mark.slow(seconds=20)
def test_hosts_with_addresses_of_their_own(apart: tuple[Hosts, Namespaces]) -> None:
    hosts, namespaces = apart
    hosts.desk.works("print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)")
    both = [hosts.start(node_rank) for node_rank in (0, 1)]
    assert [end_of(process)[0] for process in both] == [0, 0]
    for rank, device in enumerate(namespaces.devices):
        shown = hosts.run.attempt(1).rank_log(rank).read_text().splitlines()[-1]
        assert shown == f"10.213.0.1 {device}"


TRAINS = [
    *("data.seq_len=64", "model.preset=nano", "train.log_every=1", "train.eval_every=50"),
    *("requeue.hang_min_s=4", "requeue.hang_factor=2"),
]


def train(hosts: Hosts, node_rank: int, *settings: str) -> subprocess.Popen[str]:
    """A host that trains with the built-in trainer."""
    argv = ["-m", "trainkit", "run", "small.yaml", *hosts.options(node_rank)]
    typed = [part for setting in (*TRAINS, *settings) for part in ("--set", setting)]
    return hosts.started_as(node_rank, [sys.executable, *argv, *typed])


@pytest.mark.slow(seconds=40)
def test_a_host_that_is_cut_off_ends_the_attempt_on_both_sides(apart: tuple[Hosts, Namespaces]) -> None:
    """The ranks notice it, as a hang."""
    hosts, namespaces = apart
    both = [train(hosts, node_rank, "train.steps=100000") for node_rank in (0, 1)]
    hosts.desk.wait_for_log(hosts.run, "step=5/")
    namespaces.cut()
    (first, printed), (second, words) = [end_of(process) for process in both]
    assert (first, second) == (1, 1)
    for shown in (printed, words):
        assert "failed: no progress" in shown
    assert read_json(hosts.run.attempt(1).end_file)["cause"] == "hang"


@pytest.mark.slow(seconds=30)
def test_the_trainer_computes_the_same_on_hosts_and_saves_on_all(hosts: Hosts) -> None:
    both = [train(hosts, node_rank, "train.steps=100000") for node_rank in (0, 1)]
    hosts.desk.wait_for_log(hosts.run, "step=5/")
    both[1].send_signal(signal.SIGTERM)
    assert [end_of(process)[0] for process in both] == [0, 0]
    saved = read_json(hosts.run.attempt(1).end_file)["mark"]
    typed = [
        part
        for setting in (*TRAINS, "train.steps=100000", f"train.stop_at_step={saved}")
        for part in ("--set", setting)
    ]
    done = hosts.desk.types("submit", "small.yaml", "--nodes", "2", "--follow", *typed)
    assert done.returncode == 0, done.stderr
    curves = [
        [(record["step"], record["loss"]) for record in read_metrics(run)]
        for run in (hosts.run, RunDir(done.stdout.splitlines()[0]))
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == saved
