"""Tests the findings of `trainkit doctor` about nodes that differ and about Slurm's settings."""

import pytest

from tests.support.said import said
from trainkit.capabilities.doctor import NodeReport
from trainkit.capabilities.doctor.nodes import can_measure, compare_versions, settings_checks
from trainkit.job.preflight import Finding


@pytest.mark.parametrize(
    ("versions", "host", "text"),
    [
        (["2.13", "2.12", "2.13"], "b", "torch is 2.12, but 2.13 on 2 of 3 nodes"),
        (["2.13", "2.13", None], "c", "torch is missing, but 2.13 on 2 of 3 nodes"),
        (["2.13", "2.12"], None, "torch is 2.13 on a; 2.12 on b"),
    ],
)
def test_packages_that_differ(versions, host, text):
    """A node is named if most other nodes have another version."""
    reports = [
        NodeReport(name, 0, 7, versions={} if version is None else {"torch": version})
        for name, version in zip("abc", versions, strict=False)
    ]
    (found,) = compare_versions(reports)
    assert found == Finding("packages", "failure", text, found.hint, host)


def test_broken_gpu_stops_the_measurement():
    assert can_measure([Finding("GPU 3", "ok", ""), Finding("disk", "failure", "")])
    assert not can_measure([Finding("GPU 3", "failure", "")])


CONFIG = {"SLURM_VERSION": "23.11.4", "ClusterName": "big", "JobRequeue": "1", "KillWait": "30 sec"}


def states(config: dict[str, str], partitions: str = "") -> dict[str, str]:
    return {check.name: check.state for check in settings_checks(config, partitions)}


def test_settings_of_slurm_that_cost_work_are_warnings():
    assert states({**CONFIG, "AccountingStorageType": "accounting_storage/slurmdbd"}) == {
        **{"Slurm": "ok", "preemption": "ok", "requeue": "ok", "KillWait": "ok", "accounting": "ok"}
    }
    bad = {**CONFIG, "SLURM_VERSION": "20.02.1", "JobRequeue": "0", "KillWait": "5 sec"}
    bad |= {"MinJobAge": "10 sec", "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    assert set(states(bad, "PartitionName=low GraceTime=0 PreemptMode=REQUEUE").values()) == {"warning"}
    (name,) = [key for key, state in states({**bad, "PreemptType": "preempt/none"}).items() if state == "ok"]
    assert name == "preemption"


@pytest.mark.parametrize(
    ("value", "state", "text"),
    [
        ("1", "ok", "jobs can be requeued"),
        (None, "ok", "jobs can be requeued"),
        ("0", "warning", "JobRequeue is 0"),
    ],
)
def test_requeue(value, state, text):
    config = {**CONFIG, "JobRequeue": value}
    known = {name: setting for name, setting in config.items() if setting is not None}
    (found,) = [found for found in settings_checks(known, "") if found.name == "requeue"]
    assert (found.state, found.value) == (state, text)


def test_preemption_says_how_jobs_are_notified():
    config = {**CONFIG, "PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}
    partition = "PartitionName=low GraceTime=60"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    assert found.state == "ok"
    said(found.value)
    config["PreemptParameters"] = "youngest_first,send_user_signal"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    said(found.value)
