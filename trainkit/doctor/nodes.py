"""The checks of several nodes at once, in a Slurm step, and what must be the same on all of them."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig
from trainkit.doctor.bandwidth import TIMEOUT_S as MEASURE_TIMEOUT_S
from trainkit.doctor.bandwidth import Layout, bandwidth_checks
from trainkit.doctor.check import Check, Request, plural
from trainkit.doctor.disk import CLOCK_HINT, shared_file
from trainkit.doctor.node import measure, node_facts, received
from trainkit.errors import TrainkitError
from trainkit.job.node.rendezvous import LOCAL_ADDR
from trainkit.job.preflight import MAX_CLOCK_OFFSET_S, direction
from trainkit.job.processes import module_argv
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.plan.slurm_request import option_argv
from trainkit.plan.workload import Command
from trainkit.run.process import own_host
from trainkit.slurm.client import plain_environ, run_slurm
from trainkit.slurm.environment import scrubbed

LOGIN_NODE = Machine(0, 0, (), "this is a login node")
WAIT_S, QUICK_WAIT_S = 150, 15
"""How long the other nodes may still take after the first has reported, or after its task has ended."""
STOP_S = 10.0
"""How long srun may take to end its step."""
NEEDED_TO_MEASURE = {"name", "interface", "Python", "torch", "GPU"}
"""Checks without which ranks cannot find each other or start; those of a GPU have its number, too."""
NOT_FOR_SRUN = ("signal", "requeue", "no-requeue", "no-kill", "ntasks-per-node", "cpus-per-task", "time")
ADDRESS_IN_USE = ("EADDRINUSE", "address already in use", "Address already in use")


def step_argv(loaded: LoadedConfig, request: Request, timeout_s: float) -> list[str]:
    """The srun command that checks the nodes that a config requests, one task per node.

    Inside an allocation it takes the nodes of that. Raises ConfigError with every problem of the config.
    """
    worker = module_argv("trainkit.doctor.node", request.to_json())
    num_nodes = loaded.config.resources.nodes
    # A node that cannot start its task must not keep the others waiting.
    wait_s = QUICK_WAIT_S if request.quick else WAIT_S
    shape = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    common = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={wait_s}", *shape]
    if "SLURM_JOB_ID" in os.environ:
        return [*common, f"--jobid={os.environ['SLURM_JOB_ID']}", "--overlap", "--mem=0", *worker]
    known = make_target(loaded, "sbatch")
    facts = Facts(LOGIN_NODE, Target("sbatch", "doctor", known.cluster))
    plan = make_plan(loaded, facts, Command(("true",)))
    assert plan.slurm is not None
    options = {name: value for name, value in plan.slurm.sbatch.items() if name not in NOT_FOR_SRUN}
    options = {name: value for name, value in options.items() if name not in ("nodes", "ntasks")}
    minutes = int(timeout_s // 60) + 1
    return [*common, f"--time={minutes}", *option_argv({**options, "job-name": "trainkit-doctor"}), *worker]


class NodesStep:
    """The step of `step_argv` while it runs."""

    def __init__(self, argv: Sequence[str]) -> None:
        # A Ctrl-C in the terminal ends the step through `__exit__`: srun alone would ask for a second one.
        self._proc = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=plain_environ(scrubbed(os.environ)),
            start_new_session=True,
        )
        self._errors: list[str] = []
        self._step = ""
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert self._proc.stderr is not None
        self._readers = [
            threading.Thread(target=self._receive, daemon=True),
            threading.Thread(target=self._errors.extend, args=(self._proc.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _receive(self) -> None:
        assert self._proc.stdout is not None
        try:
            for message in received(self._proc.stdout):
                self._messages.put({**message, "arrived_s": time.time()})
        finally:
            self._messages.put(None)

    def __enter__(self) -> NodesStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._proc.terminate()
        try:
            self._proc.wait(STOP_S)
        except subprocess.TimeoutExpired:  # a node does not answer Slurm
            if self._step:
                with contextlib.suppress(TrainkitError):  # srun is killed in any case
                    run_slurm(["scancel", self._step], STOP_S)
            self._proc.kill()
            self._proc.wait()
        for reader in self._readers:
            reader.join(STOP_S)

    def read(
        self,
        kind: str,
        count: int,
        timeout_s: float,
        wait_s: float,
        is_last: Callable[[dict[str, Any]], bool] = lambda _: False,
    ) -> list[dict[str, Any]]:
        """The next `count` messages of a kind.

        Fewer if the step ends before, after `timeout_s`, `wait_s` after the first, or after one that
        `is_last`. Each has `arrived_s`, this host's time when it came.
        """
        found: list[dict[str, Any]] = []
        deadline_s = time.monotonic() + timeout_s
        while len(found) < count and not (found and is_last(found[-1])):
            try:
                message = self._messages.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            if message is None:
                break
            self._step = message.get("step", self._step)
            if message["kind"] == kind:
                found.append(message)
                deadline_s = min(deadline_s, time.monotonic() + wait_s)
        return found

    def send(self, line: str) -> None:
        """Send a line to every task."""
        assert self._proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the step has ended
            self._proc.stdin.write(line + "\n")
            self._proc.stdin.flush()

    def close(self) -> None:
        """Let the tasks end."""
        assert self._proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._proc.stdin.close()

    def problem(self, hosts: Sequence[str], waited_s: float) -> str:
        """Why these hosts have not reported after this time, as srun says it; all, if none are given."""
        has_ended = True
        try:
            self._proc.wait(1.0)
        except subprocess.TimeoutExpired:
            has_ended = False
        for reader in self._readers:
            reader.join(1.0)
        said = [line.strip() for line in self._errors if line.strip()]
        of_hosts = [line for line in said if set(hosts) & set(re.split(r"[\s:,]+", line))]
        if of_hosts:
            # "node2: task 1: Exited with exit code 2" follows its reason, which may not name the host.
            reasons = [line for line in (*of_hosts, *said) if ": task " not in line]
            return (reasons or of_hosts)[0]
        if not has_ended:
            return f"no answer after {waited_s:g} s"
        return said[-1] if said else f"srun ended with exit code {self._proc.returncode}"


def check_nodes(loaded: LoadedConfig, request: Request, timeout_s: float) -> Iterator[Check]:
    """Run a step on the nodes of a config; yield the checks of each, of what differs, and of the bandwidth.

    Waits at most `timeout_s` for the nodes to become free.
    """
    num_nodes = loaded.config.resources.nodes
    wait_s = QUICK_WAIT_S if request.quick else WAIT_S
    with shared_file(request.folder) as shared:
        if isinstance(shared, Check):
            yield shared
        else:
            request = replace(request, shared=shared)
        with NodesStep(step_argv(loaded, request, timeout_s)) as step:
            results = step.read("facts", num_nodes, timeout_s, wait_s)
            for result in sorted(results, key=lambda item: str(item["facts"]["host"])):
                yield from (Check(**check) for check in result["checks"])
            yield _reported(results, num_nodes, step, wait_s if results else timeout_s)
            if len(results) > 1:
                yield from compare_versions(results)
            if results:
                yield from compare_clocks(results, own_host())
            checks = [check for item in results for check in item["checks"]]
            if len(results) == num_nodes and not request.quick and can_measure(checks):
                yield from _bandwidth(step, [result["facts"] for result in results])


def _reported(
    results: Sequence[Mapping[str, Any]], num_nodes: int, step: NodesStep, waited_s: float
) -> Check:
    names = sorted(result["facts"]["host"] for result in results)
    if len(results) == num_nodes:
        return Check("nodes", "ok", f"{num_nodes} of {num_nodes} nodes reported: {','.join(names)}")
    if not results:
        value = f"{num_nodes} of {num_nodes} nodes did not report: {step.problem((), waited_s)}"
        hint = "`sinfo` shows whether nodes are free; --partition and --account choose others"
        return Check("nodes", "failure", value, hint)
    missing = sorted({*results[0]["facts"]["peers"], results[0]["facts"]["host"]} - set(names))
    value = f"{num_nodes - len(results)} of {num_nodes} nodes did not report ({','.join(missing)})"
    hint = "see that the Python environment and the code are on a filesystem of all nodes"
    return Check("nodes", "failure", f"{value}: {step.problem(missing, waited_s)}", hint)


def can_measure(checks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no check failed without which ranks cannot find each other or start."""
    failed = {check["name"].split()[0] for check in checks if check["state"] == "failure"}
    return not failed & NEEDED_TO_MEASURE


