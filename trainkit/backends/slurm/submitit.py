"""The backend for Slurm jobs submitted by submitit.

The batch script of such a job calls a pickled function.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.backend import JobScript, NewAttempt
from trainkit.backends.slurm.backend import SbatchBackend
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder, whole_paths
from trainkit.quoting import directive, quote
from trainkit.run.files import read_json, write_json
from trainkit.run.record import submitit_pickle
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.scheduler import split_job

IGNORE_SIGNALS = (
    "# When Slurm signals this shell, its supervisor must live on to record how the job ended.",
    "trap : TERM INT USR2",
)
"""Lines in the batch script that keep the shell alive when Slurm signals it. The sbatch backend's script does
not need these lines, because its supervisor replaces the shell.
"""


def _own_folder(folder: Path) -> Iterator[str]:
    """Yield bash lines that terminate the job unless the user owns the folder of the job's pickle."""
    word = quote(str(folder))
    yield f"[[ -O {word} && ! -L {word} ]] ||"
    yield f"    {{ printf 'trainkit: %s is not the folder that was submitted\\n' {word} >&2; exit 2; }}"


@dataclass(frozen=True)
class SubmititJob:
    """The callable that submitit pickles, and runs in the batch shell of its jobs.

    submitit's requeue mechanism is never used, because the supervisor handles the signals. After the ranks
    have saved, the supervisor requeues the job itself.
    """

    run_dir: str

    @whole_paths()
    def __call__(self) -> None:
        from trainkit.job.supervisor import (
            supervise_job,
        )  # the submitting command does not need the supervisor

        run = RunDir(Path(self.run_dir))
        code = supervise_job(run, read_json(run.step_file, executes=True), "submitit")
        if code:
            # submitit pickles any exception other than SystemExit and exits with 0, so Slurm would consider
            # the job completed.
            raise SystemExit(code)


class SubmititBackend(SbatchBackend):
    """Executes runs as submitit jobs. submitit adds its own script around the lines that start the ranks."""

    name = "submitit"
    template = "partials/setup.sh.j2"

    def finish_script(self, run: RunDir, script: JobScript) -> JobScript:
        """Return submitit's script; raise UsageError for an option that submitit does not support."""
        from submitit import AutoExecutor

        for name, value in script.directives.items():
            if value is not True:
                directive(value)  # raises an error if an #SBATCH line cannot contain the value
            if "\\" in str(value):
                raise UsageError(
                    f"submitit cannot pass --{name}={value!r}, which contains a backslash",
                    hint="use --backend sbatch, or choose a name without a backslash",
                )
        folder, python = run.path / "submitit", shlex.join(script.host_python)
        try:
            executor = AutoExecutor(folder=folder, cluster="slurm", slurm_python=python)
        except RuntimeError as error:
            raise UsageError(f"submitit: {error}", hint="submit from a login node of the cluster") from None
        # submitit writes --open-mode=append itself, and expects underscores instead of hyphens in option
        # names.
        options = {
            name.replace("-", "_"): value for name, value in script.directives.items() if name != "open-mode"
        }
        executor.update_parameters(
            slurm_additional_parameters=options,
            slurm_setup=[*script.setup.rstrip("\n").split("\n"), *_own_folder(folder), *IGNORE_SIGNALS],
            # As in the sbatch backend, the supervisor starts the step that contains the ranks.
            slurm_use_srun=False,
            slurm_stderr_to_stdout=True,
        )
        maker: Any = executor._executor
        text = str(maker._make_submission_file_text(maker._submitit_command_str, ""))
        return script._replace(text=text)

    def array_problem(self) -> tuple[str, str]:
        return "trainkit does not submit arrays through submitit", "add --backend sbatch"

    def submit(self, attempt: AttemptDir, new: NewAttempt, token: str) -> str:
        """Submit the script, then move the pickle into place.

        The job waits for the pickle for up to a minute.
        """
        from submitit.core.utils import DelayedSubmission, JobPaths

        run = attempt.run
        assert new.script is not None
        write_json(run.step_file, list(new.script.step))
        pickle = submitit_pickle(run, "next")
        ensure_folder(pickle.parent, 0o700)
        DelayedSubmission(SubmititJob(str(run.path))).dump(pickle)
        job = super().submit(attempt, new, token)
        # submitit also replaces %j in the folder's path.
        JobPaths(pickle.parent, split_job(job)[0]).move_temporary_file(pickle, "submitted_pickle")
        return job
