"""Computes values for the placeholders in the cause and advice sentences of a signature.

The values come from the run's config, launch plan and files. The logs show which ranks blocked the other
ranks: in a hang, at the rendezvous, or in a collective that timed out. The placeholder `suspect_rank` stands
for the rank that the user should inspect.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from trainkit.capabilities.diagnose.attempt_files import MAX_LOGS, AttemptFiles
from trainkit.capabilities.diagnose.signatures import load_signatures
from trainkit.capabilities.diagnose.texts import Evidence, Match, Text, json_line
from trainkit.config import RunConfig
from trainkit.config.running import ResourcesConfig
from trainkit.errors import UsageError
from trainkit.formats import rank_list, size, time_limit_s, time_text
from trainkit.observe.logs import clean
from trainkit.observe.status import read_config
from trainkit.run.end import read_end
from trainkit.run.events import read_events
from trainkit.run.files import Record, read_object
from trainkit.run.history import PlanRecord, read_plan
from trainkit.run.manifest import Checkpoint, published
from trainkit.run.rundir import RunDir
from trainkit.scheduler import expand_hosts

_MEM = re.compile(r"(\d+)([KMGT]?)")


def run_values(files: AttemptFiles) -> dict[str, str]:
    """Return the placeholder values for an attempt, keyed by placeholder name.

    Placeholders whose values are unknown map to an empty string or are missing.
    """
    run, attempt = files.run, files.attempt
    plan = files.plan if files.plan.values else read_plan(run)
    command, is_by_hand = " ".join(map(quote, plan.command or ())), run.was_started_by_hand
    newest = run.attempt(max(run.attempt_numbers(), default=attempt.number))
    end = read_end(newest)
    can_resume = not is_by_hand and (end is None or end.state != "finished")
    values = {
        "run": run.quoted,
        "attempt_dir": str(attempt.path),
        "command": command,
        "by_hand": command if is_by_hand else "",
        "resumable": run.quoted if can_resume else "",
        "missing_logs_dir": "" if attempt.logs_dir.exists() else str(attempt.logs_dir),
        **_disk_values(run, published(run.checkpoints_dir)),
        **({} if plan.is_command else _batch_values(plan.record("batch"))),
    }
    if attempt.number == newest.number:
        values |= _resume_values(run, is_command=plan.is_command and not is_by_hand)
    else:
        values |= _next_attempt_values(run, attempt.number + 1)
    config = read_config(attempt.config_file if attempt.config_file.is_file() else run.config_file)
    if config is None:
        return values
    return values | _config_values(config, plan, quote(str(run.config_file)))


def _batch_values(batch: Record) -> dict[str, str]:
    """Return the batch sizes, and the next smaller device batch size with the same global batch size."""
    own, steps = batch.count("device_batch_size"), batch.count("accumulation_steps")
    whole = batch.count("global_batch_size")
    if own is None or steps is None or whole is None:
        return {}
    values = {"device_batch_size": str(own), "global_batch_size": str(whole)}
    if own < 2:
        values["smallest_batch"] = "1"
    elif batch.count("pp_microbatches") is None:
        divisor = next(number for number in range(2, own + 1) if own % number == 0)
        values |= {"smaller_batch": str(own // divisor), "more_accumulation": str(steps * divisor)}
    return values


def _config_values(config: RunConfig, plan: PlanRecord, file: str) -> dict[str, str]:
    resources = config.resources
    values = {
        "nodelist": str(resources.extra.get("nodelist", "")),
        "network": config.launch.network,
        "grace_s": f"{config.requeue.grace_s:g}",
    }
    if plan.text("backend") not in (None, "local"):
        if resources.mem is None:
            values["mem_unset"] = "not set"
        elif match := _MEM.fullmatch(resources.mem):
            values |= {"mem": resources.mem, "more_mem": f"{-(-int(match[1]) * 3 // 2)}{match[2]}"}
        values |= _time_values(config.resources)
    if not plan.is_command:
        values |= {
            "trainer_config": file,
            "num_workers": str(config.data.num_workers or ""),
            "lr": f"{config.optimizer.lr:g}",
            "smaller_lr": f"{config.optimizer.lr / 3:.2g}",
            "warmup_steps": str(config.schedule.warmup_steps),
            "precision": config.precision.dtype,
        }
    return values


def _time_values(resources: ResourcesConfig) -> dict[str, str]:
    """Return the shortest of the job's time limits that can be doubled, and the doubled limit.

    The job's time limits are ``time_min``, ``slice`` and ``time`` in the config section `resources`. A
    doubled limit must not exceed the job's next longer limit.
    """
    limits = {key: getattr(resources, key) for key in ("time_min", "slice", "time")}
    given = [(key, text, time_limit_s(text)) for key, text in limits.items() if text is not None]
    for index, (key, text, limit_s) in enumerate(given):
        longer = [most_s or math.inf for _, _, most_s in given[index + 1 :]]
        if limit_s is not None and 2 * limit_s <= min(longer, default=math.inf):
            option = key.replace("_", "-")
            return {"time": text, "time_key": key, "time_option": option, "more_time": time_text(2 * limit_s)}
    return {}


def host_values(host: str, named: str) -> dict[str, str]:
    """Return a host as ``named_host`` if the node list `named` contains it, or else as ``free_host``."""
    hosts: list[str] = []
    with suppress(UsageError):  # the file in the run folder may be damaged
        hosts = expand_hosts(named) if named else []
    return {"host": host, "named_host" if host in hosts else "free_host": host}


def _resume_values(run: RunDir, *, is_command: bool) -> dict[str, str]:
    """Return from where the run's next attempt would continue."""
    if checkpoints := published(run.checkpoints_dir):
        return {"newest_step": str(checkpoints[-1].step)}
    none = "no trainkit checkpoint" if is_command else "no checkpoint"
    own = "the command continues from its own checkpoints" if is_command else f"there is {none}"
    return {"no_checkpoint": none, "starts_again": own}


