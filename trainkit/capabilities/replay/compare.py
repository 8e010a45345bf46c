"""Compares a replay with the records of the run, and finds the values and the ranks that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from trainkit.capabilities.replay import SAMPLES_FILE, SampleLosses
from trainkit.capabilities.replay.replay import ReplayPlan, changed_values
from trainkit.capabilities.replay.steps import Start, StepSample, attempt_starts, refuse_other_data
from trainkit.cli.started import StartedJson
from trainkit.config import RunConfig
from trainkit.launch.repeat import config_and_plan
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layout_rules import DEGREES, layout_name
from trainkit.run.events import read_steps, training_curve
from trainkit.run.files import INLINE, read_jsonl, read_jsonl_reversed, read_record
from trainkit.run.rollbacks import read_rollbacks
from trainkit.run.rundir import AttemptDir, RunDir

EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
"""Maps `precision.dtype` to the largest relative difference in loss and gradient norm attributed to
rounding."""
JUMP = 30.0
"""Rounding errors grow slowly from step to step. A difference larger than the largest earlier difference
times this factor is not attributed to rounding."""
MAX_UNSEEN = 10
"""Number of steps during which accumulated rounding errors stay below the tolerance."""
VALUES = ("loss", "grad_norm")
FACTS = ("trainkit", "torch", "processor", "threads", "cudnn", "nccl", "triton", "driver")
"""Recorded versions and hardware properties that must be equal for bit-identical results."""


@dataclass(frozen=True)
class ComparedStep:
    """The recorded and the replayed values of a step; a non-finite value is None."""

    step: int
    attempt: int | None
    """The attempt that recorded the step; None if no attempt recorded it."""
    recorded: dict[str, float | None] | None
    replayed: dict[str, float | None]
    difference: float | None
    """The largest relative difference between recorded and replayed values; None if the step was not
    recorded."""
    is_exact: bool
    """True if the run and the replay round identically, so that their values must be bit-identical."""
    is_equal: bool | None
    """True if the values are equal or, unless `is_exact` is true, within the tolerance; None if the step was
    not recorded."""


@dataclass(frozen=True)
class Culprit:
    """The ranks on which a step first differed, according to the metrics that each rank recorded."""

    ranks: tuple[int, ...]
    """The ranks that differed first; empty if the records do not identify them."""
    hosts: tuple[str, ...]
    """The hosts of `ranks`; if `ranks` is empty, all hosts that could be the cause."""
    what: str
    """A description of the difference."""


@dataclass(frozen=True)
class Comparison:
    """The result of a replay."""

    verdict: str
    """``equal``, ``different`` or ``unknown``."""
    is_exact: bool
    """True if the values of each step are equal or must be bit-identical (see `ComparedStep.is_exact`)."""
    tolerance: float
    """Largest relative difference at which steps that are not exact are considered equal."""
    rounding: tuple[str, ...]
    """Differences between the run and the replay that affect rounding, such as the layout; one phrase
    each."""
    start_step: int
    steps: tuple[ComparedStep, ...]
    """The compared steps in order; a step that several attempts recorded appears once per attempt."""
    culprit: Culprit | None

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as a JSON object; an infinite difference becomes null."""
        fields = asdict(self)
        for step in fields["steps"]:
            if step["difference"] == math.inf:
                step["difference"] = None
        return fields

    @property
    def first_different(self) -> ComparedStep | None:
        return next((step for step in self.steps if step.is_equal is False), None)


@dataclass(frozen=True)
class JudgedSample:
    """A sample of a recomputed step, with the step and the loss of the sample."""

    step: int
    loss: float | None
    """The loss of the sample; None if the loss is unknown or not finite."""
    sample: StepSample = field(metadata=INLINE)


@dataclass(frozen=True)
class ReplayedJson:
    """The result of a replay, and the samples of the recomputed steps."""

    comparison: Comparison = field(metadata=INLINE)
    samples: list[JudgedSample]
    """The samples, sorted by loss if the losses are known; empty if the replayed values are different."""


ReplayedOrStarted = ReplayedJson | StartedJson
"""With `--submit` but not `--follow`, `trainkit replay` prints the submitted job instead of a result."""


