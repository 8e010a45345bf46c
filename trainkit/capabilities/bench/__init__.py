"""Benches, which run a config on several layouts or with several settings and measure the runs."""

from __future__ import annotations

from pathlib import Path

from trainkit.capability import Capability


class BenchCapability(Capability):
    """The capability of `trainkit bench`. It adds nothing to the plan of a run."""

    name = "bench"

    def speeds(self, group: Path) -> dict[int, float | None]:
        from trainkit.capabilities.bench.run_bench import read_bench
        from trainkit.capabilities.bench.summary import measured_speeds

        return measured_speeds(read_bench(group))


CAPABILITY = BenchCapability
