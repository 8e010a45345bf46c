"""Writes images, histograms and texts on rank 0 in a background thread."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from logging import getLogger
from threading import BoundedSemaphore

from trainkit.capabilities.media.items import index_file, media_dir
from trainkit.capabilities.media.png import encode_png
from trainkit.capabilities.media.staging import Staged, stage_histogram, stage_image
from trainkit.capability import Recorder
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder
from trainkit.run.events import log_event
from trainkit.run.files import Record, append_jsonl, read_jsonl, utc_now, write_atomic
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.metrics import TensorBoardLog
from trainkit.trainer.progress import Progress

log = getLogger(__name__)

MAX_ITEMS, MAX_BYTES = 10_000, 2**30
"""Limits per run: the number of items, and the total size of images and texts in bytes."""
MAX_NAME, MAX_CAPTION, MAX_TEXT = 128, 1_000, 65_536
"""Maximum lengths of names, captions and texts in characters; longer captions and texts are truncated."""
MAX_PENDING = 32
"""Maximum number of items in the write queue; if the queue is full, logging another item blocks."""
_NOT_IN_A_FILE_NAME = re.compile(r"[^\w.-]+", re.ASCII)


class MediaRecorder(Recorder):
    """Writes items in a background thread; an item's file is written before its line in the index file.

    If a name is logged several times in a step, for example by several microbatches, only the first item is
    kept. During validation in the trainer, names are prefixed with ``val_``, like metric names.
    """

    def __init__(self, attempt: AttemptDir, progress: Progress, board: TensorBoardLog | None) -> None:
        self._attempt, self._progress, self._board = attempt, progress, board
        # The pool starts its thread when the first item is submitted.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="media")
        self._places = BoundedSemaphore(MAX_PENDING)
        self._step, self._names = -1, set[str]()
        self._num_items: int | None = None
        """Number of items in the run; None until the first item is logged."""
        self._num_bytes = 0
        self._is_full = self._has_failed = False
        self._newest: Future[None] | None = None
        """The future of the most recently submitted item. When the future is done, all earlier items have
        been written, because the pool has only one thread."""

    def image(self, name: str, image: object, step: int | None = None, caption: str | None = None) -> None:
        place = self._place(name, step)
        if place is None:
            return
        if caption is not None and not isinstance(caption, str):
            message = f"the caption of image {name!r} must be a str, not a {type(caption).__name__}"
            raise UsageError(message, hint="pass the caption as a str")
        staged = stage_image(f"image {name!r}", image)
        self._submit(lambda: self._write_image(*place, staged, caption))

    def histogram(self, name: str, values: object, step: int | None = None) -> None:
        place = self._place(name, step)
        if place is None:
            return
        staged = stage_histogram(f"histogram {name!r}", values)
        self._submit(lambda: self._write_histogram(*place, staged))

    def text(self, name: str, text: str, step: int | None = None) -> None:
        place = self._place(name, step)
        if place is None:
            return
        if not isinstance(text, str):
            raise UsageError(
                f"text {name!r} must be a str, not a {type(text).__name__}", hint="convert it with str(…)"
            )
        self._submit(lambda: self._write_text(*place, _cut(text, MAX_TEXT)))

    def written(self) -> Callable[[], None]:
        newest = self._newest

        def wait() -> None:
            if newest is not None:
                newest.result()

        return wait

    def close(self) -> None:
        self._pool.shutdown()

    def _place(self, name: str, step: int | None) -> tuple[str, int] | None:
        """Return an item's name and step, or None to drop the item; raise UsageError if they are invalid."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise UsageError(
                f"invalid name for an image, histogram or text: {str(name)[:MAX_NAME]!r}",
                hint=f"a name must be one line of 1 to {MAX_NAME} characters",
            )
        current = self._progress.current
        step = (current.step or 0) if step is None else step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(
                f"{name!r} is logged for the invalid step {step!r}", hint="use an integer that is at least 0"
            )
        if current.phase == "evaluate":
            name = f"val_{name}"
        if step != self._step:
            self._step, self._names = step, set()
        if self._is_full or name in self._names or not self._has_room(step):
            return None
        self._names.add(name)
        return name, step

    def _has_room(self, step: int) -> bool:
        """Count an item and return True, or return False if the run has reached a media limit."""
        if self._num_items is None:
            before = [Record(record) for record in read_jsonl(index_file(self._attempt.run))]
            self._num_items = len(before)
            self._num_bytes = sum(
                (record.count("bytes") or 0) + _num_bytes(record.text("text") or "") for record in before
            )
        if self._num_items >= MAX_ITEMS or self._num_bytes >= MAX_BYTES:
            self._is_full = True
            problem = (
                f"the run has {self._num_items:,} images, histograms and texts with a total of "
                f"{self._num_bytes / 2**20:,.0f} MiB, so no more of them are written; log them less often"
            )
            log.warning(problem)
            log_event(self._attempt.run, self._attempt.number, "media", step=step, reason=problem)
            return False
        self._num_items += 1
        return True

    def _submit(self, write: Callable[[], None]) -> None:
        self._places.acquire()
        self._newest = self._pool.submit(self._run, write)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # log the exception here, because no code reads the future's result
            if not self._has_failed:
                self._has_failed = True
                log.error(f"cannot write images, histograms and texts ({error})")
        finally:
            self._places.release()

    def _write_image(self, name: str, step: int, staged: Staged, caption: str | None) -> None:
        pixels = staged.wait()
        height, width, channels = pixels.shape
        data = encode_png(pixels.numpy().tobytes(), width, height, channels)
        run, number = self._attempt.run, self._attempt.number
        ensure_folder(media_dir(run), 0o700)
        # The digest distinguishes item names that are equal after unsafe characters have been replaced.
        slug, digest = _NOT_IN_A_FILE_NAME.sub("_", name)[:40], hashlib.sha256(name.encode()).hexdigest()[:8]
        file = f"step-{step:08d}-{slug}-{digest}-{number:03d}.png"
        write_atomic(media_dir(run) / file, data)
        self._num_bytes += len(data)
        values: dict[str, object] = {"file": file, "width": width, "height": height, "bytes": len(data)}
        if caption:
            values["caption"] = _cut(caption, MAX_CAPTION)
        self._index(name, "image", step, values)
        if self._board is not None:
            self._board.image(name, pixels, step)

    def _write_histogram(self, name: str, step: int, staged: Staged) -> None:
        low, high, total, square_sum, num_other, *counts = staged.wait().tolist()
        is_known = math.isfinite(low) and math.isfinite(high)
        values = {
            "low": low if is_known else None,
            "high": high if is_known else None,
            "counts": [int(count) for count in counts],
            "not_finite": int(num_other),
        }
        self._index(name, "histogram", step, values)
        if self._board is not None and is_known:
            self._board.histogram(name, (low, high, total, square_sum), counts, step)

    def _write_text(self, name: str, step: int, text: str) -> None:
        self._num_bytes += _num_bytes(text)
        self._index(name, "text", step, {"text": text})
        if self._board is not None:
            self._board.text(name, text, step)

    def _index(self, name: str, kind: str, step: int, values: dict[str, object]) -> None:
        record = {
            "step": step,
            "time": utc_now(),
            "attempt": self._attempt.number,
            "name": name,
            "kind": kind,
        }
        append_jsonl(index_file(self._attempt.run), {**record, **values})


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length:,} more characters)"
