"""Tests the problems that an agent finds with its node before it starts ranks."""

import errno
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.disks import fill, small_disk
from tests.support.fake_gpus.pynvml import FakeNvml
from tests.support.runs import make_attempt
from tests.support.torch_builds import make_torch
from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART
from trainkit.job import preflight
from trainkit.job.failure.records import first_rank_failure, record_refusal
from trainkit.job.preflight import (
    SUPERVISOR_VIEW_VARIABLE,
    PreflightFailed,
    check_space,
    clock_offset_s,
    require_gpus,
    require_node,
    supervisor_view,
)
from trainkit.job.rank_env import SHARED_MEMORY
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return make_attempt(tmp_path / "run")


def plan_of(attempt: AttemptDir, **changes: Any) -> LaunchPlan:
    return replace(LaunchPlan.from_dict(read_json(attempt.plan_file)), **changes)


def check(attempt: AttemptDir, **environ: str) -> None:
    require_node(attempt, plan_of(attempt), (0,), environ)


@contextmanager
def failing(match: str, is_node: bool = True) -> Iterator[pytest.ExceptionInfo[PreflightFailed]]:
    with pytest.raises(PreflightFailed, match=f"(?m){match}") as caught:
        yield caught
    assert caught.value.is_node is is_node
    assert caught.value.hint


def test_a_good_node_is_passed_at_once_and_left_as_it_was(attempt):
    before = sorted(attempt.path.rglob("*"))
    seen = supervisor_view(attempt)
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        check(attempt, **{SUPERVISOR_VIEW_VARIABLE: seen})
        rounds.append(time.process_time() - begin)
    assert min(rounds) < 0.02
    check(attempt)  # no supervisor watches this step
    assert sorted(attempt.path.rglob("*")) == before


def test_the_plan_has_to_be_the_one_that_the_supervisor_sees(attempt):
    seen = supervisor_view(attempt)
    attempt.plan_file.write_text(attempt.plan_file.read_text() + "\n")
    with failing("differs from the file that the first node"):
        check(attempt, **{SUPERVISOR_VIEW_VARIABLE: seen})


@pytest.mark.parametrize(
    ("own_s", "supervisors_s", "fails"),
    [(6, 0.1, True), (-6, 0.1, True), (4, 0, False), (6, 5.5, False), (-300, -299, False)],
)
def test_a_clock_is_wrong_where_the_supervisors_is_right(attempt, monkeypatch, own_s, supervisors_s, fails):
    seen = f"{preflight.plan_digest(attempt)} {supervisors_s:.3f}"
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + own_s)
    assert clock_offset_s(attempt.path) == pytest.approx(own_s, abs=1)
    if not fails:
        check(attempt, **{SUPERVISOR_VIEW_VARIABLE: seen})
        return
    with failing(f"is 6 s {'ahead of' if own_s > 0 else 'behind'} the clock of"):
        check(attempt, **{SUPERVISOR_VIEW_VARIABLE: seen})


