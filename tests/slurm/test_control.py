"""Tests requeue, cancel, signals and versions."""

import pytest

from trainkit.errors import UsageError
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import (
    cancel,
    cancel_waiting,
    has_expedited_requeue,
    kill_steps,
    move_dependents,
    parse_config,
    parse_version,
    requeue,
    send_signal,
    show_config,
)

LOST = "echo 'Socket timed out on send/recv operation' >&2; exit 1"


AWAY = "[ $n -ge 2 ] || { echo '(connect failure)' >&2; exit 1; }"
DONE = f"[ $n -ge 2 ] || {{ {LOST}; }}; echo 'Job is pending execution for job 12' >&2; exit 1"
GONE = "echo 'scancel: error: Kill job error on job id 12: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(
    ("act", "says", "calls"),
    [
        pytest.param(lambda: requeue("12_3"), "", ["scontrol requeue 12_3"], id="a task, not its array"),
        pytest.param(lambda: requeue("12"), AWAY, ["scontrol requeue 12"] * 2, id="away"),
        pytest.param(lambda: requeue("12"), DONE, ["scontrol requeue 12"] * 2, id="the answer was lost"),
        (lambda: [cancel(["12", "13_4"]), cancel([])], "", ["scancel 12 13_4"]),
        (lambda: cancel_waiting(["12", "13_4"]), "", ["scancel --state=PENDING 12 13_4"]),
        pytest.param(lambda: cancel(["12"]), GONE, ["scancel 12"], id="it has ended"),
        (lambda: send_signal(["12"], "USR2"), "", ["scancel --signal=USR2 12"]),
        (
            lambda: cancel_waiting(["12;east", "12", "13_4;east"]),
            "",
            ["scancel --clusters=east --state=PENDING 12 13_4", "scancel --state=PENDING 12"],
        ),
        (
            lambda: kill_steps([("12", "0"), ("12_3;east", "1")]),
            "",
            ["scancel --signal=KILL 12.0", "scancel --clusters=east --signal=KILL 12_3.1"],
        ),
        (lambda: requeue("12;east"), "", ["scontrol --clusters=east requeue 12"]),
    ],
)
def test_what_slurm_is_asked_to_do(fake, act, says, calls):
    fake.add("scontrol", says)
    fake.add("scancel", says)
    act()
    assert [" ".join(call) for call in fake.calls] == calls


def test_requeue_of_a_job_that_waits_anyway_is_refused(fake):
    fake.add("scontrol", "echo 'Job is pending execution for job 12' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Job is pending execution"):
        requeue("12")
    assert len(fake.calls) == 1, "a refusal was retried"


def test_cancel_of_somebody_elses_job(fake):
    one = "scancel: error: Kill job error on job id 12: Invalid job id specified"
    other = "scancel: error: Kill job error on job id 13: Access/permission denied"
    fake.add("scancel", f"echo '{one}' >&2; echo '{other}' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Access/permission denied"):
        cancel(["12", "13"])
    assert fake.calls == [["scancel", "12", "13"]]


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
    assert [call[1:] for call in fake.calls] == [
        ["--clusters=east", "--signal=KILL", "12.0"],
        ["--signal=KILL", "12.1"],
        ["--clusters=south", "--signal=KILL", "12.2"],
    ]


def test_no_job_id_is_an_option(fake):
    fake.add("scancel")
    fake.add("scontrol")
    for job_id in ("--user=me", "", "12 13"):
        with pytest.raises(UsageError, match="is not a Slurm job id"):
            cancel([job_id])
        with pytest.raises(UsageError, match="is not a Slurm job id"):
            requeue(job_id)
    assert fake.calls == []


def test_config(fake):
    text = (
        "Configuration data as of 2024-01-01T00:00:00\n"
        "AccountingStorageTRES   = cpu,mem,gres/gpu\n"
        "MaxArraySize            = 1001\n"
        "SLURM_VERSION           = 22.05.8\n"
        "SlurmctldHost[0]        = head(10.0.0.1)\n"
        "MailDomain              = (null)\n"
        "PluginDir               =\n"
        "SchedulerParameters     = bf_window=10,defer\n"
        "\n"
        "Slurmctld(primary) at head is UP\n"
    )
    (fake.folder / "config").write_text(text)
    fake.add("scontrol", '/bin/cat "$here/config"')
    config = show_config()
    assert config == parse_config(text)
    assert (config["MaxArraySize"], config["SlurmctldHost"]) == ("1001", "head(10.0.0.1)")
    assert (config["PluginDir"], config["SchedulerParameters"]) == ("", "bf_window=10,defer")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("slurm 22.05.8\n", (22, 5, 8)),
        ("slurm-wlm 24.11.1-0ubuntu1\n", (24, 11, 1)),
        ("slurm 23.02.0rc1", (23, 2, 0)),
        ("slurm 25.11", (25, 11, 0)),
    ],
)
def test_versions(text, numbers):
    assert parse_version(text) == numbers


def test_what_is_no_version():
    with pytest.raises(UsageError, match="not a Slurm version"):
        parse_version("slurm")


def test_features():
    versions = [(21, 8, 0), (22, 5, 0), (22, 5, 8), (23, 2, 7), (23, 11, 0), (25, 11, 0)]
    enabled = {"SlurmctldParameters": "cloud_dns,enable_expedited_requeue"}
    assert [has_expedited_requeue(v, enabled) for v in versions] == [False] * 5 + [True]
    assert has_expedited_requeue((25, 11, 0), {"SchedulerParameters": "enable_expedited_requeue"})
    assert not has_expedited_requeue((25, 11, 0), {"SlurmctldParameters": "no_enable_expedited_requeue"})
    assert not has_expedited_requeue((25, 11, 0), {})


def test_jobs_that_wait_for_a_job_follow_it_to_its_new_id(fake):
    fake.add(
        "squeue",
        "echo '20|afterok:12(unfulfilled)'; echo '21|(null)'; echo '22|afterok:120(unfulfilled)'; "
        "echo '23|afterok:9(unfulfilled),afterok:12(unfulfilled)'; echo '24|afterany:12(unfulfilled)'; "
        "echo '25|afterok:12_3(unfulfilled)'",
    )
    fake.add("scontrol")
    assert move_dependents("12", "30") == ["20", "23"]
    assert fake.calls[1:] == [
        ["scontrol", "update", "JobId=20", "Dependency=afterok:30"],
        ["scontrol", "update", "JobId=23", "Dependency=afterok:9,afterok:30"],
    ]
    assert move_dependents("12_3", "31_3") == ["25"]
    assert fake.calls[-1] == ["scontrol", "update", "JobId=25", "Dependency=afterok:31_3"]
