"""QOS as accounting knows them: their time limit, and which limits of a partition they lift."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import TrainkitError
from trainkit.frozen import dataclass
from trainkit.slurm.client import plain_environ, run_slurm
from trainkit.slurm.records import seconds_of

QOS_TIMEOUT_S = 10.0
_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall,Flags")


@dataclass(frozen=True)
class QosFacts:
    """A quality of service."""

    name: str
    max_time_s: int | None
    flags: tuple[str, ...]

    @property
    def lifts_time(self) -> bool:
        """Whether its jobs may be longer than their partition allows."""
        return "PartitionTimeLimit" in self.flags

    @property
    def lifts_nodes(self) -> bool:
        """Whether its jobs may have more nodes than their partition allows one job."""
        return "PartitionMaxNodes" in self.flags


def query_qos(environ: Mapping[str, str]) -> tuple[QosFacts, ...] | None:
    """All there are; None without accounting, or when it does not answer. Takes some tenths of a second."""
    try:
        return parse_qos(run_slurm(_ARGV, QOS_TIMEOUT_S, environ=plain_environ(environ)))
    except TrainkitError:
        return None


def parse_qos(text: str) -> tuple[QosFacts, ...]:
    """The lines of sacctmgr, `name|1-00:00:00|flag,flag`."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(
        QosFacts(name, seconds_of(limit), tuple(filter(None, flags.split(","))))
        for name, limit, flags in (row for row in rows if len(row) == 3)
    )
