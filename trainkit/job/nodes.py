"""Which hosts of a job its step runs on: as many as the plan asks for, without those that are bad."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import PurePath

from trainkit.errors import TrainkitError
from trainkit.plan.launch import LaunchPlan
from trainkit.slurm.hosts import hosts_of_job, is_out, node_states

_NOT_STARTED = re.compile(
    r"^srun: (?:error: (?:Unable to (?:confirm allocation|create step)|Application launch failed)"
    r"|.*aborted before step completely launched).*$",
    re.MULTILINE,
)
_NO_LAUNCH = re.compile(r"^srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+)", re.MULTILINE)


def why_not_started(text: str) -> str | None:
    """srun's own words, from what it printed, when Slurm could not start the step."""
    found = _NOT_STARTED.search(text)
    return None if found is None else found[0]


def hosts_that_could_not_start(text: str) -> tuple[str, ...]:
    """The hosts on which srun says that it could not start a task."""
    return tuple(dict.fromkeys(match["host"] for match in _NO_LAUNCH.finditer(text)))


def choose_hosts(all_hosts: Sequence[str], bad: Container[str], num: int) -> list[str]:
    """The first `num` hosts that are not bad, in the job's order; fewer when there are no more."""
    return [host for host in all_hosts if host not in bad][:num]


def step_argv(step: Sequence[str], plan: LaunchPlan, hosts: Sequence[str], beside: bool = False) -> list[str]:
    """The argv that starts the ranks on these hosts, from the one that stands in the script.

    Without spare nodes the step has all hosts of the job, and its argv stays as it is. `beside` is for a
    step that Slurm takes for running still, and that has the memory of the job: on a host that is cut off it
    cannot be ended.
    Raises TrainkitError when there are not as many hosts as the plan asks for.
    """
    if len(hosts) < plan.num_nodes:
        raise TrainkitError(
            f"the step needs {plan.num_nodes} nodes, and only {len(hosts)} of the job's are good"
            + (f": {','.join(hosts)}" if hosts else "")
        )
    options = ["--overlap", "--mem=0"] if beside else []
    if plan.spare_nodes:
        options.append(f"--nodelist={','.join(hosts[: plan.num_nodes])}")
    if not options:
        return list(step)
    srun = next((index for index, word in enumerate(step) if PurePath(word).name == "srun"), None)
    if srun is None:
        raise TrainkitError(
            f"the step of the script has no srun: {' '.join(step)}",
            hint="it takes one to start the step again, and to tell it the hosts",
        )
    return [*step[: srun + 1], *options, *step[srun + 1 :]]


def lost_hosts(job_id: str, hosts: Sequence[str], *, is_running: bool) -> tuple[str, ...] | None:
    """Those of a job's hosts on which nothing can be started any more; None when Slurm does not say.

    Slurm calls them down, failed or not responding, or has taken them from the job while it `is_running`: of
    one that ends, it takes them one by one as they are done.
    """
    if not hosts:
        return ()
    try:
        left, states = (hosts_of_job(job_id) if is_running else hosts), node_states(hosts)
    except TrainkitError as error:
        print(f"Slurm does not say how the hosts of {job_id} are: {error.message}", flush=True)
        return None
    if is_running and not left:
        return None  # it has ended between two questions, and that all were lost at once is not known
    return tuple(host for host in hosts if host not in left or is_out(states.get(host, "")))
