"""Evaluates the published checkpoints of a run with the user's command while the training continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.capabilities.evaluations.evaluations_plan import PREFIX, EvaluationsPlan
from trainkit.capability import Capability, Notice, Planned, Watch

if TYPE_CHECKING:  # `trainkit status` imports this module, and importing the config modules is slow
    from trainkit.capabilities.evaluations.follower import Follower
    from trainkit.capabilities.evaluations.records import Evaluation
    from trainkit.capability import Hosts, Reading
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.running import OnCheckpointConfig, ResourcesConfig
    from trainkit.config.schema import RunConfig
    from trainkit.errors import KeyProblem
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.events import Event
    from trainkit.run.history import RunHistory
    from trainkit.run.rundir import AttemptDir, RunDir

SHOWN_METRICS = 3
"""Maximum number of metrics in the row of `trainkit status`."""
ACCOUNTING = ("partition", "account", "qos")
"""Keys of the evaluations' resources that have the run's own values by default."""


class Evaluations(Capability):
    """Starts an evaluation for each checkpoint, and shows the results."""

    name = "evaluations"
    quiet = dict.fromkeys(("on_checkpoint.command",), "the {what} does not evaluate its checkpoints")

    _follower: Follower | None = None

    def contradictions(self, config: RunConfig) -> Iterable[KeyProblem]:
        given = config.on_checkpoint
        if given.command is None:
            keys = [key for key in ("export", "keep_best_by") if getattr(given, key) is not None]
            for key in keys:
                yield (
                    f"on_checkpoint.{key}",
                    "is set, but on_checkpoint.command is null, so no checkpoint is evaluated",
                    "set on_checkpoint.command",
                )
        for key in sorted(OWN_OPTIONS & given.resources.extra.keys()):
            yield (
                "on_checkpoint.resources.extra",
                f"sets the sbatch option {key}, which trainkit sets itself",
                f"remove {key}, or use the key of on_checkpoint.resources for it",
            )

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        given = loaded.config.on_checkpoint
        if given.command is None:
            return Planned()
        sbatch = None if draft.slurm is None else sbatch_options(given, loaded.config.resources)
        best = given.keep_best_by
        part = EvaluationsPlan(
            command=given.command,
            every=given.every,
            export=given.export,
            metric=None if best is None else best.metric.removeprefix(PREFIX),
            mode="max" if best is None else best.mode,
            max_waiting=given.max_waiting,
            sbatch=sbatch,
            env=dict(loaded.config.launch.env),
        )
        every = "every checkpoint" if given.every == 1 else f"one of {given.every} checkpoints"
        place = "on this machine, one at a time" if sbatch is None else "each in a job of its own"
        return Planned(part, {"on_checkpoint": f"evaluates {every} {place}: {given.command}"})

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        if plan.part(EvaluationsPlan) is None:
            return None
        from trainkit.capabilities.evaluations.follower import Follower, FollowerWatch

        self._plan = plan
        self._follower = self._follower or Follower(attempt.run)
        return FollowerWatch(self._follower)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.end(self._plan)

    def rows(self, reading: Reading) -> Mapping[str, str]:
        found = _read(reading.history.run)
        return {"evals": summary(found)} if found else {}

    def status(self, reading: Reading) -> Mapping[str, object]:
        return self.report(reading.history)

    def report(self, history: RunHistory) -> Mapping[str, object]:
        return {"evaluations": [shown(one) for one in _read(history.run)]}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        names = ("evaluation_failed", "evaluation_not_submitted")
        found = []
        for event in reading.lasting:
            if event.name in names:
                hint = not_submitted_hint(reading.history.run) if event.name == names[1] else ""
                found.append(Notice(event.time, "; ".join(filter(None, (self.past(event), hint)))))
        return found

    def past(self, event: Event) -> str:
        what = {
            "evaluation_failed": "the evaluation of step {} failed",
            "evaluation_skipped": "the evaluation of step {} was skipped",
            "evaluation_not_submitted": "the evaluation of step {} could not be submitted",
        }
        text = f"{what.get(event.name, 'the evaluation of step {} is done').format(event.step)}"
        tail = event.texts("log_tail")[-1:]
        last = [f"the last line of its log: {tail[0].strip()}"] if tail else []
        return "; ".join([text + (f": {event.reason}" if event.reason else ""), *last])


OWN_OPTIONS = {
    "nodes",
    "ntasks",
    "comment",
    "output",
    "error",
    "open-mode",
    "chdir",
    "wrap",
    "parsable",
    "array",
}
OWN_OPTIONS |= {"job-name", "gpus-per-node", "gres", "cpus-per-task", "mem", "time", *ACCOUNTING}


def sbatch_options(given: OnCheckpointConfig, resources: ResourcesConfig) -> dict[str, str | int | bool]:
    """Return the sbatch options of the job that evaluates a checkpoint, by long name."""
    own = given.resources
    options: dict[str, str | int | bool | None] = {
        "time": own.time,
        "cpus-per-task": own.cpus,
        "mem": own.mem,
    }
    options["gpus-per-node"] = own.gpus or None
    options |= {key: getattr(own, key) or getattr(resources, key) for key in ACCOUNTING}
    return {**{key: value for key, value in options.items() if value is not None}, **own.extra}


def not_submitted_hint(run: RunDir) -> str:
    """Return what to do if a job cannot submit evaluations."""
    return f"`trainkit eval {run.quoted} --follow` on the login node submits them"


def _read(run: RunDir) -> list[Evaluation]:
    from trainkit.capabilities.evaluations.records import evaluations_dir, read_evaluations

    return list(read_evaluations(run).values()) if evaluations_dir(run).is_dir() else []


def shown(one: Evaluation) -> dict[str, object]:
    """Return an evaluation as JSON output shows it."""
    return {
        "step": one.step,
        "state": one.state,
        "time": one.time,
        "job_id": one.job_id,
        "metrics": {f"{PREFIX}{name}": value for name, value in one.metrics.items()},
        "reason": one.reason,
        "log_tail": one.log_tail,
    }


def summary(found: Sequence[Evaluation]) -> str:
    """Return the number of evaluations in each state, and the newest metrics, as one line."""
    states = ("done", "running", "waiting", "failed", "damaged", "skipped")
    counts = {state: sum(one.state == state for one in found) for state in states}
    parts = [", ".join(f"{count} {state}" for state, count in counts.items() if count)]
    newest = next((one for one in reversed(found) if one.state == "done"), None)
    if newest is not None:
        names = list(newest.metrics)[:SHOWN_METRICS]
        values = ", ".join(f"{PREFIX}{name} {newest.metrics[name]:.4g}" for name in names)
        parts.append(f"step {newest.step}: {values}")
    return "; ".join(parts)


CAPABILITY = Evaluations
