"""Reports events of a run to a webhook, and by email through Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from trainkit.capabilities.notifications.policy import NotifyPolicy, policy_of
from trainkit.capability import Capability, Planned, Watch
from trainkit.errors import KeyProblem

if TYPE_CHECKING:  # `trainkit status` imports this module, and importing the config modules is slow
    from trainkit.capabilities.notifications.notifier import Notifier
    from trainkit.capability import Hosts
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.end import AttemptEnd
    from trainkit.run.rundir import AttemptDir


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Matches the name of an environment variable."""


class Notifications(Capability):
    """Implements notifications, and adds a `NotifyPolicy` to every plan."""

    name = "notifications"
    quiet = dict.fromkeys(("notify.webhook", "notify.mail"), "the {what} sends no notifications")
    may_be_secret = ("notify.webhook",)

    def contradictions(self, config: RunConfig) -> Iterator[KeyProblem]:
        from trainkit.config.running import MAIL_TYPES, WEBHOOK_VARIABLE

        notify, key = config.notify, "notify.mail"
        if notify.webhook is not None and not VARIABLE.fullmatch(notify.webhook):
            # The value is probably the URL itself, which is a secret, so do not quote it in the message.
            hint = (
                f"export {WEBHOOK_VARIABLE}=URL in the shell before you submit the run, and remove "
                f"notify.webhook"
            )
            yield "notify.webhook", "is not the name of an environment variable", hint
        if notify.mail is None:
            return
        for other in ("mail_user", "mail_type"):
            if getattr(config.resources, other) is not None:
                yield key, f"is set, but resources.{other} is also set", "remove one of the two keys"
        if not any(event in MAIL_TYPES for event in notify.on):
            known = ", ".join(MAIL_TYPES)
            message = f"is set, but notify.on contains no event for which Slurm sends email: {known}"
            yield key, message, "add one of these events, or remove notify.mail"

    def problems(self, loaded: LoadedConfig, facts: Facts) -> Iterator[KeyProblem]:
        webhook = loaded.config.notify.webhook
        url = os.environ.get(webhook or "")
        if facts.environment is None or not url:
            return
        from trainkit.capabilities.notifications.notifier import url_problem

        if (what := url_problem(url)) is not None:
            hint = f"copy the URL from the chat program, and set it with `export {webhook}=https://…`"
            yield "notify.webhook", f"is {webhook}, but the value of this environment variable {what}", hint

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        from trainkit.config.running import MAIL_TYPES, WEBHOOK_VARIABLE

        notify, found, warnings = loaded.config.notify, list[str](), list[str]()
        if notify.on and os.environ.get(notify.webhook or ""):
            found.append(f"{', '.join(notify.on)} to the URL in the environment variable {notify.webhook}")
        elif notify.on and notify.webhook not in (None, WEBHOOK_VARIABLE):
            warnings.append(
                f"notify.webhook is {notify.webhook}, but this environment variable is not set in this shell"
            )
        if notify.mail is not None and draft.slurm is None:
            warnings.append("notify.mail has no effect, because the run does not use Slurm")
        elif notify.mail is not None:
            by_mail = [event for event in notify.on if event in MAIL_TYPES]
            unknown = [event for event in notify.on if event not in MAIL_TYPES]
            without = f"; Slurm sends no email for the events {', '.join(unknown)}" if unknown else ""
            found.append(f"{', '.join(by_mail)} by email to {notify.mail}{without}")
        part = NotifyPolicy(notify.on, notify.webhook, notify.min_interval_s, notify.stalled_after_s)
        return Planned(part, {"notify": "; ".join(found)} if found else {}, tuple(warnings))

    @cached_property
    def _notifier(self) -> Notifier:
        from trainkit.capabilities.notifications.notifier import (
            Notifier,
        )  # imported here to keep the start fast, because most runs have no webhook

        return Notifier()

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        policy = policy_of(plan)
        if not policy.sends("stalled", "slow"):
            return None
        from trainkit.capabilities.notifications.progress import ProgressWatch

        return ProgressWatch(attempt, plan, policy.stalled_after_s, self._notifier)

    def on_end(self, attempt: AttemptDir, plan: LaunchPlan, end: AttemptEnd) -> None:
        if policy_of(plan).sends("finished", "failed", "requeued"):
            self._notifier.send_end(attempt, end)

    def close(self) -> None:
        if "_notifier" in vars(self):
            self._notifier.wait()


CAPABILITY = Notifications
