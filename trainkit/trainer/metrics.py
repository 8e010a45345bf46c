"""Write training metrics: one record and one log line per logged step, and records for each rank.

On logged steps, each rank keeps its share of the loss, a checksum of its gradient before reduction, and the
sum of squares of its gradient after reduction. From these values, `trainkit replay` can identify a rank that
computed wrong results. The values are copied to the host as part of the step report, so they need no
additional copy or collective. Each rank appends its values to ``attempts/NNN/ranks/rank-NNNN.jsonl`` once a
minute.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.capability import Recorder
from trainkit.extras import install_line
from trainkit.folders import ensure_folder
from trainkit.formats import JsonObject, time_text
from trainkit.plan.gpus import peak_flops
from trainkit.run.files import append_jsonl, utc_now, write_atomic
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.distributed import World
from trainkit.trainer.step_sync import StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = getLogger(__name__)

SCALARS = (
    "loss",
    "val_loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu",
    "mem_gib_peak",
    "data_wait_s",
    "step_s",
)
"""Scalars shown in TensorBoard in addition to the metrics that the run itself logs."""
RECORD_KEYS = frozenset(
    {
        *SCALARS,
        "step",
        "time",
        "attempt",
        "tokens",
        "tokens_per_s_per_gpu",
        "samples_seen",
        "slowest_rank",
        "slowest_host",
        "slowest_rank_s",
        "other_ranks_s",
    }
)
"""Reserved keys in metrics records; metrics of a user's task must have other names."""


