"""Benches: each runs a config with several layouts or settings, and measures the runs."""

from __future__ import annotations

from pathlib import Path

from trainkit.capability import Capability


class BenchCapability(Capability):
    """The capability of `trainkit bench`. The capability adds nothing to the plan of a run."""

    name = "bench"

    def speeds(self, group: Path) -> dict[int, float | None]:
        from trainkit.capabilities.bench.run_bench import read_bench
        from trainkit.capabilities.bench.summary import measured_speeds

        return measured_speeds(read_bench(group))


CAPABILITY = BenchCapability
