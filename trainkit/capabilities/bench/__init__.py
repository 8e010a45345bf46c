"""Measures the speed of a config with several layouts or settings; such a series of runs is a bench."""

from __future__ import annotations

from pathlib import Path

from trainkit.capability import Capability


class BenchCapability(Capability):
    """Provides the command `trainkit bench`. The capability does not change the launch plans of runs."""

    name = "bench"

    def speeds(self, group: Path) -> dict[int, float | None]:
        from trainkit.capabilities.bench.run_bench import read_bench
        from trainkit.capabilities.bench.summary import measured_speeds

        return measured_speeds(read_bench(group))


CAPABILITY = BenchCapability
