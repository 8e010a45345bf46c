"""Classifies the error messages of Slurm's commands, 22.05 to 25.x, and gives hints. Pure."""

from __future__ import annotations

import re
from enum import Enum

_PREFIX = re.compile(
    r"^(?:(?:sbatch|srun|salloc|squeue|sacct|sacctmgr|scontrol|scancel|sinfo): )?"
    r"(?:(?:error|fatal|warning): )?"
    r"(?:slurm_\w+ error: |Batch job submission failed: |allocation failure: )?"
)


class FailureKind(Enum):
    """Why a command of Slurm failed."""

    NOT_DELIVERED = "Slurm was not reached: nothing was requested"
    ANSWER_LOST = "the answer was lost: Slurm may have carried out the request"
    REFUSED = "Slurm refused the request"


_NOT_DELIVERED = (
    r"\(connect failure\)",
    r"Connection refused",
    r"No route to host",
    r"Network is unreachable",
    r"Could not establish a configuration source",
    r"Unable to (?:resolve|establish controller machine|determine this slurmd)",
    r"Unable to connect to database",
    r"Rate limit exceeded",
    r"standby mode",
    r"Communication connection failure",
    r"Connection timed out establishing",
    r"[Tt]emporarily un(?:able|available)",
    r"Unable to locate backup controller",
    r"System submissions disabled",
)
_ANSWER_LOST = (
    r"Unable to contact slurm controller",
    r"Socket timed out",
    r"Zero Bytes were transmitted",
    r"Connection timed out",
    r"Connection reset by peer",
    r"Broken pipe",
    r"Transport endpoint is not connected",
    r"Message (?:send|receive) failure",
    r"Communication shutdown failure",
    r"Unexpected message received",
    r"Header lengths are longer",
    r"Insane message length",
    r"Connection (?:rejected by handler|forced closed)",
    r"shutting down and closing all communications",
    r"[Aa]uthentication (?:error|credential)",
    r"Munge (?:encode|decode) failed",
    r"Problem talking to the database",
    r"failed to open persistent connection",
    r"DBD_\w+ failure",
)
_LOST = re.compile("|".join(_ANSWER_LOST))
_UNDELIVERED = re.compile("|".join(_NOT_DELIVERED))

UNREACHABLE_HINTS = (
    (
        r"configuration source",
        "Slurm is installed, but this machine does not belong to a cluster: "
        "set SLURM_CONF, or run this on a login node",
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
)
UNREACHABLE_HINT = "`scontrol ping` shows whether Slurm's controller is up; try again when it is"

REFUSAL_HINTS = (
    (
        r"[Ii]nvalid partition",
        "`sinfo -s` lists the partitions: choose one with --partition or resources.partition",
    ),
    (
        r"No partition specified",
        "this cluster has no default partition: choose one with --partition or resources.partition",
    ),
    (
        r"Invalid account|[Ii]nvalid qos|QOS usage threshold|unknown association",
        "choose with --account and --qos what "
        "`sacctmgr show associations user=$USER format=account,partition,qos` lists",
    ),
    (
        r"accounting/QOS policy|MaxJobCount|limit reached",
        "this exceeds a limit of your account or QOS (jobs, nodes, GPUs or time): "
        "request less, wait for other jobs, or choose another --qos",
    ),
    (
        r"time limit|Time ?[Ll]imit",
        "`scontrol show partition` shows MaxTime: request less with --time or resources.time",
    ),
    (
        r"node configuration is not available|More processors requested|CPU count"
        r"|Memory (?:specification|required)|Insufficient GRES",
        "no node of this partition has that many GPUs or CPUs, that much memory, or the features of the "
        "constraint: `sinfo -o '%P %D %c %m %G %f'` lists the nodes",
    ),
    (
        r"partition configuration not available",
        "this exceeds a limit of the partition: request fewer nodes, less time or another partition",
    ),
    (
        r"Node count specification",
        "the partition has fewer nodes than --nodes, or allows fewer per job",
    ),
    (
        r"Invalid (?:generic resource|GRES|Trackable)",
        "`sinfo -o '%P %G'` lists the GPUs and their names in Slurm",
    ),
    (r"feature", "`sinfo -o '%P %f'` lists the features that a constraint can name"),
    (r"[Rr]eservation", "`scontrol show reservation` lists the reservations and their users"),
    (r"[Nn]ode name specified|nodes not in this partition", "`sinfo -N` lists the nodes of every partition"),
    (r"dependency", "a job that this one depends on is unknown to Slurm or has already failed"),
    (r"array spec", "`scontrol show config` shows MaxArraySize: indices must be below it"),
    (
        r"too long",
        "a path or the exported environment is too long for Slurm: "
        "use a shorter --run-dir, or submit from a shell with fewer variables",
    ),
    (
        r"(?:unrecognized|invalid|unknown) option|ambiguous",
        "this version of Slurm does not support the option: see `sbatch --help`",
    ),
    (
        r"batch script|DOS line breaks",
        "the script must begin with `#!` and use Unix line endings",
    ),
    (
        r"group not permitted|[Pp]ermission denied",
        "you may not use this partition, or the job belongs to another user",
    ),
    (r"[Ii]nvalid job id", "Slurm does not know this job, or no longer does: `squeue --me` lists yours"),
    (r"already (?:completing|finished|done)|already completing or completed", "the job has already ended"),
    (
        r"presently disabled",
        "the job was submitted with --no-requeue, or its current state does not allow this",
    ),
    (
        r"accounting storage is disabled",
        "this cluster has no accounting: finished jobs are unknown after a few minutes",
    ),
)


def cleaned(stderr: str) -> str:
    """Slurm's message without prefixes such as `sbatch: error: `, repeated lines and blank lines."""
    lines = [_PREFIX.sub("", line).strip() for line in stderr.splitlines()]
    return "\n".join(dict.fromkeys(line for line in lines if line and not line.startswith('Try "')))


def failure_kind(stderr: str) -> FailureKind:
    """The kind of failure that a message indicates; REFUSED for unknown messages."""
    # sbatch prints these lines before it retries.
    lines = [line for line in stderr.splitlines() if not line.endswith("sleeping and retrying")]
    undelivered = [line for line in lines if _UNDELIVERED.search(line)]
    # With two controllers, a request may be lost at one and not reach the other: assume the worse.
    if any(_LOST.search(line) for line in lines if line not in undelivered):
        return FailureKind.ANSWER_LOST
    return FailureKind.NOT_DELIVERED if undelivered else FailureKind.REFUSED


def failure_hint(stderr: str, kind: FailureKind) -> str:
    """A hint for the user about a failure; empty when there is none."""
    hints = REFUSAL_HINTS if kind is FailureKind.REFUSED else UNREACHABLE_HINTS
    for pattern, hint in hints:
        if re.search(pattern, stderr):
            return hint
    return "" if kind is FailureKind.REFUSED else UNREACHABLE_HINT
