"""Runs Slurm commands with a timeout, and converts their failures into errors with hints."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from trainkit.errors import SlurmError, UsageError

QUERY_TIMEOUT_S = 12.0
"""Timeout of a query in seconds; by default, Slurm's commands give up slightly earlier, so that they can
report the reason. With a timeout of 12 s, a trainkit command exits within 15 s if Slurm does not answer."""
JOB_TIMEOUT_S = 30.0
"""Timeout in seconds of requests from inside a job, where no user is waiting and a busy controller may answer
late."""
QUERY_PATIENCE_S = 5.0
"""Seconds for which a failed query is retried; the value is small because Slurm's commands retry by
themselves."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0

_OUTPUT_VARIABLES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Prefixes of environment variables that change the output of Slurm's commands; for example,
SQUEUE_STATES=RUNNING hides pending jobs.
"""

_ACCOUNTING = ("sacct", "sacctmgr")

NO_ANSWER_S = 5.0
"""For this many seconds after Slurm failed to answer a request, queries use SHORT_TIMEOUT_S and are not
retried."""
SHORT_TIMEOUT_S = 1.5
_Place = tuple[str, str, str]
_last: dict[_Place, tuple[float, bool]] = {}
"""Maps a controller (identified by PATH, SLURM_CONF and cluster) to the time of the last request and whether
the controller answered."""
ANSWER_VALID_S = 10.0

T = TypeVar("T")


class SlurmUnreachable(SlurmError):
    """Raised if Slurm does not answer; trainkit exits with code 3.

    `may_have_arrived` means that Slurm may have carried out the request.
    """

    def __init__(self, message: str, hint: str = "", *, may_have_arrived: bool = False) -> None:
        super().__init__(message, hint)
        self.may_have_arrived = may_have_arrived


class SlurmRefused(UsageError):
    """Raised if Slurm rejects a request; trainkit exits with code 2.

    `sentence` is Slurm's error message.
    """

    def __init__(self, message: str, hint: str = "", *, stderr: str = "") -> None:
        super().__init__(message, hint)
        self.sentence = cleaned(stderr)


def run_slurm(
    argv: Sequence[str],
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    cluster: str = "",
    with_stderr: bool = False,
) -> str:
    """Run a Slurm command once, without a shell, and return its stdout. Invalid UTF-8 becomes U+FFFD.

    The command is sent to `cluster`, which may be a comma-separated list; by default, to the cluster that the
    environment selects. If `with_stderr` is set, the result is the command's stderr followed by its stdout.
    Raises UsageError if the program is not installed, SlurmUnreachable if Slurm does not answer within
    `timeout_s`, and SlurmRefused if Slurm rejects the request.
    """
    program = argv[0]
    environ = os.environ if environ is None else environ
    path = shutil.which(program, path=environ.get("PATH", os.defpath))
    if path is None:
        raise UsageError(
            f"`{program}` is not on PATH: Slurm is not available here",
            hint="use a login node of the cluster, load the Slurm module, or run on this machine with "
            "`--backend local`",
        )
    if any("\0" in arg for arg in argv):
        raise UsageError(f"an argument of {program} contains a NUL character: {list(argv)!r}")
    if cluster:
        argv = [program, f"--clusters={cluster}", *argv[1:]]
    place = _place(environ, cluster)
    # Use a short timeout if the controller did not answer the last request, so that several queries in a row
    # do not each wait for the full timeout.
    if timeout_s <= QUERY_TIMEOUT_S and _was(place, False, NO_ANSWER_S):
        timeout_s = min(timeout_s, SHORT_TIMEOUT_S)
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            list(argv),
            executable=path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=dict(environ),
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = cleaned((error.stderr or b"").decode(errors="replace"))
        _note_unanswered(program, place, began_s)
        raise SlurmUnreachable(
            f"`{program}` did not answer within {timeout_s:g} s" + (f": {message}" if message else ""),
            hint=UNREACHABLE_HINT,
            may_have_arrived=True,
        ) from None
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode != 0:
        failed = failure(program, done.returncode, stderr if stderr.strip() else stdout)
        if isinstance(failed, SlurmUnreachable):
            _note_unanswered(program, place, began_s)
        raise failed
    # The controller does not answer accounting queries, `--version` or `--help`.
    if program not in _ACCOUNTING and argv[1:] not in (["--version"], ["--help"]):
        _last[place] = time.monotonic(), True
    return stderr + stdout if with_stderr else stdout


def _note_unanswered(program: str, place: _Place, began_s: float) -> None:
    # The accounting database has its own daemon, which may be down while the controller is running.
    if program not in _ACCOUNTING and time.monotonic() - began_s >= SHORT_TIMEOUT_S:
        _last[place] = time.monotonic(), False


def _was(place: _Place, answered: bool, within_s: float) -> bool:
    last_s, last = _last.get(place, (-math.inf, answered))
    return last is answered and time.monotonic() - last_s < within_s


def _place(environ: Mapping[str, str], cluster: str = "") -> _Place:
    return environ.get("PATH", ""), environ.get("SLURM_CONF", ""), cluster


def require_controller(clusters: Sequence[str] = ()) -> None:
    """Raise SlurmUnreachable unless Slurm answers a query now or has answered one within ANSWER_VALID_S.

    Call this function before submitting a job: if Slurm is down and the answer to a submission is lost,
    finding out whether the job exists takes minutes. If there are several `clusters`, sbatch itself skips
    clusters that do not answer.
    """
    cluster = clusters[0] if len(clusters) == 1 else ""
    place = _place(os.environ, cluster)
    if not _was(place, True, ANSWER_VALID_S):
        query(["squeue", "--me", "--noheader", "--format=%A"], cluster=cluster)


def failure(program: str, returncode: int, text: str) -> SlurmUnreachable | SlurmRefused:
    """Return the error for a command's exit code and output. An unknown message is considered a rejection."""
    # sbatch prints a line with "sleeping and retrying" whenever it retries.
    lines = [line for line in text.splitlines() if not line.endswith("sleeping and retrying")]
    undelivered = [line for line in lines if _UNDELIVERED.search(line)]
    # With two controllers, one controller may have received the request even if the other one could not be
    # reached. If an answer was lost, assume that Slurm has carried out the request.
    is_lost = returncode < 0 or any(_LOST.search(line) for line in lines if line not in undelivered)
    is_away = is_lost or bool(undelivered)
    known = UNREACHABLE_HINTS if is_away else REFUSAL_HINTS
    hint = next((hint for pattern, hint in known if re.search(pattern, text)), "")
    silent = (
        f"exit code {returncode} without a message" if returncode >= 0 else f"killed by signal {-returncode}"
    )
    message = cleaned(text) or silent
    if is_away:
        message = f"{program} cannot reach Slurm: {message}"
        return SlurmUnreachable(message, hint, may_have_arrived=is_lost)
    return SlurmRefused(f"{program}: {message}", hint, stderr=text)


