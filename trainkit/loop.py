"""Add checkpoints, resuming and stop signals to your own training loop.

::

    from trainkit.loop import attach

    run = attach()                                    # process group, device, run folder, signals
    model = DistributedDataParallel(make_model().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)       # what a checkpoint contains
    for step in run.steps(1000, save_every=100):      # resumes, saves, and handles stop signals
        batch = data[run.sample_indices(step, len(data), batch_size=32)]
        ...
        run.log(loss=loss)

Start the script with ``trainkit submit -- python train.py``, through a launcher, or by hand.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from logging import INFO, Formatter, StreamHandler, getLogger
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not in `__all__`
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from trainkit import __version__
from trainkit.capability import Recorder
from trainkit.config import read_effective
from trainkit.data.order import sample_index
from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, FatalError, UsageError
from trainkit.folders import ensure_folder
from trainkit.job.rank_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RankEnv, find_rank_env
from trainkit.job.signals import StopRequest
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import Batch, LaunchPlan, Layout, RequeuePolicy
from trainkit.plan.workload import Workload
from trainkit.run.end import Action, AttemptEnd, first_of, rank_failures
from trainkit.run.events import best_result
from trainkit.run.files import utc_now, write_atomic
from trainkit.run.process import own_host
from trainkit.run.record import add_attempt, create_job
from trainkit.run.rundir import AttemptDir, RunDir, run_lock
from trainkit.shipped import of_media
from trainkit.trainer.__main__ import record_failure
from trainkit.trainer.checkpoint.loader import choose_checkpoint, load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.state import decode, encode
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import (
    COLLECTIVE_TIMEOUT,
    World,
    broadcast_from_main,
    group_ender,
    join_world,
    make_world,
    record_event,
    select_device,
)
from trainkit.trainer.metrics import TensorBoardLog, logs_written, write_pending
from trainkit.trainer.progress import Progress, RankInfo, Watchdog
from trainkit.trainer.stateless_random import stable_key

log = getLogger(__name__)
GRACE_S = 120.0
"""Seconds that `trainkit cancel` waits for the end of a run that was not started by trainkit."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def attach(run_dir: str | os.PathLike[str] | None = None) -> Attached:
    """Connect this process to its run and to the other ranks; call this once, before building the model.

    Initializes the default process group unless it is already initialized. `run_dir` is the run folder if
    this process was not started by trainkit; the default is ``runs/attached``. All ranks must be able to
    access the run folder. Raises SystemExit(75) if a stop signal arrives before all ranks are connected.
    """
    return Attached(run_dir or "runs/attached")


