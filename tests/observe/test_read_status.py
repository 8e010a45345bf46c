import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.report.run_report import read_report, render_report
from trainkit.capabilities.trackers import trackers_dir
from trainkit.capabilities.watch.run_view import read_view
from trainkit.capabilities.watch.view_text import Size, view_lines
from trainkit.cli.status import restarts_line, run_details, runs_rows
from trainkit.config import dump_effective
from trainkit.config.schema import RunConfig
from trainkit.observe.logs import ranks_of_nodes
from trainkit.observe.status import Progress, capability_rows, read_status, reading_of
from trainkit.run.events import Event, log_event
from trainkit.run.files import append_jsonl, read_json, write_json
from trainkit.run.history import PlanRecord, RunHistory, attempts_of, find_restarts
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=timezone.utc)


def ago(seconds):
    return (NOW - timedelta(seconds=seconds)).isoformat()


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(1).create()
    run.config_file.write_text(dump_effective(RunConfig.model_validate({"train": {"steps": 50}})))
    write_json(run.plan_file, {"num_nodes": 2, "workers_per_node": 4, "device": "cpu"})
    entry = {"attempt": 1, "job_id": "local-7", "submitted_at": ago(600), "host": "here"}
    write_json(run.job_file, {"name": "mine", "attempts": [entry]})
    return run


def status_of(run, alive, slurm_job=None):
    return read_status(RunHistory(run), read_job(run), alive, NOW, slurm_job)


def metrics(run, *ages_s):
    for step, age_s in enumerate(ages_s, 1):
        record = {"step": step, "time": ago(age_s), "attempt": 1, "loss": 1.0 / step, "tokens_per_s": 10.0}
        append_jsonl(run.metrics_file, record)


@pytest.mark.parametrize(
    ("alive", "first", "second"),
    [(True, "starting", "requeueing"), (False, "died", "died"), (None, "unknown", "unknown")],
)
def test_only_an_end_that_is_written_is_certain(run, alive, first, second):
    assert status_of(run, alive).state == first
    write_json(run.attempt(1).end_file, {"state": "stopped", "action": "requeue"})
    assert status_of(run, alive).state == second
    for state in ("finished", "stopped", "cancelled", "failed"):
        end = {"state": state, "action": "stopped", "reason": "because", "verdict": None}
        write_json(run.attempt(1).end_file, end)
        assert (status_of(run, alive).state, status_of(run, alive).reason) == (state, "because")


def test_a_command_runs_when_rank_0_does_and_shows_what_it_prints(run):
    pattern = r"step (?P<step>\d+): loss (?P<loss>\S+)"
    config = RunConfig.model_validate({"logging": {"pattern": pattern}})
    run.config_file.write_text(dump_effective(config))
    write_json(run.plan_file, {"num_nodes": 1, "workers_per_node": 1, "device": "cpu", "command": ["train"]})
    seen = status_of(run, True)
    assert (seen.state, seen.progress.step, seen.progress.total_steps) == ("starting", None, None)
    log = run.attempt(1).rank_log(0)
    log.parent.mkdir(exist_ok=True)
    log.write_text("loading\n")
    seen = status_of(run, True)
    assert (seen.state, seen.progress.step, seen.progress.loss) == ("running", None, None)
    log.write_text("step 7: loss nan%\n")
    assert (status_of(run, True).progress.step, status_of(run, True).progress.loss) == (7, None)
    log.write_text("step 8: loss 2.5\nstep 9: loss 2.25\rstep 10: loss 2.0\nsaved\nstep 11: lo")
    seen = status_of(run, True)
    assert (seen.state, seen.progress.step, seen.progress.loss) == ("running", 10, 2.0)
    assert "/s" not in run_details(seen), "it prints no speed"


def slurm_job(state=JobState.FAILED, **more):
    return SlurmJob("7", state, **{"slurm_state": state.name, **more})


def submitted(run, **more):
    entry = {"attempt": 1, "job_id": "7", "backend": "sbatch", "submitted_at": ago(600), **more}
    write_json(run.job_file, {"attempts": [entry]})


def test_a_job_that_slurm_was_to_start_again_and_did_not(run):
    reason = "lost node2; resumes (restart 2)"
    end = {"state": "failed", "action": "requeue", "reason": reason, "summary": "lost node2"}
    write_json(run.attempt(1).end_file, end)
    status = status_of(run, False, slurm_job(exit_code=1))
    assert status.state == "died"
    said(status.reason)


