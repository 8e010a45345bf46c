"""Tests the states of jobs that are read from the output of squeue and sacct."""

import time
from datetime import datetime, timezone

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.scheduler import JobState
from trainkit.slurm.client import FIELD, RECORD, SlurmUnreachable
from trainkit.slurm.jobs import SlurmJob, parse_accounting, parse_queue, query_jobs

NOON = 1700000000


def queue_line(job, array=0, task="N/A", state="RUNNING", restarts=0, **more):
    """Return one record of squeue, as 22.05 printed it."""
    known = {"reason": "None", "nodes": "n[1-2]", "exit_code": "0", "name": "quick"} | more
    fields = [
        *(str(job), str(array or job), task, state, known["reason"], known["nodes"], "2"),
        *(str(NOON + 60), str(NOON + 3600), str(restarts)),
        *(known["exit_code"], known["name"]),
    ]
    return FIELD.join(fields) + f"{RECORD}\n"


def accounting_line(job_id, state="COMPLETED", exit_code="0:0", name="quick", start=NOON + 60):
    times = (str(start), str(start + 60))
    return FIELD.join([job_id, state, "n[1-2]", "2", *times, exit_code, name]) + f"{FIELD}\n"


def states(jobs: dict[str, SlurmJob]) -> dict[str, str]:
    return {job_id: job.state.value for job_id, job in jobs.items()}


def prints(fake: FakeSlurm, program: str, text: str) -> None:
    (fake.folder / f"{program}.out").write_text(text)
    fake.add(program, f'/bin/cat "$here/{program}.out"')


def test_a_running_job_in_full():
    start, end = (datetime.fromtimestamp(NOON + seconds, timezone.utc) for seconds in (60, 3600))
    known = {"nodes": "n[1-2]", "num_nodes": 2, "start_time": start, "end_time": end, "restarts": 0}
    job = SlurmJob("7", JobState.RUNNING, "RUNNING", **known, name="quick", number="7")
    assert parse_queue(queue_line(7)) == {"7": job}
    assert job.sentence == ""


def test_names_may_hold_anything():
    name = f"a{FIELD}b\nc | $(x){RECORD} ü"
    assert parse_queue(queue_line(7, name=name) + queue_line(8))["7"].name == name
    assert parse_accounting(accounting_line("7", name="a\nb") + accounting_line("8"))["7"].name == "a\nb"


def test_a_job_that_waits_says_why():
    job = parse_queue(queue_line(7, state="PENDING", reason="QOSMaxJobsPerUserLimit", nodes=""))["7"]
    said(job.sentence)


def test_preempted_is_not_the_end_of_a_job_that_comes_back():
    back = parse_queue(queue_line(7, state="PENDING", restarts=1, reason="BeginTime", nodes=""))["7"]
    assert (back.state, back.restarts, back.state.is_terminal) == (JobState.REQUEUED, 1, False)
    assert not parse_queue(queue_line(7, state="COMPLETING", restarts=1))["7"].state.is_terminal


def test_exit_codes():
    """squeue 22.05 prints the status of `wait`. Newer versions and sacct print CODE:SIGNAL."""
    new = {"0:0": (0, None), "75:0": (75, None), "0:9": (0, 9), "0:53": (0, 53)}
    old = {"0": (0, None), "256": (1, None), "19200": (75, None), "9": (0, 9), "4021": (0, 53)}
    for status, (code, signal) in {**new, **old}.items():
        job = parse_queue(queue_line(7, state="FAILED", exit_code=status))["7"]
        assert (job.exit_code, job.exit_signal, job.log_not_opened) == (code, signal, signal == 53)
        assert parse_queue(queue_line(7, exit_code=status))["7"].exit_code is None
    for text, found in {**new, "": (None, None)}.items():
        job = parse_accounting(accounting_line("7", "FAILED", text))["7"]
        assert (job.exit_code, job.exit_signal) == found


def test_tasks_of_an_array():
    text = queue_line(9, 9, "3-4,6%2", "PENDING") + queue_line(10, 9, "0") + queue_line(11, 9, "1", "FAILED")
    expected = {"9_0": "running", "9_1": "failed", "9_3": "pending", "9_4": "pending", "9_6": "pending"}
    jobs = parse_queue(text)
    assert (states(jobs), jobs["9_6"].job_id) == (expected, "9_6")
    text = accounting_line("9_0") + accounting_line("9_[1-2%4]", "CANCELLED by 0")
    assert states(parse_accounting(text)) == {"9_0": "completed", "9_1": "cancelled", "9_2": "cancelled"}


