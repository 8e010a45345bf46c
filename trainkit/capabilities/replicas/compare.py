"""Compare checksums of the weights across the ranks that have equal shards."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger

import torch

from trainkit.capabilities.replicas.replicas_plan import DIFFERS, ReplicasPlan
from trainkit.capability import NewEvent, TrainedModel, TrainerHook
from trainkit.errors import FatalError
from trainkit.plan.launch import Layout
from trainkit.run.process import own_host
from trainkit.trainer.distributed import gather_from_all
from trainkit.trainer.metrics import bit_sums
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.step_sync import all_reduce_sum

log = getLogger(__name__)
CHECKSUM_BITS = 63


class ReplicaComparison(TrainerHook):
    """Compares the weights of all replicas after every `replicas.compare_every` steps."""

    def __init__(self, part: ReplicasPlan, model: TrainedModel) -> None:
        self._part, self._world = part, model.world
        self._tensors = [
            local_tensor(tensor.detach())
            for weight in model.weights
            for tensor in (weight.param, weight.lower, weight.cast)
            if tensor is not None
        ]
        self._places: list[list[str]] = []
        """The host and the device of each rank."""
        self._equal_at: int | None = None
        """The last step after which all replicas were equal; None if no comparison found them equal."""

    def begin(self, step: int, *, is_loaded: bool) -> None:
        self._places = gather_from_all([own_host(), str(self._world.device)], self._world)

    def after_step(self, step: int, *, has_updated: bool, loss: float) -> Iterable[NewEvent]:
        if step % self._part.compare_every:
            return
        found = differing(self._checksums(), self._world.layout)
        if not found:
            self._equal_at = step
            return
        since = "were never compared before in this attempt"
        if self._equal_at is not None:
            since = f"were equal after step {self._equal_at}"
        texts = []
        for rank, other in found.items():
            host, device = self._places[rank]
            yield DIFFERS, {"step": step, "rank": rank, "host": host, "device": device, "than": other}
            texts.append(f"rank {rank} ({host}, {device}) from rank {other} ({self._places[other][0]})")
        text = f"after step {step}, weights of replicas differ, which {since}: {', '.join(texts)}"
        if self._part.on_difference == "stop":
            raise FatalError(
                text,
                hint="exclude the host (resources.exclude), and start a new run with model.init_from set to "
                "a checkpoint that was saved while the replicas were equal",
            )
        if self._world.is_main:
            log.error(text)

    def _checksums(self) -> list[int]:
        """Return the checksum of each rank's weights; waits for the device."""
        sums = torch.stack(bit_sums(self._tensors)).tolist()
        digest = hashlib.sha256(json.dumps(sums).encode()).digest()
        found = torch.zeros(self._world.size, dtype=torch.int64, device=self._world.device)
        found[self._world.rank] = int.from_bytes(digest[:8], "big") >> (64 - CHECKSUM_BITS)
        checksums: list[int] = all_reduce_sum(found, self._world).tolist()
        return checksums


def differing(checksums: Sequence[int], layout: Layout) -> Mapping[int, int]:
    """Map each rank whose checksum differs from most of its replicas to one of these replicas.

    If no checksum occurs more often than another, the checksum of the lowest rank is the one to compare with.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        groups[replace(layout.place(rank), dp_replicate=0)].append(rank)
    found: dict[int, int] = {}
    for ranks in groups.values():
        # `most_common` returns equally frequent checksums in the order of the ranks.
        [(usual, _)] = Counter(checksums[rank] for rank in ranks).most_common(1)
        first = next(rank for rank in ranks if checksums[rank] == usual)
        found |= {rank: first for rank in ranks if checksums[rank] != usual}
    return dict(sorted(found.items()))
