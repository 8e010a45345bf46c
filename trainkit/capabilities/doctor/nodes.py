"""Checks a cluster: all nodes in one Slurm step, differences between the nodes, and Slurm's settings."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.capabilities.doctor import NodeReport, Request, from_json, to_json
from trainkit.capabilities.doctor.bandwidth import TIMEOUT_S as MEASURE_TIMEOUT_S
from trainkit.capabilities.doctor.bandwidth import Bandwidth, Layout, bandwidth_checks
from trainkit.capabilities.doctor.node import measure, node_report, received, shared_file
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig
from trainkit.errors import TrainkitError
from trainkit.formats import plural
from trainkit.job.node.rendezvous import LOCAL_ADDR
from trainkit.job.preflight import Finding, warn_if
from trainkit.job.processes import module_argv
from trainkit.plan.facts import Facts
from trainkit.plan.launch import option_argv
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload
from trainkit.slurm.client import plain_environ, query, require_controller, run_slurm
from trainkit.slurm.control import parse_version, show_config
from trainkit.slurm.environment import scrubbed

LOGIN_NODE = Machine(0, 0, (), "this is a login node")
WAIT_S, QUICK_WAIT_S = 150, 15
"""Seconds to wait for the other nodes after the first node has reported or its task has exited; the second
value is for quick checks."""
POLL_S = 0.1
STOP_S = 10.0
"""Seconds to wait for srun to terminate its job step."""
NEEDED_TO_MEASURE = {"name", "interface", "port", "Python", "torch", "GPU"}
"""Names of the checks that must pass before the bandwidth is measured; otherwise, ranks could not start or
connect to each other. The name of a GPU check is followed by the GPU's number."""
NOT_FOR_SRUN = (
    "signal",
    "requeue",
    "no-requeue",
    "no-kill",
    "ntasks-per-node",
    "cpus-per-task",
    "time",
    "nodes",
    "ntasks",
)


