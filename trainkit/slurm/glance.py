"""What a submission has to know of the cluster, asked all at once: it takes as long as the slowest answer."""

from __future__ import annotations

import getpass
import os
import re
import threading
from collections.abc import Mapping, Sequence

from trainkit.errors import TrainkitError
from trainkit.frozen import dataclass
from trainkit.slurm.client import plain_environ, run_slurm
from trainkit.slurm.control import Version, parse_config, parse_version
from trainkit.slurm.discover import (
    NODES_ARGV,
    PARTITIONS_ARGV,
    Association,
    Partition,
    parse_node_types,
    parse_partitions,
    with_usable,
)

GLANCE_TIMEOUT_S = 10.0
"""A controller that is away is told by its silence; sbatch, which comes next, is asked for longer."""
_CONFIG_ARGV = ("scontrol", "show", "config")
_WORD = re.compile(r"(?P<name>\w+)=(?P<value>\S*)")
_ID = re.compile(r"\(\d+\)$")


@dataclass(frozen=True)
class QosLimit:
    """A quality of service, as far as the controller tells everybody."""

    name: str
    max_time_s: int | None


@dataclass(frozen=True)
class Glance:
    """What Slurm's controller tells at once."""

    name: str
    version: Version
    config: dict[str, str]
    partitions: tuple[Partition, ...]
    associations: tuple[Association, ...] | None = None
    """None when not asked for, not enforced or not told. Which QOS they have is not told."""
    qos: tuple[QosLimit, ...] | None = None
    """All that there are; None when not asked for or not told."""


def glance(
    environ: Mapping[str, str] | None = None,
    *,
    with_accounts: bool = False,
    user: str | None = None,
    timeout_s: float = GLANCE_TIMEOUT_S,
) -> Glance:
    """Asks Slurm's controller three or four things side by side, each once, and then of a node of each kind.

    Raises SlurmUnreachable after `timeout_s`.
    """
    user = user or getpass.getuser()
    questions: list[Sequence[str]] = [_CONFIG_ARGV, PARTITIONS_ARGV, NODES_ARGV]
    if with_accounts:
        questions.append(["scontrol", "--oneliner", "show", "assoc_mgr", f"users={user}", "flags=assoc,qos"])
    environ = plain_environ(os.environ if environ is None else environ)
    answers = _ask_all(questions, environ, timeout_s)
    for answer in answers[:3]:
        if isinstance(answer, TrainkitError):
            raise answer
    settings, partitions, nodes = map(str, answers[:3])
    config = parse_config(settings)
    accounts = answers[3] if with_accounts else None
    associations, qos = parse_assoc_mgr(accounts, user) if isinstance(accounts, str) else ((), ())
    node_types = with_usable(parse_node_types(nodes), environ, timeout_s)
    is_enforced = "associations" in config.get("AccountingStorageEnforce", "")
    return Glance(
        name=config.get("ClusterName", ""),
        version=parse_version(config["SLURM_VERSION"]),
        config=config,
        partitions=tuple(parse_partitions(partitions, node_types)),
        associations=associations if associations and is_enforced else None,
        qos=qos or None,
    )


def _ask_all(
    questions: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float
) -> list[str | TrainkitError]:
    """The answers, or what went wrong, in the order of the questions."""
    answers: list[str | TrainkitError] = [""] * len(questions)

    def ask(index: int) -> None:
        try:
            answers[index] = run_slurm(questions[index], timeout_s, environ=environ)
        except TrainkitError as error:
            answers[index] = error

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def parse_assoc_mgr(text: str, user: str) -> tuple[tuple[Association, ...], tuple[QosLimit, ...]]:
    """The user's associations and all QOS in what `scontrol --oneliner show assoc_mgr` prints."""
    associations, qos = [], []
    for line in text.splitlines():
        values = {match["name"]: match["value"] for match in reversed(list(_WORD.finditer(line)))}
        if line.startswith("ClusterName=") and _ID.sub("", values.get("UserName", "")) == user:
            is_default = values.get("DefAssoc") == "Yes"
            associations.append(Association(values["Account"], is_default, values["Partition"], (), ""))
        elif line.startswith("QOS="):
            minutes = values.get("MaxWallPJ", "")
            limit_s = 60 * int(minutes) if minutes.isdigit() else None
            qos.append(QosLimit(_ID.sub("", values["QOS"]), limit_s))
    return tuple(associations), tuple(qos)
