"""The part of the plan that says which events a run reports to a webhook."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.capability import Part

if TYPE_CHECKING:
    from trainkit.plan.launch import LaunchPlan


@dataclass(frozen=True)
class NotifyPolicy(Part):
    """The values of the section `notify` of the config that a job needs."""

    CAPABILITY = "notifications"
    on: tuple[str, ...] = ()
    webhook: str | None = None
    """The environment variable that contains the URL, which is a secret."""
    min_interval_s: float = 600.0
    stalled_after_s: float = 1800.0

    def sends(self, *events: str) -> bool:
        """Whether one of these events would be reported from here."""
        return bool(os.environ.get(self.webhook or "")) and any(event in self.on for event in events)


def policy_of(plan: LaunchPlan) -> NotifyPolicy:
    """The policy of a plan; one that a person attends to never counts as stalled."""
    policy = plan.part(NotifyPolicy) or NotifyPolicy()
    if plan.attended_in is None:
        return policy
    return replace(policy, on=tuple(event for event in policy.on if event != "stalled"))
