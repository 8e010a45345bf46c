"""Decide which checkpoints of a run are kept, and at which steps the rule itself requires a save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.config.running import CheckpointConfig
from trainkit.errors import UsageError
from trainkit.run.manifest import Checkpoint, Manifest

_HINT = (
    "use last=3,every=1000,at=500,2000,log_spaced,best=2, or some of these; last=all keeps all checkpoints"
)


@dataclass(frozen=True)
class KeepRule:
    """The rule in `checkpoint.keep`; a checkpoint is kept if at least one part of the rule keeps it."""

    last: int | None = 3
    """The number of newest checkpoints to keep; None keeps all checkpoints."""
    every: int | None = None
    """Keep the first checkpoint at or after each multiple of this number of steps."""
    at: tuple[int, ...] = ()
    log_spaced: bool = False
    """Keep the checkpoints of steps 1, 2, 4, 8 and so on, as in Pythia (https://arxiv.org/abs/2304.01373)."""
    best: int = 1
    """The number of checkpoints with the best values of `checkpoint.best_metric` to keep."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> KeepRule:
        """Return the rule that a config defines with `keep` or `keep_last`."""
        keep = config.keep
        if keep is None:
            return cls(last=config.keep_last)
        return cls(keep.last, keep.every, keep.at, keep.log_spaced, keep.best)

    @classmethod
    def parse(cls, text: str) -> KeepRule:
        """Return the rule in a text such as ``last=3,every=1000,at=500,2000``; raise UsageError."""
        found: dict[str, int | None] = {}
        at: list[int] = []
        name, log_spaced = "", False
        for item in text.split(","):
            before, equals, value = item.strip().partition("=")
            # A number without a name continues the list of `at`.
            name, value = (before, value) if equals or not before.isdecimal() else (name, before)
            is_count = value.isdecimal() and int(value) > 0
            if name == "log_spaced" and value in ("", "true"):
                log_spaced = True
            elif name == "at" and is_count:
                at.append(int(value))
            elif name in ("last", "every", "best") and name not in found and is_count:
                found[name] = int(value)
            elif (name, value) == ("last", "all"):
                found[name] = None
            else:
                part = item.strip() or "an empty part"
                message = f"the rule {text!r} for keeping checkpoints is not valid: {part}"
                hint = f"use last={text}" if text.isdecimal() else _HINT
                raise UsageError(message, hint=hint)
        return cls(
            last=found.get("last", cls.last),
            every=found.get("every"),
            at=tuple(at),
            log_spaced=log_spaced,
            best=found.get("best") or cls.best,
        )

    @property
    def requires_saves(self) -> bool:
        """Return whether `saves_at` may return True."""
        return bool(self.at) or self.log_spaced

    def saves_at(self, step: int) -> bool:
        """Return whether the rule requires a save after a step, even if no other key requires one."""
        return step in self.at or (self.log_spaced and step > 0 and step & (step - 1) == 0)

    def kept(
        self, steps: Iterable[int], *, values: Mapping[int, float], always: Collection[int] = ()
    ) -> set[int]:
        """Return the steps of the checkpoints to keep.

        `values` maps steps to values of the best metric, where lower values are better; steps without a value
        are missing. The steps in `always` are kept regardless of the rule.

        The result does not depend on which other checkpoints were already deleted by the same rule.
        """
        ordered = sorted(steps)
        if self.last is None:
            return set(ordered)
        ranked = sorted((values[step], step) for step in ordered if step in values)
        found = {*ordered[-self.last :], *(step for _, step in ranked[: self.best])}
        for before, step in zip([0, *ordered], ordered, strict=False):
            passed = self.every is not None and step // self.every > before // self.every
            if passed or self.saves_at(step) or step in always:
                found.add(step)
        return found

    def kept_for_ever(self, total_steps: int) -> int:
        """Return the number of checkpoints that stay until the end because of their steps."""
        found = {step for step in self.at if step <= total_steps}
        if self.every is not None:
            found |= set(range(self.every, total_steps + 1, self.every))
        if self.log_spaced:
            found |= {1 << bits for bits in range(total_steps.bit_length())}
        return len(found)

    def most_kept(self, total_steps: int | None, *, has_best: bool) -> int | None:
        """Return the maximum number of checkpoints on disk, including one that is being written.

        Returns None if the rule keeps a number of checkpoints that depends on an unknown number of steps.
        """
        if self.last is None or (total_steps is None and (self.every or self.log_spaced)):
            return None
        steps = max(self.at, default=0) if total_steps is None else total_steps
        return self.last + 1 + self.best * has_best + self.kept_for_ever(steps)

    def fewest(self, config: CheckpointConfig, total_steps: int | None) -> int:
        """Return a lower bound of the number of checkpoints at the end, if `most_kept` is unknown.

        Saves that are triggered by epochs, by time or after validations are not counted.
        """
        if total_steps is None:
            return self.last or 1
        by_rule = self.kept_for_ever(total_steps)
        return max(by_rule, -(-total_steps // config.every_steps) if config.every_steps else 1)

    def text(self) -> str:
        """Return the rule in the form that `parse` accepts, without parts that have no effect."""
        parts = [f"last={'all' if self.last is None else self.last}"]
        parts += [] if self.every is None else [f"every={self.every}"]
        parts += [f"at={','.join(map(str, self.at))}"] if self.at else []
        parts += ["log_spaced"] if self.log_spaced else []
        return ",".join([*parts, *([] if self.best == 1 else [f"best={self.best}"])])


def obsolete(
    checkpoints: Iterable[Checkpoint],
    rule: KeepRule,
    *,
    best_step: int | None,
    pinned: Collection[int] = (),
    values: Mapping[int, float] | None = None,
) -> list[Checkpoint]:
    """Return the checkpoints to delete, oldest first.

    The checkpoint that the symlink `best` points to and the `pinned` checkpoints are always kept. `values` is
    described in `KeepRule.kept`.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    always = {*pinned, *([] if best_step is None else [best_step])}
    kept = rule.kept((one.step for one in ordered), values=values or {}, always=always)
    return [checkpoint for checkpoint in ordered if checkpoint.step not in kept]


def best_values(checkpoints: Sequence[Checkpoint]) -> dict[int, float]:
    """Return the values of the best metric in the manifests, by step, such that lower values are better.

    Only values that can be compared with the newest one are returned: a value counts if it has the same
    metric and the same validation data. Checkpoints whose manifest cannot be read are left out.
    """
    found: dict[int, float] = {}
    newest: tuple[object, ...] | None = None
    for checkpoint in sorted(checkpoints, key=lambda item: item.step, reverse=True):
        try:
            manifest: Manifest = checkpoint.manifest()
        except (OSError, ValueError):
            continue
        value, mode = manifest.metric.get("value"), manifest.metric.get("mode")
        kind = (manifest.metric.get("name"), mode, manifest.val_fingerprint)
        if isinstance(value, float) and kind == (newest or kind):
            newest = kind
            found[checkpoint.step] = -value if mode == "max" else value
    return found