def step_argv(loaded: LoadedConfig, request: Request, timeout_s: float) -> list[str]:
    """Return the srun command that checks the nodes requested by a config, with one task per node.

    Inside an allocation, the command checks the allocated nodes. Raises ConfigError, which lists all
    problems, if the config is invalid.
    """
    worker = module_argv("trainkit.capabilities.doctor.node", to_json(request))
    num_nodes = loaded.config.resources.most_nodes
    # Set srun's `--wait` option, so that a node that cannot start its task does not delay the other nodes.
    wait_s = QUICK_WAIT_S if request.quick else WAIT_S
    shape = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    common = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={wait_s}", *shape]
    if "SLURM_JOB_ID" in os.environ:
        return [*common, f"--jobid={os.environ['SLURM_JOB_ID']}", "--overlap", "--mem=0", *worker]
    known = make_target(loaded, "sbatch")
    facts = Facts(LOGIN_NODE, Target("sbatch", "doctor", known.cluster))
    plan = make_plan(loaded, facts, Workload(("true",)))
    assert plan.slurm is not None
    options = {name: value for name, value in plan.slurm.sbatch.items() if name not in NOT_FOR_SRUN}
    minutes = int(timeout_s // 60) + 1
    return [*common, f"--time={minutes}", *option_argv({**options, "job-name": "trainkit-doctor"}), *worker]


class NodesStep:
    """A running Slurm job step, started with the command from `step_argv`."""

    def __init__(self, argv: Sequence[str]) -> None:
        # Write the output to files, because the step would block if an output pipe were full.
        self._out, self._errors = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115
        # Start srun in a new session, so that Ctrl-C stops the step through `__exit__`; otherwise, srun would
        # ask for a second Ctrl-C.
        self._proc = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._errors,
            text=True,
            env=plain_environ(scrubbed(os.environ)),
            start_new_session=True,
        )
        self._step = ""
        self._num_received = 0

    def __enter__(self) -> NodesStep:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._proc.stdin.close()
        self._proc.terminate()
        try:
            self._proc.wait(STOP_S)
        except subprocess.TimeoutExpired:  # a node does not respond to Slurm
            if self._step:
                with contextlib.suppress(TrainkitError):  # ignore the error, because srun is killed anyway
                    run_slurm(["scancel", self._step], STOP_S)
            self._proc.kill()
            self._proc.wait()
        self._out.close()
        self._errors.close()

    def reports(self, count: int, timeout_s: float, wait_s: float) -> list[NodeReport]:
        """Return up to `count` node reports, sorted by host; see `_received` for the time limits."""
        found = []
        for text in self._received(count, timeout_s, wait_s):
            found.append(from_json(NodeReport, text))
            self._step = found[-1].step
        return sorted(found, key=lambda item: item.host)

    def measure(self, layout: Layout) -> list[Bandwidth]:
        """Measure the bandwidth on the nodes that have reported; if a rank fails, results are missing."""
        assert self._proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the job step has already exited
            self._proc.stdin.write(to_json(layout) + "\n")
            self._proc.stdin.flush()
        limit_s = MEASURE_TIMEOUT_S + STOP_S
        answers = []
        for text in self._received(len(layout.hosts), limit_s, limit_s):
            answers.append(from_json(Bandwidth, text))
            if answers[-1].error:
                break
        return answers

    def _received(self, count: int, timeout_s: float, wait_s: float) -> Iterator[str]:
        """Yield the next `count` messages from the nodes.

        Yields fewer messages if the step exits, `timeout_s` passes, or `wait_s` passes after the first
        message.
        """
        deadline_s, last = time.monotonic() + timeout_s, self._num_received + count
        while self._num_received < last:
            has_ended = self._proc.poll() is not None
            new = list(received(_lines_of(self._out.name)))[self._num_received : last]
            for message in new:
                self._num_received += 1
                deadline_s = min(deadline_s, time.monotonic() + wait_s)
                yield message
            if not new and (has_ended or time.monotonic() > deadline_s):
                return
            time.sleep(0.0 if new else POLL_S)

    def problem(self, hosts: Sequence[str], waited_s: float) -> str:
        """Return the reason, according to srun, why `hosts` have not reported.

        If the output of srun names none of `hosts`, the reason may concern other hosts.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._proc.wait(1.0)
        said = [line.strip() for line in _lines_of(self._errors.name) if line.strip()]
        of_hosts = [line for line in said if set(hosts) & set(re.split(r"[\s:,]+", line))]
        if of_hosts:
            # The line "node2: task 1: Exited with exit code 2" follows a line with the actual reason, which
            # may not name the host.
            reasons = [line for line in (*of_hosts, *said) if ": task " not in line]
            return (reasons or of_hosts)[0]
        if self._proc.returncode is None:
            return f"no answer after {waited_s:g} s"
        return said[-1] if said else f"srun ended with exit code {self._proc.returncode}"


def _lines_of(file: str) -> list[str]:
    return Path(file).read_text(errors="replace").splitlines(keepends=True)


def check_nodes(loaded: LoadedConfig, request: Request, timeout_s: float) -> Iterator[Finding]:
    """Run a Slurm step on the nodes that a config requests, and yield the findings.

    The findings cover the checks of each node, the differences between nodes, and the bandwidth. Waits up to
    `timeout_s` for nodes to become available. Raises SlurmError if Slurm does not respond.
    """
    require_controller()
    num_nodes = loaded.config.resources.most_nodes
    wait_s = QUICK_WAIT_S if request.quick else WAIT_S
    with shared_file(request.folder) as shared:
        if isinstance(shared, Finding):
            yield shared
        else:
            request = replace(request, shared=shared)
        with NodesStep(step_argv(loaded, request, timeout_s)) as step:
            reports = step.reports(num_nodes, timeout_s, wait_s)
            found = [item for report in reports for item in report.findings]
            yield from found
            yield _reported(reports, num_nodes, step, wait_s if reports else timeout_s)
            if len(reports) > 1:
                yield from compare_versions(reports)
            if len(reports) == num_nodes and not request.quick and can_measure(found):
                yield from _bandwidth(reports, step.measure)


def _reported(reports: Sequence[NodeReport], num_nodes: int, step: NodesStep, waited_s: float) -> Finding:
    names = [report.host for report in reports]
    if len(reports) == num_nodes:
        return Finding("nodes", "ok", f"{num_nodes} of {num_nodes} nodes reported: {','.join(names)}")
    if not reports:
        value = f"{num_nodes} of {num_nodes} nodes did not report: {step.problem((), waited_s)}"
        hint = (
            "check with `sinfo` whether nodes are free, or choose other nodes with --partition and --account"
        )
        return Finding("nodes", "failure", value, hint)
    missing = sorted({*reports[0].peers, reports[0].host} - set(names))
    value = f"{num_nodes - len(reports)} of {num_nodes} nodes did not report ({','.join(missing)})"
    hint = "check that the Python environment and the code are on a filesystem that all nodes mount"
    return Finding("nodes", "failure", f"{value}: {step.problem(missing, waited_s)}", hint)


def can_measure(findings: Iterable[Finding]) -> bool:
    """Return whether all checks that a bandwidth measurement requires have passed."""
    failed = {item.name.split()[0] for item in findings if item.state == "failure"}
    return not failed & NEEDED_TO_MEASURE


def local_bandwidth(request: Request) -> Iterator[Finding]:
    """Yield findings about the bandwidth between this host's GPUs; yield nothing for fewer than two GPUs."""
    yield from _bandwidth([node_report(request)], lambda layout: [measure(request, layout)])


def _bandwidth(
    reports: Sequence[NodeReport], measured: Callable[[Layout], Sequence[Bandwidth]]
) -> Iterator[Finding]:
    """Measure the bandwidth with one rank per GPU, or one rank per host without GPUs."""
    hosts, num_ranks = tuple(item.host for item in reports), tuple(max(1, item.num_gpus) for item in reports)
    layout = Layout(hosts, num_ranks, LOCAL_ADDR, reports[0].port)
    if layout.world_size < 2:
        return
    answers = measured(layout)
    errors = [answer for answer in answers if answer.error]
    whole = [answer for answer in answers if answer.links]
    silent = Bandwidth("the ranks exited without a result")
    yield from bandwidth_checks(layout, (errors + whole + [silent])[0], [item.links for item in reports])


