"""The checks of several nodes at once, in a Slurm step, and of Slurm's own settings."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig
from trainkit.doctor.bandwidth import Layout
from trainkit.doctor.node import Check, Request, measure, node_facts, received
from trainkit.errors import TrainkitError
from trainkit.job.node.preflight import MAX_CLOCK_OFFSET_S
from trainkit.job.node.rendezvous import LOCAL_ADDR
from trainkit.plan.make_plan import make_plan
from trainkit.plan.slurm_request import option_argv
from trainkit.slurm.client import plain_environ, query
from trainkit.slurm.control import parse_config, parse_version
from trainkit.slurm.environment import scrubbed

LOGIN_NODE = Machine(0, 0, (), "this is a login node")
OLDEST_SLURM = (22, 5)
MIN_GRACE_S = 30
WAIT_S, QUICK_WAIT_S = 120, 15
"""How long the other tasks of the step may still run after the first has ended."""
MIN_JOB_AGE_S = 120
SLOW_SHARE = 0.25
"""Share of what the link should give under which a measurement is a warning."""
ODD_SHARE = 0.5
"""Share of the median of all links under which one link is a warning."""
GLOO_GBIT_S = 10.0
"""More than this is not expected of gloo: the CPUs copy and add."""
NEEDED_TO_MEASURE = {"name", "interface", "torch", "GPU"}
"""Checks without which ranks cannot find each other or start."""
NOT_FOR_SRUN = ("signal", "requeue", "no-requeue", "no-kill", "ntasks-per-node", "cpus-per-task", "time")


def step_argv(loaded: LoadedConfig, request: Request, timeout_s: float) -> list[str]:
    """The srun command that checks the nodes that a config requests, one task per node.

    Inside an allocation it takes the nodes of that. Raises ConfigError with every problem of the config.
    """
    worker = [sys.executable, "-m", "trainkit.doctor.node", _to_json(request)]
    num_nodes = loaded.config.resources.nodes
    # A node that cannot start its task must not keep the others waiting.
    wait_s = QUICK_WAIT_S if request.quick else WAIT_S
    shape = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    common = ["srun", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={wait_s}", *shape]
    if "SLURM_JOB_ID" in os.environ:
        return [*common, f"--jobid={os.environ['SLURM_JOB_ID']}", "--overlap", "--mem=0", *worker]
    known = make_target(loaded, "sbatch")
    plan = make_plan(loaded, LOGIN_NODE, Target("sbatch", "doctor", known.cluster), command=("true",))
    assert plan.slurm is not None
    options = {name: value for name, value in plan.slurm.sbatch.items() if name not in NOT_FOR_SRUN}
    options = {name: value for name, value in options.items() if name not in ("nodes", "ntasks")}
    minutes = int(timeout_s // 60) + 1
    return [*common, f"--time={minutes}", *option_argv({**options, "job-name": "trainkit-doctor"}), *worker]


def _to_json(request: Request) -> str:
    return json.dumps({**asdict(request), "folder": str(request.folder)})


class NodesStep:
    """The step of `step_argv` while it runs."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self._proc = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environ(scrubbed(os.environ)),
        )
        self._errors: list[str] = []
        self._timeout_s = timeout_s
        assert self._proc.stdout is not None
        assert self._proc.stderr is not None
        self._messages = received(self._proc.stdout)
        self._reader = threading.Thread(target=self._errors.extend, args=(self._proc.stderr,), daemon=True)
        self._reader.start()
        self._late = threading.Timer(timeout_s, self._proc.terminate)
        self._late.start()

    def __enter__(self) -> NodesStep:
        return self

    def __exit__(self, *_: object) -> None:
        self._late.cancel()
        self._proc.terminate()
        self._proc.wait()
        self._reader.join()

    def read(self, kind: str, count: int) -> list[dict[str, Any]]:
        """The next `count` messages of a kind, fewer if the step ends before.

        Each gets `arrived_s`, this host's time when it came.
        """
        found: list[dict[str, Any]] = []
        while len(found) < count and (message := next(self._messages, None)) is not None:
            if message["kind"] == kind:
                found.append({**message, "arrived_s": time.time()})
        return found

    def send(self, line: str) -> None:
        """Send a line to every task; an empty one ends them."""
        assert self._proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the step has ended
            self._proc.stdin.write(line + "\n")
            self._proc.stdin.close()

    def problem(self) -> str:
        """Why tasks reported nothing, as srun says it at its end."""
        self._proc.wait()
        self._reader.join()
        said = [line.strip() for line in self._errors if line.strip()]
        if not self._late.is_alive():
            said.append(f"srun was stopped after {self._timeout_s:g} s")
        return said[-1] if said else f"srun ended with exit code {self._proc.returncode}"