@pytest.mark.parametrize(("later_s", "is_later"), [(-1, False), (1, False), (30, True)])
def test_a_job_that_slurm_put_back_into_the_queue_and_gave_up(run, later_s, is_later):
    submitted(run, started_at=ago(0))
    job = slurm_job(exit_code=1, start_time=NOW + timedelta(seconds=later_s))
    assert status_of(run, False, job).reason.endswith("not restart it") == is_later


@pytest.mark.parametrize(("restarts", "state"), [(0, "starting"), (1, "requeueing")])
def test_an_answer_from_before_the_job_started_is_no_requeue(run, restarts, state):
    """A site may allow one query in two minutes, so that the run folder is newer than Slurm's answer."""
    submitted(run, started_at=ago(1))
    job = slurm_job(JobState.PENDING, restarts=restarts)
    assert status_of(run, True, job).state == state


KILLED = "the job was killed by SIGKILL"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"reason": "JobLaunchFailure", "exit_code": 0, "exit_signal": 9}, KILLED),
        *(({"reason": "RaisedSignal:9(Killed)", "exit_signal": 9}, KILLED), ({"exit_signal": 9}, KILLED)),
        ({"reason": "JobLaunchFailure", "exit_code": 0}, "the job could not be launched, for example"),
        ({"reason": "NonZeroExitCode", "exit_code": 75}, "exit code 75 (state saved)"),
    ],
)
def test_how_slurm_ended_a_job(run, end, words):
    assert status_of(run, False, slurm_job(**end)).reason.startswith(f"Slurm reports FAILED; {words}")


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "RaisedSignal:53(Real-time signal 19)", ""])
def test_a_job_whose_log_slurm_could_not_open(run, reason):
    submitted(run)
    job = slurm_job(reason=reason, exit_code=0, exit_signal=53)
    status = status_of(run, False, job)
    words = "Slurm reports FAILED; Slurm could not open the log of the job and did not start the job"
    assert (status.state, status.reason, status.warnings) == ("died", words, [])
    shutil.rmtree(run.attempt(1).logs_dir)
    run.attempt(1).logs_dir.touch()
    failed_start(run, 0, "n1", 1)
    assert status_of(run, False, job).batch_log == []
    (run.path / "starts/7.0").unlink()
    submitted(run, started_at=ago(60))
    ended = "the supervisor exited without recording how the attempt ended"
    assert status_of(run, False, slurm_job(exit_signal=9)).warnings == [ended]


def failed_start(run, restarts, host, exit_code):
    (run.path / "starts").mkdir(exist_ok=True)
    write_json(run.path / f"starts/7.{restarts}", {"host": host, "exit_code": exit_code})


def test_a_job_that_ended_before_its_supervisor_began(run):
    submitted(run)
    lines = ["no venv", *map(str, range(9))]
    run.attempt(1).supervisor_log.write_text("\n".join(lines) + "\n")
    failed_start(run, 0, "n1", 137)
    waits = slurm_job(JobState.REQUEUED, slurm_state="PENDING", reason="BeginTime", restarts=1)
    status = status_of(run, True, waits)
    assert (status.state, status.place.host) == ("requeueing", "n1")
    said("\n".join(status.warnings))
    status = status_of(run, True, slurm_job(JobState.RUNNING, nodes="n2", restarts=1))
    assert (status.state, status.place.host, status.batch_log) == ("starting", None, [])
    failed_start(run, 1, "n2", 2)
    status = status_of(run, False, slurm_job(exit_code=2, nodes="n2", restarts=1))
    assert (status.state, status.place.host) == ("died", "n2")
    said(status.reason)
    said("\n".join(status.warnings))
    assert run_details(status).splitlines()[-10:] == [f"  {line}" for line in lines]
    forgotten = SlurmJob("7", JobState.UNKNOWN, reason="neither squeue nor sacct lists the job")
    reason = "ended on n2 before the supervisor began: exit code 2; neither squeue nor sacct lists the job"
    assert status_of(run, False, forgotten).reason == reason


