"""Runs one command of Slurm, with a time limit, and turns what goes wrong into errors that say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from trainkit.errors import SlurmError, UsageError
from trainkit.slurm.messages import UNREACHABLE_HINT, Trouble, cleaned, hint_of, trouble_of

QUERY_TIMEOUT_S = 30.0
"""Longer than Slurm's own commands try a controller that is away: they can say why."""
QUERY_PATIENCE_S = 5.0
"""Short, because a command that finds no controller has tried for longer itself."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0

_OTHER_TASTES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Variables that change what the commands print or select: SQUEUE_STATES=RUNNING hides what waits."""

T = TypeVar("T")


class SlurmUnreachable(SlurmError):
    """Slurm did not answer: exit code 3. `may_have_arrived` tells whether it may have done what was asked."""

    def __init__(
        self, message: str, hint: str = "", *, stderr: str = "", may_have_arrived: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.stderr = stderr
        self.may_have_arrived = may_have_arrived


class SlurmRefused(UsageError):
    """Slurm said no: exit code 2, with its own sentence in `sentence`."""

    def __init__(self, message: str, hint: str = "", *, stderr: str = "") -> None:
        super().__init__(message, hint)
        self.stderr = stderr
        self.sentence = cleaned(stderr)


@dataclass(frozen=True)
class Answer:
    """What a command printed; it ended with 0."""

    stdout_bytes: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode(errors="replace")


def run_slurm(
    argv: Sequence[str],
    timeout_s: float,
    input: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """The stdout of one command of Slurm; raises as `ask_slurm` does."""
    return ask_slurm(argv, timeout_s, input, environ, cwd).stdout


def ask_slurm(
    argv: Sequence[str],
    timeout_s: float,
    input: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Answer:
    """One command of Slurm, run once and never by a shell.

    Raises UsageError when the program is not there, SlurmUnreachable when Slurm cannot be reached or did not
    answer within `timeout_s`, SlurmRefused when it said no.
    """
    program = argv[0]
    environ = os.environ if environ is None else environ
    path = shutil.which(program, path=environ.get("PATH", os.defpath))
    if path is None:
        raise UsageError(
            f"`{program}` is not on PATH: there is no Slurm here",
            hint="start from a login node of the cluster (or load its module); "
            "`--backend local` runs on this machine",
        )
    if any("\0" in arg for arg in argv):
        raise UsageError(f"a NUL character cannot be given to {program}: {list(argv)!r}")
    try:
        done = subprocess.run(
            list(argv),
            executable=path,
            input=None if input is None else input.encode(),
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            timeout=timeout_s,
            env=dict(environ),
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = cleaned((error.stderr or b"").decode(errors="replace"))
        raise SlurmUnreachable(
            f"`{program}` did not answer within {timeout_s:g} s" + (f": {said}" if said else ""),
            hint=UNREACHABLE_HINT,
            stderr=said,
            may_have_arrived=True,
        ) from None
    answer = Answer(done.stdout, done.stderr.decode(errors="replace"))
    if done.returncode != 0:
        raise failure(program, done.returncode, answer)
    return answer


def failure(program: str, returncode: int, answer: Answer) -> SlurmUnreachable | SlurmRefused:
    """The error that a command's exit code and words mean."""
    words = answer.stderr if answer.stderr.strip() else answer.stdout
    said = cleaned(words)
    killed = returncode < 0
    trouble = Trouble.ANSWER_LOST if killed else trouble_of(words)
    hint = hint_of(words, trouble)
    if not said:
        said = f"ended by signal {-returncode}" if killed else f"exit code {returncode}, and no word"
    if trouble is Trouble.REFUSED:
        return SlurmRefused(f"{program}: {said}", hint, stderr=words)
    return SlurmUnreachable(
        f"{program} cannot reach Slurm: {said}",
        hint,
        stderr=words,
        may_have_arrived=trouble is Trouble.ANSWER_LOST,
    )


def query(
    argv: Sequence[str],
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    patience_s: float = QUERY_PATIENCE_S,
) -> Answer:
    """The answer to a question, asked again while Slurm cannot be reached; times in it are Unix seconds."""
    plain = plain_environ(os.environ if environ is None else environ)
    return retrying(lambda: ask_slurm(argv, timeout_s, environ=plain), patience_s)


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Slurm's commands print what we parse, whatever the user prefers to see."""
    plain = {name: value for name, value in environ.items() if not name.startswith(_OTHER_TASTES)}
    plain["SLURM_TIME_FORMAT"] = "%s"
    # Without it the indices of an array that waits are cut off after 64 characters.
    plain["SLURM_BITSTR_LEN"] = "0"
    return plain


def retrying(
    ask: Callable[[], T], patience_s: float = QUERY_PATIENCE_S, sleep: Callable[[float], None] = time.sleep
) -> T:
    """The answer to something that can be asked twice, asked again with growing pauses while Slurm is away.

    After `patience_s` the last SlurmUnreachable is raised. Never for a submission.
    """
    give_up = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except SlurmUnreachable:
            if time.monotonic() + pause_s > give_up:
                raise
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def safe_value(value: str, what: str) -> str:
    """A value that may stand alone in an argument list; UsageError when it could be taken for an option."""
    if not value or value.startswith("-") or "\0" in value:
        raise UsageError(f"{what} cannot be {value!r}")
    return value


FIELD = "\x1f"
RECORD = "\x1e"
"""Job names may hold newlines, so that lines are no records."""


def records(text: str, num_fields: int, end: str = RECORD) -> Iterator[list[str]]:
    """The fields of every record; the last one may hold anything. What a crash cut off is left out."""
    for record in text.split(f"{end}\n"):
        fields = record.split(FIELD, num_fields - 1)
        if len(fields) == num_fields:
            # Between clusters squeue prints their names, on lines of their own.
            fields[0] = fields[0].rpartition("\n")[2]
            yield fields


def time_of(text: str) -> datetime | None:
    """A time that Slurm printed as Unix seconds, in UTC; None for `N/A`, `Unknown` and `None`."""
    return datetime.fromtimestamp(int(text), timezone.utc) if text.isdigit() and text != "0" else None


def seconds_of(text: str) -> int | None:
    """A duration (`1-02:03:04`, `02:03:04`, `03:04`) in seconds; None for `UNLIMITED`, `INVALID`, …"""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in ([days] if dash else []) + parts) or not 2 <= len(parts) <= 3:
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)


KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
"""Which cluster is meant and how to get in. Slurm sets none of them inside a job."""
_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SPANK_"),
    *("PMI_", "PMI2_", "PMIX_", "PALS_", "TORCHELASTIC_"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "PRTE_", "ORTE_"),
    *("MV2_COMM_WORLD_", "MPI_LOCAL"),
)
_RANK_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *(
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "CROSS_RANK",
            "CROSS_SIZE",
        ),
    }
)
_DEVICES_OF_A_JOB = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)


def is_inherited(name: str) -> bool:
    """Whether a variable belongs to the job, step or launcher around us, and not to the user."""
    return name not in KEPT and (name.startswith(_PREFIXES) or name in _RANK_NAMES)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch and salloc: without another job's variables and without `SBATCH_*`.

    `SBATCH_*` would beat the lines of the script: what is shown would not be what runs. The GPUs that the job
    around us was bound to go too. SBATCH_CLUSTERS becomes SLURM_CLUSTERS, which every command understands.
    """
    inside_a_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    clean = {
        name: value
        for name, value in environ.items()
        if not is_inherited(name) and not (inside_a_job and name in _DEVICES_OF_A_JOB)
    }
    if "SBATCH_CLUSTERS" in environ:
        clean.setdefault("SLURM_CLUSTERS", environ["SBATCH_CLUSTERS"])
    return clean