def _show_log(rank: int) -> None:
    """Print trainkit's log messages on rank 0, unless the program has configured logging itself."""
    root = getLogger("trainkit")
    if rank == 0 and not root.hasHandlers():
        handler = StreamHandler(sys.stdout)
        handler.setFormatter(Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(INFO)


def _join(env: RankEnv, device: torch.device, stop: StopRequest, *, has_launcher: bool) -> World | None:
    """Connect this rank to the other ranks; return its `World`, or None if the ranks agreed to stop.

    `has_launcher` is True if a launcher such as torchrun provides the rendezvous.
    """
    layout = Layout(dp_replicate=env.world_size)
    if not dist.is_initialized():
        if env.world_size > 1 and not has_launcher:
            # `join_world` also reports the hosts of ranks that do not arrive.
            return join_world(env, device, layout, stop)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if env.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return make_world(env.rank, device, layout)


def _own_attempt(run: RunDir, world: World, env: RankEnv) -> AttemptDir:
    """Create the next attempt of a run not started by trainkit, with the files that other commands need."""
    number = 0
    if world.is_main:
        ensure_folder(run.path, parents=True)
        with run_lock(run):
            if not run.job_file.exists():
                create_job(run, backend="local", name=run.name, cwd=str(Path.cwd()), code=None)
            attempt = run.next_attempt()
            number = attempt.number
            attempt.create()
            # `trainkit status` and other commands show values from this plan.
            plan = LaunchPlan(
                backend="launcher",  # also used for a process started from a shell, without a launcher
                num_nodes=env.num_nodes,
                workers_per_node=env.local_world_size,
                device=world.device.type,
                layout=Layout(dp_replicate=env.world_size),
                batch=Batch(0, 0, 0, 0),
                lr=0.0,
                threads_per_worker=None,
                grace_s=GRACE_S,
                reasons={},
                requeue=RequeuePolicy(on=()),
                workload=Workload(_command_by_hand()),
            ).to_text()
            for file in (attempt.plan_file, run.plan_file):
                write_atomic(file, plan)
            add_attempt(run, number, os.getpid(), "by hand")
        record_event(attempt, "started", world_size=env.world_size, nodes=env.num_nodes)
    return run.attempt(broadcast_from_main(number, world))


def _command_by_hand() -> tuple[str, ...]:
    """Return the command line of this process, or torchrun's command line if torchrun started the process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # /proc may hide the processes of other users
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[:-1]
            return tuple(map(os.fsdecode, arguments))
    return tuple(sys.orig_argv)


class Attached:
    """A rank that runs your own training loop; created by `attach`.

    The attributes `rank`, `local_rank`, `world_size` and `device` have the same meaning as in PyTorch.
    `run_dir` is the run folder, and `attempt` is the number of the current attempt, starting at 1.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._stop = stop = StopRequest()
        stop.install()
        env = find_rank_env()
        _show_log(env.rank)
        plan = None
        if RUN_DIR_VARIABLE in os.environ:
            run = RunDir(os.environ[RUN_DIR_VARIABLE])
            attempt = run.attempt(int(os.environ[ATTEMPT_VARIABLE]))
            plan = LaunchPlan.read(attempt.plan_file)
        is_task = plan is not None and plan.per == "gpu"
        wanted = "cuda" if torch.cuda.is_available() and (plan is None or plan.device == "cuda") else "cpu"
        device = select_device(wanted, env.local_rank, is_task=is_task)
        owns_group = not dist.is_initialized()
        world = _join(env, device, stop, has_launcher=plan is None or plan.workload.has_launcher)
        if world is None:
            log.info(f"stopped during start-up ({stop.signal_name or 'by another rank'}): no step trained")
            raise SystemExit(EXIT_STOPPED)
        if plan is None:
            attempt = _own_attempt(RunDir(run_dir), world, env)
        self.rank = env.rank
        self.local_rank = env.local_rank
        self.world_size = env.world_size
        self.device = world.device
        self.run_dir: Path = attempt.run.path
        self.attempt = attempt.number
        self._world = world
        self._attempt = attempt
        self._progress = Progress()
        self._tracked: dict[str, object] = {}
        self._values: dict[str, float | Tensor] = {}
        self._records: deque[dict[str, object]] = deque(maxlen=10_000)
        """Metrics records that have not been written to metrics.jsonl yet."""
        self._board: TensorBoardLog | None = None
        self._recorder = Recorder()
        if self.is_main:
            if plan is None or read_effective(attempt.config_file).logging.tensorboard is not False:
                self._board = TensorBoardLog(attempt.run, None)
            self._recorder = of_media().recorder()(attempt, self._progress, self._board)
        # Use a separate group for small collectives, because a save may be using the checkpoint group at the
        # same time.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._stops: tuple[Tensor, dist.Work] | None = None
        """The result and the handle of the last step's all-reduce, which shows whether any rank has a stop
        signal; None before the first step."""
        self._saver = CheckpointSaver(attempt, world, {}, KeepRule())
        self._rank_info = RankInfo(env.rank, env.node_rank, own_host())
        self._watchdog = Watchdog(attempt, self._rank_info, self._progress, stop)
        self._watchdog.listen()
        self._end_groups = group_ender() if owns_group else None
        self._is_by_hand = plan is None
        self._outcome: Action | None = None
        """The outcome of the training loop, such as "finished"; None while the loop is running."""
        self._report_failures()
        atexit.register(self._close)
        if plan is not None:
            self._watchdog.watch(plan)

    @property
    def is_main(self) -> bool:
        """Return whether this rank is rank 0."""
        return self.rank == 0

    def track(self, **objects: Any) -> None:
        """Add objects to checkpoints under the given names; call this method before `steps`.

        Each object can be:

        - a module, also one wrapped in DistributedDataParallel or sharded with `fully_shard`;
        - an optimizer of a tracked module;
        - any object with `state_dict` and `load_state_dict`, such as a learning rate scheduler, whose state
          consists of tensors and JSON values.
        """
        self._tracked |= objects

    def steps(
        self,
        total: int,
        *,
        save_every: int | None = None,
        log_every: int = 10,
        keep_last: int | None = 3,
        keep: str | None = None,
        seed: int | None = 0,
    ) -> Iterator[int]:
        """Yield step numbers up to `total`, beginning with 1 or with the step after the newest checkpoint.

        - Every `log_every` steps, the logged values are written once the device has computed them.
        - Every `save_every` steps and after the last step, the tracked objects are saved. The newest
          `keep_last` checkpoints are kept; None keeps all checkpoints. With `keep`, a rule such as
          ``last=3,every=1000,at=500,2000,log_spaced``, the checkpoints that the rule keeps stay, and the
          objects are also saved at the steps that ``at`` and ``log_spaced`` name.
        - After a stop signal, the tracked objects are saved, and the process exits with code 75. All ranks
          stop after the same step, at most two steps after the signal.

        Before each step, PyTorch's random number generators are seeded with `seed`, the step and the rank, so
        that a resumed run has the same dropout. If `seed` is None, the generators are not seeded. If you
        leave the loop with ``break``, nothing is saved; call `save` first. Raises TrainkitError if a
        checkpoint does not match the tracked objects or `keep` is not a rule, and CheckpointError if the
        final state cannot be saved.
        """
        if keep is not None and keep_last != KeepRule.last:
            raise UsageError(f"keep_last is {keep_last}, but keep is also given", hint="write last=N in keep")
        rule = KeepRule(last=keep_last) if keep is None else KeepRule.parse(keep)
        self._saver = CheckpointSaver(self._attempt, self._world, {}, rule)
        self._progress.enter("load")
        self._check_tracked()
        step = self._restore()
        if self.is_main:
            values = {"step": step, "total_steps": total, "samples_seen": None, "num_samples": None}
            record_event(self._attempt, "training", **values)
        first = step + 1
        if self._board is not None:
            self._board.begin(first)
        while step < total:
            step += 1
            self._progress.begin_step(step)
            self._progress.enter("forward_backward")
            if seed is not None:
                torch.manual_seed(stable_key(seed, step, self.rank))
            self._values = {}
            began_s = time.monotonic()
            yield step
            self._progress.end_step()
            if step == first and self.is_main:
                record_event(self._attempt, "first_step", step=step)
            if step % log_every == 0 or step in (1, total):
                self._write(step, time.monotonic() - began_s)
            if self._any_stopped_at_last_step() and step < total:
                self._end(step, "stop")
                name = self._stop.signal_name or "by another rank"
                if self.is_main:
                    log.info(f"stopped after step {step} of {total}: asked to stop ({name})")
                self._outcome = "stopped"
                raise SystemExit(EXIT_STOPPED)
            if save_every is not None and step % save_every == 0 and step < total:
                self._save(step, "every_steps", blocking=False)
            elif rule.saves_at(step) and step < total:
                self._save(step, "keep", blocking=False)
        self._end(step, "final")
        self._outcome = "finished"

    def _any_stopped_at_last_step(self) -> bool:
        """Return whether any rank had a stop signal at the previous call, so that this call need not wait."""
        before, value = self._stops, torch.tensor(float(bool(self._stop)))
        work = dist.all_reduce(value, group=self._group, async_op=True)
        assert work is not None
        self._stops = value, work
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    def save(self, step: int) -> None:
        """Save the tracked objects as the state after `step`, synchronously; call this method on every rank.

        Raises CheckpointError if the save fails.
        """
        self._save(step, "asked", blocking=True)
        self._saver.require_saved(step)

    @contextmanager
    def without_hang_detection(self) -> Iterator[None]:
        """Pause hang detection within the block, for example during validation; call this on every rank."""
        with self._progress.within("unwatched"):
            yield

    def log(self, **values: Any) -> None:
        """Set values to log for the current step. `steps` logs the mean of each value over all ranks.

        values: numbers or tensors with one element. Every rank must log the same names.
        """
        self._values |= values

    def log_image(
        self, name: str, image: object, step: int | None = None, caption: str | None = None
    ) -> None:
        """Log an image, which is shown in the report, TensorBoard, MLflow and W&B.

        image: a tensor [height, width] or [channels, height, width], a NumPy array [height, width] or
        [height, width, channels], or a PIL image. Floats must be between 0 and 1, and integers between 0 and
        255. step: defaults to the current step. If a name is logged several times in one step, only the first
        image is kept.

        Any rank may call this method, but only rank 0's images are kept. Raises UsageError if `image` is
        not an image.
        """
        self._recorder.image(name, image, step, caption)

    def log_histogram(self, name: str, values: object, step: int | None = None) -> None:
        """Log a histogram of the numbers in a tensor, array or list; the rules of `log_image` apply."""
        self._recorder.histogram(name, values, step)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Log a text, such as a generated sample; the rules of `log_image` apply."""
        self._recorder.text(name, text, step)

    def sample_indices(
        self, step: int, num_samples: int, batch_size: int, *, seed: int = 0, shuffle: bool = True
    ) -> list[int]:
        """Return the indices of the `batch_size` samples for this rank to train on in a step.

        Each epoch contains every sample once, in a different order. The samples of a step depend only on the
        step number, so checkpoints need not contain a position. Together, the ranks get the same samples as
        long as ``batch_size x world_size`` does not change.
        """
        first = ((step - 1) * self.world_size + self.rank) * batch_size
        found: list[int] = sample_index(range(first, first + batch_size), num_samples, seed, shuffle).tolist()
        return found

    def _write(self, step: int, step_s: float) -> None:
        """Write the mean of each logged value; call this on all ranks, even if nothing was logged."""
        names = sorted(self._values)
        shown = ", ".join(names)
        extremes = torch.tensor([stable_key(shown), -stable_key(shown)])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        if int(extremes[0]) != -int(extremes[1]):
            raise FatalError(
                f"the ranks differ in run.log(): rank {self.rank} has logged {shown or 'nothing'}",
                hint="log the same names on every rank, not only on rank 0",
            )
        if not names:
            return
        numbers = [torch.as_tensor(self._values[name], device=self.device).detach() for name in names]
        sums = torch.stack([number.double().view(()) for number in numbers]).cpu()
        dist.all_reduce(sums, group=self._group)
        if not self.is_main:
            return
        means = {  # write null for non-finite values, as the trainer does
            name: mean if math.isfinite(mean) else None
            for name, mean in zip(names, (sums / self.world_size).tolist(), strict=True)
        }
        if "val_loss" in means:
            record_event(self._attempt, "evaluated", step=step, val_loss=means["val_loss"])
        record = {"step": step, "time": utc_now(), "attempt": self.attempt, **means}
        record["step_s"] = round(step_s, 6)
        self._records.append(record)
        write_pending(self._attempt.run.metrics_file, self._records)
        if self._board is not None:
            self._board.write(step, {**means, "step_s": round(step_s, 6)})

    def _save(self, step: int, reason: str, *, blocking: bool) -> None:
        if not self._tracked:
            return
        with self._progress.within("save"):
            self._saver.finish()
            tensors, values = self._state()
            self._saver.tensors = tensors
            record = {
                "trainkit": __version__,
                "torch": torch.__version__,
                "world_size": self.world_size,
                "progress": {"step": step},
                "state": values,
            }
            wait_for_logs = logs_written(self._recorder, self._board)
            needs_space = reason in ("every_steps", "keep")
            self._saver.save(SaveRequest(step, record, False, reason, wait_for_logs, needs_space), blocking)
            # The next step may change the tensors as soon as this method returns.
            self._saver.wait_until_staged()

    def _end(self, step: int, reason: str) -> None:
        """Save unless `step` has already been saved; raise CheckpointError if saving fails."""
        self._progress.enter("end")
        self._saver.finish()
        if self._tracked and step > 0:
            if self._saver.last_step != step:
                self._save(step, reason, blocking=True)
            self._saver.require_saved(step)
        self._progress.enter("unwatched")  # code after the training loop may take any amount of time

    def _close(self) -> None:
        """Close the logs, staging buffers and process groups; called when Python exits."""
        self._saver.close()
        self._recorder.close()
        if self._board is not None:
            self._board.close()
        if self._is_by_hand and self.is_main:
            self._record_end()
        self._watchdog.close()
        if self._end_groups is not None and dist.is_initialized():
            self._end_groups()
        # If a process group is still referenced when the interpreter exits, the process can abort with
        # SIGABRT.
        gc.collect()

    def _record_end(self) -> None:
        """Record the end of a run that has no supervisor because it was not started by trainkit."""
        code, reason, failure = EXIT_STOPPED, "the program exited before the last step", None
        if self._outcome == "finished":
            code, reason = EXIT_OK, "all steps were trained"
        elif self._outcome == "stopped":
            reason = f"saved after {self._stop.signal_name or 'another rank was asked to stop'}"
        elif first := first_of(
            rank_failures(self._attempt)
        ):  # a failure of another rank also stops this rank
            failure = replace(first[1], more={})
            code, reason = failure.exit_code or EXIT_FAILED, f"rank {failure.rank} failed"
        state: Action = self._outcome or ("stopped" if failure is None else "failed")
        try:
            step, best = self._progress.current.step, best_result(self._attempt.run)
            end = AttemptEnd(state, state, None, code, reason, failure, step=step, best=best, time=utc_now())
            end.write(self._attempt)
        except OSError as error:
            log.error(f"cannot record the end of the run in {self._attempt.end_file} ({error})")
        event = "finished" if state == "finished" else "stopped"
        record_event(self._attempt, event, state=state, exit_code=code, reason=reason)

    def _restore(self) -> int:
        """Load the newest intact checkpoint and return its step; return 0 if there is no checkpoint."""
        chosen = choose_checkpoint(self._attempt, self._world)
        if chosen is None:
            return 0
        checkpoint, manifest = chosen
        found = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
        saved = cast(Mapping[str, TensorStorageMetadata], found)  # all other values are in the manifest
        values = manifest.state
        tensors: dict[str, Tensor] = {}
        for name, item in self._tracked.items():
            if name not in values:
                raise FatalError(
                    f"{name} is tracked, but not in {checkpoint.path.name}",
                    hint="track the same objects as before, or start a new run",
                )
            tensors |= self._wanted(name, item, saved)
        load_tensors(checkpoint, tensors, self._world)
        for name, item in self._tracked.items():
            self._load(item, name, decode(values[name], tensors))
        step = manifest.progress["step"]
        assert isinstance(step, int)
        self._saver.last_step = step
        if self.is_main:
            log.info(f"resumed from {checkpoint.path.name}: step={step}")
            record_event(self._attempt, "resumed", step=step)
        return step

    def _wanted(self, name: str, item: Any, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Return the tensors into which a checkpoint is loaded.

        Modules and optimizers provide their own tensors.
        """
        if not isinstance(item, nn.Module | Optimizer):
            # The saved state may have more entries than the state of the new object.
            found = {path: saved[path] for path in saved if path.startswith(f"{name}.")}
            return {path: torch.empty(at.size, dtype=at.properties.dtype) for path, at in found.items()}
        tensors: dict[str, Tensor] = {}
        encode(name, self._state_of(name, item), tensors)
        if isinstance(item, Optimizer):
            for path in [path for path in tensors if path not in saved]:
                # PyTorch has created state for all parameters, but the checkpoint contains none for
                # parameters that had no gradient.
                tensors.pop(path).zero_()
        return tensors

    def _state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return all tracked objects' tensors, keyed by path, and their encoded states, keyed by name."""
        tensors: dict[str, Tensor] = {}
        values = {}
        for name, item in self._tracked.items():
            values[name] = encode(name, self._state_of(name, item), tensors)
        return tensors, values

    def _check_tracked(self) -> None:
        """Raise TrainkitError for objects that cannot be saved; called before optimizers have any state."""
        for name, item in self._tracked.items():
            if isinstance(item, Optimizer):
                self._model_of(name, item)
            else:
                encode(name, self._state_of(name, item), {})

    def _state_of(self, name: str, item: Any) -> Any:
        if isinstance(item, nn.Module):
            return get_model_state_dict(item)
        if isinstance(item, Optimizer):
            return get_optimizer_state_dict(self._model_of(name, item), item, options=FLAT)
        return item.state_dict()

    def _load(self, item: Any, name: str, state: Any) -> None:
        if isinstance(item, nn.Module):
            set_model_state_dict(item, state)
        elif isinstance(item, Optimizer):
            # State that is missing from the checkpoint remains zero, as set by `_wanted`.
            state = {**self._state_of(name, item), **state}
            set_optimizer_state_dict(self._model_of(name, item), item, state, options=FLAT)
        else:
            item.load_state_dict(state)

    def _model_of(self, name: str, optimizer: Optimizer) -> nn.Module:
        """Return the tracked module that contains all parameters of an optimizer."""
        params = {param for group in optimizer.param_groups for param in group["params"]}
        for item in self._tracked.values():
            if isinstance(item, nn.Module) and params <= set(item.parameters()):
                return item
        raise FatalError(
            f"no tracked module contains all parameters of {name}",
            hint="track the module too: run.track(model=model, optimizer=optimizer)",
        )

    def _report_failures(self) -> None:
        """Record any exception that terminates this process as a possible cause of the run's failure."""
        show = sys.excepthook

        def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, Exception):
                record_failure(self._attempt, self._rank_info, error, self._progress.current)
                self._outcome = "failed"
            else:
                show(kind, error, trace)

        sys.excepthook = record
