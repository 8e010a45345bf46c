"""Tests which samples a step contains, for any number of ranks and threads."""

import itertools
import threading
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import trainkit.trainer.causal_lm as batches_module
from tests.support.models import ALONE
from trainkit.config import RunConfig
from trainkit.data.order import sample_index
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import Batch, BatchStage, Layout
from trainkit.trainer.causal_lm import IGNORE_LABEL, BatchSource, CausalLM, Microbatch, PrefetchedBatches
from trainkit.trainer.loop import Evaluator
from trainkit.trainer.progress import Progress

SEQ_LEN = 4
DEVICE_BATCH = 2
GLOBAL_BATCH = 16
NAMES = ("tokens", "labels", "sample_keys")


@dataclass
class NumberedSamples:
    """A dataset whose sample i begins with the token 1000 x i."""

    num_samples: int = 50
    seq_len: int = SEQ_LEN

    def sample_index(
        self, positions: npt.NDArray[np.int64], seed: int, shuffle: bool
    ) -> npt.NDArray[np.int64]:
        return sample_index(positions, self.num_samples, seed, shuffle)

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return 1000 * np.asarray(indices)[:, None] + 1 + np.arange(self.seq_len + 1)


def source(dp_rank: int = 0, dp_size: int = 1, dataset: Any = None, **changes: Any) -> BatchSource:
    accumulation = GLOBAL_BATCH // (DEVICE_BATCH * dp_size)
    fields: dict[str, Any] = {
        "dataset": dataset or NumberedSamples(),
        "batch": Batch(DEVICE_BATCH, accumulation, GLOBAL_BATCH, GLOBAL_BATCH * SEQ_LEN),
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "seed": 3,
        "shuffle": True,
        "end": None,
    }
    return BatchSource(**(fields | changes))


def union(position: int, dp_size: int, **changes: Any) -> dict[str, Tensor]:
    """Return the rows of all ranks in a step, ordered by microbatch and then by rank."""
    steps = [source(rank, dp_size, **changes).steps_at(position, 1)[0] for rank in range(dp_size)]
    micros = [step.microbatches[index] for index in range(len(steps[0].microbatches)) for step in steps]
    return {
        name: torch.cat([getattr(m, name) for m in micros]) for name in ("tokens", "labels", "sample_keys")
    }


