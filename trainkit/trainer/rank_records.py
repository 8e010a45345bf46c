"""Records what each rank computed by itself, so that `trainkit replay` can name the one that erred.

On the steps that are logged, a rank keeps its share of the loss, a checksum of its gradient before it is
reduced, and the sum of squares of its gradient afterwards. They travel to the host with the step report,
without another copy or collective, and are written to ``attempts/NNN/ranks/rank-NNNN.jsonl`` once a minute.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from logging import getLogger

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainkit.folders import ensure_folder
from trainkit.run.files import append_jsonl, write_atomic
from trainkit.run.rundir import AttemptDir

log = getLogger(__name__)
MAX_BYTES = 2**20
"""A larger file loses its older half."""
MAX_PENDING = 10_000
FLUSH_S = 60.0
SPIKE_RATIO = 3.0
"""A gradient norm of this many times the last one is written at once: what follows may end the process."""
CHECKSUM_BITS = 52
"""What a float64 represents exactly."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class LocalGradient:
    """A checksum of this rank's gradient before its reduction; any changed bit changes it.

    It adds the bits as whole numbers, so it does not depend on the order of the sum.
    """

    def __init__(self) -> None:
        self.is_due = False
        """Whether the gradient of the current step is wanted."""
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, grads: Sequence[Tensor]) -> None:
        """Add gradients that are about to be reduced."""
        if self.is_due:
            self._sums += [
                grad.detach().view(_WORDS[grad.element_size()]).sum(dtype=torch.int64) for grad in grads
            ]

    def take(self, device: torch.device) -> Tensor:
        """The checksum of the step, float64 []; NaN where no gradient is reduced, or not by trainkit."""
        sums, self._sums = self._sums, []
        if not sums:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        total = torch.stack([item.to(device) for item in sums]).sum()
        return (total & ((1 << CHECKSUM_BITS) - 1)).double()


class ObservedReduceScatter:
    """The reduce-scatter of FSDP, which shows the gradient to a `LocalGradient` first."""

    def __init__(self, local_gradient: LocalGradient) -> None:
        self._local_gradient = local_gradient

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._local_gradient.add([input_tensor])
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def observe_reduce_scatter(model: torch.nn.Module, local_gradient: LocalGradient) -> None:
    """Have the gradients of a sharded model be shown before they are reduced."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ObservedReduceScatter(local_gradient))  # type: ignore[arg-type]


class RankRecords:
    """Keeps and writes the records of this rank."""

    def __init__(self, attempt: AttemptDir, rank: int, host: str, local_gradient: LocalGradient) -> None:
        self._file = attempt.rank_record(rank)
        self._host = host
        self._local_gradient = local_gradient
        self.values: list[Tensor] = []
        """The sum of the loss, checksum and sum of squares of the current step, float64 [] each."""
        self._pending: deque[dict[str, object]] = deque(maxlen=MAX_PENDING)
        self._flushed_s = time.monotonic()
        self._last_norm = math.inf

    def begin_step(self, *, is_due: bool) -> None:
        """Begin a step, which is recorded if it is due."""
        self.values, self._local_gradient.is_due = [], is_due

    def keep_loss(self, sums: Tensor) -> None:
        """Keep this rank's share of the loss, the first of the sums."""
        if self._local_gradient.is_due:
            self.values.append(sums.detach().double().view(-1)[0].clone())

    def keep_gradient(self, square_sum: Tensor, device: torch.device) -> None:
        """Keep the checksum of the gradient, and the sum of squares of what this rank has of it reduced."""
        if self._local_gradient.is_due:
            self.values += [self._local_gradient.take(device), square_sum.to(device)]

    def add(self, step: int, grad_norm: float, own: Sequence[float]) -> None:
        """Add the record of a step with the values of `values`; without any, the step is not due."""
        if not own:
            return
        values = dict(zip(("loss_sum", "local_gradient", "square_sum"), own, strict=True))
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._pending.append({"step": step, "host": self._host, **shown})
        is_spike = not grad_norm <= SPIKE_RATIO * self._last_norm
        self._last_norm = grad_norm
        if is_spike or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the pending records; those that cannot be written, as on a full disk, are kept."""
        self._flushed_s = time.monotonic()
        try:
            ensure_folder(self._file.parent, 0o700)
            while self._pending:
                append_jsonl(self._file, self._pending[0])
                self._pending.popleft()
            if self._file.is_file() and self._file.stat().st_size > MAX_BYTES:
                lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
                write_atomic(self._file, "".join(lines[len(lines) // 2 :]))
        except OSError as error:
            log.error(
                f"cannot write {self._file.name} ({error}); {len(self._pending)} records kept in memory"
            )
