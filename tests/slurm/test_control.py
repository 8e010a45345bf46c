"""Tests requeue, cancel, signals and versions."""

import pytest

from trainkit.errors import UsageError
from trainkit.slurm import control
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import cancel, cancel_waiting, kill_steps, requeue

LOST = "echo 'Socket timed out on send/recv operation' >&2; exit 1"
AWAY = "[ $n -ge 2 ] || { echo '(connect failure)' >&2; exit 1; }"
DONE = f"[ $n -ge 2 ] || {{ {LOST}; }}; echo 'Job is pending execution for job 12' >&2; exit 1"
GONE = "echo 'scancel: error: Kill job error on job id 12: Invalid job id specified' >&2; exit 1"
EAST = "scancel --clusters=east"


@pytest.mark.parametrize(
    ("act", "says", "calls"),
    [
        pytest.param(lambda: requeue("12_3"), "", ["scontrol requeue 12_3"], id="a task, not its array"),
        pytest.param(lambda: requeue("12"), AWAY, ["scontrol requeue 12"] * 2, id="away"),
        pytest.param(lambda: requeue("12"), DONE, ["scontrol requeue 12"] * 2, id="the answer was lost"),
        (lambda: requeue("12;east"), "", ["scontrol --clusters=east requeue 12"]),
        (lambda: [cancel(["12", "13_4"]), cancel([])], "", ["scancel 12 13_4"]),
        pytest.param(lambda: cancel(["12"]), GONE, ["scancel 12"], id="it has ended"),
        (lambda: control.send_signal(["12"], "USR2"), "", ["scancel --signal=USR2 12"]),
        (
            lambda: cancel_waiting(["12;east", "12", "13_4;east"]),
            *("", [f"{EAST} --state=PENDING 12 13_4", "scancel --state=PENDING 12"]),
        ),
        (
            lambda: kill_steps([("12", "0"), ("12_3;east", "1")]),
            *("", ["scancel --signal=KILL 12.0", f"{EAST} --signal=KILL 12_3.1"]),
        ),
    ],
)
def test_what_slurm_is_asked_to_do(fake, act, says, calls):
    fake.add("scontrol", says)
    fake.add("scancel", says)
    act()
    assert [" ".join(call) for call in fake.calls] == calls


def test_a_refusal_is_not_retried(fake):
    fake.add("scontrol", "echo 'Job is pending execution for job 12' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Job is pending execution"):
        requeue("12")
    other = "scancel: error: Kill job error on job id 13: Access/permission denied"
    fake.add("scancel", f"{GONE.partition(';')[0]}; echo '{other}' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Access/permission denied"):
        cancel(["12", "13"])
    assert fake.calls == [["scontrol", "requeue", "12"], ["scancel", "12", "13"]]


def test_cancel_while_slurm_is_away(fake):
    fake.add("scancel", LOST)
    with pytest.raises(SlurmUnreachable):
        kill_steps([("12", "0")], patience_s=0)
    assert fake.calls == [["scancel", "--signal=KILL", "12.0"]]
    with pytest.raises(SlurmUnreachable):
        kill_steps([("12", "0")], patience_s=1)
    assert len(fake.calls) > 2, "not retried within its patience"


def test_a_cluster_that_is_away_keeps_no_other_from_cancelling(fake):
    fake.add("scancel", f'[ "$1" != --clusters=east ] || {{ {LOST}; }}')
    with pytest.raises(SlurmUnreachable):
        kill_steps([("12;east", "0"), ("12", "1"), ("12;south", "2")], patience_s=0)
    calls = [f"{EAST} --signal=KILL 12.0", "scancel --signal=KILL 12.1"]
    assert [" ".join(call) for call in fake.calls] == [*calls, "scancel --clusters=south --signal=KILL 12.2"]


@pytest.mark.parametrize("job_id", ["--user=me", "", "12 13"])
def test_no_job_id_is_an_option(fake, job_id):
    for act in (lambda: cancel([job_id]), lambda: requeue(job_id)):
        with pytest.raises(UsageError, match="is not a Slurm job id"):
            act()
    assert fake.calls == []


CONFIG = """\
Configuration data as of 2024-01-01T00:00:00
MaxArraySize            = 1001
SlurmctldHost[0]        = head(10.0.0.1)
PluginDir               =
SchedulerParameters     = bf_window=10,defer

Slurmctld(primary) at head is UP
"""


def test_config(fake):
    (fake.folder / "config").write_text(CONFIG)
    fake.add("scontrol", '/bin/cat "$here/config"')
    config = control.show_config()
    assert config == control.parse_config(CONFIG)
    assert (config["MaxArraySize"], config["SlurmctldHost"]) == ("1001", "head(10.0.0.1)")
    assert (config["PluginDir"], config["SchedulerParameters"]) == ("", "bf_window=10,defer")


def test_versions_and_their_features():
    texts = ("slurm 22.05.8\n", "slurm-wlm 24.11.1-0ubuntu1\n", "slurm 23.02.0rc1", "slurm 25.11")
    assert [*map(control.parse_version, texts)] == [(22, 5, 8), (24, 11, 1), (23, 2, 0), (25, 11, 0)]
    with pytest.raises(UsageError, match="not a Slurm version"):
        control.parse_version("slurm")
    versions = [(21, 8, 0), (22, 5, 0), (22, 5, 8), (23, 2, 7), (23, 11, 0), (25, 11, 0)]
    enabled = {"SlurmctldParameters": "cloud_dns,enable_expedited_requeue"}
    assert [control.has_expedited_requeue(v, enabled) for v in versions] == [False] * 5 + [True]
    assert control.has_expedited_requeue((25, 11, 0), {"SchedulerParameters": "enable_expedited_requeue"})
    for config in ({"SlurmctldParameters": "no_enable_expedited_requeue"}, {}):
        assert not control.has_expedited_requeue((25, 11, 0), config)


def test_jobs_that_wait_for_a_job_follow_it_to_its_new_id(fake):
    waits = {20: "ok:12", 22: "ok:120", 23: "ok:9(unfulfilled),afterok:12", 24: "any:12", 25: "ok:12_3"}
    lines = [f"echo '{job}|after{other}(unfulfilled)'" for job, other in waits.items()]
    fake.add("squeue", "; ".join([*lines, "echo '21|(null)'"]))
    fake.add("scontrol")
    assert control.move_dependents("12", "30") == ["20", "23"]
    assert fake.calls[1:] == [
        ["scontrol", "update", "JobId=20", "Dependency=afterok:30"],
        ["scontrol", "update", "JobId=23", "Dependency=afterok:9,afterok:30"],
    ]
    assert control.move_dependents("12_3", "31_3") == ["25"]
    assert fake.calls[-1] == ["scontrol", "update", "JobId=25", "Dependency=afterok:31_3"]
