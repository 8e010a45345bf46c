"""Tests the webhook of a run: its reports, their number, and the delay by an endpoint that is silent."""

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from job_tree import wait_for

from tests.support.runs import make_attempt
from tests.support.said import said
from tests.support.webhooks import SECRET, Webhook, webhook
from trainkit.capabilities.notifications import notifier as notifications
from trainkit.capabilities.notifications.notifier import DeliveryError, Notification, Notifier, post
from trainkit.capabilities.notifications.progress import ProgressWatch
from trainkit.capability import Hosts
from trainkit.config.running import WEBHOOK_VARIABLE
from trainkit.job import hangs
from trainkit.job.attempt import AttemptCapabilities
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd, RankFailure
from trainkit.run.events import log_event
from trainkit.run.files import (
    append_jsonl,
    as_utc,
    parse_time,
    read_json,
    read_jsonl,
    seconds_between,
    write_json,
)
from trainkit.run.rundir import AttemptDir

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    with webhook() as found:
        monkeypatch.setenv(WEBHOOK_VARIABLE, found.url)
        yield found


def end_of(action: str, state: str, cause: str | None = None, **more: Any) -> AttemptEnd:
    values = {"action": action, "state": state, "cause": cause, "reason": "why", "step": 7, **more}
    return AttemptEnd(**values)


@pytest.mark.parametrize(
    ("end", "event"),
    [
        (end_of("finished", "finished"), "finished"),
        (end_of("failed", "failed", "crash"), "failed"),
        (end_of("stopped", "stopped", "preempted"), "failed"),
        (end_of("restart", "failed", "crash"), "requeued"),
        (end_of("requeue", "stopped", "preempted"), "requeued"),
        (end_of("resubmit", "stopped", "timeout"), "requeued"),
        (end_of("stopped", "stopped"), None),  # stopped by train.stop_at_step
        (end_of("stopped", "cancelled", "preempted"), None),
        (end_of("failed", "cancelled", "crash"), None),
    ],
)
def test_what_an_end_is_reported_as(end, event):
    notification = notifications.end_notification(end)
    assert (notification and notification.event) == event


def test_what_the_report_of_an_end_says():
    verdict = RankFailure(rank=5, host="node3", type="OutOfMemory", message="12 GiB more")
    notification = notifications.end_notification(end_of("failed", "failed", "crash", verdict=verdict))
    said(notification.text)
    assert notification.command == "diagnose"
    assert (notification.rank, notification.host, notification.step) == (5, "node3", 7)
    end = end_of("requeue", "stopped", "slow_host", reason="restarts without b: rank 5 slow")
    said(notifications.end_notification(end).text)
    diverged = [
        notifications.end_notification(end_of(action, action), 15).text for action in ("finished", "failed")
    ]
    said("\n".join(diverged))


def test_the_rate_limit_is_by_event_and_never_for_the_last_one():
    last, soon, later = as_utc(NOW), NOW + timedelta(seconds=599), NOW + timedelta(seconds=600)
    assert not notifications.is_due(last, "requeued", soon, 600)
    assert notifications.is_due(last, "requeued", later, 600)
    assert notifications.is_due(None, "stalled", soon, 600)
    assert notifications.is_due(last, "failed", soon, 600)
    assert notifications.is_due(
        last, "requeued", NOW - timedelta(seconds=5), 600
    )  # the clock of that host is 5 s behind


def test_fifty_restarts_send_few_messages(tmp_path, endpoint):
    attempt, notifier = make_attempt(tmp_path / "run"), Notifier()
    for _ in range(50):
        end = end_of("restart", "failed", "crash")
        Notifier().send_end(attempt, end)  # each attempt of a job may be a different process
        notifier.send_end(attempt, end)
        notifier.wait()
    notifier.send_end(attempt, end_of("failed", "failed", "crash"))
    notifier.wait()
    assert endpoint.events[0] == "requeued"
    assert endpoint.events[-1] == "failed"
    assert len(endpoint.events) <= 3  # each of the two processes may have sent the first report
    state = attempt.run.path / notifications.STATE_NAME
    assert set(read_json(state)["sent"]) == {"requeued", "failed"}
    assert SECRET not in state.read_text()


def test_what_leaves_has_no_secret_and_notifies_no_channel(tmp_path, endpoint, capfd):
    attempt, notifier = make_attempt(tmp_path / "run"), Notifier()
    reason = "postgres://me:hunter2@db/x, password: hunter2, Bearer hunter2hunter2 <!channel> @here"
    notifier.send_end(attempt, replace(end_of("failed", "failed", "crash"), reason=reason))
    notifier.wait()
    sent = json.dumps(endpoint.messages[-1])
    assert "hunter2" not in sent
    assert "postgres://me:***@db/x, password: ***, Bearer *** < !channel> @ here" in sent
    log_line(f"ended: {reason}")
    assert "hunter2" not in capfd.readouterr().out


