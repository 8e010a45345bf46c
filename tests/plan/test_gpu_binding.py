"""Slurm options that bind GPUs to tasks: what works with a task per rank, and with one per node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.config import RunConfig, load_config
from trainkit.plan.launch_draft import gpu_binding_problems, gpu_binding_warnings


def config(srun: dict[str, object], per: str = "gpu", extra: dict[str, object] | None = None) -> RunConfig:
    overrides = [
        f"launch.srun_extra={json.dumps(srun)}",
        f"resources.extra={json.dumps(extra or {})}",
        f"launch.per={per}",
        "resources.nodes=2",
    ]
    return load_config(None, overrides=overrides, environ={}, cwd=Path("/nowhere")).config


FITTING: list[dict[str, object]] = [
    {"gpus-per-task": 1},
    {"gpu-bind": "single:1"},
    {"gpu-bind": "map_gpu:0,1,2,3"},
    {"gpu-bind": "mask_gpu:0xF"},
    {"gpu-bind": "closest"},
    {"gpu-bind": "none"},
    {"gpus-per-task": 1, "gpu-bind": "none"},
    {"cpu-bind": "none"},
]


@pytest.mark.parametrize("srun", FITTING)
def test_with_a_task_per_rank(srun: dict[str, object]) -> None:
    assert list(gpu_binding_problems(config(srun), "gpu", 4)) == []


@pytest.mark.parametrize(
    ("srun", "message"),
    [
        ({"gpus-per-task": 2}, "is 2: a task would see 2 GPUs, but it is one rank"),
        ({"gpu-bind": "single:2"}, "is single:2: ranks would share a GPU"),
        ({"ntasks-per-gpu": 2}, "is 2: ranks would share a GPU"),
        ({"gpus-per-task": "h100:4"}, "is h100:4: a task would see 4 GPUs, but it is one rank"),
    ],
)
def test_what_cannot_work_with_a_task_per_rank(srun: dict[str, object], message: str) -> None:
    [(key, found, hint)] = gpu_binding_problems(config(srun), "gpu", 4)
    assert (key, found) == (f"launch.srun_extra.{next(iter(srun))}", message)
    assert hint


@pytest.mark.parametrize(
    ("srun", "seen"),
    [
        ({"gpus-per-task": 1}, "1 GPU"),
        ({"gpu-bind": "per_task:2"}, "2 GPUs"),
        ({"gpu-bind": "single:1"}, "1 GPU"),
        ({"gpu-bind": "single:4"}, "1 GPU"),
        ({"ntasks-per-gpu": 1}, "1 GPU"),
    ],
)
def test_what_cannot_work_with_a_task_per_node(srun: dict[str, object], seen: str) -> None:
    name, value = next(iter(srun.items()))
    [(key, message, hint)] = gpu_binding_problems(config(srun, "node"), "node", 4)
    assert key == f"launch.srun_extra.{name}"
    assert message == f"is {value}: a task would see {seen}, but it starts all 4 ranks of its node"
    assert hint == "remove it, or set launch.per: gpu"
    [(_, _, hint)] = gpu_binding_problems(config(srun), "node", 4)
    assert hint == "remove it", "torchrun is always started once per node"


@pytest.mark.parametrize("srun", [{"gpus-per-task": 4}, {"gpu-bind": "mask_gpu:0xF"}, {"gpu-bind": "none"}])
def test_with_a_task_per_node(srun: dict[str, object]) -> None:
    assert list(gpu_binding_problems(config(srun, "node"), "node", 4)) == []


def test_one_rank_per_node_has_its_gpu_with_any_binding() -> None:
    for srun in ({"gpus-per-task": 1}, {"gpu-bind": "single:1"}, {"gpu-bind": "map_gpu:0"}):
        for per in ("gpu", "node"):
            assert list(gpu_binding_problems(config(srun, per), per, 1)) == []
        assert list(gpu_binding_warnings(config(srun), "gpu", 1)) == []


def test_options_of_sbatch_count_too() -> None:
    """srun inherits them."""
    [(key, _, _)] = gpu_binding_problems(config({}, extra={"gpu-bind": "single:2"}), "gpu", 4)
    assert key == "resources.extra.gpu-bind"


def test_what_nccl_may_lose_is_said() -> None:
    [text] = gpu_binding_warnings(config({"gpus-per-task": 1}), "gpu", 4)
    assert text.startswith(
        "launch.srun_extra.gpus-per-task is 1: where a rank sees only its own GPU, NCCL may"
    )
    assert list(gpu_binding_warnings(config({"gpus-per-task": 1, "gpu-bind": "none"}), "gpu", 4)) == []
    assert list(gpu_binding_warnings(config({"gpu-bind": "mask_gpu:0xF"}), "gpu", 4)) == []