def check_nodes(
    argv: Sequence[str], num_nodes: int, timeout_s: float, *, measures: bool = True
) -> Iterator[Check]:
    """Run the step of `step_argv`; yield the checks of all its nodes, of what differs, and of the bandwidth.

    Waits at most `timeout_s`, also for the nodes to become free.
    """
    with NodesStep(argv, timeout_s) as step:
        results = step.read("facts", num_nodes)
        for result in sorted(results, key=lambda item: str(item["facts"]["host"])):
            yield from (Check(**check) for check in result["checks"])
        if len(results) < num_nodes:
            missing = f"{num_nodes - len(results)} of {num_nodes} nodes did not report"
            hint = "see that the Python environment and the code are on a filesystem of all nodes"
            if not results:
                hint = "`sinfo` shows whether nodes are free; --partition and --account choose others"
            yield Check("nodes", "failure", f"{missing}: {step.problem()}", hint)
        else:
            names = ",".join(sorted(result["facts"]["host"] for result in results))
            yield Check("nodes", "ok", f"{num_nodes} of {num_nodes} nodes reported: {names}")
        if len(results) > 1:
            yield from compare(results)
        layout = _layout([result["facts"] for result in results])
        failed = {
            check["name"] for item in results for check in item["checks"] if check["state"] == "failure"
        }
        # What stops the ranks from finding each other was said already.
        if (
            len(results) == num_nodes
            and measures
            and layout.world_size > 1
            and not failed & NEEDED_TO_MEASURE
        ):
            step.send(layout.to_json())
            answers = [item["bandwidth"] for item in step.read("bandwidth", num_nodes)]
            yield from _measured(layout, answers, [result["facts"]["links"] for result in results])
        else:
            step.send("")


def _layout(facts: Sequence[Mapping[str, Any]]) -> Layout:
    """The ranks of a measurement: one for each GPU, or one for a host without."""
    ordered = sorted(facts, key=lambda item: str(item["host"]))
    hosts = tuple(str(item["host"]) for item in ordered)
    num_ranks = tuple(max(1, int(item["num_gpus"])) for item in ordered)
    return Layout(hosts, num_ranks, LOCAL_ADDR, int(ordered[0]["port"]) if ordered else 0)


def local_bandwidth(request: Request) -> Iterator[Check]:
    """The check of the bandwidth between the GPUs of this host; none with fewer than two."""
    layout = _layout([node_facts(request)])
    if layout.world_size > 1:
        yield from _measured(layout, [measure(request, layout)], [])


def _measured(
    layout: Layout, answers: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, float]]
) -> Iterator[Check]:
    errors = [answer for answer in answers if "error" in answer]
    whole = [answer for answer in answers if "links" in answer]
    silent: Mapping[str, Any] = {"error": "the ranks ended without a result"}
    yield from bandwidth_checks(layout, (errors + whole + [silent])[0], links)


def bandwidth_checks(
    layout: Layout, found: Mapping[str, Any], links: Sequence[Mapping[str, float]]
) -> Iterator[Check]:
    """The checks of what `run_ranks` measured, against the slowest of the hosts' `link_gbit_s`."""
    if "error" in found:
        hint = "`trainkit diagnose` explains such an error of a run; NCCL_DEBUG=INFO shows what NCCL does"
        yield Check("bandwidth", "failure", f"not measured: {found['error']}", hint)
        return
    backend, size_mib = found["backend"], found["size_mib"]
    expected, name = _expected(backend, links) if len(layout.hosts) > 1 else (None, "")
    where = f"{layout.world_size} ranks ({backend}, {size_mib} MiB)"
    value = f"{found['all_reduce_gbit_s']:,.1f} Gbit/s bus bandwidth over {where}"
    hint = f"under {SLOW_SHARE:.0%} of what {name} should give: check launch.network, cables and other jobs"
    is_slow = expected is not None and found["all_reduce_gbit_s"] < SLOW_SHARE * expected
    yield Check("all-reduce", "warning" if is_slow else "ok", value, hint if is_slow else "")
    speeds = sorted((speed, source, target) for source, target, speed in found["links"])
    slowest, source, target = speeds[0]
    median = statistics.median(speed for speed, _, _ in speeds)
    value = (
        f"{slowest:,.1f} Gbit/s from {source} to {target}, the slowest of {len(speeds)}; median {median:,.1f}"
    )
    if expected is not None:
        value += f"; {name} should give {expected:,.0f}"
    if slowest < ODD_SHARE * median:
        suspects = [item for item in speeds if item[0] < ODD_SHARE * median]
        pairs = "; ".join(f"{source} to {target}" for _, source, target in suspects[:4])
        yield Check("point to point", "warning", value, f"check the links of {pairs}")
    elif expected is not None and median < SLOW_SHARE * expected:
        yield Check("point to point", "warning", value, hint)
    else:
        yield Check("point to point", "ok", value)


def _expected(backend: str, links: Sequence[Mapping[str, float]]) -> tuple[float | None, str]:
    """What the slowest host's link should give in Gbit/s, and which link that is."""
    kind = "infiniband" if backend == "nccl" and all("infiniband" in link for link in links) else "ethernet"
    speeds = [link[kind] for link in links if kind in link]
    if len(speeds) < len(links) or not speeds:
        return None, ""
    names = {"infiniband": "InfiniBand", "ethernet": "the network interface"}
    return min(speeds) if backend == "nccl" else min(*speeds, GLOO_GBIT_S), names[kind]


