"""Measures the health of a node while its ranks run: CPUs, memory, network, disks and GPUs.

One agent on each node appends samples to ``health/HOST.jsonl`` in the run folder. The agent takes samples in
a separate thread, so that an unresponsive driver or filesystem cannot block the agent. The ranks themselves
take no samples.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.capabilities.health.samples import BY_CGROUP, BY_PROCESSES, health_file
from trainkit.capability import Companion
from trainkit.cluster.machine import (
    PROC,
    NoDriver,
    gpu_handle,
    host_memory_gib,
    job_memory_gib,
    kernel_lines,
    memory_of_gib,
    nvml,
)
from trainkit.folders import ensure_folder
from trainkit.job.preflight import unknown_values
from trainkit.job.processes import descendants, log_line, tree_of
from trainkit.job.rank_env import visible_gpus
from trainkit.run.files import append_jsonl, utc_now, write_atomic
from trainkit.run.rundir import AttemptDir

MAX_BYTES = 4 * 2**20
"""Maximum size of a sample file in bytes; if the file is larger, every second sample in its older half is
deleted."""
BLOCK_DEVICES = Path("/sys/block")
NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr")
"""Prefixes of block devices that are not disks, or whose transfers are already counted for other devices."""
SECTOR_BYTES = 512
MIB, GIB = 2**20, 2**30
THROTTLES = {
    "SwPowerCap": "power",
    "HwSlowdown": "hardware",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "power supply",
}
"""Maps the suffix of an NVML throttle reason to a short name."""


class HealthSampler(Companion):
    """Takes samples of a node until `end` is called."""

    def __init__(
        self, attempt: AttemptDir, host: str, interval_s: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.file = health_file(attempt.run, host)
        self._number, self._host, self._interval_s = attempt.number, host, interval_s
        self._gpus = _Gpus(environ.get("CUDA_VISIBLE_DEVICES"))
        self._counters = _Counters()
        self._problem = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, *, is_finished: bool) -> None:
        """Stop sampling without waiting for the thread, which may be blocked in a call that never returns."""
        self._ends.set()

    def _run(self) -> None:
        is_over = self._ends.wait(self._interval_s)
        if not is_over:
            self._gpus.open()  # loading NVML earlier would slow down the starting ranks
        while not is_over:
            try:
                ensure_folder(self.file.parent)
                self.append()
                if self.file.stat().st_size > MAX_BYTES:
                    thin_out(self.file)
            except OSError as error:
                self._report(f"cannot write {self.file}: {error.strerror or error}")
            is_over = self._ends.wait(self._interval_s)

    def append(self) -> None:
        """Take one sample and append it to the sample file."""
        gpus, problem = self._gpus.sample()
        if problem:
            self._report(f"cannot query the GPUs: {problem}")
        record = {"time": utc_now(), "attempt": self._number, "host": self._host}
        append_jsonl(self.file, {**record, **self._counters.sample(), "gpus": gpus})

    def _report(self, problem: str) -> None:
        """Log a problem unless it has been logged before; the run continues without samples."""
        if problem != self._problem:
            self._problem = problem
            log_line(f"warning: {problem}")


def thin_out(file: Path) -> None:
    """Delete every second line in the older half of a file."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    half = len(lines) // 2
    write_atomic(file, "".join(lines[:half:2] + lines[half:]))


class _Counters:
    """Measures the utilization of the host.

    Rates are averages since the previous sample. Unknown values are None.
    """

    def __init__(self) -> None:
        self._read_s, self._before = time.monotonic(), _counters()
        self._parent = os.getppid()
        """Process id of the parent of all agents on this host: the supervisor, a Slurm step, or a
        launcher."""

    def sample(self) -> dict[str, float | str | None]:
        now_s, now = time.monotonic(), _counters()
        elapsed_s = max(1e-3, now_s - self._read_s)
        grown = {name: now[name] - self._before[name] for name in now.keys() & self._before.keys()}
        self._read_s, self._before = now_s, now
        num_jiffies = grown.get("all_cpu")
        used_gib, total_gib = host_memory_gib() or (None, None)
        return {
            "cpu_percent": round(100.0 * grown["cpu"] / num_jiffies, 1) if num_jiffies else None,
            "load_1m": round(os.getloadavg()[0], 2),
            "mem_used_gib": used_gib,
            "mem_total_gib": total_gib,
            **self._job_memory(),
            **{
                f"{name}_mib_s": round(max(0, grown[name]) / elapsed_s / MIB, 2) if name in grown else None
                for name in ("net_rx", "net_tx", "disk_read", "disk_write")
            },
        }

    def _job_memory(self) -> dict[str, float | str | None]:
        """Return the job's memory use, and the method by which it was measured."""
        if (used_gib := job_memory_gib()) is not None:
            return {"job_mem_gib": used_gib, "job_mem_by": BY_CGROUP}
        trees = (descendants(pid, tree_of(pid)) for pid in (self._parent, os.getpid()))
        used_gib = memory_of_gib({self._parent, os.getpid(), *chain.from_iterable(trees)})
        return {"job_mem_gib": used_gib, "job_mem_by": None if used_gib is None else BY_PROCESSES}