def test_a_requeued_job_that_ended_before_its_next_supervisor_began(run):
    submitted(run, started_at=ago(600), host="n1")
    write_json(run.attempt(1).end_file, {"state": "stopped", "action": "requeue", "reason": "saved"})
    failed_start(run, 1, "n2", None)
    job = slurm_job(exit_signal=9, nodes="n2", restarts=1)
    reason = "the job was killed by SIGKILL; it ended on n2 before the supervisor began"
    assert status_of(run, False, job).reason == f"Slurm reports FAILED; {reason}"


def test_running_then_stopping(run):
    log_event(run, 1, "first_step", total_steps=77)  # the trainer knows the length of epochs
    metrics(run, 2, 1)
    status = status_of(run, True)
    assert (status.state, status.progress.total_steps) == ("running", 77)
    log_event(run, 1, "signal", signal="SIGTERM")
    assert status_of(run, True).state == "stopping"


def test_what_several_attempts_took(run):
    plan = {"num_nodes": 4, "workers_per_node": 4, "world_size": 16, "device": "cuda"}
    write_json(run.plan_file, {**plan, "requeue": {"total_s": 7200.0}})
    attempts = [
        {"attempt": number, "job_id": "7", "submitted_at": ago(9999), "reason": reason}
        for number, reason in ((1, "submit"), (2, "resume"), (3, "restart"))
    ]
    write_json(run.job_file, {"name": "mine", "attempts": attempts})
    append_jsonl(run.events_file, {"time": ago(9000), "event": "started", "attempt": 1})  # an older version
    append_jsonl(run.events_file, {"time": ago(5400), "event": "stopped", "attempt": 1})
    for number, nodes, begin, end in ((2, 2, 3600, 1800), (3, 4, 900, None)):
        place = {"partition": "b", "gpu_type": "l4"}
        size = {"attempt": number, "nodes": nodes, "world_size": 4 * nodes, **place}
        append_jsonl(run.events_file, {"time": ago(begin), "event": "started", **size})
        if end is not None:
            append_jsonl(run.events_file, {"time": ago(end), "event": "stopped", "attempt": number})
    status = status_of(run, True)
    assert status.used.worker_hours == 16 * 1.0 + 8 * 0.5 + 16 * 0.25
    assert (status.used.attempt_nodes, status.used.slices_s, status.place.partition) == ([2, 4], 2700.0, "b")
    used = status.used.text(status.place.device)
    said(used)
    assert f"used        {used}" in run_details(status)
    assert "4 x 4 on cuda, partition b (l4)" in run_details(status)
    history = RunHistory(run)
    history.events.update()
    view = read_view(history, status, NOW)
    assert f"used       {used}" in [line.plain for line in view_lines(view, Size(100))]
    page = render_report(read_report(history, status, NOW.timestamp()))
    assert '<b>24</b><span class="dim">GPU-hours</span>' in page
    assert '<th class="n">Nodes<' in page
    assert '<td>2<td class="n">2<td class="n">30m00s<' in page


def test_runs_of_one_name_are_distinguished_by_their_folder(run, tmp_path):
    status = status_of(run, True)
    below, elsewhere = (runs_rows([status], cwd)[1] for cwd in (tmp_path.parent, Path("/x")))
    assert below == (tmp_path.name, "starting", "1", "2 x 4", "-/50", "-", "-", "10m00s")
    assert elsewhere[0] == str(tmp_path)


SPEEDS = [
    # The loss of a language model counts tokens, the loss of most tasks samples, or neither.
    ({"tokens_per_s": 10.0, "tokens": 640, "samples_seen": 10}, (10.0, None), "tokens/s    10"),
    ({"tokens_per_s": 10.0, "tokens": 640, "samples_seen": 640}, (10.0, 10.0), "samples/s   10"),
    ({"tokens_per_s": 10.0, "tokens": 7, "samples_seen": 640}, (10.0, None), "tokens/s    10"),
    ({"samples_per_s": 12345.6}, (None, 12345.6), "samples/s   12,346"),
    ({"samples_per_s": "fast"}, (None, None), "tokens/s    -"),
    ({"tokens_per_s": None, "tokens": 0, "samples_seen": 0}, (None, None), "tokens/s    -"),
    ({"tokens": None, "samples_seen": None, "tokens_per_s": 3.0}, (3.0, None), "tokens/s    3"),
    ({}, (None, None), "tokens/s    -"),
]


