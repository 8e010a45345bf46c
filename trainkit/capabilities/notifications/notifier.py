"""Sends notifications about a run to a webhook, from background threads.

The URL of the webhook is a secret. The URL is read from an environment variable, and is never written to a
file, log or message. ``notifications.json`` in the run folder records when each event was last reported, so
that `notify.min_interval_s` also limits a run that restarts repeatedly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

from trainkit import __version__
from trainkit.capabilities.notifications.policy import policy_of
from trainkit.errors import TrainkitError
from trainkit.formats import mask_secrets
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd, RankFailure
from trainkit.run.events import Event, diverged_since, with_divergence
from trainkit.run.files import Record, parse_time, read_object, utc_now, write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir
from trainkit.run.submitted import read_submitted
from trainkit.shipped import restart_cause

STATE_NAME = "notifications.json"
SEND_TIMEOUT_S = 5.0
"""Timeout for the response of the webhook endpoint, in seconds."""
END_TIMEOUT_S = 6.0
"""Maximum time that an exiting job waits for notifications that are being sent, in seconds."""
LAST_EVENTS = ("finished", "failed")
"""Events that are exempt from the rate limit, because they are the last events of a run."""


class DeliveryError(TrainkitError):
    """Raised if the webhook endpoint did not accept a notification; the message does not contain the URL."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="check the URL and make sure that this machine can reach the server")


@dataclass(frozen=True)
class Notification:
    """A message about one event of a run."""

    event: str
    """Name of the event, as listed in `notify.on`."""
    text: str
    """A sentence about the event, without the run's name."""
    command: str
    """The trainkit command that shows details, such as ``diagnose``."""
    reason: str | None = None
    """The cause of the event, or None if `text` states the cause."""
    state: str | None = "running"
    step: int | None = None
    rank: int | None = None
    host: str | None = None


def end_notification(end: AttemptEnd, diverged: int | None = None) -> Notification | None:
    """Return the notification for the end of an attempt, or None if the user or the config ended the attempt.

    `diverged` is the first step at which the loss or the gradients were non-finite.
    """
    state, failure = end.state, end.verdict or RankFailure()
    reason = str(with_divergence(end.reason, diverged))
    fields = (reason, state, end.step, failure.rank, failure.host)
    if end.action == "finished":
        text = "; ".join(filter(None, ("finished", with_divergence(None, diverged))))
        return Notification("finished", text, "report", *fields)
    first = "" if failure.message is None else f"; {failure.line}"
    if end.resumes:
        text = f"restarts: {reason}" if end.action == "restart" else f"is requeued: {reason}"
        if end.cause is not None and restart_cause(end.cause).in_place:
            text = reason  # `reason` is a complete phrase, such as "restarts without HOST: …"
        return Notification("requeued", f"{text}{first}", "status", *fields)
    if state == "failed" or (state == "stopped" and end.cause is not None):
        return Notification("failed", f"{state}: {reason}{first}", "diagnose", *fields)
    return None


def event_notification(event: Event) -> Notification:
    """Return the notification for a ``slow_rank`` event, or for a ``silent`` event of a COMMAND."""
    rank, host, step = event.rank, event.host, event.step
    if event.name == "silent":
        return Notification("stalled", str(event.reason), "diagnose", step=step, rank=rank, host=host)
    times = f"{event.number('ratio') or 0.0:.1f} times as long as other ranks"
    since = f"has been slow since step {event.count('since_step')} ({event.text('phase')})"
    text = f"rank {rank} on {host} {since}, taking {times}"
    return Notification("slow", text, "status", step=step, rank=rank, host=host)


