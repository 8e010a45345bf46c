"""Tests that a task with a tensor plan trains with tensor parallelism as on one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.support import split_tasks
from tests.support.hf_models import need, save_model
from tests.support.models import fake_mesh
from tests.support.parity import (
    Case,
    assert_same_curves,
    close,
    curve,
    make_trainer,
    metrics_of,
    run_cases,
    run_chain,
    saved_tensors,
    worst_difference,
)
from tests.support.runs import train
from tests.support.said import said
from trainkit.capabilities.task_check.worker import Smoke
from trainkit.cli.main import main
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.models.model import allocate, local_tensor
from trainkit.trainer.parallel.tensor import STYLES, fill_shards, find_styles, split_model
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_code import TaskError
from trainkit.trainer.user_task import UserTask

FILE = Path(split_tasks.__file__)
COMMON = (
    *(f"task={FILE}:Speak", "train.steps=4", "train.eval_every=2", "train.grad_clip=0.5"),
    "optimizer.lr=0.01",
)
ALONE = Case("alone", 1, {})


def config_of(folder: Path, *options: str, task: str = "Speak") -> RunConfig:
    (folder / "t.yaml").write_text("name: t\n")
    overrides = [f"task={FILE}:{task}", "train.eval_every=null", "data.num_workers=0", *options]
    return load_config(folder / "t.yaml", overrides=overrides, environ={}, cwd=folder).config


def assert_same_metrics(folder: Path, cases: list[Case], alone: str = "alone") -> None:
    assert_same_curves(folder, cases, alone)
    expected = metrics_of(folder / alone)
    for case in cases:
        for mine, theirs in zip(metrics_of(folder / case.name), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


def train_and_compare(rank: int, attempt: AttemptDir) -> None:
    """Train, and check that the ranks that share a shard of a weight have the same values."""
    trainer = make_trainer(rank, attempt)
    trainer.train()
    group = trainer.world.mesh["tp"].get_group()
    num_split = 0
    for module in trainer.built.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays gathered after the validation
    for name, param in trainer.built.model_parts[0].model.named_parameters():
        dims = param.device_mesh.mesh_dim_names
        if "tp" in dims and not param.placements[dims.index("tp")].is_replicate():
            num_split += 1
            continue
        own = local_tensor(param.detach()).contiguous()
        others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, own, group=group)
        assert all(torch.equal(other, own) for other in others), name
    # Two layers split q, k, v and up with their biases, out and down. The embedding, the head and its bias
    # are also split.
    assert num_split == 2 * (4 * 2 + 2) + 3
    close(trainer)


@pytest.mark.slow
@pytest.mark.smoke
def test_two_ranks_have_the_curve_of_one(tmp_path):
    case = Case("tp", 2, {"tp": 2})
    run_cases(tmp_path, [ALONE], COMMON)
    run_cases(tmp_path, [case], COMMON, function=train_and_compare)
    assert_same_metrics(tmp_path, [case])
    assert set(metrics_of(tmp_path / "tp")[1]) >= {"right", "val_accuracy", "val_right"}
    assert saved(tmp_path / "tp") == saved(tmp_path / "alone")


@pytest.mark.slow
def test_every_layout_has_the_same_curve(tmp_path):
    sequence = (f"task={FILE}:SpeakInSequence",)
    cases = [
        Case("selective", 2, {"tp": 2, "activation_checkpointing": "selective"}),
        Case("sequence", 4, {"tp": 2, "dp_shard": 2, "activation_checkpointing": "full"}, sequence),
        Case("zero2-offload", 4, {"tp": 2, "dp_shard": 2, "zero": 2, "offload": True}),
        Case("ddp", 4, {"tp": 2, "dp_replicate": 2}),
    ]
    run_cases(tmp_path, [ALONE, *cases], COMMON)
    assert_same_metrics(tmp_path, cases)


@pytest.mark.slow
def test_tied_and_frozen_weights_and_those_read_from_files(tmp_path):
    layouts = {"tied": (4, {"tp": 2, "dp_shard": 2}), "on_meta": (2, {"tp": 2}), "frozen": (2, {"tp": 2})}
    cases = []
    for name, (num_procs, layout) in layouts.items():
        options = (f"task_args.{name}=true", "train.steps=2")
        cases += [Case(f"{name}-alone", 1, {}, options), Case(name, num_procs, layout, options)]
    run_cases(tmp_path, cases, COMMON)
    for name in layouts:
        assert_same_metrics(tmp_path, [Case(name, 1, {})], f"{name}-alone")
        assert saved(tmp_path / name) == saved(tmp_path / f"{name}-alone")
    assert "optimizer.embed.weight.exp_avg" not in saved(tmp_path / "frozen")


@pytest.mark.slow
def test_a_resume_continues_the_same_curve(tmp_path):
    """The curve is equal to the last bit on the same layout with dropout, and to 1e-5 on other layouts."""
    layout: dict[str, object] = {"tp": 2, "dp_shard": 2}
    cases = [Case("cut", 4, layout, ("train.stop_at_step=2",)), Case("cut", 4, layout)]
    dropout = (*COMMON, "task_args.dropout=0.2")
    run_cases(tmp_path, [*cases, Case("whole", 4, layout)], dropout, function=train_and_compare)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    uneven = (*COMMON, "task_args.hidden=46")  # 23 rows of a tensor-parallel rank are sharded over two ranks
    run_chain(tmp_path, [(2, {"tp": 2}), (4, layout), (1, {})], uneven, steps=1)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5


@pytest.mark.slow
def test_bf16(tmp_path):
    case = Case("ddp", 4, {"tp": 2, "dp_replicate": 2})
    run_cases(tmp_path, [ALONE, case], [*COMMON, "train.steps=2", "precision.dtype=bf16"])
    assert worst_difference(tmp_path / "ddp", tmp_path / "alone") < 3e-2


@pytest.mark.slow
def test_a_weight_without_the_gradients_of_the_other_ranks_ends_the_run(tmp_path):
    options = [*COMMON, "parallel.tp=2", "data.num_workers=0"]
    options.append("task_args.without=[layers.*.attention.q_norm]")
    attempt = train(tmp_path / "run", options, 2, expect=78)
    said(read_json(attempt.rank_error(0))["message"])
    assert not read_metrics(RunDir(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_models_of_transformers(tmp_path):
    need("transformers")
    common = [
        *("model.architecture=transformers", "model.preset=tiny", "data.tokenizer=bytes"),
        *("train.steps=2", "train.eval_every=2", "train.grad_clip=0.5", "optimizer.lr=0.003"),
        *("model.num_layers=null", "model.num_kv_heads=null"),
    ]
    for kind, changes, case in (
        ("qwen2", {"vocab_size": 321}, Case("tp", 2, {"tp": 2})),
        ("qwen3", {"head_dim": 16}, Case("tp-fsdp", 4, {"tp": 2, "dp_shard": 2})),
    ):
        model = save_model(tmp_path / f"{kind}-model", kind, tie_word_embeddings=True, **changes)
        (tmp_path / kind).mkdir()
        run_cases(tmp_path / kind, [ALONE, case], [*common, f"model.hf={model}"])
        assert_same_metrics(tmp_path / kind, [case])


def saved(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in saved_tensors(folder).items()}


class Planned(split_tasks.Speak):
    plan: Mapping[str, Any]

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return self.plan


PLANS: dict[str, Any] = {
    "empty": {},
    "list": ["head"],
    "nothing": {"layers.up": "colwise"},
    "layer": {"layers.*": "colwise"},
    "style": {"head": "columns"},
    "norm": {"norm": ColwiseParallel()},
    "rows": {"layers.?.up": "rowwise"},
    "embedding": {"embed": "colwise"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_that_do_not_fit(tmp_path, plan):
    task = Planned(config_of(tmp_path))
    task.plan = PLANS[plan]
    with pytest.raises(TaskError) as caught:
        find_styles(task, task.config, task.build_model(), 3)
    said(str(caught.value))
    said(str(caught.value.hint))


def test_one_parameter_is_not_split_in_two_ways(tmp_path):
    task = split_tasks.Speak(config_of(tmp_path), tied=True, without=("head",))
    with pytest.raises(TaskError) as caught, fake_mesh() as mesh:
        split(task, mesh)
    said(str(caught.value))


def test_the_first_pattern_counts(tmp_path):
    task = Planned(config_of(tmp_path))
    task.plan = {"layers.0.up": "colwise_gather_output", "layers.*.up": "colwise"}
    model = task.build_model()
    found = find_styles(task, task.config, model, 2)
    first, second = (model.get_submodule(f"layers.{index}.up") for index in range(2))
    assert found == {first: STYLES["colwise_gather_output"], second: STYLES["colwise"]}


def test_an_embedding_with_a_padding_index_cannot_be_split_by_rows(tmp_path):
    task = Planned(config_of(tmp_path))
    task.plan = {"embed": "rowwise"}
    model = task.build_model()
    model.embed = nn.Embedding(24, 32, padding_idx=0)
    with pytest.raises(TaskError, match="embed has padding_idx"):
        find_styles(task, task.config, model, 2)


def split(task: split_tasks.Speak, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = task.build_model()
    return model, split_model(task.config, model, find_styles(task, task.config, model, 2), mesh)


def test_a_rank_gets_memory_for_its_shards_only(tmp_path):
    task = split_tasks.Speak(config_of(tmp_path), tied=True, frozen=True)
    torch.manual_seed(0)
    whole = {name: param.detach() for name, param in task.build_model().named_parameters()}
    frozen = {name for name in whole if name.startswith(("embed.", "layers.0."))}
    torch.manual_seed(0)
    with fake_mesh() as mesh:
        model, values = split(task, mesh)
        assert all(param.is_meta for param in model.parameters())
        allocate(model, torch.device("cpu"))
        fill_shards(model, values)
        shards = {name: local_tensor(param.detach()) for name, param in model.named_parameters()}
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert {name for name, param in model.named_parameters() if not param.requires_grad} == frozen
    assert shards.keys() == whole.keys()
    assert torch.equal(shards["embed.weight"], whole["embed.weight"][12:])
    assert torch.equal(shards["layers.1.up.bias"], whole["layers.1.up.bias"][24:])
    assert torch.equal(shards["layers.1.down.weight"], whole["layers.1.down.weight"][:, 24:])
    for name in ("layers.1.down.bias", "layers.1.attention.q_norm.weight", "norm.weight", "positions.table"):
        assert torch.equal(shards[name], whole[name])


def test_parts_of_weights_are_read(tmp_path):
    task = UserTask(config_of(tmp_path, "task_args.on_meta=true"), None, opens_data=False)
    task.build_model()
    values = cast(split_tasks.Speak, task.task).values
    index = [slice(3, 5), slice(16, 32)]
    assert torch.equal(task.read_weight("head.weight", index), values["head.weight"][3:5, 16:32])
    values["head.weight"] = torch.ones(24, 48)
    with pytest.raises(TaskError, match=r"read_weight\('head.weight'\) returned rows of shape \[48\]"):
        task.read_weight("head.weight", index)


def test_a_task_without_a_plan_is_refused_at_submit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "t.yaml").write_text("name: t\ndevice: cpu\ntrain: {global_batch_size: 8}\n")
    common = ["check", "t.yaml", "--gpus-per-node", "2", "--set", f"task={FILE}:NoPlan", "--set"]
    for key in ("tp", "pp", "cp"):
        assert main([*common, f"parallel.{key}=2"]) == 2
        said(capsys.readouterr().err)


def test_a_smoke_test_checks_the_plan(tmp_path):
    assert list(Smoke(config_of(tmp_path)).problems()) == []
    extra = 'task_args.extra={"layer.*.up": "colwise"}'
    [problem] = Smoke(config_of(tmp_path, extra)).problems()
    said(problem.message)


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(
    ("kind", "tp", "message"),
    [
        ("llama", 2, ""),
        ("llama", 3, "is 3, which does not divide num_attention_heads 4 of"),
        ("gpt2", 2, "is 2, which GPT2LMHeadModel does not support: it has no tensor-parallel plan"),
        ("mixtral", 2, "is 2, which MixtralForCausalLM does not support: it has "),
    ],
)
def test_models_of_transformers_that_cannot_be_split(tmp_path, kind, tp, message):
    need("transformers")
    folder = save_model(tmp_path / "model", kind)
    options = [f"model.hf={folder}", "model.architecture=transformers", "data.tokenizer=bytes"]
    options += ["task=causal_lm", f"parallel.tp={tp}"]
    problem = definite_problem(config_of(tmp_path, *options))
    if not message:
        assert problem is None
        return
    assert problem.key == "parallel.tp"
    assert problem.message.startswith(message)