@pytest.mark.parametrize(("record", "speeds", "line"), SPEEDS)
def test_samples_are_counted_where_there_are_no_tokens(run, record, speeds, line):
    append_jsonl(run.metrics_file, {"step": 1, "time": ago(1), "attempt": 1, "loss": 1.0, **record})
    status = status_of(run, True)
    assert (status.progress.tokens_per_s, status.progress.samples_per_s) == speeds
    assert line in run_details(status).splitlines()
    shown = status.to_dict()
    assert (shown["tokens_per_s"], shown.get("samples_per_s")) == speeds
    assert ("samples_per_s" in shown) == (speeds[1] is not None)
    heading, row = runs_rows([status], run.path.parent)
    unit, _, value = line.replace("/s", "").partition(" ")
    assert (heading[6], row[6]) == (f"{unit.upper()}/S", value.strip())
    other = replace(status, progress=Progress(tokens_per_s=5.0))
    mixed = [one[6] for one in runs_rows([status, other], run.path.parent)]
    assert (mixed[0], mixed[2]) == ("TOKENS/S", "5")
    assert mixed[1] == (f"{value.strip()} samples" if unit == "samples" else value.strip())


def test_stale_metrics_are_a_warning_unless_steps_are_slow(run):
    metrics(run, 302, 301, 300)
    said("\n".join(status_of(run, True).warnings))
    run.metrics_file.unlink()
    metrics(run, 500, 400, 300)
    assert status_of(run, True).warnings == []


def test_newest_published_checkpoint(run):
    for name in ("step-00000009", "step-00000010"):
        (run.checkpoints_dir / name).mkdir(parents=True)
        (run.checkpoints_dir / name / "manifest.json").write_text("{}")
    (run.checkpoints_dir / "step-00000011").mkdir()
    (run.checkpoints_dir / "step-00000012.rejected").mkdir()
    assert status_of(run, True).checkpoint == str(run.checkpoints_dir / "step-00000010")


def test_damaged_files_are_no_reason_to_fail(run):
    run.config_file.write_text("- not\n- a config\n")
    run.plan_file.write_text("{")
    status = status_of(run, True)
    assert (status.progress.total_steps, status.place.num_nodes) == (None, None)
    run.job_file.write_text("{")
    status = status_of(run, None)
    assert (status.state, status.attempt, status.job_id) == ("incomplete", None, None)


def test_saves_that_fail_in_a_row_are_a_warning(run):
    def warnings(step, attempt=1, event="checkpoint_failed"):
        log_event(run, attempt, event, step=step, error="rank 3: OSError: disk full")
        return status_of(run, True).warnings

    assert warnings(100) == [], "one can fail for a moment"
    said("\n".join(warnings(200)))
    said(warnings(300)[0])
    assert warnings(400, event="checkpoint_commit") == []
    assert warnings(500) == []
    entries = [{"attempt": number, "job_id": "local-7", "host": "here"} for number in (1, 2)]
    run.attempt(2).create()
    write_json(run.job_file, {"name": "mine", "attempts": entries})
    assert warnings(600, attempt=2) == [], "the first of this attempt"
    assert len(warnings(700, attempt=2)) == 1


def test_a_silence_that_lasts_is_a_warning(run):
    log_event(run, 1, "silent", rank=0, lock=None, reason="no output for 610 s, and no output before")
    [warning] = status_of(run, True).warnings
    said(warning)
    assert "no output" not in " ".join(status_of(run, False).warnings)
    log_event(run, 1, "silent_over")
    assert status_of(run, True).warnings == []


def test_how_far_the_trackers_are(run):
    assert status_of(run, True).added["trackers"] == {}
    trackers_dir(run).mkdir()
    write_json(trackers_dir(run) / "mlflow.json", {"step": 40, "place": "http://host", "problem": ""})
    write_json(trackers_dir(run) / "wandb.json", {"step": 20, "place": "x", "problem": "CommError: refused"})
    status = status_of(run, True)
    rows = capability_rows(reading_of(RunHistory(run), status))
    text = run_details(status, rows)
    lines = [f"{label:<12}{words}" for label, words in rows["trackers"].items()]
    assert all(f"{line}\n" in text for line in lines)
    said("\n".join(lines))


def event(second, attempt, name, **fields):
    return Event({"time": f"2026-01-01T12:00:{second:06.3f}Z", "attempt": attempt, "event": name, **fields})


