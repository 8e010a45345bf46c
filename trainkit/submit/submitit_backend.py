"""Starts the next attempt of a run through submitit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import TrainkitError, UsageError
from trainkit.rundir import RunDir, write_json
from trainkit.slurm.client import SlurmUnreachable, scrubbed
from trainkit.slurm.submit import submit_once
from trainkit.submit.quoting import directive

if TYPE_CHECKING:
    from submitit import AutoExecutor

    from trainkit.submit.script import JobScript


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
            folder=_folder(run), cluster="slurm", slurm_python=shlex.join(script.host_python)
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


def submit_with_submitit(
    run: RunDir, script: JobScript, mark: str, notify: Callable[[str], None] = lambda text: None
) -> str:
    """Submit, and give the job id; `notify` gets a sentence when that takes long.

    Raises TrainkitError when Slurm refuses, SlurmUnreachable when it may or may not have taken the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from trainkit.job.supervisor import SubmititJob

    write_json(run.step_file, list(script.step))
    executor = make_executor(run, script)
    clean = scrubbed(os.environ)

    def submit() -> str:
        try:
            with _environment(clean):
                return str(executor.submit(SubmititJob(str(run.path))).job_id)
        except FailedJobError as error:
            raise _failure(error) from None
        except FailedSubmissionError as error:  # sbatch printed no job id
            raise SlurmUnreachable(f"submitit: {error}", may_have_arrived=True) from None

    job_id = submit_once(submit, mark=mark, environ=clean, notify=notify)
    _put_in_place(run, job_id)
    return job_id


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Another environment for a while, in place of this process's own."""
    inherited = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(inherited)


def _put_in_place(run: RunDir, job_id: str) -> None:
    """Give submitit's files the names that its job looks for, for 60 s.

    It does so itself, unless the answer with the job's id was lost.
    """
    from submitit.core.utils import JobPaths

    paths = JobPaths(_folder(run), job_id)
    if paths.submitted_pickle.exists():
        return
    for pattern, name in (
        ("[0-9a-f]" * 32 + ".pkl", "submitted_pickle"),
        (".submission*.sh", "submission_file"),
    ):
        files = [file for file in _folder(run).glob(pattern) if not file.is_symlink()]
        paths.move_temporary_file(max(files, key=lambda file: file.stat().st_mtime), name)


def _folder(run: RunDir) -> Path:
    return run.path / "submitit"


def _failure(error: Exception) -> TrainkitError:
    from trainkit.slurm.client import Answer, failure

    words = str(error).strip()
    known = failure("sbatch", 1, Answer(b"", words))
    if isinstance(known, SlurmUnreachable):
        return known
    return UsageError(f"submitit: {known.message}", hint=known.hint)
