"""Defines the part of the launch plan that contains the notification settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.capability import Part

if TYPE_CHECKING:
    from trainkit.plan.launch import LaunchPlan


@dataclass(frozen=True)
class NotifyPolicy(Part):
    """The values of the config section `notify` that a job needs."""

    CAPABILITY = "notifications"
    on: tuple[str, ...] = ()
    webhook: str | None = None
    """Name of the environment variable that contains the webhook URL, which is a secret."""
    min_interval_s: float = 600.0
    stalled_after_s: float = 1800.0

    def sends(self, *events: str) -> bool:
        """Return whether the webhook's variable is set and at least one of the given events is reported."""
        return bool(os.environ.get(self.webhook or "")) and any(event in self.on for event in events)


def policy_of(plan: LaunchPlan) -> NotifyPolicy:
    """Return the policy of a plan; stalls are not reported for a run that waits for user input."""
    policy = plan.part(NotifyPolicy) or NotifyPolicy()
    if plan.attended_in is None:
        return policy
    return replace(policy, on=tuple(event for event in policy.on if event != "stalled"))