_PREFIX = re.compile(
    r"^(?:(?:sbatch|srun|salloc|squeue|sacct|sacctmgr|scontrol|scancel|sinfo): )?"
    r"(?:(?:error|fatal|warning): )?"
    r"(?:slurm_\w+ error: |Batch job submission failed: |allocation failure: )?"
)


_UNDELIVERED = re.compile(
    r"\(connect failure\)"
    r"|Connection refused"
    r"|No route to host"
    r"|Network is unreachable"
    r"|Could not establish a configuration source"
    r"|Unable to (?:resolve|establish controller machine|determine this slurmd)"
    r"|Unable to connect to database"
    r"|Rate limit exceeded"
    r"|standby mode"
    r"|Communication connection failure"
    r"|Connection timed out establishing"
    r"|[Tt]emporarily un(?:able|available)"
    r"|Unable to locate backup controller"
    r"|System submissions disabled"
    r"|invalid entry for --cluster"
)
"""Matches error messages which mean that Slurm never received the request."""
_LOST = re.compile(
    r"Unable to contact slurm controller"
    r"|Socket timed out"
    r"|Zero Bytes were transmitted"
    r"|Connection timed out"
    r"|Connection reset by peer"
    r"|Broken pipe"
    r"|Transport endpoint is not connected"
    r"|Message (?:send|receive) failure"
    r"|Communication shutdown failure"
    r"|Unexpected message received"
    r"|Header lengths are longer"
    r"|Insane message length"
    r"|Connection (?:rejected by handler|forced closed)"
    r"|shutting down and closing all communications"
    r"|[Aa]uthentication (?:error|credential)"
    r"|Munge (?:encode|decode) failed"
    r"|Problem talking to the database"
    r"|failed to open persistent connection"
    r"|DBD_\w+ failure"
)
"""Matches error messages which mean that the answer was lost, so Slurm may have carried out the request."""