PREEMPTED = [
    event(1, 1, "started"),
    event(2, 1, "checkpoint_commit", step=5),
    event(3, 1, "signal", signal="SIGTERM"),
    event(3.5, 1, "checkpoint_commit", step=7, reason="stop"),
    event(4, 1, "requeue_decision", action="requeue", cause="preempted"),
    event(4.25, 1, "stopped"),
    event(20, 2, "submitted"),
    event(20.25, 2, "started"),
    event(30, 2, "first_step", step=8),
]
DIED = "2026-01-01T12:00:30.500Z"
CRASHED = [
    event(31, 2, "rank_failed", rank=1, host="n1", type="exit", message="killed by SIGKILL", failed_at=DIED),
    event(31, 2, "requeue_decision", action="restart", cause="crash"),
    event(31, 2, "stopped"),
    event(31, 3, "started"),
]


def test_each_part_of_the_way_back_is_measured_from_the_moment_of_a_failure():
    """An attempt that ends without a restart is not counted as a restart."""
    decision = event(4, 1, "requeue_decision", action="failed", cause="crash")
    for events, expected in (
        (PREEMPTED, "1 (1 preempted); last: requeue in 27.0 s (save 0.5, end 0.8, queue 16.0, start 9.8)"),
        (
            PREEMPTED + CRASHED,
            "2 (1 preempted, 1 crash); last: restart (end 0.5, queue 0.0);"
            " rank 1 failed first on n1: killed by SIGKILL",
        ),
        ([event(1, 1, "started"), decision, event(4, 1, "stopped")], None),
    ):
        restarts = find_restarts(attempts_of(events))
        assert (restarts_line(restarts) if restarts else None) == expected


def test_the_numbers_in_the_line_of_an_event_are_short():
    said(event(1, 2, "evaluated", val_loss=5.822849869728088).line)


@pytest.mark.parametrize("damage", [{"workers_per_node": -1}, {"num_nodes": 2**62}, {"node_sizes": [1, 0]}])
def test_of_a_damaged_plan_no_ranks_are_known(damage):
    whole = {"num_nodes": 2, "workers_per_node": 2}
    assert ranks_of_nodes(PlanRecord(whole)) == [range(2), range(2, 4)]
    assert ranks_of_nodes(PlanRecord({**whole, **damage})) == []


@pytest.mark.parametrize(
    ("state", "logged", "ended", "shown"),
    [
        ("finished", 40, 50, "50/50"),  # the last steps were not logged
        ("finished", 45, 45, "45/50"),
        ("finished", 45, None, "45/50"),
        ("finished", 0, 0, "0/50"),
        ("stopped", 40, 43, "43/50"),
        ("failed", 40, 43, "40/50"),  # step 43 was not completed
        ("cancelled", 40, 43, "40/50"),
    ],
)
def test_the_last_step_of_a_run_that_has_ended(run, state, logged, ended, shown):
    append_jsonl(run.metrics_file, {"step": logged, "time": ago(9), "attempt": 1, "loss": 1.0})
    write_json(run.attempt(1).end_file, {"state": state, "action": state, "step": ended})
    assert f"\nstep        {shown}, last metrics" in run_details(status_of(run, False))


@pytest.mark.parametrize(
    ("val_losses", "attempt", "since"),
    [
        ([2.0, None, None], 1, 20),
        ([None], 1, 10),
        ([None, 2.0], 1, None),
        ([2.0, None], 2, None),  # the new attempt has not validated yet
        ([], 1, None),
    ],
)
def test_only_the_validation_loss_is_not_finite(run, val_losses, attempt, since):
    metrics(run, 30, 20, 10)
    for index, value in enumerate(val_losses, 1):
        log_event(run, 1, "evaluated", step=10 * index, val_loss=value)
    if attempt == 2:
        job = read_json(run.job_file)
        write_json(run.job_file, {**job, "attempts": [*job["attempts"], {"attempt": 2, "job_id": "local-8"}]})
    found = status_of(run, True)
    assert found.progress.diverged_since == since
    assert (found.reason or "").startswith("" if since is None else f"diverged since step {since}")


def test_a_terminal_has_a_short_last_event(run, monkeypatch):
    def last_event():
        return next(one for one in run_details(status).splitlines() if one.startswith("last event"))

    log_event(run, 1, "note", text="x" * 300)
    status = status_of(run, True)
    assert len(last_event()) > 300
    monkeypatch.setattr("trainkit.cli.status.terminal_width", lambda: 80)
    assert len(last_event()) == 80
    assert last_event().endswith("…")
