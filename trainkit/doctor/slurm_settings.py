"""Slurm's version, and the settings of a cluster that decide whether a run survives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.doctor.check import Check
from trainkit.errors import TrainkitError
from trainkit.slurm.client import query
from trainkit.slurm.control import parse_config, parse_version

OLDEST_SLURM = (22, 5)
MIN_GRACE_S = 30
MIN_JOB_AGE_S = 120


def slurm_checks() -> Iterator[Check]:
    """The checks of Slurm's version and of the settings that decide whether a run survives."""
    try:
        config = parse_config(query(["scontrol", "show", "config"]).stdout)
        partitions = query(["scontrol", "show", "partition", "--oneliner"]).stdout
    except TrainkitError as error:
        yield Check("Slurm", "failure", error.message, error.hint)
        return
    yield from settings_checks(config, partitions)


def settings_checks(config: Mapping[str, str], partitions: str) -> Iterator[Check]:
    """The checks of `scontrol show config`, and of the text of `scontrol show partition --oneliner`."""
    version = parse_version(config.get("SLURM_VERSION", ""))
    text = f"{version[0]}.{version[1]:02d}.{version[2]}"
    if version[:2] < OLDEST_SLURM:
        yield Check("Slurm", "warning", text, "not tested; the oldest tested version is 22.05")
    else:
        yield Check("Slurm", "ok", f"{text}, cluster {config.get('ClusterName', 'unknown')}")
    yield from _preemption(config, partitions)
    if config.get("JobRequeue") == "0":
        hint = "trainkit passes --requeue, and submits a new job where the site forbids it"
        yield Check("requeue", "warning", "JobRequeue is 0", hint)
    else:
        yield Check("requeue", "ok", "jobs can be requeued")
    kill_wait_s = _seconds(config.get("KillWait", ""))
    if kill_wait_s is not None and kill_wait_s < MIN_GRACE_S:
        hint = "at the time limit SIGKILL follows this soon; requeue.grace_s asks for an earlier notice"
        yield Check("KillWait", "warning", config["KillWait"], hint)
    else:
        yield Check("KillWait", "ok", config.get("KillWait", "unknown"))
    if "slurmdbd" in config.get("AccountingStorageType", ""):
        yield Check("accounting", "ok", "sacct knows how old jobs ended")
    else:
        age_s = _seconds(config.get("MinJobAge", ""))
        value = f"none: Slurm forgets a job {config.get('MinJobAge', 'soon')} after its end"
        is_short = age_s is not None and age_s < MIN_JOB_AGE_S
        hint = "how a job ended is then known from its run folder only"
        yield Check("accounting", "warning" if is_short else "ok", value, hint if is_short else "")


def _preemption(config: Mapping[str, str], partitions: str) -> Iterator[Check]:
    fields = [
        dict(item.partition("=")[::2] for item in line.split()) for line in partitions.splitlines() if line
    ]
    default = config.get("PreemptMode", "OFF")
    preempted = [
        item
        for item in fields
        if not {"OFF", "GANG"} >= set(item.get("PreemptMode", default).upper().split(","))
    ]
    if config.get("PreemptType", "").endswith("none") or not preempted:
        yield Check("preemption", "ok", "jobs are not preempted")
        return
    signal = "SIGTERM and the job's own signal" if _sends_own_signal(config) else "SIGTERM"
    for item in preempted:
        grace_s = _seconds(item.get("GraceTime", "0")) or 0
        mode = item.get("PreemptMode", default)
        value = f"partition {item['PartitionName']}: {mode}, GraceTime {grace_s} s, notice by {signal}"
        if grace_s < MIN_GRACE_S:
            hint = (
                "a preempted run has no time for a save: set checkpoint.every_minutes to what you can lose, "
                "or ask for a GraceTime of 30 s"
            )
            yield Check("preemption", "warning", value, hint)
        else:
            yield Check("preemption", "ok", value)


def _sends_own_signal(config: Mapping[str, str]) -> bool:
    """Whether preempted jobs get the signal that they asked for with ``--signal``."""
    return "send_user_signal" in config.get("PreemptParameters", "").split(",")


def _seconds(text: str) -> int | None:
    """The number in `30 sec`; None if there is none."""
    first = text.split()[0] if text.split() else ""
    return int(first) if first.isdigit() else None