def test_one_call_for_all_jobs(fake):
    prints(fake, "squeue", queue_line(8) + queue_line(7) + queue_line(9, 9, "0") + queue_line(10, 9, "1"))
    fake.add("sacct")
    jobs = query_jobs(["7", "9_1", "8", "7", "9_0"])
    assert list(jobs) == ["7", "9_1", "8", "9_0"]
    assert fake.programs == ["squeue"]
    assert "--jobs=7,9,8" in fake.calls[0]
    assert (query_jobs([]), len(fake.calls)) == ({}, 1)


def test_each_cluster_is_asked_about_its_own_jobs(fake):
    """Two clusters may give two jobs the same id."""
    fake.add("squeue", "case $1 in *=east) /bin/cat $here/east;; *) /bin/cat $here/here;; esac")
    (fake.folder / "here").write_text(queue_line(7) + queue_line(8))
    (fake.folder / "east").write_text(queue_line(7, state="PENDING"))
    prints(fake, "sacct", accounting_line("9", "FAILED"))
    jobs = query_jobs(["7;east", "8", "9;east", "7"])
    found = {name: f"{job.job_id} {job.state.value}" for name, job in jobs.items()}
    assert found == {"8": "8 running", "7": "7 running", "7;east": "7 pending", "9;east": "9 failed"}
    asked = [(call[0], call[1] == "--clusters=east", call[-1]) for call in fake.calls]
    east = [("squeue", True, "--jobs=7,9"), ("sacct", True, "--jobs=9")]
    assert asked == [("squeue", False, "--jobs=8,7"), *east]