class Notifier:
    """Sends the notifications of one process, and logs notifications that could not be sent."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._one_at_a_time = threading.Lock()
        self._problem = ""

    def send_end(self, attempt: AttemptDir, end: AttemptEnd) -> None:
        """Send the notification for the end of an attempt, if there is one, in the background."""
        since = None
        with contextlib.suppress(OSError):  # report the end of the attempt even if its metrics cannot be read
            since = diverged_since(attempt.run, attempt.number)
        if (notification := end_notification(end, since)) is not None:
            self.send(attempt, notification)

    def send(self, attempt: AttemptDir, notification: Notification) -> None:
        """Send a notification in the background, unless the config or the rate limit suppresses it."""
        thread = threading.Thread(target=self._send, args=(attempt, notification), name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until all notifications have been sent, for at most `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log_line(f"warning: a notification was not sent within {timeout_s:g} s")

    def _send(self, attempt: AttemptDir, notification: Notification) -> None:
        with self._one_at_a_time:
            try:
                plan = LaunchPlan.from_dict(read_submitted(attempt))
                if policy_of(plan).sends(notification.event):
                    _send_limited(attempt, plan, notification)
            except (OSError, ValueError, TrainkitError) as error:
                if (problem := str(error)) != self._problem:  # do not log the same problem repeatedly
                    self._problem = problem
                    log_line(f"warning: a notification was not sent: {problem}")


def _send_limited(attempt: AttemptDir, plan: LaunchPlan, notification: Notification) -> None:
    """Send a notification unless the same event was reported within the last `min_interval_s` seconds."""
    policy = policy_of(plan)
    file, event = attempt.run.path / STATE_NAME, notification.event
    sent = Record(read_object(file)).record("sent")
    if is_due(sent.text(event), event, datetime.now(timezone.utc), policy.min_interval_s):
        post(os.environ[policy.webhook or ""], message(attempt, plan, notification))
        write_json(file, {"sent": {**sent.values, event: utc_now()}})


def is_due(last: str | None, event: str, now: datetime, min_interval_s: float) -> bool:
    """Return whether an event may be reported at the time `now`; `last` is the time of its last report."""
    then = parse_time(last)
    if event in LAST_EVENTS or then is None:
        return True
    since_s = (now - then).total_seconds()
    return (
        not 0.0 <= since_s < min_interval_s
    )  # a time in the future was recorded by a host with a different clock


_MENTION = re.compile(r"<(?=[!@#])|@(?=(?:everyone|channel|here)\b)")
"""Matches mentions that make a chat program notify a whole channel; an exception message could contain
them."""


def _outside(text: str) -> str:
    """Remove secrets and channel mentions from a text before it is sent to another machine."""
    return _MENTION.sub(r"\g<0> ", mask_secrets(text))


def message(attempt: AttemptDir, plan: LaunchPlan, notification: Notification) -> str:
    """Return the message to send to the endpoint, as JSON; chat programs display the value of ``text``."""
    # Import this module here, because importing it is slow and most processes send nothing.
    from trainkit.config import read_effective

    run, job, total_steps = attempt.run, read_job(attempt.run), None
    entry, step = job.of_attempt(attempt.number), notification.step
    if not plan.workload.is_command:  # `train.steps` does not apply to a COMMAND
        total_steps = read_effective(attempt.config_file).train.steps
    where = f"job {entry.job_id or None}, attempt {attempt.number}"
    at = "" if step is None else f", step {step}" + ("" if total_steps is None else f"/{total_steps}")
    command = f"trainkit {notification.command} {quote(str(run.path))}"
    value = {
        "text": f"{job.name} {_outside(notification.text)} ({where}{at})\n`{command}`",
        "event": notification.event,
        "run": job.name,
        "run_dir": str(run.path),
        "job_id": entry.job_id or None,
        "attempt": attempt.number,
        "state": notification.state,
        "reason": _outside(notification.reason or notification.text),
        "rank": notification.rank,
        "host": notification.host,
        "step": step,
        "total_steps": total_steps,
        "command": command,
        "time": utc_now(),
    }
    return json.dumps(value)


def send_test(url: str, name: str) -> int:
    """Send a test message for a run, and return the HTTP status; may raise DeliveryError."""
    text = f"{name}: this is a test message from trainkit; events of the run will be reported here"
    return post(url, json.dumps({"text": text, "event": "test", "run": name, "time": utc_now()}))


def url_problem(url: str) -> str | None:
    """Return why a value is not a valid webhook URL, without quoting the value; None if it is valid."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in ("http", "https"):
        return "does not start with https:// or http://"
    if not host or any(character.isspace() or not character.isprintable() for character in url):
        return "has no host, or contains white space"
    if parts.username is not None:
        return "contains a user name or password, which a webhook URL must not contain"
    return None


def post(url: str, text: str, timeout_s: float = SEND_TIMEOUT_S) -> int:
    """Post JSON to a URL without following redirects, and return the HTTP status.

    Raises DeliveryError with a message that does not contain the URL.
    """
    problem = url_problem(url)
    if problem is not None:
        raise DeliveryError(f"the URL {problem}")
    # Import these modules here, because importing them is slow and most processes of a job send nothing.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """Rejects redirects, so that no other server receives the notification."""

        def redirect_request(self, *arguments: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": f"trainkit/{__version__}"}
    try:
        request = Request(url, text.encode(), headers, method="POST")
        with build_opener(NoRedirect).open(request, timeout=timeout_s) as response:
            return int(response.status)
    except HTTPError as error:
        raise DeliveryError(f"the server answered with HTTP {error.code}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            raise DeliveryError(f"the server did not answer within {timeout_s:g} s") from None
        # The messages of other exceptions may contain the URL.
        text = (isinstance(reason, OSError) and reason.strerror) or type(reason).__name__
        raise DeliveryError(f"the server cannot be reached: {text}") from None
