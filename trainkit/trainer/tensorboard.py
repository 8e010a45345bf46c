"""The training curve for TensorBoard."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import Any

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


class TensorBoardLog:
    """Writes scalars from a thread of its own: neither the import nor the disk holds up a step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._first_step = first_step
        self._writer: Any = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")

    def write(self, record: dict[str, Any]) -> None:
        """Add the scalars of one metrics record."""
        self._pool.submit(self._add, record)

    def _add(self, record: dict[str, Any]) -> None:
        try:
            self._add_scalars(record)
        except Exception as error:  # nobody waits for this thread: what is not said here is never said
            log.error(f"step {record['step']} is missing in TensorBoard ({error})")

    def _add_scalars(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Steps that an earlier attempt computed beyond its last checkpoint are hidden.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        for name in SCALARS:
            if record.get(name) is not None:
                self._writer.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._pool.shutdown()
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            log.error(f"the end of the curve is missing in TensorBoard ({error})")
