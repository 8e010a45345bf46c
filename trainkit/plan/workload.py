"""One model on one layout: everything that the memory and the time of a step depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainkit.config.running import ParallelConfig
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.layouts.schedules import TWO_BACKWARDS
from trainkit.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """What one rank of a job works on."""

    shape: ModelShape
    layout: Layout
    parallel: ParallelConfig
    """Its degrees do not count: they are those of `layout`."""
    seq_len: int
    device_batch_size: int
    accumulation_steps: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    device: str = "cuda"
    """``cpu`` has other kernels, which keep more; memory trackers without a GPU see those."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def shards(self) -> int:
        """Over how many ranks parameters, gradients and optimizer state are split, tp and pp aside."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def is_wrapped(self) -> bool:
        """Whether parameters are cast and gathered in units; a single process casts them as it goes."""
        return self.layout.world_size > 1

    @property
    def keeps_gathered(self) -> bool:
        """Whether what was gathered for the forward pass stays until the backward pass.

        Copies have nothing to gather, and a pipeline needs them again for every microbatch.
        """
        copies = self.shards == 1 and self.layout.dp_replicate > 1 and not self.parallel.offload
        return copies or self.parallel.zero == 2 or self.layout.pp > 1

    @property
    def splits_stream(self) -> bool:
        """Whether tensor-parallel ranks share the residual stream."""
        return self.parallel.sequence_parallel and self.layout.tp > 1

    @property
    def samples_at_once(self) -> int:
        """Samples of one pass through a stage."""
        if self.layout.pp == 1:
            return self.device_batch_size
        return self.device_batch_size // self.parallel.pp_microbatches

    @property
    def passes_per_step(self) -> int:
        """Microbatches of one optimizer step on a rank."""
        if self.layout.pp == 1:
            return self.accumulation_steps
        return self.parallel.pp_microbatches * self.accumulation_steps

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients wait for later passes of the step before they are reduced."""
        return self.layout.pp > 1 or (self.accumulation_steps > 1 and self.shards == 1)

    @property
    def adds_up_shards(self) -> bool:
        """Whether every pass reduces its gradients, and shards of earlier passes of the step are there."""
        return self.layout.pp == 1 and self.shards > 1 and self.accumulation_steps > 1

    @property
    def recomputes_for_weights(self) -> bool:
        """Whether activations are computed again for the gradients of weights apart from those of inputs."""
        parallel = self.parallel
        goes_back_twice = self.layout.pp > 1 and parallel.pp_schedule in TWO_BACKWARDS
        return goes_back_twice and parallel.activation_checkpointing == "full"

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one pass that a rank works on."""
        return self.samples_at_once * self.seq_len // self.layout.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.samples_per_step * self.seq_len

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step over all ranks: the global batch size."""
        return self.device_batch_size * self.accumulation_steps * self.layout.dp

    def one_microbatch(self) -> Workload:
        """The same with what a pipeline computes at once as the whole batch of a process."""
        return replace(self, device_batch_size=max(1, self.samples_at_once))

    def with_parallel(self, **changes: object) -> Workload:
        """The same with other values in `parallel`."""
        return replace(self, parallel=self.parallel.model_copy(update=changes))


def parallel_with(parallel: ParallelConfig, batch: Batch) -> ParallelConfig:
    """The section with the number of microbatches that a plan derived."""
    if batch.pp_microbatches is None:
        return parallel
    return parallel.model_copy(update={"pp_microbatches": batch.pp_microbatches})


def workload_of(
    config: RunConfig, shape: ModelShape, layout: Layout, batch: Batch, device: str = "cuda"
) -> Workload:
    """The workload of a config whose layout and batch are known."""
    return Workload(
        shape=shape,
        layout=layout,
        parallel=parallel_with(config.parallel, batch),
        seq_len=config.data.seq_len,
        device_batch_size=batch.device_batch_size,
        accumulation_steps=batch.accumulation_steps,
        dtype=config.precision.dtype,
        optimizer=config.optimizer.name,
        device=device,
    )
