"""What Slurm's commands say when something is wrong, from 22.05 to 25.x, and what to do about it. Pure."""

from __future__ import annotations

import re
from enum import Enum

_PREFIX = re.compile(
    r"^(?:(?:sbatch|srun|salloc|squeue|sacct|sacctmgr|scontrol|scancel|sinfo): )?"
    r"(?:(?:error|fatal|warning): )?"
    r"(?:slurm_\w+ error: |Batch job submission failed: |allocation failure: )?"
)


class Trouble(Enum):
    """Why a command of Slurm failed."""

    NOT_DELIVERED = "Slurm was not reached, so nothing was asked of it"
    ANSWER_LOST = "Slurm may have done what was asked, and its answer did not arrive"
    REFUSED = "Slurm said no"


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
        "Slurm's programs are installed, but this machine knows no cluster: "
        "set SLURM_CONF, or start from a login node",
    ),
    (
        r"[Aa]uthentication|[Mm]unge",
        "munge does not work on this machine (`munge -n | unmunge` shows why): tell the administrators",
    ),
    (
        r"database|slurmdbd|persistent connection",
        "the accounting database is away; `squeue` still knows jobs that wait or run",
    ),
    (r"Rate limit|queue full|[Tt]emporarily", "Slurm is busy: try again in a minute"),
    (r"submissions disabled", "the administrators have paused submissions: try again later"),
)
UNREACHABLE_HINT = "`scontrol ping` tells whether Slurm's controller is up; try again when it is"

REFUSAL_HINTS = (
    (
        r"[Ii]nvalid partition",
        "`sinfo -s` lists the partitions: give one with --partition or resources.partition",
    ),
    (
        r"No partition specified",
        "this cluster has no default partition: give one with --partition or resources.partition",
    ),
    (
        r"Invalid account|[Ii]nvalid qos|QOS usage threshold|unknown association",
        "`sacctmgr show associations user=$USER format=account,partition,qos` lists what you may use: "
        "give it with --account and --qos",
    ),
    (
        r"accounting/QOS policy|MaxJobCount|limit reached",
        "this is over a limit of your account or QOS (jobs, nodes, GPUs or time): "
        "ask for less, wait for other jobs, or give another --qos",
    ),
    (
        r"time limit|Time ?[Ll]imit",
        "`scontrol show partition` shows MaxTime: give less with --time or resources.time",
    ),
    (
        r"node configuration is not available|More processors requested|CPU count"
        r"|Memory (?:specification|required)|Insufficient GRES",
        "no node of this partition has that many GPUs, CPUs or that much memory, or none fits the "
        "constraint: `sinfo -o '%P %D %c %m %G %f'` shows what there is",
    ),
    (
        r"partition configuration not available",
        "this asks for more than the partition allows: fewer nodes, less time or another partition",
    ),
    (
        r"Node count specification",
        "the partition has fewer nodes than asked for with --nodes, or allows fewer a job",
    ),
    (
        r"Invalid (?:generic resource|GRES|Trackable)",
        "`sinfo -o '%P %G'` shows which GPUs there are and what Slurm calls them",
    ),
    (r"feature", "`sinfo -o '%P %f'` shows which features a constraint can name"),
    (r"[Rr]eservation", "`scontrol show reservation` shows the reservations and who may use them"),
    (r"[Nn]ode name specified|nodes not in this partition", "`sinfo -N` lists the nodes of every partition"),
    (r"dependency", "the job that this one waits for is unknown to Slurm, or has already failed"),
    (r"array spec", "`scontrol show config` shows MaxArraySize: indices have to be below it"),
    (
        r"too long",
        "a path, or the environment that is handed over, is too long for Slurm: "
        "use a shorter --run-dir or submit from a cleaner shell",
    ),
    (
        r"(?:unrecognized|invalid|unknown) option|ambiguous",
        "this version of Slurm does not know the option: see `sbatch --help`",
    ),
    (
        r"batch script|DOS line breaks",
        "the script has to begin with `#!` and its lines have to end with a newline only",
    ),
    (
        r"group not permitted|[Pp]ermission denied",
        "you may not use this partition, or this is somebody else's job",
    ),
    (r"[Ii]nvalid job id", "Slurm does not know this job (any more): `squeue --me` lists yours"),
    (r"already (?:completing|finished|done)|already completing or completed", "the job has ended"),
    (
        r"presently disabled",
        "the job was submitted with --no-requeue, or is in a state in which this cannot be done",
    ),
    (
        r"accounting storage is disabled",
        "this cluster keeps no accounting: finished jobs are forgotten after a few minutes",
    ),
)


def cleaned(stderr: str) -> str:
    """Slurm's words without `sbatch: error: ` in front, each line once, blank lines left out."""
    lines = [_PREFIX.sub("", line).strip() for line in stderr.splitlines()]
    return "\n".join(dict.fromkeys(line for line in lines if line and not line.startswith('Try "')))


def trouble_of(stderr: str) -> Trouble:
    """What kind of failure these words mean; a refusal when they are not known."""
    # What sbatch says before it tries again by itself is not the end of the story.
    lines = [line for line in stderr.splitlines() if not line.endswith("sleeping and retrying")]
    away = [line for line in lines if _UNDELIVERED.search(line)]
    # A request can be lost on one controller and not reach the other: the worse one counts.
    if any(_LOST.search(line) for line in lines if line not in away):
        return Trouble.ANSWER_LOST
    return Trouble.NOT_DELIVERED if away else Trouble.REFUSED


def hint_of(stderr: str, trouble: Trouble) -> str:
    """What a person can do about it; empty when unknown."""
    hints = REFUSAL_HINTS if trouble is Trouble.REFUSED else UNREACHABLE_HINTS
    for pattern, hint in hints:
        if re.search(pattern, stderr):
            return hint
    return "" if trouble is Trouble.REFUSED else UNREACHABLE_HINT