def compare(what: ReplayPlan, copy: RunDir) -> Comparison:
    """Compare all steps since the checkpoint, because a difference may have begun before the requested steps.

    Raises UsageError if the training data has changed since the run.
    """
    starts = attempt_starts(copy)
    start = starts[max(starts)]
    start_step = min(began.step for began in starts.values())
    settings: dict[int, tuple[RunConfig, LaunchPlan]] = {}
    recorded = _recorded(what, start_step + 1, settings)
    attempts = sorted({number for by_attempt in recorded.values() for number in by_attempt})
    reasons: dict[int, list[str]] = {}
    for number in attempts:
        before = attempt_starts(what.run).get(number, Start())
        refuse_other_data(number, before.data, start.data)
        reasons[number] = list(_rounding(what, *settings[number], before, start))
    # A rounding difference in one attempt also affects all later attempts.
    inexact = next((number for number in attempts if reasons[number]), math.inf)
    tolerance = TOLERANCE[what.config.precision.dtype]
    steps = []
    for record in training_curve(copy):
        step, now = record.step, {name: record.number(name) for name in VALUES}
        if not recorded.get(step):
            steps.append(ComparedStep(step, None, None, now, None, True, None))
        for attempt, was in sorted(recorded.get(step, {}).items()):
            difference = max(_difference(was[name], now[name]) for name in VALUES)
            is_exact = attempt < inexact
            is_equal = difference <= (0.0 if is_exact else tolerance)
            steps.append(ComparedStep(step, attempt, was, now, difference, is_exact, is_equal))
    verdict = _verdict(steps, what.first)
    is_exact = all(step.is_exact or step.difference == 0.0 for step in steps)
    rounding = tuple(dict.fromkeys(text for number in attempts for text in reasons[number]))
    found = Comparison(verdict, is_exact, tolerance, rounding, start_step, tuple(steps), None)
    bad = found.first_different
    if verdict != DIFFERENT or bad is None or bad.attempt is None:
        return found
    num_ranks = settings[bad.attempt][1].world_size
    return replace(found, culprit=_culprit(copy, found, bad, what.run.attempt(bad.attempt), num_ranks))


def _verdict(steps: Sequence[ComparedStep], first: int) -> str:
    bad = next((index for index, step in enumerate(steps) if step.is_equal is False), None)
    if bad is None:
        return EQUAL if any(step.is_equal for step in steps if step.step >= first) else UNKNOWN
    before = [step.difference for step in steps[:bad] if step.difference is not None]
    limit = JUMP * max(before) if before else (0.0 if bad < MAX_UNSEEN else math.inf)
    has_jumped = (steps[bad].difference or 0.0) > limit
    return DIFFERENT if steps[bad].is_exact or has_jumped else UNKNOWN


def _recorded(
    what: ReplayPlan, first: int, settings: dict[int, tuple[RunConfig, LaunchPlan]]
) -> dict[int, dict[int, dict[str, float | None]]]:
    """Map each recorded step, starting with step `first`, to the values that each attempt recorded.

    Attempts whose config would change the result of a step are skipped, and so are steps from which the run
    went back before or after the attempt of the replay. The config and the plan of each attempt are added to
    `settings`.
    """
    rollbacks, own = read_rollbacks(what.run), what.at.attempt.number
    found: dict[int, dict[int, dict[str, float | None]]] = {}
    comparable: dict[int, bool] = {}
    for record in read_steps(what.run):
        attempt = record.attempt
        if attempt is None or not first <= record.step <= what.last:
            continue
        if attempt not in comparable:
            folder = what.run.attempt(attempt)
            settings[attempt] = config_and_plan(folder)
            comparable[attempt] = not changed_values(folder, *settings[attempt], what.at)
        between = (item for item in rollbacks if min(attempt, own) <= item.attempt < max(attempt, own))
        if comparable[attempt] and all(record.step <= item.step for item in between):
            found.setdefault(record.step, {})[attempt] = {name: record.number(name) for name in VALUES}
    return found


def _rounding(
    what: ReplayPlan, config: RunConfig, plan: LaunchPlan, before: Start, start: Start
) -> Iterator[str]:
    """Yield the differences between an attempt and the replay that affect rounding, such as the layout."""
    now = what.plan
    if plan.layout != now.layout:
        yield f"layout {layout_name(now.layout, {})} instead of {layout_name(plan.layout, {})}"
    elif now.batch.device_batch_size != plan.batch.device_batch_size:
        yield f"device_batch_size {now.batch.device_batch_size} instead of {plan.batch.device_batch_size}"
    for key, value in what.config.parallel.model_dump().items():
        was = getattr(config.parallel, key)
        if key not in (*DEGREES, "pp_microbatches") and was != value:
            yield f"parallel.{key} {value} instead of {was}"
    if plan.device == "cuda" and not config.train.deterministic:
        yield "without train.deterministic, the order of sums on GPUs is not fixed"
    for name in FACTS:
        was, is_now = getattr(before, name), getattr(start, name)
        if was is not None and is_now is not None and was != is_now:
            yield f"{name} {is_now} instead of {was}"


