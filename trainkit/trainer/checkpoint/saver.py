"""Save checkpoints: stage tensors in memory, write files in the background, and publish with a rename."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from trainkit.errors import CheckpointError
from trainkit.formats import size
from trainkit.plan.keep import KeepRule, best_values, obsolete
from trainkit.run.files import write_json
from trainkit.run.manifest import (
    MANIFEST_VERSION,
    SEAL,
    Checkpoint,
    FileSum,
    best_step,
    num_bytes,
    point_best_at,
    published,
    seal,
)
from trainkit.run.pins import delete, pins
from trainkit.run.rundir import MANIFEST_NAME, PARTIAL_SUFFIX, AttemptDir
from trainkit.trainer.checkpoint.storage import HashingWriter, JoiningSavePlanner
from trainkit.trainer.distributed import World, broadcast_from_main, record_event
from trainkit.trainer.split_master import SplitMaster
from trainkit.trainer.torch_private import make_stager

log = getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """A request to save a checkpoint; `record` is added to the checkpoint's manifest."""

    step: int
    record: Mapping[str, object]
    is_best: bool
    reason: str
    wait_for_logs: Callable[[], None] | None = None
    """Blocks until all logs up to this step are on disk; called before the checkpoint is published.

    A run that resumes from the checkpoint does not repeat earlier steps, so their log records must not be
    lost.
    """
    needs_space: bool = False
    """Whether the save is left out, like a failed save, if it does not fit on the disk."""


