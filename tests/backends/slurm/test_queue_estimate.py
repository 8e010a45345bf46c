"""Tests the estimate of a job's start: which partitions are queried, and how the answers are reported."""

import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.said import said
from trainkit.backends.slurm.queue_estimate import SlurmEstimates, Wait, estimate_waits, wait_lines, when
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.slurm import submit
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.submit import Answer

KIND = NodeKind(4, 64, 512_000, {"h100": 8})
PARTITIONS = {
    **{"gpu": {"is_default": True}, "high": {}, "debug": {"max_time_s": 300}, "secret": {"is_hidden": True}}
}
WEST = Cluster("west", tuple(Partition(name, nodes=(KIND,), **more) for name, more in PARTITIONS.items()))
START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
SAYS = f"sbatch: Job 9 to start at {int(START.timestamp())} using 64 processors on nodes g1 in partition gpu"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    (fake.folder / "bin").mkdir(parents=True)
    fake.add("sbatch", f"echo '{SAYS}' >&2")
    fake.add("scontrol", "echo g1")
    return fake


def waits(fake: FakeSlurm, *overrides: str, cluster: Cluster = WEST) -> list[Wait]:
    given = ["train.global_batch_size=null", *overrides]
    loaded = load_config(None, overrides=given, environ={}, cwd=fake.folder)
    plan: LaunchPlan = make_plan(loaded, Facts(Machine(2, 0, (), "no GPU"), Target("sbatch", "", cluster)))
    return estimate_waits(plan, loaded.config, cluster)


def test_every_partition_that_could_take_it(fake):
    asked, other, never = waits(fake, "resources.comment=mine")
    assert asked == Wait("gpu", True, Answer(START, ("g1",)))
    assert other == Wait("high", False, Answer(START, ("g1",)))
    too_long = "resources.time: is 01:00:00, but partition debug allows at most 00:05:00"
    assert never == Wait("debug", False, Answer(remark=too_long))
    calls = [call for call in fake.calls if call[0] == "sbatch"]
    assert {call[-2] for call in calls} == {"--partition=gpu", "--partition=high"}
    assert all("--nodes=1" in call and "--gpus-per-node=8" in call for call in calls)
    assert not any(word.startswith("--comment") for call in calls for word in call)


def test_a_partition_that_was_asked_for_is_first_though_hidden(fake):
    names = [item.partition for item in waits(fake, "resources.partition=secret")]
    assert names == ["secret", "gpu", "high", "debug"]


def test_refused_for_good_or_for_now(fake):
    refusals = {"Invalid account": True, "Requested node configuration is not available": False}
    for why, is_for_good in refusals.items():
        fake.add("sbatch", f"echo 'allocation failure: {why}' >&2; exit 1")
        assert waits(fake)[0] == Wait("gpu", True, Answer(remark=why, refused=is_for_good))
    fake.add("sbatch", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match="connect failure"):
        waits(fake)


def test_the_time_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(submit, "ENOUGH_S", 0.3)
    monkeypatch.setattr(submit, "ASK_TIMEOUT_S", 60.0)
    fake.add("sbatch", f"/bin/sleep 0.4; echo '{SAYS}' >&2")
    partitions = tuple(replace(WEST.partitions[0], name=f"p{number}") for number in range(12))
    cluster = replace(WEST, partitions=(WEST.partitions[0], *partitions))
    begin = time.monotonic()
    found = waits(fake, cluster=cluster)
    assert time.monotonic() - begin < 3
    assert found[0].answer.start_time == START
    [remark] = {item.answer.remark for item in found[-4:]}
    said(remark)
    assert len(found) == 13


def test_table():
    found = [
        Wait("gpu", True, Answer(START + timedelta(seconds=30), ("g1", "g2"))),
        Wait("high", False, Answer(START + timedelta(hours=2, minutes=5, seconds=20), tuple("abcdef"))),
        Wait("debug", False, Answer(remark="never")),
    ]
    later = f"in 2h05m ({(START + timedelta(hours=2, minutes=5)).astimezone():%Y-%m-%d %H:%M})"
    assert list(wait_lines(found, START)) == [
        *("partition       would start", f"gpu (selected)  {'now'.ljust(len(later))}  on g1, g2"),
        f"high            {later}  on a, … and f (6 nodes)",
        f"debug           {'no'.ljust(len(later))}  never",
    ]


STARTS, BUSY, REFUSED = Answer(START), Answer(remark="busy"), Answer(remark="no account", refused=True)


@pytest.mark.parametrize(
    ("asked", "others", "refusal"),
    [
        *(([], [], None), ([STARTS], [], None), ([BUSY], [], None), ([REFUSED], [], "no account")),
        *(([REFUSED, STARTS], [], None), ([REFUSED, BUSY], [REFUSED], None), ([], [REFUSED], None)),
        ([REFUSED, replace(REFUSED, remark="no time")], [STARTS], "no account"),
    ],
)
def test_refused_wherever_it_asks(asked, others, refusal):
    answers = [(True, answer) for answer in asked] + [(False, answer) for answer in others]
    found = SlurmEstimates([Wait(f"p{at}", own, answer) for at, (own, answer) in enumerate(answers)])
    assert found.refusal == refusal
    assert len([*found.lines(80)]) == (len(answers) + 1 if answers else 0)
    assert [one["partition"] for one in found.to_list()] == [f"p{at}" for at in range(len(answers))]


def test_how_long():
    words = {-5: "now", 59: "now", 61: "in 1m01s", 3600: "in 1h00m", 86400: "in 1d00h", 90000: "in 1d01h"}
    found = {seconds: when(START + timedelta(seconds=seconds), START).partition(" (")[0] for seconds in words}
    assert found == words


def test_as_plain_data():
    known = {"partition": "gpu", "is_asked": True, "start_time": "2026-03-04T05:06:07+00:00"}
    expected = {**known, "nodes": ["g1"], "remark": "", "refused": False}
    assert Wait("gpu", True, Answer(START, ("g1",))).to_dict() == expected
