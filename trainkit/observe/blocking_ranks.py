"""The ranks that the others waited for: in a hang, at the rendezvous, or in a collective that timed out.

Each function returns values for the sentences of a signature; `suspect_rank` is the rank to look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainkit.observe.attempt_files import MAX_LOGS, AttemptFiles
from trainkit.observe.run_text import Evidence, Match, Text, clean, json_line
from trainkit.observe.signatures import Signature
from trainkit.observe.torch_output import WATCHDOG
from trainkit.run.files import read_json


def hang_values(
    files: AttemptFiles, match: Match, blocking: int | None
) -> tuple[dict[str, str], list[Evidence]]:
    """Which ranks wait for the blocking one, and where, according to the reports of a hang."""
    waiting, lines = [], []
    if match.signature.name != "hang":
        return {}, []
    for path in sorted(files.attempt.hangs_dir.glob("rank-*.json"))[:MAX_LOGS]:
        try:
            report = read_json(path)
            rank, phase, stack = int(report["rank"]), str(report["phase"]), list(report["stack"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # cut off by a crash
        if rank != blocking:
            waiting.append(rank)
        if stack:  # none for a COMMAND
            text = clean(f"rank {rank} on {report.get('host')}, in {phase}: {stack[0]}")
            lines.append(Evidence(files.shown(path), json_line(path, "stack"), text))
    values = {"waiting": _listed(waiting)} if waiting and blocking is not None else {}
    return values | ({"hangs_dir": str(files.attempt.hangs_dir)} if lines else {}), lines


def missing_rank_values(files: AttemptFiles, match: Match) -> dict[str, str]:
    """The ranks, with their hosts, that did not reach the rendezvous."""
    ranks = [int(number) for number in re.findall(r"\d+", match.groups.get("missing", ""))]
    if match.groups.get("joined", "").isdigit():
        ranks = _ranks_not_joined(files, int(match.groups["joined"]))
    if not ranks:
        return {}
    values = {"missing_ranks": _listed(ranks), "missing_rank": str(ranks[0]), "suspect_rank": str(ranks[0])}
    hosts = dict.fromkeys(filter(None, map(files.host_of, ranks)))
    return values | ({"missing_hosts": ", ".join(hosts)} if hosts else {})


def _ranks_not_joined(files: AttemptFiles, num_joined: int) -> list[int]:
    """The ranks that did not reach the store of rank 0, if that is known."""
    others = list(range(1, files.world_size()))
    if num_joined == 1:
        return others
    silent = [rank for rank in others if not _has_output(files, rank)]
    return silent if len(silent) == len(others) + 1 - num_joined else []


def _has_output(files: AttemptFiles, rank: int) -> bool:
    log = files.attempt.rank_log(rank)
    return log.is_file() and log.stat().st_size > 0


def collective_values(
    files: AttemptFiles, match: Match, logs: Iterable[Text], signatures: Sequence[Signature]
) -> dict[str, str]:
    """The rank that did not take part in the collective that timed out."""
    if match.signature.name != "collective-timeout":
        return {}
    cascades = [signature for signature in signatures if signature.role == "cascade"]
    timed_out: dict[int, int] = {}
    waited: set[int] = set()
    for text in logs:
        for line in text.lines:
            for found in WATCHDOG.finditer(line):
                timed_out.setdefault(int(found["rank"]), int(found["sequence"]))
        if text.rank is not None and any(text.find(signature) for signature in cascades):
            waited.add(text.rank)
    waited |= timed_out.keys()
    silent = [rank for rank in range(files.world_size()) if rank not in waited]
    if 0 < len(silent) <= len(waited):
        why = f"{_listed(silent)} reported no time-out: the other ranks waited there"
        return {"suspect": why, "suspect_rank": str(silent[0])}
    behind = [rank for rank, number in timed_out.items() if number == min(timed_out.values())]
    if len(behind) < len(timed_out):
        why = f"{_listed(behind)} had started fewer collectives than the others"
        return {"suspect": why, "suspect_rank": str(behind[0])}
    return {}


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
