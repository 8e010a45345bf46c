"""Starts the next attempt of a run through submitit."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import TrainkitError, UsageError
from trainkit.job.submitit_shell import BatchShell
from trainkit.rundir import RunDir, write_json
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.environment import scrubbed
from trainkit.slurm.submit import find_marked
from trainkit.submit.quoting import directive

if TYPE_CHECKING:
    from submitit import AutoExecutor

    from trainkit.submit.slurm_script import JobScript


OUTLIVE_SIGNALS = (
    "# When Slurm ends this shell, the supervisor that it waits for has still to write how the job ended.",
    "trap : TERM INT USR2",
)
"""Our own script needs none of this: there the supervisor takes the place of the shell."""


def make_executor(run: RunDir, script: JobScript) -> AutoExecutor:
    """submitit's executor with everything that the sbatch backend writes into its script.

    Raises UsageError when submitit cannot express it.
    """
    from submitit import AutoExecutor

    for name, value in script.directives.items():
        if value is not True:
            directive(value)  # refuses what no #SBATCH line can hold, whoever writes it
        if "\\" in str(value):
            raise UsageError(
                f"submitit cannot pass --{name}={value!r} on: it has a backslash",
                hint="--backend sbatch can, or choose a name without it",
            )
    try:
        executor = AutoExecutor(
            folder=run.path / "submitit", cluster="slurm", slurm_python=shlex.join(script.host_python)
        )
    except RuntimeError as error:
        raise UsageError(f"submitit: {error}", hint="start from a login node of the cluster") from None
    # submitit writes --open-mode=append itself, and knows options by names with underscores.
    options = {
        name.replace("-", "_"): value for name, value in script.directives.items() if name != "open-mode"
    }
    executor.update_parameters(
        slurm_additional_parameters=options,
        slurm_setup=[*script.setup.rstrip("\n").split("\n"), *OUTLIVE_SIGNALS],
        # The step with the ranks is started by our supervisor: one srun, as in the sbatch backend.
        slurm_use_srun=False,
        slurm_stderr_to_stdout=True,
    )
    return executor


def submitit_text(run: RunDir, script: JobScript) -> str:
    """The batch script that submitit would submit."""
    executor: Any = make_executor(run, script)._executor
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def submit_with_submitit(run: RunDir, script: JobScript, mark: str) -> str:
    """Submit, and give the job id.

    Raises TrainkitError when Slurm refuses, SlurmUnreachable when it may or may not have taken the job.
    """
    from submitit.core.utils import FailedJobError

    write_json(run.step_file, list(script.step))
    began = time.time()
    executor = make_executor(run, script)
    inherited = dict(os.environ)
    os.environ.clear()
    os.environ.update(scrubbed(inherited))
    try:
        job = executor.submit(BatchShell(str(run.path)))
    except FailedJobError as error:
        found = find_marked(mark, since=began)
        if found is None:
            raise _failure(error) from None
        return found
    finally:
        os.environ.clear()
        os.environ.update(inherited)
    return str(job.job_id)


def _failure(error: Exception) -> TrainkitError:
    from trainkit.slurm.client import Answer, failure

    words = str(error).strip()
    known = failure("sbatch", 1, Answer(b"", words))
    if isinstance(known, SlurmUnreachable):
        return known
    return UsageError(f"submitit: {known.message}", hint=known.hint)


def script_of(run: RunDir, job_id: str) -> Path:
    """Where submitit has put the script of a job."""
    return run.path / "submitit" / f"{job_id}_submission.sh"
