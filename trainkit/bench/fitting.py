"""The batch of a process on a layout: as the config has it, or as near to that as the layout allows. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError, Problem
from trainkit.frozen import dataclass
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import divisors, layout_problems
from trainkit.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Site:
    """What all layouts of a bench have in common."""

    world_size: int
    node_size: int
    """Processes of a node."""
    shape: ModelShape
    seq_len: int
    device_batch_size: int
    """As the config has it."""
    global_batch_size: int
    """Samples of a step, the same on every layout."""


@dataclass(frozen=True)
class FittedBatch:
    """What one process reads at once on a layout."""

    device_batch_size: int
    microbatches: int
    notes: tuple[str, ...]
    """What differs from the config, and why."""


def fit(layout: Layout, parallel: ParallelConfig, site: Site, microbatches: int | None) -> FittedBatch:
    """The batch of a process that shares the samples of a step evenly and that the layout can be run with.

    `microbatches` is a number that was asked for. Raises ConfigError when there is none.
    """
    if site.global_batch_size % layout.dp:
        message = (
            f"is {site.global_batch_size}, which {layout.dp} data-parallel processes cannot share evenly"
        )
        raise ConfigError([Problem("train.global_batch_size", message, hint=_sizes(site, layout))])
    share = site.global_batch_size // layout.dp
    problems: list[Problem] = []
    for size in _nearest(share, site.device_batch_size):
        for number in _microbatches(layout, size, parallel.pp_microbatches, microbatches):
            tried = parallel.model_copy(update={"pp_microbatches": number})
            found = list(layout_problems(layout, tried, site.shape, size, site.seq_len, share // size))
            if not found:
                return FittedBatch(size, number, tuple(_notes(layout, parallel, site, size, number)))
            problems = problems or found
    raise ConfigError(problems)


def _sizes(site: Site, layout: Layout) -> str:
    below = site.global_batch_size // layout.dp * layout.dp
    return f"{' or '.join(str(size) for size in (below, below + layout.dp) if size)} would do"


def _nearest(share: int, wanted: int) -> list[int]:
    """The divisors of a share, those that take no more memory than what is wanted first, nearest first."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    return sorted(sizes, key=lambda size: (size > wanted, abs(size - wanted)))


def _microbatches(layout: Layout, size: int, wanted: int, asked: int | None) -> Iterator[int]:
    """How a batch can be cut: what was asked for, else as nearly as possible what the config has."""
    if asked is not None or layout.pp == 1:
        yield wanted if asked is None else asked
        return
    cuts = [number for number in range(1, size + 1) if size % number == 0]
    yield from sorted(cuts, key=lambda number: (abs(number - wanted), number))


def _notes(
    layout: Layout, parallel: ParallelConfig, site: Site, size: int, microbatches: int
) -> Iterator[str]:
    wanted, share = site.device_batch_size, site.global_batch_size // layout.dp
    if size != wanted:
        if share % wanted:
            why = f"each of {layout.dp} data-parallel has {share} of the {site.global_batch_size} samples"
        else:
            why = f"it is cut into {microbatches} microbatches"
        yield f"train.device_batch_size: {size} instead of {wanted}: {why}"
    if microbatches != parallel.pp_microbatches:
        why = f"of a batch of {size} {parallel.pp_schedule} over {layout.pp} ranks can have {divisors(size)}"
        yield f"parallel.pp_microbatches: {microbatches} instead of {parallel.pp_microbatches}: {why}"