def test_a_cluster_that_cannot_be_reached(fake):
    """The answer is the one of Slurm 22.05. Slurm is asked once, this cluster for five seconds."""
    printed = (
        "squeue: error: No cluster 'east' known by database.\nsqueue: error: 'east' can't be reached now, or "
        "it is an invalid entry for --cluster.  Use 'sacctmgr list clusters' to see available clusters."
    )
    (fake.folder / "printed").write_text(printed)
    fake.add("squeue", "/bin/cat $here/printed >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match="No cluster 'east' known by database") as caught:
        query_jobs(["7;east"])
    said(caught.value.hint)
    assert not caught.value.may_have_arrived
    assert fake.programs == ["squeue"]


def test_accounting_is_asked_once_for_what_squeue_has_forgotten(fake):
    prints(fake, "squeue", queue_line(8))
    prints(fake, "sacct", accounting_line("7", "TIMEOUT") + accounting_line("6") + accounting_line("8"))
    jobs = query_jobs(["6", "7", "8", "5"])
    assert states(jobs) == {"6": "completed", "7": "timeout", "8": "running", "5": "unknown"}
    assert fake.programs == ["squeue", "sacct"]
    assert "--jobs=6,7,5" in fake.calls[1]
    said(jobs["5"].sentence)


def test_an_array_is_asked_for_as_a_whole(fake):
    """Only accounting has the tasks that ended first."""
    prints(fake, "squeue", queue_line(9, 9, "10-11", "PENDING") + queue_line(14, 9, "2"))
    prints(fake, "sacct", accounting_line("9_0") + accounting_line("9_2", "RUNNING") + accounting_line("9_1"))
    jobs = query_jobs(["9"])
    ended = {"9_0": "completed", "9_1": "completed"}
    assert [*states(jobs).items()] == [
        *{**ended, "9_2": "running", "9_10": "pending", "9_11": "pending"}.items()
    ]


def test_tasks_that_were_cancelled_while_they_waited_share_a_record(fake):
    """Slurm 22.05 shows them in one record after `scancel --state=PENDING`, without their indices."""
    rest = queue_line(9, 9, "N/A", "CANCELLED", reason="JobArrayTaskLimit", nodes="")
    prints(fake, "squeue", rest + queue_line(10, 9, "1"))
    prints(fake, "sacct", accounting_line("9_0") + accounting_line("9_[3-4]", "PENDING"))
    jobs = query_jobs(["9_0", "9_1", "9_2", "9_3"])
    known = {"9_0": "completed", "9_1": "running"}
    assert states(jobs) == {**known, "9_2": "cancelled", "9_3": "cancelled"}
    assert jobs["9_2"].job_id == "9_2"
    prints(fake, "sacct", accounting_line("9_0"))
    assert states(query_jobs(["9"])) == {"9": "cancelled", **known}
    fake.add("sacct", "exit 1")
    unknown = {**known, "9_0": "unknown"}
    assert states(query_jobs([*unknown])) == unknown, "it may have ended before"


PARENTS = {
    **{"FAILED": "failed", "CANCELLED by 1000": "cancelled", "BOOT_FAIL": "failed", "DEADLINE": "timeout"},
    **{"NODE_FAIL": "node_fail", "COMPLETED": "unknown", "PENDING": "unknown", "REVOKED": "unknown"},
}


@pytest.mark.parametrize("parent", PARENTS)
def test_tasks_of_which_only_the_array_has_a_record(fake, parent):
    """If an array ends without success, each of its tasks gets this end."""
    prints(fake, "squeue", "")
    prints(fake, "sacct", accounting_line("9", parent) + accounting_line("9_1"))
    jobs = query_jobs(["9_1", "9_2"])
    assert states(jobs) == {"9_1": "completed", "9_2": PARENTS[parent]}
    assert jobs["9_2"].job_id == "9_2"


def test_jobs_in_a_state_that_says_nothing(fake):
    prints(fake, "squeue", queue_line(5, state="REVOKED") + queue_line(6, state="NEW_IN_2030"))
    prints(fake, "sacct", accounting_line("7", "REVOKED by 0") + accounting_line("8", "RUNNING"))
    jobs = query_jobs(["5", "6", "7", "8"])
    assert {job.state for job in jobs.values()} == {JobState.UNKNOWN}
    assert jobs["8"].slurm_state == "RUNNING"
    said("\n".join(job.sentence for job in jobs.values()))


@pytest.mark.parametrize(
    "sacct",
    [
        None,
        "Slurm accounting storage is disabled",
        "sacct: error: Sending PersistInit msg: Connection refused",
    ],
    ids=["none", "disabled", "refused"],
)
def test_without_accounting_a_forgotten_job_is_unknown(fake, sacct):
    fake.add("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    if sacct is not None:
        fake.add("sacct", f"echo '{sacct}' >&2; exit 1")
    job = query_jobs(["7"])["7"]
    assert (job.state, job.state.is_terminal) == (JobState.UNKNOWN, False)
    said(job.sentence)


def test_squeue_away_is_an_error_whatever_accounting_says(fake, monkeypatch):
    monkeypatch.setattr("trainkit.slurm.client.FIRST_PAUSE_S", 9.0)
    fake.add("squeue", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    prints(fake, "sacct", accounting_line("7"))
    with pytest.raises(SlurmUnreachable):
        query_jobs(["7"])
    assert fake.programs == ["squeue"]


@pytest.mark.parametrize("job_id", ["--all", "1; 2", "", "7 8"])
def test_what_is_no_job_id_is_never_handed_over(fake, job_id):
    fake.add("squeue")
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        query_jobs(["7", job_id])
    assert fake.calls == []


def test_more_ids_than_an_argument_can_hold(fake):
    prints(fake, "squeue", queue_line(1_000_007))
    fake.add("sacct")
    jobs = query_jobs([str(1_000_000 + index) for index in range(30_000)])
    assert len(jobs) == 30_000
    assert jobs["1000007"].state is JobState.RUNNING
    assert "--me" in fake.calls[0]


def test_a_thousand_tasks():
    """`status` may take 2 s in total for ten thousand; the limit here is a tenth on a slow machine."""
    name, tasks = "sweep\nof " + "x" * 50, range(1000)
    finished = "".join(accounting_line(f"9_{task}", name=name) for task in tasks)
    waiting = queue_line(9, 9, "0-999%4", "PENDING", name=name)
    apart = "".join(queue_line(10 + task, 9, str(task), name=name) for task in tasks)
    for parse, text in ((parse_accounting, finished), (parse_queue, waiting), (parse_queue, apart)):
        spent_s = [1.0]
        while spent_s[-1] > 0.05 and len(spent_s) < 9:
            begin = time.process_time()
            jobs = parse(text)
            spent_s.append(time.process_time() - begin)
        assert list(jobs) == [f"9_{task}" for task in tasks]
        assert min(spent_s) < 0.05