class CheckpointSaver:
    """Saves the checkpoints of one attempt; all ranks must call every method, at the same step."""

    def __init__(
        self,
        attempt: AttemptDir,
        world: World,
        tensors: Mapping[str, Tensor | SplitMaster],
        keep: KeepRule,
    ) -> None:
        self._attempt = attempt
        self._run = attempt.run
        self._world = world
        self.tensors = tensors
        self._keep = keep
        self._staging: Future[None] | None = None
        self._allocating: Future[Any] | None = None
        self._has_buffers = True
        self._pending: tuple[SaveRequest, Path, Future[Any], float] | None = None
        self.last_step: int | None = None
        """Step of the newest checkpoint known to be published; None if there is none."""
        self._problem = ""
        """Why the latest save failed; empty if it succeeded."""

    def allocate_buffers(self) -> None:
        """Allocate the staging buffers in the background, so that the first save is as fast as later ones."""
        allocating = self.stager.stage(dict(self.tensors))
        assert isinstance(allocating, Future)
        self._allocating = allocating

    def save(self, request: SaveRequest, blocking: bool) -> None:
        """Save a checkpoint; if `blocking`, return only after the checkpoint is published.

        A failed save is only logged: training continues, and earlier checkpoints are not deleted.
        """
        self.finish()
        if request.step == self.last_step:
            return
        if self._run.follow():
            log.warning(f"the run folder was moved to {self._run.path}")
        if request.needs_space and (problem := broadcast_from_main(self._shortage(), self._world)):
            self._problem = problem
            self._report_failure(request.step)
            return
        if self._world.is_main:
            record_event(self._attempt, "checkpoint_begin", step=request.step, reason=request.reason)
        target = self._run.checkpoint_dir(request.step)
        unfinished = target.with_name(f"{target.name}.attempt-{self._attempt.number:03d}{PARTIAL_SUFFIX}")
        started = time.monotonic()
        blocking = blocking or not self._can_stage()
        from_device = blocking and self._world.device.type == "cuda"
        publish = partial(self._publish, request, unfinished, target)
        writer = HashingWriter(unfinished, publish, from_device=from_device)
        group, alone = self._world.checkpoint_group, not self._world.distributed
        future: Future[Any] = Future()
        if blocking:
            try:
                saved = state_dict_saver.save(
                    dict(self.tensors),
                    storage_writer=writer,
                    planner=JoiningSavePlanner(),
                    process_group=group,
                    no_dist=alone,
                )
                future.set_result(saved)
            # CheckpointException is listed separately because it is not derived from Exception.
            except (Exception, CheckpointException) as error:
                future.set_exception(error)
        else:
            if self._world.device.type == "cuda":
                # Wait for the optimizer's kernels, because the stager copies the tensors on a separate
                # stream.
                torch.cuda.current_stream().synchronize()
            response = state_dict_saver.async_save(
                dict(self.tensors),
                storage_writer=writer,
                planner=JoiningSavePlanner(),
                process_group=group,
                no_dist=alone,
                async_stager=self.stager,
            )
            assert isinstance(response, AsyncSaveResponse)
            self._staging = response.staging_completion
            future = response.upload_completion
        self._pending = (request, unfinished, future, started)
        if blocking:
            self.finish()

    def _publish(
        self, request: SaveRequest, unfinished: Path, target: Path, files: Mapping[str, FileSum]
    ) -> None:
        """Publish a checkpoint: write the manifest, which lists all ranks' files, then rename the folder.

        The coordinator publishes in the thread that writes the files, so that training does not wait.
        """
        if request.wait_for_logs is not None:
            request.wait_for_logs()
        manifest = {
            "version": MANIFEST_VERSION,
            "step": request.step,
            **request.record,
            "files": {name: asdict(item) for name, item in sorted(files.items())},
        }
        manifest[SEAL] = seal(manifest)
        write_json(unfinished / MANIFEST_NAME, manifest)
        _sync_folder(unfinished)
        unfinished.rename(target)
        try:
            _sync_folder(target.parent)
            if request.is_best:
                point_best_at(Checkpoint(target, request.step))
            self._delete_obsolete(target.parent)
        except OSError as error:
            # The checkpoint is already published, so only log this error.
            log.error(f"cannot clean up after checkpoint {target.name}: {error}")

    def _delete_obsolete(self, folder: Path) -> None:
        """Delete the checkpoints that the rule does not keep and that nobody has pinned."""
        there = published(folder)
        # The manifests need not be read if the symlink `best` alone shows what to keep.
        values = best_values(there) if self._keep.best > 1 else None
        held = pins(self._run)
        delete(
            self._run,
            obsolete(there, self._keep, best_step=best_step(folder), pinned=held, values=values),
        )

    @property
    def is_staging(self) -> bool:
        """Return whether a save may still copy the state; before a step, all ranks return the same value."""
        return self._staging is not None

    def wait_until_staged(self) -> None:
        """Wait until the state has been copied and may be modified; call this before each optimizer step."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def poll(self) -> None:
        """Report the result of the save in progress if the save has finished; never block."""
        if self._pending is not None and self._pending[2].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and report its result."""
        if self._pending is None:
            return
        request, unfinished, future, started = self._pending
        self._pending = self._staging = None
        error = future.exception()
        self._problem = "" if error is None else _root_cause(error)
        if error is None:
            self.last_step = request.step
        if not self._world.is_main:
            return
        saved, duration_s = f"checkpoint step={request.step}", time.monotonic() - started
        if error is None:
            best = " best" if request.is_best and request.reason != "best" else ""
            name = self._run.checkpoint_dir(request.step).name
            log.info(f"{saved} reason={request.reason}{best} save_s={duration_s:.2f} {name}")
            fields = {"step": request.step, "reason": request.reason, "best": request.is_best}
            record_event(self._attempt, "checkpoint_commit", **fields, save_s=round(duration_s, 3))
            return
        # Remove the incomplete files: they cannot be used, and the save may have failed because the disk is
        # full.
        shutil.rmtree(unfinished, ignore_errors=True)
        self._report_failure(request.step)

    def _report_failure(self, step: int) -> None:
        if self._world.is_main:
            text = f"checkpoint step={step} could not be saved: {self._problem}"
            log.error(f"{text}; earlier checkpoints are unaffected")
            record_event(self._attempt, "checkpoint_failed", step=step, error=self._problem)

    def _shortage(self) -> str:
        """Return on rank 0 why the next save would not fit on the disk, or "" if it fits or is unknown.

        The save is expected to need as many bytes as the newest checkpoint.
        """
        if not self._world.is_main:
            return ""
        try:
            there = published(self._run.checkpoints_dir)
            need = num_bytes(there[-1]) if there else 0
            free = shutil.disk_usage(self._run.checkpoints_dir).free
        except OSError:
            return ""  # The save itself reports what is wrong with the disk.
        if need <= free:
            return ""
        run = self._run.quoted
        # These checkpoints are only named: the rule keeps them, so the user decides.
        best = best_step(self._run.checkpoints_dir)
        least = obsolete(there, KeepRule(last=1), best_step=best, pinned=pins(self._run))
        names = ", ".join(item.path.name for item in least)
        advice = "free some disk space"
        if least:
            advice += f", or stop the run and delete {names} with `trainkit ckpt prune {run} --keep-last 1`"
        return f"it needs {size(need)}, but only {size(free)} are free, so the save was not tried; {advice}"

    def require_saved(self, step: int) -> None:
        """Raise CheckpointError unless the checkpoint of this step has been published."""
        if self.last_step != step:
            why = f": {self._problem}" if self._problem else ""
            raise CheckpointError(
                f"the state after step {step} could not be saved to {self._run.checkpoints_dir}{why}",
                hint="fix the cause, then `trainkit resume` continues from the previous checkpoint",
            )

    def mark_best(self) -> None:
        """Point the symlink `best` at the newest published checkpoint."""
        assert self.last_step is not None
        if not self._world.is_main:
            return
        try:
            point_best_at(Checkpoint(self._run.checkpoint_dir(self.last_step), self.last_step))
        except OSError as error:
            log.error(f"cannot point `best` at step {self.last_step} ({error})")

    def close(self) -> None:
        """Release the staging buffers and stop the staging thread; call this after the last save finishes."""
        if "stager" in vars(self):
            self.stager.close()

    def _can_stage(self) -> bool:
        """Return whether all ranks could allocate staging buffers; every rank must call this."""
        if self._allocating is not None:
            error, self._allocating = self._allocating.exception(), None
            missing = torch.tensor(int(error is not None))
            if self._world.distributed:
                dist.all_reduce(missing, group=self._world.checkpoint_group)
            self._has_buffers = not missing
            if not self._has_buffers and (error is not None or self._world.is_main):
                reason = "on another rank" if error is None else _root_cause(error)
                log.warning(
                    f"not enough memory for asynchronous saves ({reason}): every save blocks training"
                )
        return self._has_buffers

    @cached_property
    def stager(self) -> DefaultStager:
        """Return the stager; all saves share it, so that its buffers are reused."""
        cuda = self._world.device.type == "cuda"
        return make_stager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )


def _root_cause(error: BaseException) -> str:
    """Return the error of the lowest-numbered failed rank as a single line."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