def test_only_the_events_of_the_config_are_sent(tmp_path, endpoint):
    attempt = make_attempt(tmp_path / "run", ["notify.on=[failed]"])
    notifier = Notifier()
    for action in ("finished", "failed"):
        notifier.send_end(attempt, end_of(action, action))
    notifier.wait()
    assert endpoint.events == ["failed"]


@pytest.mark.parametrize(
    "url", ["hooks.example.org/x", "ftp://h/x", "https://", "https://a:b@h/x", "http://h:x/", "https://h/a b"]
)
def test_what_is_no_url_is_said_without_it(url):
    problem = notifications.url_problem(url)
    assert url not in problem
    with pytest.raises(DeliveryError) as error:
        post(url, "{}")
    assert url not in error.value.render()


def test_a_delivery_that_fails(endpoint):
    moved = webhook(status=302, headers={"Location": endpoint.url})
    with moved as first, pytest.raises(DeliveryError, match="the server answered with HTTP 302"):
        post(first.url, "{}")
    assert endpoint.messages == []
    with pytest.raises(DeliveryError, match="the server cannot be reached"):
        post(endpoint.url.replace("http:", "https:"), "{}")
    with webhook(is_silent=True) as silent, pytest.raises(DeliveryError, match="did not answer within"):
        post(silent.url, "{}", timeout_s=0.2)


CRASHES_ONCE = "sys.exit(0 if ATTEMPT == 2 else 3)\n"


def test_a_run_reports_its_restart_and_its_end(start_job, endpoint):
    script = """
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                argv = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                continue
            with open(RUN_DIR + "/argv", "ab") as f:
                f.write(argv + b"\\n")
    """
    job = start_job(textwrap.dedent(script) + CRASHES_ONCE, requeue={"on": ("crash",)})
    job.wait()
    assert endpoint.events == ["requeued", "finished"]
    first, last = endpoint.messages
    assert (first["attempt"], first["rank"], first["state"]) == (1, 0, "failed")
    assert (last["attempt"], last["run"], last["run_dir"]) == (2, "run", str(job.run.path))
    assert last["job_id"] == job.entry.job_id
    assert last["path"] == f"/services/{SECRET}"
    assert "resumes (restart 1)" in first["text"]
    argv = (job.run.path / "argv").read_bytes()
    assert b"trainkit.job.supervisor" in argv
    assert SECRET.encode() not in argv
    assert [file for file in job.run.path.rglob("*") if file.is_file() and SECRET in read(file)] == []


def test_a_command_that_prints_nothing_is_reported_as_stalled(start_job, endpoint):
    waits = "while not os.path.exists(RUN_DIR + '/go'): time.sleep(0.02)"
    job = start_job(waits, notify={"stalled_after_s": 1.0})
    wait_for(lambda: endpoint.messages)
    (job.run.path / "go").touch()
    job.wait()
    assert endpoint.events == ["stalled", "finished"]
    assert endpoint.messages[0]["command"] == f"trainkit stacks {job.run.path}"


def read(file: Path) -> str:
    return file.read_text(errors="replace")


@pytest.mark.parametrize(
    ("is_silent", "problem"),
    [pytest.param(True, "did not answer", marks=pytest.mark.slow(seconds=8)), (False, "HTTP 500")],
)
def test_a_dead_endpoint_delays_nothing_for_long(start_job, monkeypatch, is_silent, problem):
    with webhook(is_silent=is_silent, status=500) as found:
        monkeypatch.setenv(WEBHOOK_VARIABLE, found.url)
        job = start_job(CRASHES_ONCE, requeue={"on": ("crash",)})
        job.wait()
    ends = [read_json(job.run.attempt(number).end_file) for number in (1, 2)]
    assert [end["action"] for end in ends] == ["restart", "finished"]
    # Neither the restart nor the second attempt waits for the first notification.
    events = {(event["attempt"], event["event"]): event for event in read_jsonl(job.run.events_file)}
    restart_s = seconds_between(events[1, "stopped"]["time"], parse_time(events[2, "started"]["time"]))
    assert restart_s < notifications.SEND_TIMEOUT_S / 2
    logs = "".join(read(job.run.attempt(number).supervisor_log) for number in (1, 2))
    assert logs.count(problem) == 1
    assert SECRET not in logs
    assert not (job.run.path / notifications.STATE_NAME).exists()