def compare_versions(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Compare package versions across nodes; each finding lists the nodes that differ from the majority."""
    hint = "use one environment on a shared filesystem, or install the same versions on all nodes"
    is_same = True
    for name in sorted({name for report in reports for name in report.versions}):
        values = {item.host: item.versions.get(name, "missing") for item in reports}
        (usual, count), *others = Counter(values.values()).most_common()
        is_same &= not others
        if others and count == others[0][1]:
            shown = "; ".join(
                f"{value} on {_names(values, value)}" for value in dict.fromkeys(values.values())
            )
            yield Finding("packages", "failure", f"{name} is {shown}", hint)
            continue
        for host, value in values.items():
            if value != usual:
                text = f"{name} is {value}, but {usual} on {count} of {len(values)} nodes"
                yield Finding("packages", "failure", text, hint, host)
    if is_same:
        yield Finding("packages", "ok", f"the same on {plural(len(reports), 'node')}")


def _names(values: Mapping[str, object], value: object) -> str:
    """Return the names of the first few hosts that have `value`, joined as text."""
    hosts = sorted(host for host, found in values.items() if found == value)
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return f"{', '.join(hosts[:3])}{more}"


OLDEST_SLURM = (22, 5)
MIN_GRACE_S = 30
MIN_JOB_AGE_S = 120


def slurm_checks() -> Iterator[Finding]:
    """Check Slurm's version, and the Slurm settings that decide whether a run survives interruptions."""
    try:
        config = show_config()
        partitions = query(["scontrol", "show", "partition", "--oneliner"])
    except TrainkitError as error:
        yield Finding("Slurm", "failure", error.message, error.hint)
        return
    yield from settings_checks(config, partitions)


def settings_checks(config: Mapping[str, str], partitions: str) -> Iterator[Finding]:
    """Check the settings shown by `scontrol show config` and `scontrol show partition --oneliner`."""
    version = parse_version(config.get("SLURM_VERSION", ""))
    text = f"{version[0]}.{version[1]:02d}.{version[2]}, cluster {config.get('ClusterName', 'unknown')}"
    hint = "trainkit is not tested with this version; the oldest tested version is 22.05"
    yield warn_if(version[:2] < OLDEST_SLURM, "Slurm", text, hint)
    yield from _preemption(config, partitions)
    off = config.get("JobRequeue") == "0"
    hint = "trainkit passes --requeue to sbatch and, if the site forbids requeueing, submits a new job"
    yield warn_if(off, "requeue", "JobRequeue is 0" if off else "jobs can be requeued", hint)
    kill_wait = config.get("KillWait", "unknown")
    hint = "KillWait is the time between the time limit and SIGKILL; set requeue.grace_s to stop earlier"
    yield warn_if(_seconds(kill_wait, MIN_GRACE_S) < MIN_GRACE_S, "KillWait", kill_wait, hint)
    if "slurmdbd" in config.get("AccountingStorageType", ""):
        yield Finding("accounting", "ok", "sacct reports the final state of past jobs")
    else:
        age = config.get("MinJobAge", "soon")
        value = f"none: Slurm forgets a job {age} after it has finished"
        hint = "after this time, trainkit can determine the job's final state only from the run folder"
        yield warn_if(_seconds(age, MIN_JOB_AGE_S) < MIN_JOB_AGE_S, "accounting", value, hint)


def _preemption(config: Mapping[str, str], partitions: str) -> Iterator[Finding]:
    fields = [
        dict(item.partition("=")[::2] for item in line.split()) for line in partitions.splitlines() if line
    ]
    default = config.get("PreemptMode", "OFF")
    preempted = [
        item
        for item in fields
        if not {"OFF", "GANG"} >= set(item.get("PreemptMode", default).upper().split(","))
    ]
    if config.get("PreemptType", "").endswith("none") or not preempted:
        yield Finding("preemption", "ok", "jobs are not preempted")
        return
    sends_own = "send_user_signal" in config.get("PreemptParameters", "").split(",")
    signal = "SIGTERM and the job's own signal" if sends_own else "SIGTERM"
    for item in preempted:
        grace_s = _seconds(item.get("GraceTime", ""), 0)
        mode = item.get("PreemptMode", default)
        value = f"partition {item['PartitionName']}: {mode}, GraceTime {grace_s} s, stop signal {signal}"
        hint = (
            "a preempted run has no time to save: set checkpoint.every_minutes to the time that you can "
            "afford to lose, or ask the administrators for a GraceTime of 30 s"
        )
        yield warn_if(grace_s < MIN_GRACE_S, "preemption", value, hint)


def _seconds(text: str, unknown: int) -> int:
    """Return the number of seconds in a string such as `30 sec`, or `unknown` if there is no number."""
    first = text.partition(" ")[0]
    return int(first) if first.isdigit() else unknown
