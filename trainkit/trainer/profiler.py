"""Profile a window of steps with torch.profiler, and summarize how the time was spent."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from trainkit.config.running import ProfilerConfig
from trainkit.folders import ensure_folder
from trainkit.formats import JsonObject
from trainkit.run.files import write_json
from trainkit.trainer.distributed import World
from trainkit.trainer.torch_private import dump_memory_history, record_memory_history

log = getLogger(__name__)

KINDS = (
    ("communication", re.compile(r"nccl|c10d", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|cutlass|nvjet|cublas|aten::(mm|addmm|bmm)|xmma", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset|aten::(copy_|fill_|cat)", re.IGNORECASE)),
    ("elementwise", re.compile(r"")),
)
"""Kinds of GPU kernels or CPU operators, each with a pattern for their names; the first matching pattern is
used."""
NUM_OPERATORS = 10
"""Number of operators that the summary lists."""


class ProfileWindow:
    """Profiles the steps from `start_step` to `start_step + num_steps - 1`.

    Writes a Perfetto trace and a summary; with `memory`, also a snapshot for pytorch.org/memory_viz.
    """

    def __init__(self, config: ProfilerConfig, folder: Path, world: World) -> None:
        enabled = config.start_step is not None and world.rank in config.ranks
        self._first = config.start_step if enabled else None
        self._last = (config.start_step or 0) + config.num_steps - 1
        self._file = folder / f"rank-{world.rank:04d}.json"
        self._cuda = world.device.type == "cuda"
        self._memory = config.memory and self._cuda
        if enabled and config.memory and not self._cuda:
            log.warning("profiler.memory has no effect: memory can be recorded only on GPUs")
        self._profile: Any = None
        self._started = 0.0
        self._num_steps = 0

    def before(self, step: int) -> None:
        """Start recording if this step is the first in the window; call this right before the step."""
        if step != self._first:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if self._memory:
            record_memory_history(True)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, with_flops=True)
        self._profile.start()
        self._started = time.perf_counter()

    def after(self, step: int) -> None:
        """Stop recording if this step is the last in the window; call this right after the step."""
        if self._profile is None:
            return
        self._num_steps += 1
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Stop recording and write the results, even if the window is incomplete."""
        if self._profile is None:
            return
        if self._cuda:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - self._started
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            ensure_folder(self._file.parent)
            self._write_memory()
            profile.export_chrome_trace(str(self._file))
            if self._num_steps:
                summary = summary_of(profile.events(), self._num_steps, wall_s, cuda=self._cuda)
                write_json(self._file.with_suffix(".summary.json"), summary)
                shares = [f"{kind} {share:.0%}" for kind, share in summary["share"].items() if share >= 0.005]
                log.info(f"profiled steps took {summary['step_s']:.4f} s each: {', '.join(shares)}")
        except (OSError, RuntimeError) as error:
            log.error(f"cannot write the profile to {self._file} ({error})")
        else:
            log.info(f"profile written to {self._file}; open it at ui.perfetto.dev")

    def _write_memory(self) -> None:
        if self._memory:
            file = self._file.with_suffix(".memory.pickle")
            dump_memory_history(str(file))
            record_memory_history(False)
            log.info(f"memory snapshot written to {file}; open it at pytorch.org/memory_viz")


def summary_of(events: Iterable[Any], num_steps: int, wall_s: float, *, cuda: bool) -> JsonObject:
    """Summarize how the time of the profiled steps was spent, given the events in the profile.

    In the result, `share` has one entry per kind of work, plus ``idle``. Durations are seconds per step, and
    `largest_seconds_per_step` lists the operators that took longest. On a GPU, the events are kernels,
    durations of concurrent kernels are added, and ``idle`` is the time during which no kernel ran. On a CPU,
    the events are operators, excluding the time of the operators that they call, and ``idle`` is the time
    during which no operator ran, for example because Python code ran.
    """
    wanted = "CUDA" if cuda else "CPU"
    by_kind = {kind: 0.0 for kind, _ in KINDS}
    by_name: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type.name != wanted or event.is_user_annotation:
            continue
        own_us = event.self_device_time_total if cuda else event.self_cpu_time_total
        kind = next(kind for kind, pattern in KINDS if pattern.search(event.name))
        by_kind[kind] += own_us / 1e6
        by_name[event.name] = by_name.get(event.name, 0.0) + own_us / 1e6
        spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    busy_s = covered_s(spans) if cuda else sum(by_kind.values())
    by_kind["idle"] = max(0.0, wall_s - busy_s)
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:NUM_OPERATORS]
    return {
        "num_steps": num_steps,
        "step_s": wall_s / num_steps,
        "share": {kind: seconds / wall_s for kind, seconds in by_kind.items()},
        "seconds_per_step": {kind: seconds / num_steps for kind, seconds in by_kind.items()},
        "largest_seconds_per_step": {name: seconds / num_steps for name, seconds in largest},
    }


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the number of seconds that at least one of the (start, end) spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
