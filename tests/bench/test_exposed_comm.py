"""The time of exposed communication, in traces made by hand and in one that torch has written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainkit.bench.measure import covered, keep_needed, trace_exposed_comm_s

MAIN, GLOO = 7, 9
"""Threads: the first of the process, and one of gloo's."""


def event(name: str, start_s: float, end_s: float, cat: str = "cpu_op", tid: int = MAIN) -> dict[str, Any]:
    """A complete event; times in seconds for people, in microseconds for the trace."""
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "cat": cat, "name": name, "pid": MAIN, "tid": tid, **times}


def kernel(name: str, start_s: float, end_s: float, stream: int = 7) -> dict[str, Any]:
    return {**event(name, start_s, end_s, "kernel", stream), "pid": 0}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "baseTimeNanoseconds": 0}


def test_on_a_gpu_only_what_no_other_kernel_covers_counts() -> None:
    found = trace(
        kernel("gemm", 0.0, 4.0),
        kernel("ncclDevKernel_AllGather_RING_LL", 2.0, 6.0, stream=20),
        kernel("gemm", 5.0, 5.5),
        kernel("ncclDevKernel_SendRecv", 8.0, 9.0, stream=24),
        event("aten::mm", 0.0, 9.0),
        event("cudaDeviceSynchronize", 6.0, 8.0, "cuda_runtime"),
    )
    assert trace_exposed_comm_s(found, "cuda") == pytest.approx(1.0 + 0.5 + 1.0)


def test_two_kernels_of_nccl_at_a_time_are_counted_once() -> None:
    found = trace(
        kernel("gemm", 0.0, 1.0),
        kernel("ncclDevKernel_AllReduce", 1.0, 4.0, stream=20),
        kernel("ncclDevKernel_ReduceScatter", 2.0, 5.0, stream=24),
    )
    assert trace_exposed_comm_s(found, "cuda") == pytest.approx(4.0)


def test_on_a_cpu_gloo_during_an_operation_is_hidden() -> None:
    found = trace(
        event("aten::mm", 0.0, 3.0),
        event("gloo:all_reduce", 1.0, 5.0, "user_annotation", GLOO),
        event("aten::add_", 1.0, 5.0, tid=GLOO),  # of the reduction itself: nobody trains there
        event("aten::mm", 4.0, 6.0),
    )
    assert trace_exposed_comm_s(found, "cpu") == pytest.approx(1.0)


def test_what_waits_inside_an_operation_computes_nothing() -> None:
    found = trace(
        event("aten::add", 0.0, 10.0),  # on a split tensor: its communication happens inside
        event("_c10d_functional::wait_tensor", 2.0, 5.0),
        event("c10d::allreduce_", 7.0, 8.0),
        event("aten::copy_", 7.2, 7.8),  # a part of the collective
    )
    assert trace_exposed_comm_s(found, "cpu") == pytest.approx(4.0)


def test_a_receive_that_was_posted_early_is_exposed_only_when_nothing_else_is_done() -> None:
    found = trace(
        event("c10d::recv_", 0.0, 0.1),
        event("gloo:recv", 0.1, 5.0, "user_annotation"),
        event("aten::mm", 0.1, 3.0),
    )
    assert trace_exposed_comm_s(found, "cpu") == pytest.approx(0.1 + 2.0)


def test_nothing_before_the_given_time_counts() -> None:
    found = trace(
        kernel("gemm", 0.0, 1.0), kernel("ncclA", 1.0, 3.0, stream=20), kernel("ncclB", 4.0, 5.0, stream=20)
    )
    base = {"baseTimeNanoseconds": 1_700_000_000_000_000_000}
    assert trace_exposed_comm_s({**found, **base}, "cuda", 1_700_000_002.5) == pytest.approx(1.5, abs=1e-3)
    assert trace_exposed_comm_s({**found, **base}, "cuda", 1_700_000_009.0) == 0.0


def test_alone_nothing_is_exposed() -> None:
    assert trace_exposed_comm_s(trace(event("aten::mm", 0.0, 3.0)), "cpu") == 0.0


def test_a_trace_is_read_without_what_takes_most_of_its_space() -> None:
    waits = event("gloo:all_reduce", 1.0, 5.0, "user_annotation", GLOO)
    found = trace(
        {**event("aten::mm", 0.0, 3.0), "args": {"Input Dims": [[1, 2], [3, 4]], "ph": "none"}},
        {**waits, "args": {"Process Group Name": "0"}},
        kernel("ncclDevKernel_AllReduce", 1.0, 2.0),
        event("cudaLaunchKernel", 0.0, 1.0, "cuda_runtime"),
    )
    read = json.loads(json.dumps(found), object_hook=keep_needed)
    assert [trace_exposed_comm_s(read, device) for device in ("cpu", "cuda")] == [
        trace_exposed_comm_s(found, device) for device in ("cpu", "cuda")
    ]
    assert trace_exposed_comm_s(read, "cpu") == pytest.approx(2.0)
    assert "args" not in json.dumps(read)
    assert "cudaLaunchKernel" not in json.dumps(read)


def test_without_kernels_it_is_not_known() -> None:
    on_host = trace(event("aten::mm", 0.0, 3.0), event("nccl:all_reduce", 1.0, 2.0, "user_annotation"))
    assert trace_exposed_comm_s(on_host, "cuda") is None
    assert trace_exposed_comm_s(trace(), "cpu") is None
    assert trace_exposed_comm_s({}, "cpu") is None


def test_covered() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (3, 4), (1, 2)]) == 5
    assert covered([]) == 0


@pytest.mark.slow
def test_a_trace_of_torch_is_understood() -> None:
    from tests.support.runs import run_ranks

    run_ranks(late_all_reduce, 2)


def late_all_reduce(world: Any) -> None:
    """Rank 1 comes 0.3 s late to a collective: that is what rank 0 waits for, and rank 1 does not."""
    import itertools
    import statistics
    import tempfile
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    values = torch.ones(1000)
    dist.all_reduce(values)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        begins = []
        for _ in range(5):  # a process that loses its core for a moment spoils one
            dist.barrier()
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            begins.append(time.time())
            if world.rank == 1:
                time.sleep(0.3)
            dist.all_reduce(values)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        found = json.loads(file.read_text())
    since = [trace_exposed_comm_s(found, "cpu", begin) for begin in begins]
    assert None not in since
    seconds = statistics.median(a - b for a, b in itertools.pairwise([*since, 0.0]))
    assert (seconds > 0.25) == (world.rank == 0), f"rank {world.rank}: {seconds}"