def _bandwidth(step: NodesStep, facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Measure in the tasks of a step; at the next port if another program has taken one."""
    layouts = _layouts(facts)
    if not layouts or layouts[0].world_size < 2:
        return
    answers: list[Mapping[str, Any]] = []
    for layout in layouts:
        step.send(layout.to_json())
        limit_s = MEASURE_TIMEOUT_S + STOP_S
        messages = step.read("bandwidth", len(layout.hosts), limit_s, limit_s, _is_hopeless)
        answers = [message["bandwidth"] for message in messages]
        if not any(map(_has_taken_port, answers)):
            break
    yield from _measured(layouts[0], answers, [item["links"] for item in facts])


def _is_hopeless(message: Mapping[str, Any]) -> bool:
    """Whether a rank has failed for another reason than its port."""
    return "error" in message["bandwidth"] and not _has_taken_port(message["bandwidth"])


def _has_taken_port(answer: Mapping[str, Any]) -> bool:
    return any(text in answer.get("error", "") for text in ADDRESS_IN_USE)


def _layouts(facts: Sequence[Mapping[str, Any]]) -> list[Layout]:
    """The ranks of a measurement, one for each GPU or for a host without, at each free port of the first."""
    ordered = sorted(facts, key=lambda item: str(item["host"]))
    hosts = tuple(str(item["host"]) for item in ordered)
    num_ranks = tuple(max(1, int(item["num_gpus"])) for item in ordered)
    return [Layout(hosts, num_ranks, LOCAL_ADDR, int(port)) for port in ordered[0]["ports"]]


def local_bandwidth(request: Request) -> Iterator[Check]:
    """The check of the bandwidth between the GPUs of this host; none with fewer than two."""
    layouts = _layouts([node_facts(request)])
    if not layouts or layouts[0].world_size < 2:
        return
    answer: Mapping[str, Any] = {}
    for layout in layouts:
        answer = measure(request, layout)
        if not _has_taken_port(answer):
            break
    yield from _measured(layouts[0], [answer], [])


def _measured(
    layout: Layout, answers: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, float]]
) -> Iterator[Check]:
    errors = [answer for answer in answers if "error" in answer]
    whole = [answer for answer in answers if "links" in answer]
    silent: Mapping[str, Any] = {"error": "the ranks ended without a result"}
    yield from bandwidth_checks(layout, (errors + whole + [silent])[0], links)


FILE_SERVER = "the run folder's file server"


def compare_versions(results: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """The checks of the packages and the code of all nodes."""
    names = {name for result in results for name in result["facts"]["versions"]}
    differ: list[tuple[str | None, str]] = []
    for name in sorted(names):
        values = {
            result["facts"]["host"]: result["facts"]["versions"].get(name, "missing") for result in results
        }
        differ += _differences(name, values)
    hint = "use one environment on a shared filesystem, or install the same versions there"
    yield from (Check("packages", "failure", text, hint, host) for host, text in differ)
    if not differ:
        yield Check("packages", "ok", f"the same on {plural(len(results), 'node')}")


def _differences(name: str, values: Mapping[str, str]) -> Iterator[tuple[str | None, str]]:
    """(host, sentence) for each host whose value is not that of the majority; without one, for no host."""
    counts = Counter(values.values()).most_common()
    if len(counts) == 1:
        return
    (usual, count), (_, second), *_ = counts
    if count == second:
        shown = "; ".join(f"{value} on {_names(values, value)}" for value, _ in counts)
        yield None, f"{name} is {shown}"
        return
    for host, value in values.items():
        if value != usual:
            yield host, f"{name} is {value}, but {usual} on {count} of {len(values)} nodes"


def _names(values: Mapping[str, object], value: object, most: int = 3) -> str:
    """The hosts with a value."""
    hosts = sorted(host for host, found in values.items() if found == value)
    more = f" and {len(hosts) - most} more" if len(hosts) > most else ""
    return f"{', '.join(hosts[:most])}{more}"


def compare_clocks(results: Sequence[Mapping[str, Any]], caller: str) -> Iterator[Check]:
    """The checks of the clocks of all nodes, of this host (the `caller`), and of the file server.

    Each clock has one vote; those that differ from the largest group that agrees are off.
    """
    offsets_s = {item["facts"]["host"]: item["time_s"] - item["arrived_s"] for item in results}
    nodes = set(offsets_s)
    offsets_s.setdefault(caller, 0.0)
    server_s = _server_offset_s(results)
    if server_s is not None:
        offsets_s[FILE_SERVER] = server_s
    groups = _agreeing(offsets_s)
    if len(groups) == 1:
        spread_s = max(offsets_s[host] for host in nodes) - min(offsets_s[host] for host in nodes)
        yield Check("clock", "ok", f"of {plural(len(nodes), 'node')} within {spread_s:.1f} s")
        return
    if len(groups[0]) == len(groups[1]):
        first, second = (statistics.median(offsets_s[name] for name in group) for group in groups[:2])
        ahead, behind = (groups[0], groups[1]) if first > second else (groups[1], groups[0])
        text = f"that of {' and '.join(ahead)} is {abs(first - second):.0f} s ahead of {' and '.join(behind)}"
        yield Check("clock", "failure", text, CLOCK_HINT)
        return
    time_s = statistics.median(offsets_s[name] for name in groups[0])
    for name in (name for group in groups[1:] for name in group):
        apart_s = offsets_s[name] - time_s
        text = f"{abs(apart_s):.0f} s {direction(apart_s)} the other clocks"
        if name in nodes:
            yield Check("clock", "failure", text, CLOCK_HINT, name)
        elif name == FILE_SERVER:
            yield Check("clock", "failure", f"{name} is {text}", CLOCK_HINT)
        else:  # no rank runs there
            yield Check("clock", "warning", f"this host, {name}, is {text}", CLOCK_HINT)


def _server_offset_s(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds by which the file server is ahead of this host; None if the nodes disagree.

    They disagree when the folder is on a disk of each node: its times are then those of the node.
    """
    found: list[float] = [
        item["time_s"] - item["arrived_s"] - item["facts"]["file_server_offset_s"]
        for item in results
        if item["facts"]["file_server_offset_s"] is not None
    ]
    if not found or max(found) - min(found) > MAX_CLOCK_OFFSET_S:
        return None
    return statistics.median(found)


def _agreeing(offsets_s: Mapping[str, float]) -> list[list[str]]:
    """Groups of clocks that agree, the largest first; each clock is in one group."""
    groups: list[list[str]] = []
    for name in sorted(offsets_s, key=lambda item: offsets_s[item]):
        if groups and offsets_s[name] - offsets_s[groups[-1][0]] <= MAX_CLOCK_OFFSET_S:
            groups[-1].append(name)
        else:
            groups.append([name])
    return sorted(groups, key=len, reverse=True)