def _counters() -> dict[str, int]:
    """Return the kernel's counters of CPU jiffies and transferred bytes, omitting unknown counters."""
    found = {}
    for name, *values in kernel_lines(PROC / "stat"):
        if name == "cpu":
            _, _, _, idle, iowait, *_ = jiffies = list(map(int, values[:8]))
            found["cpu"], found["all_cpu"] = sum(jiffies) - idle - iowait, sum(jiffies)
    interfaces = [words for words in kernel_lines(PROC / "net" / "dev")[2:] if len(words) > 9]
    if interfaces:
        others = [words for words in interfaces if words[0] != "lo:"]
        found["net_rx"], found["net_tx"] = (sum(int(words[at]) for words in others) for at in (1, 9))
    with contextlib.suppress(OSError):  # the disk counters do not include network filesystems
        disks = {path.name for path in BLOCK_DEVICES.iterdir() if not path.name.startswith(NOT_DISKS)}
        lines = [words for words in kernel_lines(PROC / "diskstats") if words[2] in disks]
        read, written = (SECTOR_BYTES * sum(int(words[at]) for words in lines) for at in (5, 9))
        found["disk_read"], found["disk_write"] = read, written
    return found


class _Gpus:
    """The GPUs that the ranks on this node can use, as reported by NVML."""

    def __init__(self, listed: str | None) -> None:
        self._listed, self._stays_open = visible_gpus(listed), ExitStack()
        self._nvml: Any = None
        self._handles: list[tuple[int, Any, str]] = []

    def open(self) -> None:
        """Find the GPUs; without an NVIDIA driver, the list of GPUs stays empty."""
        with contextlib.suppress(NoDriver):
            self._nvml = driver = self._stays_open.enter_context(nvml())
            with contextlib.suppress(driver.NVMLError):  # MIG slices, for example, reject some NVML queries
                names = range(driver.nvmlDeviceGetCount()) if self._listed is None else self._listed
                for handle in (gpu_handle(driver, str(name)) for name in names):
                    model = str(driver.nvmlDeviceGetName(handle))
                    self._handles.append((int(driver.nvmlDeviceGetIndex(handle)), handle, model))

    def sample(self) -> tuple[list[dict[str, object]], str]:
        """Return the state of each GPU, and a description of a problem or an empty string."""
        problem, found = "", []
        for index, handle, name in self._handles:
            sample: dict[str, object] = {"index": index, "name": name}
            for key, get in self._queries().items():
                try:
                    sample[key] = get(handle)
                except self._nvml.NVMLError as error:
                    sample[key] = None
                    if not isinstance(error, unknown_values(self._nvml)):
                        problem = problem or f"GPU {index}: {error}"
            found.append(sample)
        return found, problem

    def _queries(self) -> dict[str, Callable[[Any], object]]:
        nvml = self._nvml
        return {
            "util_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "mem_used_gib": lambda gpu: round(nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB, 2),
            "mem_total_gib": lambda gpu: round(nvml.nvmlDeviceGetMemoryInfo(gpu).total / GIB, 2),
            "power_w": lambda gpu: round(nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, 1),
            "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "throttle": lambda gpu: throttle_reasons(
                nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            ),
            "ecc_errors": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }


def throttle_reasons(nvml: Any, mask: int) -> list[str]:
    """Decode the reasons for a GPU's reduced clocks from NVML's bit mask; idle is not considered a reason."""
    prefix = "nvmlClocksThrottleReason"
    found = (why for name, why in THROTTLES.items() if mask & getattr(nvml, prefix + name, 0))
    return list(dict.fromkeys(found))