def compare(results: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """The checks of what must be the same on all nodes: packages, code, and the time."""
    names = {name for result in results for name in result["facts"]["versions"]}
    differ = []
    for name in sorted(names):
        versions = {
            result["facts"]["host"]: result["facts"]["versions"].get(name, "missing") for result in results
        }
        differ += list(_minority(name, versions))
    if differ:
        hint = "use one environment on a shared filesystem, or install the same versions there"
        yield from (Check("packages", "failure", text, hint, host) for host, text in differ)
    else:
        yield Check("packages", "ok", f"the same on {len(results)} nodes")
    # This host's own clock may be the one that is off: the nodes are compared with their median.
    offsets_s = {item["facts"]["host"]: item["time_s"] - item["arrived_s"] for item in results}
    offsets = sorted(offsets_s.values())
    median_s = offsets[len(offsets) // 2]
    off = {
        host: offset_s
        for host, offset_s in offsets_s.items()
        if abs(offset_s - median_s) > MAX_CLOCK_OFFSET_S
    }
    for host, offset_s in off.items():
        apart_s = offset_s - median_s
        text = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the clocks of other nodes"
        hint = "ask the administrators to synchronize it; `chronyc tracking` shows the offset"
        yield Check("clock", "failure", text, hint, host)
    if not off:
        yield Check("clock", "ok", f"of {len(results)} nodes within {offsets[-1] - offsets[0]:.1f} s")


def _minority(name: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(host, sentence) for each host whose value is not the most frequent one."""
    (usual, count), *_ = Counter(values.values()).most_common()
    for host, value in values.items():
        if value != usual:
            yield host, f"{name} is {value}, but {usual} on {count} of {len(values)} nodes"


def slurm_checks() -> Iterator[Check]:
    """The checks of Slurm's version and of the settings that decide whether a run survives."""
    try:
        config = parse_config(query(["scontrol", "show", "config"]).stdout)
        partitions = query(["scontrol", "show", "partition", "--oneliner"]).stdout
    except TrainkitError as error:
        yield Check("Slurm", "failure", error.message, error.hint)
        return
    yield from settings_checks(config, partitions)


def settings_checks(config: Mapping[str, str], partitions: str) -> Iterator[Check]:
    """The checks of `scontrol show config`, and of the text of `scontrol show partition --oneliner`."""
    version = parse_version(config.get("SLURM_VERSION", ""))
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_SLURM:
        yield Check("Slurm", "warning", text, "not tested; the oldest tested version is 22.05")
    else:
        yield Check("Slurm", "ok", f"{text}, cluster {config.get('ClusterName', 'unknown')}")
    yield from _preemption(config, partitions)
    if config.get("JobRequeue") == "0":
        hint = "trainkit passes --requeue, and submits a new job where the site forbids it"
        yield Check("requeue", "warning", "JobRequeue is 0", hint)
    else:
        yield Check("requeue", "ok", "jobs can be requeued")
    kill_wait_s = _seconds(config.get("KillWait", ""))
    if kill_wait_s is not None and kill_wait_s < MIN_GRACE_S:
        hint = "at the time limit SIGKILL follows this soon; requeue.grace_s asks for an earlier notice"
        yield Check("KillWait", "warning", config["KillWait"], hint)
    else:
        yield Check("KillWait", "ok", config.get("KillWait", "unknown"))
    if "slurmdbd" in config.get("AccountingStorageType", ""):
        yield Check("accounting", "ok", "sacct knows how old jobs ended")
    else:
        age_s = _seconds(config.get("MinJobAge", ""))
        value = f"none: Slurm forgets a job {config.get('MinJobAge', 'soon')} after its end"
        is_short = age_s is not None and age_s < MIN_JOB_AGE_S
        hint = "how a job ended is then known from its run folder only"
        yield Check("accounting", "warning" if is_short else "ok", value, hint if is_short else "")


def _preemption(config: Mapping[str, str], partitions: str) -> Iterator[Check]:
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
        yield Check("preemption", "ok", "jobs are not preempted")
        return
    signal = "SIGTERM and the job's own signal" if _sends_own_signal(config) else "SIGTERM"
    for item in preempted:
        grace_s = _seconds(item.get("GraceTime", "0")) or 0
        mode = item.get("PreemptMode", default)
        value = f"partition {item['PartitionName']}: {mode}, GraceTime {grace_s} s, notice by {signal}"
        if grace_s < MIN_GRACE_S:
            hint = (
                "a preempted run has no time for a save: set checkpoint.every_minutes to what you can lose, "
                "or ask for a GraceTime of 30 s"
            )
            yield Check("preemption", "warning", value, hint)
        else:
            yield Check("preemption", "ok", value)


def _sends_own_signal(config: Mapping[str, str]) -> bool:
    """Whether preempted jobs get the signal that they asked for with ``--signal``."""
    return "send_user_signal" in config.get("PreemptParameters", "").split(",")


def _seconds(text: str) -> int | None:
    """The number in `30 sec`; None if there is none."""
    first = text.split()[0] if text.split() else ""
    return int(first) if first.isdigit() else None
