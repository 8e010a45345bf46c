"""Detects slow ranks, so that their hosts can be excluded, and commands that print nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.capabilities.slow_ranks.policy import SlowRanksPlan, slow_ranks_plan
from trainkit.capability import Capability, HostView, Notice, Planned, Watch

if TYPE_CHECKING:
    from datetime import datetime

    from trainkit.capability import Hosts, RankObserver, Reading, TimedRanks
    from trainkit.config.loaded import LoadedConfig
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.events import Event
    from trainkit.run.history import RunHistory
    from trainkit.run.rundir import AttemptDir


class SlowRanks(Capability):
    """Detects slow ranks and silent commands, and adds a `SlowRanksPlan` to every plan."""

    name = "slow_ranks"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        from trainkit.plan.workload import out_of_reach

        given = loaded.config.requeue
        part = SlowRanksPlan(given.inspect_s, given.silence_s, given.slow_hosts, given.slow_after_s)
        warnings = list[str]()
        if draft.slurm is None and part.slow_hosts != "ignore":
            warnings.append("requeue.slow_hosts has no effect: only Slurm jobs can exclude a host")
        # Ranks started as a Slurm step have no supervisor that could inspect a command.
        if not draft.workload.is_command or facts.target.node_sizes is not None:
            return Planned(part, warnings=tuple(warnings))
        before = "end" if out_of_reach(draft.workload.argv) is None else "notice"
        return Planned(part, {"silence": part.silence}, tuple(warnings), follows=before)

    def without_hangs(self, plan: LaunchPlan) -> LaunchPlan:
        part = replace(slow_ranks_plan(plan), inspect_s=None, silence_s=None)
        reasons = {key: text for key, text in plan.reasons.items() if key != "silence"}
        return replace(plan.with_part(part), reasons=reasons)

    def rank_observer(self, plan: LaunchPlan, ranks: TimedRanks) -> RankObserver:
        from trainkit.capabilities.slow_ranks.compare import SlowRanks as Comparison

        return Comparison(ranks)

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        part, has_spare = slow_ranks_plan(plan), len(hosts.good) > plan.fewest_nodes
        is_inspected = plan.workload.is_command and part.inspect_after_s is not None
        # Without a spare node, the restarted job would wait in the queue, possibly for longer than the slow
        # host would delay the run.
        leaves = part.slow_hosts == "restart" and has_spare
        if not (is_inspected or leaves):
            return None
        from trainkit.capabilities.slow_ranks.watch import RanksWatch

        return RanksWatch(attempt, plan, hosts.good if leaves else None, is_inspected=is_inspected)

    def hosts_to_leave(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Collection[str]:
        if slow_ranks_plan(plan).slow_hosts == "ignore":
            return ()
        from trainkit.capabilities.slow_ranks.slow_hosts import slow_hosts

        return slow_hosts(attempt, hosts.all)

    def status(self, reading: Reading) -> Mapping[str, object]:
        from trainkit.capabilities.slow_ranks.shown import slow_of

        return {"slowdowns": slow_of(reading.lasting)}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        from trainkit.capabilities.slow_ranks.shown import notices_of

        return list(notices_of(reading.history.run, reading.lasting))

    def past(self, event: Event) -> str:
        from trainkit.capabilities.slow_ranks.shown import sentence

        return sentence(event, "was slow from")

    def hosts(self, reading: Reading, now: datetime) -> Mapping[str, HostView]:
        from trainkit.capabilities.slow_ranks.shown import hosts_of

        return hosts_of(reading.lasting)

    def advice(self, attempt: AttemptDir, host: str | None, lasting: Sequence[Event]) -> Mapping[str, str]:
        from trainkit.capabilities.slow_ranks.shown import advice_values

        return advice_values(lasting)

    def report(self, history: RunHistory) -> Mapping[str, object]:
        from trainkit.capabilities.slow_ranks.shown import SLOWDOWN_EVENTS, find_slowdowns

        events = (event for event in history.events.owned.all if event.name in SLOWDOWN_EVENTS)
        return {"slowdowns": find_slowdowns(events)}


CAPABILITY = SlowRanks
