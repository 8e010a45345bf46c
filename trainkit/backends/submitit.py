"""Runs on Slurm whose jobs submitit submits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.backends import JobScript, NewAttempt
from trainkit.backends.slurm import SbatchBackend
from trainkit.errors import UsageError, print_note
from trainkit.run.files import write_json
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.slurm.client import SlurmUnreachable, failure
from trainkit.slurm.environment import scrubbed
from trainkit.slurm.quoting import directive
from trainkit.slurm.submit import submit_once

if TYPE_CHECKING:
    from submitit import AutoExecutor


IGNORE_SIGNALS = (
    "# When Slurm signals this shell, its supervisor must live on to record how the job ended.",
    "trap : TERM INT USR2",
)
"""Not needed in the script of the sbatch backend, where the supervisor replaces the shell."""


def make_executor(run: RunDir, script: JobScript) -> AutoExecutor:
    """The executor of submitit with the options and setup of a script.

    Raises UsageError for options that submitit cannot pass.
    """
    from submitit import AutoExecutor

    for name, value in script.directives.items():
        if value is not True:
            directive(value)  # raises for values that an #SBATCH line cannot contain
        if "\\" in str(value):
            raise UsageError(
                f"submitit cannot pass --{name}={value!r}, which contains a backslash",
                hint="use --backend sbatch, or choose a name without a backslash",
            )
    try:
        executor = AutoExecutor(
            folder=_folder(run), cluster="slurm", slurm_python=shlex.join(script.host_python)
        )
    except RuntimeError as error:
        raise UsageError(f"submitit: {error}", hint="submit from a login node of the cluster") from None
    # submitit writes --open-mode=append itself, and spells options with underscores.
    options = {
        name.replace("-", "_"): value for name, value in script.directives.items() if name != "open-mode"
    }
    executor.update_parameters(
        slurm_additional_parameters=options,
        slurm_setup=[*script.setup.rstrip("\n").split("\n"), *IGNORE_SIGNALS],
        # The supervisor starts the step of the ranks, as in the sbatch backend.
        slurm_use_srun=False,
        slurm_stderr_to_stdout=True,
    )
    return executor


class SubmititBackend(SbatchBackend):
    """A job that submitit submits, with its own script around the part that starts the ranks."""

    name = "submitit"
    template = "partials/setup.sh.j2"

    def finish_script(self, run: RunDir, script: JobScript) -> JobScript:
        executor: Any = make_executor(run, script)._executor
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
        return replace(script, text=text)

    def array_problem(self) -> tuple[str, str]:
        return "trainkit does not submit arrays through submitit", "add --backend sbatch"

    def submit(self, attempt: AttemptDir, new: NewAttempt, token: str) -> str:
        """Submit the script; raises SlurmUnreachable when the job may exist."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        from trainkit.job.supervisor import SubmititJob

        run = attempt.run
        assert new.script is not None
        write_json(run.step_file, list(new.script.step))
        executor = make_executor(run, new.script)
        clean = scrubbed(os.environ)

        def submit() -> str:
            try:
                with _environment(clean):
                    return str(executor.submit(SubmititJob(str(run.path))).job_id)
            except FailedJobError as error:
                known = failure("sbatch", 1, str(error).strip())
                if isinstance(known, SlurmUnreachable):
                    raise known from None
                raise UsageError(f"submitit: {known.message}", hint=known.hint) from None
            except FailedSubmissionError as error:  # sbatch printed no job id
                raise SlurmUnreachable(f"submitit: {error}", may_have_arrived=True) from None

        job_id = submit_once(submit, token=token, notify=print_note)
        _rename_files(run, job_id)
        return job_id


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process within the block."""
    inherited = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(inherited)


def _rename_files(run: RunDir, job_id: str) -> None:
    """Rename submitit's files to the names that its job waits for, for 60 s.

    submitit does this itself unless the answer with the job id was lost.
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
