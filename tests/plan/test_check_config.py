"""Tests the whole check before a run with all problems at once: runs that cannot fit are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from planning import NO_GPU, plan_of, problems_of

from tests.support.said import said
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.errors import ConfigError, Problem
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload


def test_a_good_config_gives_its_plan(tmp_path):
    plan = plan_of(folder=tmp_path)
    # 869,504 parameters with 4 bytes for each value and 8 for AdamW
    assert plan.checkpoint_bytes == 10_434_048
    assert replace(plan, checkpoint_bytes=None) == plan_of()


def test_problems_of_layout_data_and_model_together(tmp_path):
    overrides = ["train.device_batch_size=5", "train.global_batch_size=32", "model.num_heads=3"]
    found = problems_of(*overrides, "data.source=missing.txt", folder=tmp_path)
    own = ("train.global_batch_size=32", "data.source=missing.txt", "model.num_heads=3")
    places = [(one.partition("=")[0], f"--set {one}") for one in own]
    assert [(one.key, one.origin) for one in found] == [*places, ("model.num_kv_heads", "")]


def test_plan_prints_the_weights_of_a_mixture(tmp_path):
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text("hello world\n" * 10_000)
    mixture = "data.source={web.txt: 3, code.txt: 1}"
    plan = plan_of(mixture, folder=tmp_path)
    said(plan.reasons["mixture"])
    (tmp_path / "code.txt").unlink()
    [problem] = problems_of(mixture, folder=tmp_path)
    said(problem.render())


def test_what_only_the_plan_and_the_data_show(tmp_path):
    machine = Machine(16, 1, ("H100",), "this machine has an H100")
    float8 = ["precision.float8=true", "precision.dtype=bf16"]
    for given in (float8, ["model.vocab_size=100"]):
        [found] = problems_of(*given, folder=tmp_path)
        said(found.render())
    [found] = problems_of(*float8, "parallel.compile=false", machine=machine, folder=tmp_path)
    said(found.render())
    plan_of(*float8, machine=machine, folder=tmp_path)


def test_where_weights_are_not_sharded_none_are_gathered(tmp_path):
    machine = Machine(16, 2, ("H100", "H100"), "this machine has two H100")
    given = ["precision.float8=gather", "launch.backend=local"]
    assert plan_of(*given, "parallel.dp_shard=2", machine=machine, folder=tmp_path).warnings == ()
    [warning] = plan_of(*given, "parallel.dp_replicate=2", machine=machine, folder=tmp_path).warnings
    said(warning)


def warnings_of(tmp_path: Path, gpus: dict[str, int], *overrides: str) -> tuple[str, ...]:
    """Return the warnings of a plan for a 70B model on a cluster with these GPUs per node, if given."""
    partition = Partition("gpu", is_default=True, nodes=(NodeKind(2, 64, 512_000, gpus),))
    target = Target("sbatch", "a test", Cluster("west", (partition,) if gpus else ()))
    given = ["model.preset=70b", "train.global_batch_size=null", "train.device_batch_size=1", *overrides]
    return plan_of(*given, target=target, folder=tmp_path).warnings


def test_gpus_of_unknown_memory_are_no_problem_but_a_warning(tmp_path):
    said("\n".join(warnings_of(tmp_path, {"": 4})))
    said("\n".join(warnings_of(tmp_path, {"": 4, "zx81": 4})))
    said("\n".join(warnings_of(tmp_path, {"zx81": 4}, "resources.gpu_type=zx81")))
    said("\n".join(warnings_of(tmp_path, {}, "device=cuda", "resources.gpus_per_node=4")))
    with pytest.raises(ConfigError) as error:
        warnings_of(tmp_path, {"h100": 4})
    assert [problem.key for problem in error.value.problems] == ["parallel.dp_shard"]
    assert warnings_of(tmp_path, {"h100": 4}, "model.preset=tiny") == ()
    assert warnings_of(tmp_path, {"": 4}, "device=cpu", "model.preset=tiny") == ()


def test_a_gpu_of_this_machine_that_is_unknown(tmp_path):
    machine = Machine(16, 1, ("NVIDIA ZX81",), "this machine has 1 x NVIDIA ZX81")
    [warning] = plan_of(machine=machine, folder=tmp_path).warnings
    said(warning)
    loaded = load_config(None, environ={}, cwd=tmp_path)
    command = make_plan(loaded, Facts(machine), Workload(("true",)))
    assert command.warnings == (), "a command has no plan of memory"


LLAMA = ("model.preset=7b", "model.vocab_size=32000", "data.seq_len=4096", "train.global_batch_size=64")


def cluster(gpu_type: str, gpus: int = 8) -> Target:
    nodes = (NodeKind(16, cpus=128, gpus={gpu_type: gpus}),)
    return Target("sbatch", "", Cluster("big", partitions=(Partition("gpu", is_default=True, nodes=nodes),)))


def check(tmp_path: Path, target: Target, *overrides: str, machine: Machine = NO_GPU) -> LaunchPlan:
    return plan_of(*LLAMA, *overrides, machine=machine, target=target, folder=tmp_path)


def problem(tmp_path: Path, target: Target, *overrides: str, machine: Machine = NO_GPU) -> Problem:
    [found] = problems_of(*LLAMA, *overrides, machine=machine, target=target, folder=tmp_path)
    return found


def test_what_fits_is_reported(tmp_path):
    full = "parallel.activation_checkpointing=full"
    plan = check(tmp_path, cluster("h100"), "train.device_batch_size=1", full)
    said(plan.reasons["memory"])
    tight = check(tmp_path, cluster("h200"), "train.device_batch_size=4", "data.seq_len=6240")
    said(tight.reasons["memory"])


def test_what_is_too_large(tmp_path):
    said(problem(tmp_path, cluster("h100"), "train.device_batch_size=8").render())
    found = problem(tmp_path, cluster("a100-40gb"), "model.preset=70b", "train.device_batch_size=1")
    assert found.key == "parallel.dp_shard"
    said(found.message)
    machine = Machine(16, 1, ("NVIDIA L4",), "this machine has 1 x NVIDIA L4")
    found = problem(tmp_path, LOCAL, "train.device_batch_size=1", machine=machine)
    assert (found.key, found.origin) == ("parallel.dp_shard", "")


def test_silent_where_memory_is_not_known(tmp_path):
    unknown = [check(tmp_path, target) for target in (cluster("something-new"), cluster(""))]
    unknown += [check(tmp_path, target, "device=cpu") for target in (LOCAL, cluster("h100"))]
    assert not any("memory" in plan.reasons for plan in unknown)


def test_a_layout_that_the_model_does_not_allow(tmp_path):
    overrides = ("parallel.tp=8", "model.num_kv_heads=4", "train.device_batch_size=1")
    found = problem(tmp_path, cluster("h100"), *overrides)
    assert (found.key, found.origin) == ("parallel.tp", "--set parallel.tp=8")
    overrides = ("parallel.pp=8", "train.device_batch_size=2", "parallel.pp_microbatches=4")
    assert problem(tmp_path, cluster("h100"), *overrides).key == "parallel.pp_microbatches"


def test_a_model_that_is_larger_than_this_machine(tmp_path):
    small, large = (replace(NO_GPU, memory=size * 2**30) for size in (100, 101))
    options = ("device=cpu", "train.device_batch_size=1")
    found = problem(tmp_path, LOCAL, *options, machine=small)
    assert found.key == "model.preset"
    said(found.message)
    check(tmp_path, LOCAL, *options, machine=large)
    check(tmp_path, LOCAL, *options)
    # Each of several hosts stores a share of the copy.
    two = (*options, "resources.nodes=2")
    assert problem(tmp_path, LOCAL, *two, machine=small).key == "model.preset"
    check(tmp_path, Target("launcher", "two hosts", per="node"), *two, machine=small)


def test_no_memory_for_the_copies_that_are_saved_while_training_goes_on(tmp_path):
    """A copy needs 12 bytes for each of 6.7 billion parameters, once per node."""
    options = ("resources.nodes=2", "train.device_batch_size=1", "parallel.dp_replicate=2")
    found = problem(tmp_path, cluster("h200"), *options, "resources.mem=64G")
    said(found.render())
    check(tmp_path, cluster("h200"), *options, "resources.mem=96G")
    check(tmp_path, cluster("h200"), *options, "resources.mem=64G", "checkpoint.async=false")
    check(tmp_path, cluster("h200"), *options, 'resources.mem="0"')
    # The same holds on this machine.
    names = ("NVIDIA H200",) * 2
    machine = replace(NO_GPU, num_gpus=2, gpu_names=names, gpu_reason="two", memory=64 * 2**30)
    found = problem(tmp_path, LOCAL, "train.device_batch_size=1", machine=machine)
    assert found.key == "checkpoint.async"
    said(found.message)