UNREACHABLE_HINT = (
    "`scontrol ping` shows whether Slurm's controller is up; try again once the controller is up"
)
UNREACHABLE_HINTS = (
    (
        r"invalid entry for --cluster",
        "if `sacctmgr show clusters` does not list the cluster, log in to the cluster; otherwise, the "
        "cluster is down",
    ),
    (
        r"configuration source",
        "Slurm is installed, but this machine does not belong to a cluster: "
        "set SLURM_CONF, or use a login node",
    ),
    (
        r"[Aa]uthentication|[Mm]unge",
        "munge does not work on this machine (`munge -n | unmunge` shows why): contact the administrators",
    ),
    (
        r"database|slurmdbd|persistent connection",
        "the accounting database is down; `squeue` still lists pending and running jobs",
    ),
    (r"Rate limit|queue full|[Tt]emporarily", "Slurm is busy: try again in a minute"),
    (r"submissions disabled", "submissions are disabled by the administrators: try again later"),
    (r"", UNREACHABLE_HINT),
)

REFUSAL_HINTS = (
    (r"[Ii]nvalid partition", "`sinfo -s` lists the partitions: choose one with --partition"),
    (r"No partition specified", "this cluster has no default partition: choose one with --partition"),
    (
        r"Invalid account|[Ii]nvalid qos|QOS usage threshold|unknown association",
        "`sacctmgr show associations user=$USER` lists the possible values of --account and --qos",
    ),
    (
        r"accounting/QOS policy|MaxJobCount|limit reached",
        "the job exceeds a limit of your account or QOS: request fewer resources, wait, or choose another "
        "--qos",
    ),
    (
        r"[Tt]ime ?[Ll]imit",
        "request a shorter --time; `scontrol show partition` shows the maximum as MaxTime",
    ),
    (
        r"node configuration is not available|More processors requested|CPU count"
        r"|Memory (?:specification|required)|Insufficient GRES",
        "no node has all requested resources: `sinfo -o '%P %D %c %m %G %f'` lists the resources of the "
        "nodes",
    ),
    (r"partition configuration not available|Node count", "request less --nodes or --time"),
    (r"Invalid (?:generic resource|GRES|Trackable)", "`sinfo -o '%P %G'` lists the GPUs"),
    (r"feature", "`sinfo -o '%P %f'` lists the possible values of --constraint"),
    (r"[Rr]eservation", "`scontrol show reservation` lists the reservations and their users"),
    (r"[Nn]ode name specified|nodes not in this partition", "`sinfo -N` lists the nodes of every partition"),
    (r"dependency", "a dependency of the job is unknown to Slurm or has already failed"),
    (r"array spec", "use array indices below MaxArraySize, which `scontrol show config` shows"),
    (r"too long", "use a shorter --run-dir, or submit from a shell with fewer variables"),
    (
        r"(?:unrecognized|invalid|unknown) option|ambiguous",
        "this version of Slurm does not support the option: see `sbatch --help`",
    ),
    (
        r"group not permitted|[Pp]ermission denied",
        "you are not allowed to use this partition, or the job belongs to another user",
    ),
    (
        r"[Ii]nvalid job id",
        "Slurm does not know this job, or no longer knows it: `squeue --me` lists your jobs",
    ),
    (r"already (?:completing|finished|done)|already completing or completed", "the job has already ended"),
    (r"Only one cluster", "to name several clusters, use --clusters, not the variable SLURM_CLUSTERS"),
    (
        r"presently disabled",
        "the job has the option --no-requeue, or the job cannot be requeued in its current state",
    ),
)


