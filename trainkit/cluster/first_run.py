"""The first run config of somebody who is new to a cluster: the quickstart, on nodes that are there."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainkit.cluster.limits import partition_troubles
from trainkit.cluster.model import Cluster, Partition
from trainkit.cluster.resource_request import ResourceRequest
from trainkit.cluster.units import time_text
from trainkit.cluster.write_profile import commented, flow
from trainkit.resources import FIRST_RUN

TIME_S = 1800
LEAST_TIME_S = 300
BATCH, DEVICE_BATCH = 32, 4
"""Of the quickstart."""


def first_run_text(cluster: Cluster | None) -> str:
    """A config that runs as it is; None stands for a machine without Slurm."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: Cluster | None) -> Iterator[str]:
    partition = None if cluster is None else first_partition(cluster)
    where = "this machine" if cluster is None else f"the cluster {cluster.name}"
    yield f"# A first run on {where}: a small model learns to write Python, without a download."
    yield "#"
    yield f"#   trainkit check {FIRST_RUN}"
    yield f"#   trainkit submit {FIRST_RUN} --follow"
    yield "#"
    yield "# `trainkit check … --show-origin` lists every key with its value."
    yield commented("extends: quickstart.yaml", "ships with trainkit; what stands here goes before it")
    yield "name: first-run"
    yield ""
    yield "resources:"
    yield "  nodes: 1"
    gpus = 0 if partition is None else max((kind.num_gpus() for kind in partition.nodes), default=0)
    comment = f"all GPUs of a node: {gpus}" if gpus else "one process a node where there is no GPU"
    yield commented("  gpus_per_node: auto", comment)
    if cluster is None or partition is None:
        return
    others = [item.name for item in cluster.partitions if not item.is_hidden and item is not partition]
    yield commented(f"  partition: {flow(partition.name)}", f"also: {', '.join(others)}" if others else "")
    limit_s = partition.max_time_s
    comment = "no limit there" if limit_s is None else f"at most {time_text(limit_s)} there"
    yield commented(f"  time: {flow(time_text(min(TIME_S, limit_s or TIME_S)))}", comment)
    yield from _account_lines(cluster)
    batch = math.lcm(DEVICE_BATCH * gpus or 1, BATCH)
    if gpus and batch != BATCH:
        yield ""
        yield "train:"
        yield commented(
            f"  global_batch_size: {DEVICE_BATCH * gpus}", f"{DEVICE_BATCH} for each of {gpus} GPUs"
        )


def _account_lines(cluster: Cluster) -> Iterator[str]:
    names = list(dict.fromkeys(item.name for item in cluster.accounts or ()))
    default = next((item.name for item in cluster.accounts or () if item.is_default), None)
    if not names:
        return
    others = [name for name in names if name != (default or names[0])]
    also = f"also: {', '.join(others)}" if others else ""
    if default is None:
        yield commented(f"  account: {flow(names[0])}", also)
    else:
        yield commented(f"  # account: {flow(default)}", "; ".join(filter(None, ("the default", also))))


def first_partition(cluster: Cluster) -> Partition | None:
    """Where somebody who names none should go: to GPUs, by default, if they are there; else by default."""
    asked = ResourceRequest(nodes=1, workers_per_node=1, account=_first_account(cluster))
    usable = [
        item
        for item in sorted(cluster.partitions, key=lambda item: not item.is_default)
        if item.is_up
        and not item.is_hidden
        and not (item.max_time_s is not None and item.max_time_s < LEAST_TIME_S)
        and next(partition_troubles(asked, cluster, item), None) is None
    ]
    with_gpus = [item for item in usable if any(kind.num_gpus() for kind in item.nodes)]
    return next(iter([*with_gpus, *usable, *cluster.partitions]), None)


def _first_account(cluster: Cluster) -> str | None:
    """The account that a run is charged to when there is no default one."""
    accounts = cluster.accounts or ()
    if not accounts or any(item.is_default for item in accounts):
        return None
    return accounts[0].name