def _next_attempt_values(run: RunDir, number: int) -> dict[str, str]:
    """Return from where the next attempt, which has already started, has resumed."""
    step = None
    with suppress(OSError):  # the events file may be missing or on a failing disk
        step = next((event.step for event in read_events(run, "resumed", attempt=number)), None)
    return {} if step is None else {"next_attempt": str(number), "resumed_step": str(step)}


def _disk_values(run: RunDir, checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    values: dict[str, str] = {}
    # The advice omits the values read from the run folder if the disk is failing.
    with suppress(OSError):
        folder = run.path.resolve()
        free = shutil.disk_usage(folder).free
        mount = next((path for path in (folder, *folder.parents) if path.is_mount()), folder)
        values |= {"filesystem": str(mount), "free": size(free)}
        if older := checkpoints[:-1]:
            files = [path for item in older for path in item.path.iterdir() if path.is_file()]
            older_size = size(sum(path.stat().st_size for path in files))
            values |= {"num_older": str(len(older)), "older_size": older_size}
    return values


WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+)"
)
"""Matches the message of the NCCL watchdog about a collective that timed out, including the sequence number
of the collective."""


def hang_values(
    files: AttemptFiles, match: Match, blocking: int | None
) -> tuple[dict[str, str], list[Evidence]]:
    """Return the ranks that wait for the blocking rank, and evidence lines from their hang reports.

    Returns an empty dict and an empty list unless the failure is a hang.
    """
    waiting, lines = [], []
    if match.signature.name != "hang":
        return {}, []
    for path in sorted(files.attempt.hangs_dir.glob("rank-*.json"))[:MAX_LOGS]:
        report = Record(read_object(path))
        rank, stack = report.count("rank"), report.texts("stack")
        if rank is None:
            continue  # a crash truncated the hang report
        if rank != blocking:
            waiting.append(rank)
        if stack:  # hang reports of a COMMAND contain no stack
            text = clean(f"rank {rank} on {report.text('host')}, in {report.text('phase')}: {stack[0]}")
            lines.append(Evidence(files.shown(path), json_line(path, "stack"), text))
    # If there are records of collectives, they already name the waiting ranks.
    known = waiting if blocking is not None and "whole" not in match.groups else []
    hangs_dir = str(files.attempt.hangs_dir) if lines else ""
    return {"waiting": rank_list(known) if known else "", "hangs_dir": hangs_dir}, lines


