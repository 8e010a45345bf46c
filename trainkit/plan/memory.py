"""How much memory a step takes on the GPU that needs most, and what for. Pure.

Parameters, gradients and optimizer state are float32 and split as ZeRO does (arXiv 1910.02054): 4, 4 and,
for AdamW, 8 bytes a parameter over ``dp_shard x cp x tp x pp`` ranks. The rest comes and goes, so a step is
looked at in a few moments, of which the worst one counts.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cached_property

from trainkit.frozen import dataclass
from trainkit.plan.moments import Moments, Parts
from trainkit.plan.schedules import InFlight, worst_in_flight
from trainkit.plan.weights import held_by, local_counts
from trainkit.plan.workload import Workload


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, moment by moment."""

    pp_rank: int
    moments: dict[str, Parts]
    """``loss``: its backward pass begins; ``backward``: that of a block; ``weights``: that of weights alone;
    ``reduce``: the gradients that are reduced last; ``update``: the optimizer's step."""

    @cached_property
    def worst(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: self.moments[moment].total)

    @cached_property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self.moments[self.worst].total

    @property
    def at_worst(self) -> Parts:
        """What the peak consists of."""
        return self.moments[self.worst]

    @property
    def largest(self) -> Parts:
        """The most that each part takes at any moment; they do not all come at once."""
        each = zip(*(astuple(parts) for parts in self.moments.values()), strict=True)
        return Parts(*(max(values) for values in each))


def memory_of(work: Workload) -> Memory:
    """The memory of the rank that needs most."""
    return max((rank_memory(work, rank) for rank in ranks_to_look_at(work)), key=lambda found: found.peak)


def ranks_to_look_at(work: Workload) -> list[int]:
    """The ends of a pipeline, and the first of its ranks that has most layers."""
    pp, schedule = work.layout.pp, work.parallel.pp_schedule
    layers = [held_by(rank, pp, schedule, work.shape.num_layers).num_layers for rank in range(pp)]
    return sorted({0, layers.index(max(layers)), pp - 1})


def rank_memory(work: Workload, pp_rank: int) -> Memory:
    """The memory of one rank of the pipeline; the others of its stages need as much."""
    held = held_by(pp_rank, work.layout.pp, work.parallel.pp_schedule, work.shape.num_layers)
    counts = local_counts(work.shape, held, work.layout)
    found: dict[str, Parts] = {}
    for in_flight in _in_flight(work, pp_rank):
        rank = Moments(work, held, counts, in_flight)
        moments = {"backward": rank.backward(), "update": rank.update()}
        if held.has_head:
            moments["loss"] = rank.loss()
        if work.is_wrapped:
            moments["reduce"] = rank.reduce()
        if work.recomputes_for_weights:
            moments["weights"] = rank.weights()
        for name, parts in moments.items():
            found[name] = max(parts, found.get(name, parts), key=lambda item: item.total)
    return Memory(pp_rank, found)


def _in_flight(work: Workload, pp_rank: int) -> list[InFlight]:
    """What waits for its backward pass at the times at which a rank may hold most."""
    pp = work.layout.pp
    if pp == 1:
        return [InFlight(summed=int(work.accumulates))]
    return worst_in_flight(work.parallel.pp_schedule, pp, pp_rank, work.passes_per_step)
