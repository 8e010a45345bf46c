"""The step of a Slurm job: its argv, and whom Slurm signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from trainkit.errors import TrainkitError
from trainkit.job import processes
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.plan.launch import LaunchPlan


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The id of this process's job, ``123_4`` for a task of an array; None outside of a job."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def step_argv(
    step: Sequence[str], plan: LaunchPlan, hosts: Sequence[str], overlap: bool = False
) -> list[str]:
    """The argv that starts the ranks on the first of these hosts, derived from the step in the batch script.

    Without spare nodes or a range of nodes the step uses all hosts of the job, and its argv is
    unchanged. Set `overlap` when Slurm may still count an earlier step as running, which then occupies the
    job's memory: a step on an unreachable host cannot be ended.
    Raises TrainkitError when there are fewer hosts than the plan has nodes, or the step does not use srun.
    """
    if len(hosts) < plan.num_nodes:
        good = f"{len(hosts)} of the job's are good: {','.join(hosts) or 'none'}"
        raise TrainkitError(f"the step needs {plan.num_nodes} nodes, but only {good}")
    options = ["--overlap", "--mem=0"] if overlap else []
    if plan.may_lose_nodes:
        options.append(f"--nodelist={','.join(hosts[: plan.num_nodes])}")
    if plan.sizes and plan.slurm is not None:
        # The script has the options for the most nodes, and Slurm takes the last of two equal options.
        sized = {f"--{name}=": plan.slurm.srun[name] for name in ("nodes", "ntasks")}
        step = [word for word in step if not word.startswith(tuple(sized))]
        options += [f"{name}{value}" for name, value in sized.items()]
    if not options:
        return list(step)
    srun = next((index for index, word in enumerate(step) if PurePath(word).name == "srun"), None)
    if srun is None:
        raise TrainkitError(
            f"the step of the script has no srun: {' '.join(step)}",
            hint="a step can only be restarted, or moved to other hosts, when srun starts it",
        )
    return [*step[: srun + 1], *options, *step[srun + 1 :]]


PATIENCE_S = 0.5
"""How long after the agent its ranks may receive a signal that Slurm sends to both."""


class StepListener:
    """A child of the agent that notes the notices it receives: its ranks have received the same.

    Whom Slurm signals depends on its `ProctrackType`, on the version and on how it was asked.
    """

    def __init__(self) -> None:
        """Start it; call after the ranks, with the notice signals blocked."""
        self._reader, writer = os.pipe()
        self._heard: set[int] = set()
        before_listening = processes.dies_with(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            try:
                os.setpgid(0, 0)  # as the ranks
                before_listening()
                # A connection of the agent ends when the last process that has it closes it.
                for file in list(Path("/proc/self/fd").iterdir()):
                    if int(file.name) > 2 and int(file.name) != writer:
                        with contextlib.suppress(OSError):  # that of the listing itself
                            os.close(int(file.name))
                while True:
                    os.write(writer, bytes([signal.sigwait(NOTICE_SIGNALS)]))
            finally:
                os._exit(1)
        os.close(writer)

    def has_heard(self, number: signal.Signals) -> bool:
        deadline_s = time.monotonic() + PATIENCE_S
        while number not in self._heard and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left_s)[0]:
                received = os.read(self._reader, 64)
                if not received:
                    return False  # it was killed
                self._heard.update(received)
        return number in self._heard