def stall_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[AttemptDir, list[Notification], Callable[[float], None]]:
    """Return an attempt, its reports, and a function that advances the clock and polls."""
    now_s = [1000.0]
    monkeypatch.setattr(hangs.time, "monotonic", lambda: now_s[0])
    attempt = make_attempt(tmp_path / "run", ["notify.stalled_after_s=100", *overrides])
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    notifications: list[Notification] = []

    class Recorder(Notifier):
        def send(self, attempt: AttemptDir, notification: Notification) -> None:
            notifications.append(notification)

    watch = ProgressWatch(attempt, plan, 100.0, Recorder())

    def wait(seconds: float) -> None:
        for _ in range(round(seconds / 10)):
            now_s[0] += 10.5
            watch.poll()

    return attempt, notifications, wait


def test_a_stalled_run_is_reported_once_until_it_makes_progress(tmp_path, monkeypatch):
    attempt, notifications, wait = stall_watch(tmp_path, monkeypatch)
    append_jsonl(attempt.run.metrics_file, {"step": 30, "attempt": 1})
    wait(80)
    assert notifications == []
    wait(400)
    [notification] = notifications
    assert (notification.event, notification.step) == ("stalled", 30)
    said(notification.text)
    append_jsonl(attempt.run.metrics_file, {"step": 31, "attempt": 1})
    wait(20)
    append_jsonl(attempt.run.metrics_file, {"step": 32, "attempt": 1})
    wait(400)
    assert [notification.event for notification in notifications] == ["stalled", "stalled"]


def test_a_run_that_logs_seldom_is_not_stalled(tmp_path, monkeypatch):
    attempt, notifications, wait = stall_watch(tmp_path, monkeypatch)
    for step in range(1, 20):
        append_jsonl(attempt.run.metrics_file, {"step": step, "attempt": 1})
        wait(80 if step == 1 else 150)
    assert notifications == []


def test_slow_ranks_of_this_attempt_are_reported(tmp_path, monkeypatch):
    attempt, notifications, wait = stall_watch(tmp_path, monkeypatch)
    slow = {"since_step": 5, "phase": "compute", "ratio": 1.71, "step": 24}
    log_event(attempt.run, 7, "slow_rank", rank=1, host="a", **slow)
    log_event(attempt.run, attempt.number, "slow_rank", rank=2, host="b", **slow)
    log_event(attempt.run, attempt.number, "slow_rank_over", rank=2, host="b", **slow)
    wait(40)
    [notification] = notifications
    assert (notification.event, notification.host, notification.step) == ("slow", "b", 24)
    said(notification.text)


def test_saves_that_fail_in_a_row_and_a_silence_are_reported(tmp_path, monkeypatch):
    attempt, notifications, wait = stall_watch(tmp_path, monkeypatch)
    run, number = attempt.run, attempt.number
    log_event(run, number, "checkpoint_failed", step=10, error="full")
    log_event(run, number, "checkpoint_commit", step=20)
    log_event(run, number, "checkpoint_failed", step=30, error="full")
    wait(40)
    assert notifications == []
    for step in (40, 50):
        log_event(run, number, "checkpoint_failed", step=step, error="OSError: disk full")
    log_event(run, number, "silent", rank=1, host="b", reason="no output for 610 s")
    wait(40)
    saves, silence = notifications
    assert (saves.event, saves.step) == ("stalled", 40)
    said(saves.text)
    assert (silence.event, silence.text, silence.host) == ("stalled", "no output for 610 s", "b")
    assert silence.command == "diagnose"


def test_an_old_plan_has_no_notifications(tmp_path, endpoint):
    attempt = make_attempt(tmp_path / "run")
    plan = json.loads(attempt.plan_file.read_text())
    del plan["notify"]
    write_json(attempt.plan_file, plan)
    notifier = Notifier()
    notifier.send_end(attempt, end_of("finished", "finished"))
    notifier.wait()
    assert endpoint.messages == []


def test_the_end_of_an_attempt_is_no_moment_to_look_for_stalls(tmp_path, monkeypatch):
    polls: list[object] = []
    monkeypatch.setattr(ProgressWatch, "poll", lambda watch: polls.append(watch))
    monkeypatch.setenv(WEBHOOK_VARIABLE, "http://127.0.0.1:9/")
    attempt = make_attempt(tmp_path / "run", ["notify.on=[stalled]"])
    capabilities = AttemptCapabilities(attempt, LaunchPlan.read(attempt.plan_file))
    capabilities.end(AttemptEnd(state="failed"))
    assert polls == []
    capabilities.begin(Hosts())
    capabilities.poll(is_stopping=False)
    assert len(polls) == 1