@pytest.mark.parametrize("position", [0, 16, 40, 1000])
@pytest.mark.parametrize("end", [None, 1010])
@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_ranks_together_read_what_one_process_reads(position, dp_size, end):
    expected = union(position, 1, end=end)
    found = union(position, dp_size, end=end)
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_stand_at_consecutive_positions(shuffle):
    rows = union(32, 2, shuffle=shuffle)
    wanted = sample_index(np.arange(32, 48), 50, seed=3, shuffle=shuffle)
    assert (rows["tokens"][:, 0] // 1000).tolist() == wanted.tolist()
    assert torch.equal(rows["labels"][:, :-1], rows["tokens"][:, 1:]), "labels are the next tokens"
    assert torch.equal(rows["labels"][:, -1], rows["tokens"][:, -1] + 1)


SKIPPED = ((5, 9), (40, 75))


@pytest.mark.parametrize("dp_size", [1, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_a_run_leaves_out(dp_size, num_workers):
    """The other samples, with their random numbers, fill the steps in the same order."""
    kept = [*range(5), *range(9, 40), *range(75, 200)]
    everything = [union(start, 1) for start in range(0, 200, GLOBAL_BATCH)]
    readers = [
        PrefetchedBatches(source(rank, dp_size, skipped=SKIPPED, end=104), GLOBAL_BATCH, num_workers)
        for rank in range(dp_size)
    ]
    for number in range(1, 8):
        steps = [next(reader) for reader in readers]
        count = 8 if number == 6 else 0 if number == 7 else GLOBAL_BATCH
        assert {step.num_samples for step in steps} == {count}
        wanted = kept[number * GLOBAL_BATCH :][:count]
        for name in ("tokens", "sample_keys"):
            micros = zip(*(step.microbatches for step in steps), strict=True)
            rows = torch.cat([getattr(micro, name) for micro in itertools.chain(*micros)])[:count]
            places = (divmod(position, GLOBAL_BATCH) for position in wanted)
            expected = [everything[step][name][row] for step, row in places]
            assert rows.tolist() == [value.tolist() for value in expected]
    for reader in readers:
        reader.close()


def test_a_step_crosses_the_end_of_an_epoch():
    ids = [(union(start, 1)["tokens"][:, 0] // 1000).tolist() for start in range(0, 112, 16)]
    flat = [index for step in ids for index in step]
    assert sorted(flat[:50]) == list(range(50)), "each sample once an epoch"
    assert sorted(flat[50:100]) == list(range(50))
    assert flat[:50] != flat[50:100], "in another order"


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("left", [1, 2, 3, 15, 16])
def test_the_end_of_the_data_is_padded_masked_and_counted(dp_size, left):
    steps = [source(rank, dp_size, end=96 + left).steps_at(96, 1)[0] for rank in range(dp_size)]
    assert {step.num_samples for step in steps} == {left}
    assert sum(step.num_tokens for step in steps) == left * SEQ_LEN
    for step in steps:
        assert len(step.microbatches) == GLOBAL_BATCH // (DEVICE_BATCH * dp_size)
        assert step.num_tokens == sum(int((m.labels != IGNORE_LABEL).sum()) for m in step.microbatches)
        assert all(m.tokens.shape == (DEVICE_BATCH, SEQ_LEN) for m in step.microbatches)
    labels = union(96, dp_size, end=96 + left)["labels"]
    assert (labels[:left] != IGNORE_LABEL).all()
    assert (labels[left:] == IGNORE_LABEL).all()


def test_beyond_the_end_there_is_nothing_to_count():
    batches = PrefetchedBatches(source(end=20), 16, num_workers=0)
    assert next(batches).num_samples == 4
    empty = next(batches)
    assert (empty.num_samples, empty.num_tokens) == (0, 0)


def test_sample_keys_depend_on_seed_and_position_only():
    keys = union(48, 1)["sample_keys"]
    assert torch.equal(union(48, 1, shuffle=False)["sample_keys"], keys)
    assert torch.equal(union(48, 4, dataset=NumberedSamples(7))["sample_keys"], keys)
    assert torch.equal(union(40, 1)["sample_keys"][8:], keys[:8]), "wherever the step begins"
    assert not torch.equal(union(48, 1, seed=4)["sample_keys"], keys)
    assert keys.dtype == torch.int32


def test_sample_keys_are_promises():
    assert source().steps_at(0, 1)[0].microbatches[0].sample_keys.tolist() == [-1330467478, -1561825288]
    assert source().steps_at(2**40, 1)[0].microbatches[0].sample_keys.tolist() == [-1939650490, -363037967]


@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("end", [None, 150])
def test_read_ahead_equals_read_directly(num_workers, end):
    direct = source(1, 2, end=end)
    batches = PrefetchedBatches(direct, 16, num_workers)
    for number, batch in enumerate(islice(batches, 9)):
        [expected] = direct.steps_at(min(16 + number * GLOBAL_BATCH, end or 10**9), 1)
        assert (batch.num_tokens, batch.num_samples) == (expected.num_tokens, expected.num_samples)
        for pair in zip(batch.microbatches, expected.microbatches, strict=True):
            assert all(torch.equal(*(getattr(micro, name) for micro in pair)) for name in NAMES)
    batches.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("step", [0, 2, 3, 6])
def test_a_warmup_of_the_batch_size(num_workers, step):
    """Each step begins where the step before ends, whatever the step at which an attempt begins."""
    warmup = (BatchStage(3, 1, 4), BatchStage(5, 2, 8))
    batch, sizes = Batch(DEVICE_BATCH, 4, GLOBAL_BATCH, 64, warmup=warmup), [4, 4, 4, 8, 8, 16, 16, 6]
    begins = [*itertools.accumulate(sizes, initial=0)]
    readers = [
        PrefetchedBatches(source(rank, 2, batch=batch, end=begins[-1]), begins[step], num_workers, step)
        for rank in range(2)
    ]
    for number in range(step, len(sizes)):
        steps = [next(reader) for reader in readers]
        assert {found.num_samples for found in steps} == {sizes[number]}
        micros = zip(*(found.microbatches for found in steps), strict=True)
        found = torch.cat([micro.tokens for micro in itertools.chain(*micros)])[: sizes[number], 0] // 1000
        positions = np.arange(begins[number], begins[number + 1])
        assert found.tolist() == sample_index(positions, 50, seed=3, shuffle=True).tolist()
    for reader in readers:
        reader.close()


def test_an_error_while_reading_ahead_comes_out_at_its_step(monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_STEPS_PER_READ", 1)

    class Broken(NumberedSamples):
        def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
            if 33 in np.asarray(indices):
                raise OSError("the disk is gone")
            return super().read(indices)

    batches = PrefetchedBatches(source(dataset=Broken(), shuffle=False), 0, num_workers=2)
    assert [next(batches).num_samples, next(batches).num_samples] == [16, 16]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    batches.close()


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_close_in_the_middle_leaves_no_thread(num_workers):
    before = set(threading.enumerate())
    batches = PrefetchedBatches(source(), 0, num_workers)
    next(batches)
    started = set(threading.enumerate()) - before
    assert bool(started) == (num_workers > 0)
    batches.close()
    batches.close()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_reads_ahead_while_nobody_waits():
    class Counting(NumberedSamples):
        reads = 0
        enough = threading.Event()

        def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
            Counting.reads += 1
            if Counting.reads >= 3:
                Counting.enough.set()
            return super().read(indices)

    batches = PrefetchedBatches(source(dataset=Counting()), 0, num_workers=2)
    next(batches)
    assert Counting.enough.wait(timeout=60), "read twice more than was asked for"
    batches.close()


class NumberedTask:
    """A task that has only validation data."""

    val_data = NumberedSamples()
    batches = CausalLM.batches

    def __init__(self, train: dict[str, int]) -> None:
        self.config = RunConfig.model_validate({"train": train})


@pytest.mark.parametrize(("dp", "device_batch_size"), [(1, 4), (2, 4), (16, 2)])
def test_a_validation_has_the_same_samples_on_every_layout(dp, device_batch_size):
    task = NumberedTask({"device_batch_size": device_batch_size, "global_batch_size": 4, "eval_batches": 3})
    plan = SimpleNamespace(
        layout=SimpleNamespace(dp=dp), batch=SimpleNamespace(device_batch_size=device_batch_size)
    )
    evaluators = [
        Evaluator(
            cast(Any, task),
            cast(Any, plan),
            replace(ALONE, rank=rank, size=dp, layout=Layout(dp_shard=dp)),
        )
        for rank in range(dp)
    ]
    read = [
        token // 1000
        for evaluator in evaluators
        for step in islice(evaluator._batches, evaluator._num_batches)
        for micro in step.microbatches
        for token in micro.tokens[micro.labels[:, 0] != IGNORE_LABEL][:, 0].tolist()
    ]
    assert sorted(read) == list(range(12))


@pytest.mark.parametrize("stop_at", [None, 0, 1, 2])
def test_a_validation_ends_soon_after_a_stop(stop_at):
    """The validation ends at most one batch later. Without a stop, the result is the mean over all tokens."""
    plan = SimpleNamespace(layout=SimpleNamespace(dp=1), batch=SimpleNamespace(device_batch_size=4))
    task = NumberedTask({"global_batch_size": 4, "eval_batches": 3})
    stop, tried = StopRequest(), []

    class Passes:
        metric_names = ()

        def loss_sums(self, micro: Microbatch) -> torch.Tensor:
            tried.append(len(tried))
            if stop_at == tried[-1]:
                stop.request("SIGTERM")
            return micro.tokens.numel() * torch.tensor(float(len(tried)))

    built = SimpleNamespace(model_parts=[torch.nn.Linear(1, 1)], forward_backward=Passes())
    found = Evaluator(cast(Any, task), cast(Any, plan), ALONE).run(cast(Any, built), stop, Progress())
    assert (found and found.loss) == (2.0 if stop_at is None else None)
    assert len(tried) == (3 if stop_at is None else min(3, stop_at + 2))
