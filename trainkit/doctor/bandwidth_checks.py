"""What is said of a measured bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.doctor.bandwidth import Layout
from trainkit.doctor.check import Check

SLOW_SHARE = 0.25
"""Share of what the link should give under which a measurement is a warning."""
ODD_SHARE = 0.5
"""Share of the median of all links under which one link is a warning."""
GLOO_GBIT_S = 10.0
"""More than this is not expected of gloo: the CPUs copy and add."""


def bandwidth_checks(
    layout: Layout, found: Mapping[str, Any], links: Sequence[Mapping[str, float]]
) -> Iterator[Check]:
    """The checks of what `run_ranks` measured, against the slowest of the hosts' `link_gbit_s`."""
    if "error" in found:
        hint = "`trainkit diagnose` explains such an error of a run; NCCL_DEBUG=INFO shows what NCCL does"
        yield Check("bandwidth", "failure", f"not measured: {found['error']}", hint)
        return
    backend, size_mib = found["backend"], found["size_mib"]
    expected, name = _expected(backend, links) if len(layout.hosts) > 1 else (None, "")
    where = f"{layout.world_size} ranks ({backend}, {size_mib} MiB)"
    value = f"{found['all_reduce_gbit_s']:,.1f} Gbit/s bus bandwidth over {where}"
    hint = f"under {SLOW_SHARE:.0%} of what {name} should give: check launch.network, cables and other jobs"
    is_slow = expected is not None and found["all_reduce_gbit_s"] < SLOW_SHARE * expected
    yield Check("all-reduce", "warning" if is_slow else "ok", value, hint if is_slow else "")
    speeds = sorted((speed, source, target) for source, target, speed in found["links"])
    slowest, source, target = speeds[0]
    median = statistics.median(speed for speed, _, _ in speeds)
    value = (
        f"{slowest:,.1f} Gbit/s from {source} to {target}, the slowest of {len(speeds)}; median {median:,.1f}"
    )
    if expected is not None:
        value += f"; {name} should give {expected:,.0f}"
    if slowest < ODD_SHARE * median:
        suspects = [item for item in speeds if item[0] < ODD_SHARE * median]
        pairs = "; ".join(f"{source} to {target}" for _, source, target in suspects[:4])
        yield Check("point to point", "warning", value, f"check the links of {pairs}")
    elif expected is not None and median < SLOW_SHARE * expected:
        yield Check("point to point", "warning", value, hint)
    else:
        yield Check("point to point", "ok", value)


def _expected(backend: str, links: Sequence[Mapping[str, float]]) -> tuple[float | None, str]:
    """What the slowest host's link should give in Gbit/s, and which link that is."""
    kind = "infiniband" if backend == "nccl" and all("infiniband" in link for link in links) else "ethernet"
    speeds = [link[kind] for link in links if kind in link]
    if len(speeds) < len(links) or not speeds:
        return None, ""
    names = {"infiniband": "InfiniBand", "ethernet": "the network interface"}
    return min(speeds) if backend == "nccl" else min(*speeds, GLOO_GBIT_S), names[kind]