def test_a_server_that_takes_its_time_is_not_a_wrong_clock(attempt, monkeypatch):
    """The server stamps the file when the data arrives, and answers when the data is on disk."""
    real, offsets_s = time.time, iter([0.0, 7.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(offsets_s))
    assert clock_offset_s(attempt.path) == pytest.approx(0, abs=0.5)


def test_a_full_run_folder_is_not_the_fault_of_the_node(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        attempt = make_attempt(disk / "run")
        fill(disk, leave_bytes=8192)
        with failing("cannot be written on .*: No space left", is_node=False):
            check(attempt)
        with failing("No space left", is_node=False):
            supervisor_view(attempt)
        assert list(attempt.path.glob(".probe*")) == []


def test_a_run_folder_that_only_this_node_cannot_write(attempt, monkeypatch):
    refuse = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with failing("cannot be written on .*: Read-only file system"):
        check(attempt)


def test_no_space_for_what_the_ranks_put_on_the_node(attempt, tmp_path):
    with small_disk(tmp_path / "tmp", "8m") as disk, failing(rf"^{disk} on .* has only \d\.\d MiB free$"):
        check(attempt, TMPDIR=str(disk))
    check(attempt, TMPDIR=str(tmp_path / "made-on-another-node"))


def test_a_small_folder_fails_only_under_what_a_job_refuses(tmp_path):
    expected = (("4m", "failure", "has only 4.0 MiB free"), ("64m", "warning", "64 MiB free in "))
    for size, state, value in expected:
        with small_disk(tmp_path / size, size) as shm:
            found = check_space("/dev/shm", shm)
        assert found.state == state
        assert found.value.startswith(value)
        assert "set TMPDIR" in found.hint


def test_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # root may write everywhere
    found = [check_space("/tmp", tmp_path), check_space("/dev/shm", SHARED_MEMORY)]
    assert [(one.state, one.value) for one in found] == [
        ("warning", f"{tmp_path} is not writable"),
        ("warning", "/dev/shm is not writable"),
    ]
    assert "TMPDIR" in found[0].hint
    assert "data loader" in found[1].hint


def test_the_record_says_that_the_node_is_to_blame(attempt):
    record_refusal(attempt, 1, 0, PreflightFailed("GPU 3 is gone"))
    record = read_json(attempt.rank_error(1))
    assert (record["type"], record["node"], record["exit_code"]) == ("PreflightFailed", True, 1)
    verdict = first_rank_failure(attempt)
    assert verdict.message == "GPU 3 is gone"
    record_refusal(attempt, 1, 0, PreflightFailed("no space", is_node=False))
    assert "node" not in read_json(attempt.rank_error(1))


def check_gpus(nvml: FakeNvml, ranks: Sequence[int], visible: str | None, *, is_task: bool = False) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    require_gpus(nvml, ranks, environ, is_task=is_task)


def action(number: int) -> dict[str, Any]:
    """Return the fields of a GPU that requires a recovery action. The number 0 means none."""
    return {"FieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=number))]}


def errors(number: int) -> dict[str, Any]:
    """Return the fields of a GPU with a number of uncorrectable errors since its last reset."""
    return {"TotalEccErrors": lambda kind, counter: {(1, 0): number}[kind, counter]}


WELL = {**action(0), "RemappedRows": (2, 1, 0, 0), "RetiredPagesPendingStatus": 0, **errors(0)}
V100 = {**WELL, "Name": "Tesla V100-SXM2-16GB"}


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ({**WELL, **action(1)}, "needs a reset or a reboot .recovery action 1"),
        ({**WELL, "RemappedRows": (0, 1, 1, 0)}, "has broken memory rows that a reset would remap"),
        ({**WELL, "RemappedRows": (0, 9, 0, 1)}, "failed to remap a broken memory row"),
        ({"RetiredPagesPendingStatus": 1}, "has broken memory pages that a reset would retire"),
        (errors(3), "has had 3 uncorrectable memory errors"),
        ({"lost": True}, "does not respond: GPU is lost"),
    ],
)
def test_gpus_that_are_not_well(gpu, message):
    nvml = FakeNvml(WELL, gpu, {})
    with failing(f"^GPU 1 of .*{message}"):
        check_gpus(nvml, (0, 1), None)
    check_gpus(nvml, (0,), None)
    check_gpus(nvml, (0, 1), "2,0")  # GPUs of other jobs are not checked


def test_a_gpu_that_is_missing():
    for visible, shown in ((None, ""), ("0,2,1", " and CUDA_VISIBLE_DEVICES=0,2,1")):
        with failing(f"has no GPU: .* has 2{shown}$"):
            check_gpus(FakeNvml(WELL, WELL), (0, 1, 2), visible)
    check_gpus(FakeNvml(WELL), (0, 1), "GPU-8a4f,MIG-1/2/3")  # other names are left to the ranks


@pytest.mark.parametrize("visible", ["0", "0,1", "", "NoDevFiles", "GPU-8a4f", "0,-1,1"])
@pytest.mark.parametrize("local_ranks", [(0, 1, 2, 3), (3,)])
def test_ranks_that_may_use_too_few_gpus_are_not_the_fault_of_the_node(visible, local_ranks):
    """The ranks would fail on any node. For example, Slurm has bound an agent with four ranks to one GPU."""
    with failing(f"has CUDA_VISIBLE_DEVICES={visible}$", is_node=False) as caught:
        check_gpus(FakeNvml(*[WELL] * 4), local_ranks, visible)
    assert caught.value.exit_code == EXIT_NO_RESTART
    assert "gpu-bind: none" in caught.value.hint


def test_fewer_gpus_than_ranks_because_slurm_has_given_no_more():
    """Only Slurm's count shows that a node is not broken in a container without CUDA_VISIBLE_DEVICES."""
    with failing("has SLURM_GPUS_ON_NODE=1$", is_node=False) as caught:
        require_gpus(FakeNvml(WELL), range(4), {"SLURM_GPUS_ON_NODE": "1"}, is_task=False)
    assert caught.value.exit_code == EXIT_NO_RESTART
    for granted in ("4", ""):
        with failing("has no GPU: .* has 1$"):
            require_gpus(FakeNvml(WELL), range(4), {"SLURM_GPUS_ON_NODE": granted}, is_task=False)


@pytest.mark.parametrize(
    ("num_gpus", "visible"),
    [
        *((1, "0"), (1, None)),  # a cgroup confines the task to its GPU
        *((4, "3"), (4, "GPU-8a4f")),  # only CUDA_VISIBLE_DEVICES binds the task
        *((4, "0,1,2,3"), (4, None)),  # nothing binds the task
    ],
)
def test_a_task_with_a_gpu_of_its_own_passes(num_gpus, visible):
    gpus = [*[{"lost": True}] * (num_gpus - 1), WELL]
    check_gpus(FakeNvml(*gpus), (3,), visible, is_task=True)
    if num_gpus == 1 or visible == "3":
        with failing("GPU . of .* does not respond"):
            check_gpus(FakeNvml(*[{"lost": True}] * num_gpus), (3,), visible, is_task=True)


def test_one_gpu_under_another_number_is_not_blamed_on_the_node():
    """A cgroup may have confined the task to one GPU, which then has number 0, or the other GPUs are lost."""
    with failing("has 1 and CUDA_VISIBLE_DEVICES=3$", is_node=False) as caught:
        check_gpus(FakeNvml(WELL), (3,), "3", is_task=True)
    assert caught.value.exit_code == EXIT_FAILED
    with failing("has 3 and CUDA_VISIBLE_DEVICES=3$"):
        check_gpus(FakeNvml(WELL, WELL, WELL), (3,), "3", is_task=True)


@pytest.mark.parametrize(
    ("cuda", "capability", "message", "build"),
    [
        ("13.0", (9, 0), "needs a driver for CUDA 13, and has one for 12.4$", "cu126"),
        ("13.0", (7, 0), "needs a driver for CUDA 13", "cu126"),
        (None, (9, 0), "built without CUDA", "cu126"),
        ("12.6", (7, 0), None, ""),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_of_a_node_is_not_the_fault_of_the_node(
    attempt, tmp_path, monkeypatch, cuda, capability, message, build
):
    package = make_torch(tmp_path / "site", "2.13.0+x", cuda)
    monkeypatch.setattr(preflight, "find_spec", lambda name: SimpleNamespace(origin=package / "__init__.py"))
    nvml = FakeNvml({**V100, "CudaComputeCapability": capability})
    monkeypatch.setattr(FakeNvml, "nvmlSystemGetCudaDriverVersion_v2", lambda _: 12040)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    plan = plan_of(attempt, device="cuda")
    if message is None:
        require_node(attempt, plan, (0,), {})
        return
    with failing(message, is_node=False) as caught:
        require_node(attempt, plan, (0,), {})
    assert caught.value.exit_code == EXIT_NO_RESTART
    assert f"/whl/{build}` installs" in caught.value.hint


@pytest.mark.parametrize("per", ["gpu", "node"])
def test_the_plan_decides_whether_a_rank_is_a_task(attempt, monkeypatch, per):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(WELL))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    plan = plan_of(attempt, device="cuda", per=per, workers_per_node=4)
    if per == "gpu":
        require_node(attempt, plan, (3,), {"CUDA_VISIBLE_DEVICES": "0"})
        return
    with failing("local rank 1 has no GPU", is_node=False):
        require_node(attempt, plan, range(4), {"CUDA_VISIBLE_DEVICES": "0"})