class TensorBoardLog:
    """Writes scalars in a thread, so that training does not wait for TensorBoard's import or the disk.

    Images, texts and histograms are written by the calling thread.
    """

    def __init__(self, run: RunDir, first_step: int | None) -> None:
        """`first_step` is the attempt's first step, or None if it is set later by `begin` or `close`."""
        self._run = run
        self._first_step = first_step
        self._held: list[tuple[int, Callable[[SummaryWriter], None]]] | None = (
            [] if first_step is None else None
        )
        self._writer: SummaryWriter | None = None
        self._is_missing = False
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")
        self._newest: Future[None] | None = None
        """The pending write of the most recent values; the pool has a single thread, so earlier values are
        written first."""

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Add the scalars of one step, skipping None values."""

        def add(writer: SummaryWriter) -> None:
            for name, value in scalars.items():
                if value is not None:
                    writer.add_scalar(name, value, step)

        self._newest = self._pool.submit(self._add, step, add)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Add an image, given as a uint8 tensor [height, width, channels]."""
        self._add(step, lambda writer: writer.add_image(name, pixels, step, dataformats="HWC"))

    def text(self, name: str, text: str, step: int) -> None:
        """Add a text for one step."""
        self._add(step, lambda writer: writer.add_text(name, text, step))

    def histogram(self, name: str, sums: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Add a histogram with bins of equal width; `sums` is (lowest, highest, sum, sum of squares)."""
        low, high, total, square_sum = sums
        limits = [low + (high - low) * (index + 1) / len(counts) for index in range(len(counts))]
        values = low, high, sum(counts), total, square_sum, limits, list(counts)
        self._add(step, lambda writer: writer.add_histogram_raw(name, *values, step))

    def _add(self, step: int, add: Callable[[SummaryWriter], None]) -> None:
        if self._is_missing:
            return
        try:
            with self._lock:
                if self._held is not None:
                    self._held.append((step, add))
                else:
                    add(self._opened())
        except ImportError as error:
            self._is_missing = True
            log.info(f"cannot write TensorBoard files: {error} (`{install_line('tensorboard')}` installs it)")
        except Exception as error:  # log the error here, because nothing reads the result of this thread
            log.error(f"cannot write step {step} to TensorBoard ({error})")

    def written(self) -> Callable[[], None]:
        """Return a function that waits until everything added so far is on disk."""
        newest = self._newest

        def wait() -> None:
            if newest is not None:
                newest.result()
            self._flush()

        return wait

    def _flush(self) -> None:
        try:
            with self._lock:
                if self._writer is not None:
                    self._writer.flush()
        except Exception as error:  # training continues without TensorBoard
            log.error(f"cannot write to TensorBoard ({error})")

    def begin(self, first_step: int | None) -> None:
        """Write the values held back until the first step was known; write all later values immediately."""
        with self._lock:
            held, self._held = self._held or [], None
            self._first_step = first_step
        for item in held:
            self._newest = self._pool.submit(self._add, *item)

    def _opened(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._run.tensorboard_dir
            # SummaryWriter would also create missing parent folders. If the run folder was moved, fail here
            # instead of recreating it at the old path.
            ensure_folder(folder)
            # `purge_step` tells TensorBoard to discard the steps that an earlier attempt trained after its
            # last checkpoint.
            self._writer = SummaryWriter(str(folder), purge_step=self._first_step)
        return self._writer

    def close(self) -> None:
        """Write pending values and close the TensorBoard log."""
        if self._held is not None:
            self.begin(None)  # with None, TensorBoard discards no steps of earlier attempts
        self._pool.shutdown()
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            log.error(f"cannot close the TensorBoard log ({error})")


def logs_written(recorder: Recorder, board: TensorBoardLog | None) -> Callable[[], None]:
    """Return a function that waits until everything logged so far on rank 0 is on disk."""
    # Wait for the recorder first, because it writes to the TensorBoard log.
    waits = [recorder.written(), *([] if board is None else [board.written()])]

    def wait() -> None:
        for one in waits:
            one()

    return wait


@dataclass
class _Interval:
    """Totals accumulated since the last metrics record."""

    started: float
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    data_wait_s: float = 0.0
    paused_s: float = 0.0


@dataclass
class Metrics:
    """Collects step reports and writes metrics records on rank 0."""

    attempt: AttemptDir
    world: World
    dtype: str
    total_steps: int
    tensorboard: TensorBoardLog | None
    flops_per_sample: float | None

    def __post_init__(self) -> None:
        device = self.world.device
        uses_gpu = device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device), self.dtype) if uses_gpu else None
        self._unwritten: deque[dict[str, object]] = deque(maxlen=100_000)
        self._interval = _Interval(time.monotonic())

    def start(self) -> None:
        """Start measuring time; call this method right before the first step."""
        self._interval = _Interval(time.monotonic())

    def count(self, report: StepReport, num_samples: int) -> None:
        """Add a step's counts to the current logging interval."""
        self._interval.steps += 1
        self._interval.samples += num_samples
        self._interval.tokens += report.num_tokens
        self._interval.data_wait_s += report.data_wait_s

    def exclude(self, pause_s: float) -> None:
        """Exclude non-training time, such as validation or a synchronous save, from the throughput."""
        self._interval.paused_s += pause_s

    def write(
        self,
        state: TrainingState,
        report: StepReport,
        lr: float,
        validation: StepReport | None,
        observed: Mapping[str, float | str] = {},
    ) -> None:
        """Write the record of the step that just ended (on rank 0 only), and begin a new logging interval.

        `observed` contains the values returned by the `RankObservers`.
        """
        interval, self._interval = self._interval, _Interval(time.monotonic())
        if not self.world.is_main:
            return
        elapsed_s = max(1e-9, self._interval.started - interval.started - interval.paused_s)
        tokens_per_s = interval.tokens / elapsed_s
        mfu = None  # unknown if the FLOPs of the model or of the device are unknown
        if self._peak_flops is not None and self.flops_per_sample is not None:
            flops_per_s = interval.samples / elapsed_s * self.flops_per_sample
            mfu = round(flops_per_s / (self._peak_flops * self.world.size), 4)
        values: JsonObject = {  # None marks a value that is unknown or not finite
            "step": state.step,
            "time": utc_now(),
            "attempt": self.attempt.number,
            # While fp16 training is lowering its loss scale, only the gradient overflows, so the loss can
            # still be recorded.
            "loss": report.loss if state.nonfinite_in_a_row == 0 and math.isfinite(report.loss) else None,
            "grad_norm": report.grad_norm if report.finite else None,
            "lr": lr,
            "tokens": state.tokens_seen,
            "tokens_per_s": round(tokens_per_s, 2),
            "tokens_per_s_per_gpu": round(tokens_per_s / self.world.size, 2),
            "mfu": mfu,
            "step_s": round(elapsed_s / max(1, interval.steps), 6),
            "data_wait_s": round(interval.data_wait_s / max(1, interval.steps), 6),
            "mem_gib_peak": round(peak_memory_gib(self.world.device), 4),
            "samples_seen": state.samples_seen,
        }
        more = _finite(report.metrics)
        if validation is not None:
            more["val_loss"] = validation.loss
            more |= {f"val_{name}": value for name, value in _finite(validation.metrics).items()}
        # Expand `values` twice: the first expansion puts the trainer's keys first, and the second restores
        # the trainer's values if a capability uses the same name.
        self._unwritten.append({**values, **observed, **values, **more})
        self.flush()
        log.info(self._line(values, more.get("val_loss")))
        if self.tensorboard is not None:
            scalars = {name: values.get(name, more.get(name)) for name in SCALARS}
            self.tensorboard.write(state.step, {**scalars, **more})

    def flush(self) -> None:
        """Write the pending metrics records; records that cannot be written stay pending."""
        write_pending(self.attempt.run.metrics_file, self._unwritten)

    def close(self) -> None:
        """Write the pending TensorBoard values and close the log."""
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _line(self, record: JsonObject, val_loss: float | None) -> str:
        eta_s = (self.total_steps - record["step"]) * record["step_s"]
        mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
        loss = "not-finite" if record["loss"] is None else f"{record['loss']:.4f}"
        grad_norm = "not-finite" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        validated = "" if val_loss is None else f" val_loss={val_loss:.4f}"
        return (
            f"step={record['step']}/{self.total_steps} loss={loss}{validated} grad_norm={grad_norm}"
            f" lr={record['lr']:.3g} tokens_per_s={record['tokens_per_s']:,.0f} mfu={mfu}"
            f" mem_gib={record['mem_gib_peak']:.2f} data_wait_s={record['data_wait_s']:.4f}"
            f" step_s={record['step_s']:.3f} eta={time_text(round(eta_s))}"
        )


def write_pending(file: Path, pending: deque[dict[str, object]]) -> None:
    """Append records to a JSON Lines file; if writing fails, as on a full disk, keep them pending."""
    try:
        while pending:
            append_jsonl(file, pending[0])
            pending.popleft()
    except OSError as error:
        log.error(f"cannot write {file.name} ({error}); {len(pending)} records kept in memory")


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return only the finite metrics, because JSON cannot represent NaN and infinity."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated GPU memory, or resident memory if it uses a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


MAX_BYTES = 2**20
"""Size in bytes above which the older half of a rank's record file is deleted."""
MAX_PENDING = 10_000
FLUSH_S = 60.0
SPIKE_RATIO = 3.0
"""Ratio of the gradient norm to the last recorded norm above which records are written immediately, in case a
crash follows."""
CHECKSUM_BITS = 52
"""Number of bits in the checksum; a float64 represents integers of this size exactly."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor's bit patterns (0-dim, int64), which any single changed bit changes."""
    return [
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        .view(_WORDS[tensor.element_size() // (2 if tensor.is_complex() else 1)])
        .sum(dtype=torch.int64)
        for tensor in tensors
    ]


class LocalGradient:
    """A checksum of this rank's gradient before reduction; any single changed bit changes the checksum.

    The checksum is an integer sum of the gradient's bit patterns, so it does not depend on the order of
    summation.
    """

    def __init__(self) -> None:
        self.is_due = False
        """True if the gradient of the current step will be recorded."""
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, grads: Sequence[Tensor]) -> None:
        """Update the checksum with gradients that are about to be reduced."""
        if self.is_due:
            self._sums += bit_sums(grad.detach() for grad in grads)

    def take(self, device: torch.device) -> Tensor:
        """Return the step's checksum (0-dim, float64), or NaN if `add` received no gradients."""
        sums, self._sums = self._sums, []
        if not sums:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        total = torch.stack([item.to(device) for item in sums]).sum()
        return (total & ((1 << CHECKSUM_BITS) - 1)).double()


class RankRecords:
    """Collects and writes the records of this rank."""

    def __init__(self, attempt: AttemptDir, rank: int, host: str, local_gradient: LocalGradient) -> None:
        self._attempt, self._rank = attempt, rank
        self._host = host
        self._local_gradient = local_gradient
        self.values: list[Tensor] = []
        """The current step's loss sum, gradient checksum and gradient sum of squares, each a 0-dim float64
        tensor."""
        self._pending: deque[dict[str, object]] = deque(maxlen=MAX_PENDING)
        self._flushed_s = time.monotonic()
        self._last_norms: dict[int, float] = {}
        """Maps the number of an optimizer turn (0 without turns) to the gradient norm in its latest
        record."""

    def begin_step(self, *, is_due: bool) -> None:
        """Begin a step; `is_due` specifies whether the step will be recorded."""
        self.values, self._local_gradient.is_due = [], is_due

    def keep_loss(self, sums: Tensor) -> None:
        """Keep this rank's share of the loss, which is the first element of `sums`."""
        if self._local_gradient.is_due:
            self.values.append(sums.detach().double().view(-1)[0].clone())

    def keep_gradient(self, square_sum: Tensor, device: torch.device) -> None:
        """Keep the checksum of this rank's gradient, and the sum of squares of its reduced gradient."""
        if self._local_gradient.is_due:
            self.values += [self._local_gradient.take(device), square_sum.to(device)]

    def add(self, step: int, grad_norm: float, own: Sequence[float], turn: int = 0, name: str = "") -> None:
        """Add the record of a step; `own` contains the numbers to record, or is empty for an unrecorded step.

        If optimizers take turns in a step, each turn has its own record: `turn` counts from 1, and `name` is
        the name of the optimizer.
        """
        if not own:
            return
        values = dict(zip(("loss_sum", "local_gradient", "square_sum"), own, strict=True))
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        of_turn = {"turn": turn, "optimizer": name} if turn else {}
        self._pending.append({"step": step, **of_turn, "host": self._host, **shown})
        is_spike = not grad_norm <= SPIKE_RATIO * self._last_norms.get(turn, math.inf)
        self._last_norms[turn] = grad_norm
        if is_spike or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the pending records; records that cannot be written stay pending."""
        self._flushed_s = time.monotonic()
        file = self._attempt.rank_record(self._rank)
        with contextlib.suppress(OSError):
            ensure_folder(file.parent, 0o700)
        write_pending(file, self._pending)
        with contextlib.suppress(OSError):
            if file.stat().st_size > MAX_BYTES:
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                write_atomic(file, "".join(lines[len(lines) // 2 :]))