def _difference(recorded: float | None, replayed: float | None) -> float:
    """Return the difference divided by the smaller value, or infinity if only one of the values is finite."""
    if recorded == replayed:
        return 0.0
    if recorded is None or replayed is None or not recorded or not replayed:
        return math.inf
    return abs(recorded - replayed) / min(abs(recorded), abs(replayed))


def _culprit(
    copy: RunDir, found: Comparison, bad: ComparedStep, attempt: AttemptDir, num_ranks: int
) -> Culprit:
    """Find the ranks that differed first, using values recorded before and after gradient reduction."""
    ranks = range(num_ranks)
    was = [rank_records(attempt, rank, bad.step) for rank in ranks]
    hosts = tuple(str(records[0].get("host", "")) if records else "" for records in was)
    all_hosts = tuple(sorted({host for host in hosts if host}))
    if not bad.is_exact:
        return Culprit(
            (), all_hosts, "individual ranks can be compared only if the replay is exact to the last digit"
        )
    if not all(was):
        return Culprit((), all_hosts, f"the ranks have no records of step {bad.step}")
    # A preempted replay job starts from the beginning, so use the newest attempt that computed the step.
    newest = [copy.attempt(number) for number in reversed(copy.attempt_numbers())]
    now = [next(filter(None, (rank_records(one, rank, bad.step) for one in newest)), []) for rank in ranks]
    num_turns = len(was[0])
    if any(len(records) != num_turns for records in (*was, *now)):
        return Culprit(
            (),
            all_hosts,
            f"some ranks have no record of step {bad.step}, or of the turn of one of its optimizers "
            "(see `Task.turns`)",
        )
    before = [s.step for s in found.steps if s.step < bad.step and s.is_equal and s.attempt == bad.attempt]
    last_equal = max([found.start_step, *before])

    def other(name: str, turn: int = 0) -> list[int]:
        return [rank for rank in ranks if was[rank][turn].get(name) != now[rank][turn].get(name)]

    if bad.step - last_equal > 1 and len(other("loss_sum")) == num_ranks:
        between = f"between steps {last_equal} and {bad.step}, but the steps in between were not recorded"
        return Culprit((), all_hosts, f"the weights began to differ {between}; see train.log_every")
    for turn in range(num_turns):
        # An error in the turn of one optimizer changes the weights that all ranks use in the next turn.
        optimizer = was[0][turn].get("optimizer")
        where = "" if optimizer is None else f", in optimizer turn {turn + 1} of {num_turns} ({optimizer})"
        for name, label in (
            ("loss_sum", "its loss, in the forward pass"),
            ("local_gradient", "its gradient before the reduction, in the backward pass"),
            ("square_sum", "its shard of the gradient after the reduction"),
        ):
            differing = other(name, turn)
            if not differing:
                continue
            text = f"{label}{where}"
            if len(differing) < num_ranks or num_ranks == 1:
                own_hosts = tuple(dict.fromkeys(hosts[rank] for rank in differing))
                return Culprit(tuple(differing), own_hosts, text)
            return Culprit((), all_hosts, f"every rank differs: {text}")
    return Culprit((), all_hosts, "no single rank differs; only the sum over all ranks does")


def rank_records(attempt: AttemptDir, rank: int, step: int) -> list[dict[str, object]]:
    """Return the records of a rank for a step: one per optimizer turn (see `Task.turns`), or one in total.

    The list is empty if the step was not recorded or its records were deleted.
    """
    found = dict[object, dict[str, object]]()
    for record in read_jsonl_reversed(attempt.rank_record(rank)):
        if record.get("step") == step:
            found.setdefault(record.get("turn"), record)
        elif found:
            break
    return list(reversed(found.values()))


def worst_samples(
    copy: RunDir, samples: Mapping[int, Sequence[StepSample]]
) -> list[tuple[int, float | None, StepSample]]:
    """Return (step, loss, sample) for all samples, highest loss first.

    The loss is the mean over the tokens of the sample: infinity if it is not finite, and None for a
    user-defined task.
    """
    lines = (read_record(SampleLosses, record) for record in read_jsonl(copy.path / SAMPLES_FILE))
    losses: dict[int, list[float | str] | list[None]] = {line.step: line.losses for line in lines}
    found = [
        (step, None if loss is None else float(loss), sample)
        for step, own in samples.items()
        for loss, sample in zip(losses.get(step, [None] * len(own)), own, strict=True)
    ]
    return sorted(found, key=lambda item: item[1] or 0.0, reverse=True)
