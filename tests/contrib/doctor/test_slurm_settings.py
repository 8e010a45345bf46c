"""What `trainkit doctor` says of Slurm's settings."""

from trainkit.contrib.doctor.nodes import settings_checks

CONFIG = {"SLURM_VERSION": "23.11.4", "ClusterName": "big", "JobRequeue": "1", "KillWait": "30 sec"}


def states(config: dict[str, str], partitions: str = "") -> dict[str, str]:
    return {check.name: check.state for check in settings_checks(config, partitions)}


def test_settings_of_slurm_that_cost_work_are_warnings() -> None:
    assert states({**CONFIG, "AccountingStorageType": "accounting_storage/slurmdbd"}) == {
        **{"Slurm": "ok", "preemption": "ok", "requeue": "ok", "KillWait": "ok", "accounting": "ok"}
    }
    bad = {
        **CONFIG,
        "SLURM_VERSION": "20.02.1",
        "JobRequeue": "0",
        "KillWait": "5 sec",
        "MinJobAge": "10 sec",
    }
    bad = {**bad, "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    assert set(states(bad, "PartitionName=low GraceTime=0 PreemptMode=REQUEUE").values()) == {"warning"}
    (name,) = [key for key, state in states({**bad, "PreemptType": "preempt/none"}).items() if state == "ok"]
    assert name == "preemption"


def test_preemption_says_how_jobs_are_notified() -> None:
    config = {**CONFIG, "PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}
    partition = "PartitionName=low GraceTime=60"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    assert (found.state, found.value) == ("ok", "partition low: REQUEUE, GraceTime 60 s, notice by SIGTERM")
    config["PreemptParameters"] = "youngest_first,send_user_signal"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    assert found.value.endswith("notice by SIGTERM and the job's own signal")
