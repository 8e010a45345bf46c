"""Provides folders of benches with made-up runs, with curves, ends and profiles like a trainer's."""

from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.sweeps import BEGAN, stamp
from trainkit.capabilities.bench.run_bench import LAYOUT, Bench, BenchLength, BenchRun
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import DEGREES, layout_name
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.group import GroupRecord, Trial
from trainkit.run.process import ProcessId, own_host
from trainkit.run.rundir import RunDir

LENGTH = BenchLength(steps=10, warmup=2)
TWO = (Layout(1, 2), Layout(1, 1, tp=2))


def made_up_bench(folder: Path, layouts: tuple[Layout, ...] = TWO, repeats: int = 1) -> Bench:
    """Create a local bench of layouts that was cancelled before anything started."""
    folder.mkdir(exist_ok=True)
    runs, trials = [], []
    for index, (repeat, layout) in enumerate(product(range(1, repeats + 1), layouts)):
        values = {LAYOUT: layout_name(layout, {})}
        degrees = {degree: getattr(layout, degree) for degree in DEGREES}
        runs.append(BenchRun(str(index), values, repeat, degrees, 4, 4, []))
        trials.append(Trial(index, {**values, "repeat": repeat} if repeats > 1 else values))
    keys = list(trials[0].values)
    ended = ProcessId(own_host(), "an earlier one", 1)
    record = GroupRecord(
        name="small-layouts", backend="local", keys=keys, process=ended, cancelled_at=stamp(0)
    )
    write_json(folder / "sweep.json", record.to_dict(trials))
    bench = Bench(
        *("layouts", "small.yaml", "local", "cpu", LENGTH, repeats, [LAYOUT], [], runs, {}, [], folder)
    )
    bench.write()
    return bench


def train_made_up(run: RunDir, num_steps: int = 10, step_s: float = 0.5, **end: Any) -> None:
    """Write the files of a run with steps of this duration, one wait for data, and an end."""
    attempt = run.attempt(1)
    (run.path / "checkpoints" / "step-00000010").mkdir(parents=True)
    attempt.create()
    run.config_file.write_text("name: small\n")
    for step in range(1, num_steps + 1):
        # step 1 allocates memory, and steps after 7 are profiled
        seconds = step_s * (100 if step == 1 else 7 if step > 7 else 1)
        record = {
            **{"step": step, "time": stamp(step), "attempt": 1, "loss": 5.0 - step / 10},
            **{"tokens_per_s": 1024 / seconds, "tokens_per_s_per_gpu": 512 / seconds, "mfu": None},
            **{"step_s": seconds, "data_wait_s": 0.01 * step, "mem_gib_peak": 1.0 + step / 100},
            "samples_seen": 16 * step,
        }
        append_jsonl(run.metrics_file, record)
    write_json(
        run.job_file,
        {"name": "small", "attempts": [{"attempt": 1, "job_id": "local-1", "host": "elsewhere", "pid": 1}]},
    )
    ended = {"state": "finished", "action": "stopped", "exit_code": 0, "reason": "all ranks", "verdict": None}
    write_json(attempt.end_file, {**ended, "time": stamp(num_steps), **end})


def profile_made_up(run: RunDir, rank: int, *waits: tuple[float, float]) -> None:
    """Write the profile of a rank that computes for 20 s after step 7, with waits for gloo in between.

    `waits` are the begin and the end of each wait, in seconds after step 7.
    """
    base = int((BEGAN + timedelta(seconds=7)).timestamp() * 1e9)
    cuts = [0.0, *(moment for wait in waits for moment in wait), 20.0]
    work = [_event("aten::mm", begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    talk = [_event("c10d::allreduce_", begin, end) for begin, end in waits]
    file = run.attempt(1).rank_profile(rank)
    file.parent.mkdir(exist_ok=True)
    write_json(file, {"traceEvents": [*work, *talk], "baseTimeNanoseconds": base})


def _event(name: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, **times}