def cleaned(stderr: str) -> str:
    """Return a Slurm message without prefixes such as `sbatch: error: `, repeated lines and blank lines."""
    lines = [_PREFIX.sub("", line).strip() for line in stderr.splitlines()]
    return "\n".join(dict.fromkeys(line for line in lines if line and not line.startswith('Try "')))


def query(
    argv: Sequence[str],
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    patience_s: float = QUERY_PATIENCE_S,
    cluster: str = "",
) -> str:
    """Run a query and return its stdout, with times in Unix seconds; retry while Slurm does not answer.

    A query to another cluster is not retried. Raises the same errors as `run_slurm`.
    """
    plain = plain_environ(os.environ if environ is None else environ)
    if cluster or (patience_s <= QUERY_PATIENCE_S and _was(_place(plain), False, NO_ANSWER_S)):
        patience_s = 0.0
    return retrying(lambda: run_slurm(argv, timeout_s, environ=plain, cluster=cluster), patience_s)


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the user's settings for the output of Slurm's commands."""
    plain = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_VARIABLES)}
    plain["SLURM_TIME_FORMAT"] = "%s"
    # By default, Slurm truncates the index list of a pending array to 64 characters.
    plain["SLURM_BITSTR_LEN"] = "0"
    return plain


def retrying(request: Callable[[], T], patience_s: float = QUERY_PATIENCE_S) -> T:
    """Call `request`, and retry it with exponential backoff while it raises SlurmUnreachable.

    Raises the last error once `patience_s` seconds have passed. Use this function for idempotent requests
    only, never for a submission.
    """
    give_up = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return request()
        except SlurmUnreachable:
            if time.monotonic() + pause_s > give_up:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def safe_value(value: str, what: str) -> str:
    """Return `value` if it is safe to pass as a command-line argument.

    Raises UsageError if a command could parse `value` as an option.
    """
    if not value or value.startswith("-") or "\0" in value:
        raise UsageError(f"{what} cannot be {value!r}")
    return value


FIELD = "\x1f"
RECORD = "\x1e"
"""The separator between records; not a newline, because job names may contain newlines."""


def records(text: str, num_fields: int, end: str = RECORD) -> Iterator[list[str]]:
    """Yield the fields of every complete record. The last field may contain the field separator."""
    for record in text.split(f"{end}\n"):
        fields = record.split(FIELD, num_fields - 1)
        if len(fields) == num_fields:
            # For a query of several clusters, squeue prints each cluster's name on a line before that
            # cluster's jobs.
            fields[0] = fields[0].rpartition("\n")[2]
            yield fields


def time_of(text: str) -> datetime | None:
    """Parse a time in Unix seconds into a UTC datetime; return None for `N/A`, `Unknown` and `None`."""
    return datetime.fromtimestamp(int(text), timezone.utc) if text.isdigit() and text != "0" else None


def seconds_of(text: str) -> int | None:
    """Parse a duration such as `1-02:03:04` into seconds; return None for `UNLIMITED` and `INVALID`."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in ([days] if dash else []) + parts) or not 2 <= len(parts) <= 3:
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)
