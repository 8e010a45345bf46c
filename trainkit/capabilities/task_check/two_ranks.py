"""Tests a task with two ranks on this machine, to find problems that do not occur with a single rank."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import TRAIN
from trainkit.errors import Problem, TrainkitError
from trainkit.plan.launch import Batch, Layout
from trainkit.trainer.build import build_for_task
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.distributed import make_world
from trainkit.trainer.file_optimizer import make_own_optimizers
from trainkit.trainer.metrics import LocalGradient
from trainkit.trainer.own_optimizers import make_own_state
from trainkit.trainer.progress import Progress
from trainkit.trainer.starting_state import check_same_data
from trainkit.trainer.user_code import TRACEBACK_HINT, describe, errors_of_user, problem_of, refusal
from trainkit.trainer.user_task import UserTask

SIZE = 2
TIMEOUT = timedelta(minutes=5)
"""Timeout for a collective."""
DEVICE_BATCH = 2
SHARDS_HINT = (
    "the error may occur only if several ranks shard the model, which parallel.dp_shard: 1 prevents; "
    "see `after_step` in docs/own-task.md"
)


class TwoRanks:
    """Two processes that compute the gradient of one step together when `problems` is called.

    Create this object before this process runs a backward pass, because PyTorch may not support a backward
    pass in a fork of a process that has already run one.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        context = multiprocessing.get_context("fork")
        self._ranks: list[multiprocessing.Process] = []
        self._answers: list[Connection] = []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(
                target=_run, args=(rank, config, Path(folder), there, [*self._answers, here])
            )
            process.start()
            there.close()
            self._ranks.append(process)  # type: ignore[arg-type]
            self._answers.append(here)

    def problems(self) -> list[Problem]:
        """Return the first problem of either rank, or an empty list if both ranks computed the gradient."""
        for answer in self._answers:
            answer.send(True)
        waiting = list(self._answers)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                waiting.remove(ready)
                try:
                    found: Problem | None = ready.recv()
                except EOFError:
                    rank = self._answers.index(ready)
                    message = f"rank {rank} of {SIZE} exited without a result"
                    found = refusal(
                        self._config, message, "check whether the task's code exits the process"
                    ).problem
                if found is not None:
                    return [found]
        return []

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        self._stack.close()


def _run(rank: int, config: RunConfig, folder: Path, answer: Connection, of_others: list[Connection]) -> None:
    """Run as one of the two ranks: wait until the parent process requests the gradient, and compute it."""
    for other in of_others:
        other.close()  # otherwise this rank would not exit when its parent exits
    try:
        answer.recv()
    except EOFError:
        return
    try:
        _compute_gradient(rank, config, folder)
    except TrainkitError as error:
        answer.send(problem_of(config, error))
    except Exception as error:  # the user's code may raise any exception
        who = f"rank {rank} of {SIZE}{', which shard the model,' if _shards(config) else ''}"
        hint = SHARDS_HINT if _shards(config) else TRACEBACK_HINT
        answer.send(refusal(config, f"{who} failed: {describe(error)}", hint).problem)
    else:
        answer.send(None)


def _shards(config: RunConfig) -> bool:
    """Return whether the two ranks shard the model, as a run on several ranks does by default."""
    return config.parallel.dp_shard != 1


def _compute_gradient(rank: int, config: RunConfig, folder: Path) -> None:
    """Compute the gradient of the first step in the same way as a rank of the trainer, and call `after_step`.

    The parameters are not updated.
    """
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
    os.environ |= {name: str(value) for name, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)  # A forked process does not inherit its parent's thread pool.
    task = UserTask(config, None)
    store = dist.FileStore(str(folder / "store"), SIZE)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    # A sharded model also shows errors in after_step().
    layout = Layout(dp_shard=SIZE) if _shards(config) else Layout(dp_replicate=SIZE)
    world = make_world(rank, torch.device("cpu"), layout, TIMEOUT)
    check_same_data(task, world)
    built = build_for_task(task, world, Progress(), LocalGradient())
    optimizers = make_own_optimizers(task, built.weights, layout)
    make_own_state(task, optimizers, world)
    built.forward_backward.begin_step(1)
    size = Batch(DEVICE_BATCH, 1, DEVICE_BATCH * SIZE, 0)
    batches = task.batches(TRAIN, size, world, TrainingState(), None)
    try:
        batch = next(batches)
        for number, turn in enumerate(("",) if optimizers is None else optimizers.turns()):
            micros = batch.of_turn(number, turn).microbatches
            built.forward_backward.accumulate_gradient(micros, torch.ones(()), lambda sums: None)
        sharded = " with a model that two ranks shard" if _shards(config) else ""
        with errors_of_user(config, f"after_step() failed{sharded}"):
            built.after_step()
    finally:
        batches.close()
