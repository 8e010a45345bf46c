"""What to change when a model does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainkit.frozen import dataclass
from trainkit.plan.choices import MODES, Choice, batches, choose, is_refused
from trainkit.plan.hardware import Hardware

MOST_NODES = 512
"""More are not tried."""


@dataclass(frozen=True)
class Advice:
    """A change after which it fits."""

    what: str
    """Which change, as it is told."""
    choice: Choice


def advise(asked: Choice, global_batch_size: int | None) -> Iterator[Advice]:
    """Ways to make it fit, the least change first: recomputation, a smaller batch, another layout, more GPUs.

    Offload comes last: it fits more than anything else and is slow.
    """
    yield from _on_the_same_layout(asked, global_batch_size)
    fitting = [
        found for found in choose(asked.work, asked.hardware, global_batch_size) if found.fit == "fits"
    ]
    if fitting:
        yield Advice("another layout", fitting[0])
        return
    more = fewest_gpus(asked, global_batch_size)
    if more is not None:
        yield Advice(f"{more.hardware.num_gpus} GPUs", more)
    offloaded = choose(asked.work.with_parallel(offload=True), asked.hardware, global_batch_size)
    if offloaded and offloaded[0].fit == "fits":
        yield Advice("parallel.offload", offloaded[0])


def _on_the_same_layout(asked: Choice, global_batch_size: int | None) -> Iterator[Advice]:
    mode = asked.work.parallel.activation_checkpointing
    for stronger in MODES[MODES.index(mode) + 1 :]:
        work = asked.work.with_parallel(activation_checkpointing=stronger)
        choice = Choice(work, asked.hardware)
        if not is_refused(work) and choice.fit == "fits":
            yield Advice(f"parallel.activation_checkpointing: {stronger}", choice)
            break
    for smaller in batches(asked.work, global_batch_size):
        work = smaller.with_parallel(activation_checkpointing=mode)
        if work.samples_at_once < asked.work.samples_at_once and not is_refused(work):
            choice = Choice(work, asked.hardware)
            if choice.fit == "fits":
                yield Advice(f"train.device_batch_size: {work.device_batch_size}", choice)
                break


def fewest_gpus(asked: Choice, global_batch_size: int | None) -> Choice | None:
    """The best choice on as few GPUs as do; None when not even many do, or the batch has too few samples."""
    for hardware in _sizes(asked.hardware):
        found = choose(asked.work, hardware, global_batch_size)
        if found and found[0].fit == "fits":
            return found[0]
    return None


def _sizes(hardware: Hardware) -> Iterator[Hardware]:
    """Numbers of GPUs to try: parts of a node, then whole nodes by powers of two and their halves between."""
    size = max(hardware.node_size, hardware.gpu.node_size)
    for num_gpus in range(1, size + 1):
        if size % num_gpus == 0:
            yield replace(hardware, num_gpus=num_gpus, node_size=num_gpus)
    nodes = 2
    while nodes <= MOST_NODES:
        yield replace(hardware, num_gpus=nodes * size, node_size=size)
        if nodes % 2 == 0:
            yield replace(hardware, num_gpus=3 * nodes // 2 * size, node_size=size)
        nodes *= 2
