"""Tests when a run returns to the queue for more nodes."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.capabilities.growth import GrowthPlan, growth_watch
from trainkit.capabilities.growth.growth_watch import ASK_EVERY_S, GrowthWatch, decide_growth, vain_growths
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import TrainkitError
from trainkit.job.decision import PlannedStop
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan, SlurmRequest
from trainkit.plan.make_plan import with_parts
from trainkit.plan.node_range import plan_nodes
from trainkit.plan.workload import Workload
from trainkit.run.events import log_event, read_events
from trainkit.run.files import append_jsonl, read_json, write_json
from trainkit.run.history import Attempt
from trainkit.run.record import AUTO_RESTART, add_slurm_attempt
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.submit import Answer

HOUR = 3600.0
SAVES = "4 nodes are free: the run would need 5h00m instead of 10h00m, plus 10m00s for"


@pytest.mark.parametrize(
    ("left_s", "restart_s", "waits", "num_nodes", "reason"),
    [
        (10 * HOUR, 600, {4: 0}, 4, SAVES),
        (10 * HOUR, 600, {4: -5}, 4, ""),  # Slurm's clock is behind
        (10 * HOUR, 600, {8: HOUR, 4: 0}, 4, ""),  # eight nodes are not free now
        (10 * HOUR, 600, {8: 30, 4: 0}, 8, ""),
        (10 * HOUR, 600, {8: 2 * HOUR, 4: HOUR}, None, "4 nodes would be free in 1h00m"),
        (10 * HOUR, 600, {8: None}, None, "Slurm predicts no start time"),
        (10 * HOUR, 600, {}, None, "Slurm predicts no start time"),
        (10 * HOUR, 17000, {4: 0}, None, ""),  # the restart takes most of the time that is saved
        (10 * HOUR, 14300, {4: 0}, 4, ""),  # a little more than a tenth of the time is saved
        (10 * HOUR, 14500, {4: 0}, None, ""),
        (720, 600, {4: 0}, None, ""),  # the run is nearly done
        (0, 600, {4: 0}, None, ""),
    ],
)
def test_the_decision(left_s, restart_s, waits, num_nodes, reason):
    found = decide_growth(left_s, restart_s, 2, waits)
    assert found.num_nodes == num_nodes
    assert found.reason.startswith(reason)


def test_a_growth_without_more_nodes_is_vain():
    sizes = [(2, "grow"), (2, "grow"), (4, "preempted"), (2, "grow"), (1, "preempted"), (2, None)]
    attempts = [Attempt(number, num_nodes=size, cause=cause) for number, (size, cause) in enumerate(sizes, 1)]
    assert vain_growths(attempts) == 2


class Played:
    """A watch of a job on two nodes that may have four or eight, with a fake clock and a fake Slurm."""

    def __init__(self, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt, self.now_s, self.asked = attempt, 0.0, list[set[str]]()
        self.waits: dict[int, float | Exception] = {}
        """Maps a number of additional nodes to the time at which they are free."""
        monkeypatch.setattr(growth_watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr("trainkit.slurm.submit.query_start", self._query_start)
        monkeypatch.setenv("SLURM_JOB_PARTITION", "low")
        options = {"nodes": "2,4,8", "partition": "low,high", "exclude": "bad"}
        plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
        self.plan = replace(plan, num_nodes=2, sizes={"4": {}, "8": {}}, slurm=SlurmRequest({**options}))
        self.watch = GrowthWatch(attempt, self.plan, ["a", "b", "c"], num_good=2)

    def _query_start(self, script: str, *, extra_argv: list[str], **more: object) -> tuple[Answer, str]:
        self.asked.append(set(extra_argv))
        [nodes] = (int(word.removeprefix("--nodes=")) for word in extra_argv if word.startswith("--nodes="))
        wait_s = self.waits[nodes]
        if isinstance(wait_s, Exception):
            raise wait_s
        return Answer(datetime.now(timezone.utc) + timedelta(seconds=wait_s)), ""

    def trains(self, seconds: float, last_step: int, total_steps: int) -> None:
        """Record that the attempt has trained up to a step."""
        begin, run, number = datetime(2030, 1, 1, tzinfo=timezone.utc), self.attempt.run, self.attempt.number
        for name, at_s in (("started", 0), ("training", 60), ("first_step", 62)):
            more = {"nodes": 2, "partition": "low"} if name == "started" else {"total_steps": total_steps}
            time = (begin + timedelta(seconds=at_s)).isoformat()
            log_event(run, number, name, **more, **{"time": time})
        for share in (0.5, 1.0):
            time = (begin + timedelta(seconds=60 + share * seconds)).isoformat()
            record = {"time": time, "attempt": number, "step": round(share * last_step)}
            append_jsonl(run.metrics_file, record)

    def after(self, seconds: float) -> PlannedStop | None:
        self.now_s += seconds
        return self.watch.poll()

    def decisions(self) -> list[tuple[int | None, str | None]]:
        """Return the decisions that the events report."""
        events = read_events(self.attempt.run, "growth")
        return [(event.count("num_nodes"), event.reason) for event in events]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(make_attempt(tmp_path / "run"), monkeypatch)


def test_slurm_is_asked_every_half_hour_about_the_nodes_that_the_run_lacks(played):
    played.trains(HOUR, 100, 1100)
    played.waits = {6: 2 * HOUR, 2: HOUR}
    assert played.after(ASK_EVERY_S - 1) is None
    assert played.asked == []
    assert played.after(2) is None
    assert played.asked[0] >= {"--nodes=6", "--partition=low", "--exclude=bad,a,b,c"}
    assert played.after(ASK_EVERY_S - 3) is None
    played.waits = {6: SlurmRefused("busy"), 2: 0.0}
    # 10 hours remain, and the start-up took 62 s.
    saves = "the run would need 5h00m instead of 10h00m, plus 3m02s for the restart"
    grows = f"grows to 4 nodes: 4 nodes are free: {saves}"
    assert played.after(4) == PlannedStop("grow", grows)
    assert len(played.asked) == 4
    (size, reason), last = played.decisions()
    assert (size, last) == (None, (4, grows))
    said(reason)


@pytest.mark.parametrize("error", [TrainkitError("Slurm is away"), SlurmRefused("no such partition")])
def test_a_slurm_that_names_no_time_changes_nothing(played, error):
    played.trains(HOUR, 100, 1100)
    played.waits = {6: error, 2: error}
    assert played.after(ASK_EVERY_S + 1) is None
    [(size, reason)] = played.decisions()
    assert size is None
    said(reason)


def test_without_a_step_a_size_or_a_restart_left_nobody_asks(tmp_path, played, monkeypatch):
    assert played.after(ASK_EVERY_S + 1) is None
    [(size, reason)] = played.decisions()
    assert size is None
    said(reason)
    most = replace(played.plan, num_nodes=8, sizes={"2": {}, "4": {}})
    played.watch = GrowthWatch(played.attempt, most, ["a"], num_good=1)
    assert played.after(ASK_EVERY_S + 1) is None
    write_json(played.attempt.end_file, {"cause": "preempted", "mark": 1})
    following = Played(make_attempt(tmp_path / "run"), monkeypatch)
    following.trains(HOUR, 100, 1100)
    for number in (1, 2):
        add_slurm_attempt(following.attempt.run, number, "7", "" if number == 1 else AUTO_RESTART, "sbatch")
    plan = replace(following.plan, requeue=replace(following.plan.requeue, max=1))
    following.watch = GrowthWatch(following.attempt, plan, ["a", "b"], num_good=2)
    assert following.after(ASK_EVERY_S + 1) is None
    limit = "does not grow: requeue.max is 1, and the run has restarted 1 time"
    assert following.decisions()[1:] == [(None, limit)]
    assert played.asked == following.asked == []


@pytest.mark.parametrize(("nodes", "follows"), [("2-4", "sizes"), ("2", "checkpoint_bytes")])
def test_the_part_is_a_key_of_the_plan_that_is_left_out_without_it(tmp_path, nodes, follows):
    file = tmp_path / "run.yaml"
    facts = Facts(Machine(4, 0, (), "no driver"), Target("sbatch", "a test", Cluster("unknown")))
    plans = []
    for grow in ("true", "false"):
        file.write_text(f"device: cpu\nresources: {{nodes: {nodes}, grow: {grow}}}\n")
        loaded = load_config(file, layers=False)
        workload = Workload(("true",))
        plan = with_parts(plan_nodes(loaded, facts, workload), loaded, facts)
        assert LaunchPlan.from_dict(plan.to_dict()) == plan
        plans.append(plan)
    grows, stays = plans
    keys = list(grows.to_dict())
    assert keys[keys.index("grow") - 1] == follows
    assert (grows.to_dict()["grow"], "grow" in stays.to_dict()) == (True, False)
    without_range = "resources.grow has no effect because resources.nodes is 2"
    assert (without_range in grows.warnings) == (nodes == "2")
    assert grows.at(2).part(GrowthPlan) == GrowthPlan()
    assert stays.part(GrowthPlan) is None