_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")


def missing_path_values(files: AttemptFiles, match: Match) -> dict[str, str]:
    """Return the folder against which relative paths are resolved, and what is missing or was found there.

    Returns an empty dict unless the failure was caused by a missing file.
    """
    if match.signature.name != "missing-file":
        return {}
    # A function such as os.rename names two paths; usually, the folder of the second path is missing.
    job, paths = files.job, [one or two for one, two in _QUOTED.findall(match.groups.get("what", ""))]
    path = paths[-1] if paths else ""
    # The trainer runs in the folder of the submission; only a COMMAND runs in the copy of the code.
    if job.code is None or not files.plan.is_command:
        return {"in_place_dir": job.cwd or "", **_missing_folder(job.cwd, path)}
    copy_dir = str(files.run.work_dir / job.code.subfolder)
    if path and job.cwd and not path.startswith("/"):
        found = os.path.normpath(f"{job.cwd}/{path}")
        if os.path.lexists(found):
            return {"copy_dir": copy_dir, "found_at": found, "missing_path": path}
    return {"copy_dir": copy_dir, "copied_dir": job.code.source, **_missing_folder(copy_dir, path)}


def _missing_folder(base: str | None, path: str) -> dict[str, str]:
    """Return `path`, and its folder if the folder does not exist.

    Relative paths are resolved against `base`.
    """
    if not path:
        return {}
    values = {"missing_path": path}
    if base is not None or path.startswith("/"):
        folder = Path(os.path.normpath(Path(base or "/", path))).parent
        if folder != Path(base or "/") and not os.path.lexists(folder):
            values["missing_dir"] = str(folder)
    return values


def missing_rank_values(files: AttemptFiles, match: Match) -> dict[str, str]:
    """Return the ranks that did not join the rendezvous, and their hosts."""
    ranks = [int(number) for number in re.findall(r"\d+", match.groups.get("missing", ""))]
    if match.groups.get("joined", "").isdigit():
        ranks = _ranks_not_joined(files, int(match.groups["joined"]))
    if not ranks:
        return {}
    hosts = ", ".join(dict.fromkeys(filter(None, map(files.host_of, ranks))))
    first = dict.fromkeys(("missing_rank", "suspect_rank"), str(ranks[0]))
    return {"missing_ranks": rank_list(ranks), "missing_hosts": hosts, **first}


def _ranks_not_joined(files: AttemptFiles, num_joined: int) -> list[int]:
    """Return the ranks that did not connect to rank 0's store, or an empty list if they are unknown."""
    others = list(range(1, files.world_size))
    if num_joined == 1:
        return others
    logs = {rank: files.attempt.rank_log(rank) for rank in others}
    silent = [rank for rank, log in logs.items() if not log.is_file() or log.stat().st_size == 0]
    return silent if len(silent) == len(others) + 1 - num_joined else []


def collective_values(files: AttemptFiles, match: Match, logs: Iterable[Text]) -> dict[str, str]:
    """Return the rank that did not join the collective that timed out."""
    if match.signature.name != "collective-timeout":
        return {}
    cascades = [signature for signature in load_signatures() if signature.role == "cascade"]
    timed_out: dict[int, int] = {}
    waited: set[int] = set()
    for text in logs:
        for line in text.lines:
            for found in WATCHDOG.finditer(line):
                timed_out.setdefault(int(found["rank"]), int(found["sequence"]))
        if text.rank is not None and any(text.find(signature) for signature in cascades):
            waited.add(text.rank)
    waited |= timed_out.keys()
    silent = [rank for rank in range(files.world_size) if rank not in waited]
    if 0 < len(silent) <= len(waited):
        why = f"{rank_list(silent)} reported no timeout, unlike the waiting ranks"
        return {"suspect": why, "suspect_rank": str(silent[0])}
    behind = [rank for rank, number in timed_out.items() if number == min(timed_out.values())]
    if len(behind) < len(timed_out):
        why = f"{rank_list(behind)} had started fewer collectives than the other ranks"
        return {"suspect": why, "suspect_rank": str(behind[0])}
    return {}
