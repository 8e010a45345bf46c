"""Benches: a config is run on several layouts, or with several settings, and measured."""

from __future__ import annotations

from pathlib import Path

from trainkit.capability import Capability


class BenchCapability(Capability):
    """The capability: its runs are like any others, so no plan has a part of it."""

    name = "bench"

    def speeds(self, group: Path) -> dict[int, float | None]:
        from trainkit.capabilities.bench.run_bench import read_bench
        from trainkit.capabilities.bench.summary import measured_speeds

        return measured_speeds(read_bench(group))


CAPABILITY = BenchCapability
