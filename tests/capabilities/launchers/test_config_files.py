"""Tests the files for the tools of launchers, and the refusal of options that a tool does not have."""

from pathlib import Path

import pytest

from tests.support.said import cases, said
from trainkit.capabilities.launchers.config_files import Job, LauncherInput, launcher_input
from trainkit.capabilities.launchers.launcher_plan import ACCELERATE_CONFIG, DS_CONFIG, MEGATRON_ARGS
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL
from trainkit.config import LoadedConfig, load_config
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload

FACTS = Facts(Machine(4, 0, (), "there is no NVIDIA driver on this machine"), LOCAL, None)
DS = ("train.py", "--deepspeed_config", "{ds_config}")


def loaded(tmp_path: Path, text: str) -> LoadedConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, layers=False)


def given(
    tmp_path: Path, launcher: str, text: str, command: tuple[str, ...] = DS, device: str = "cuda"
) -> LauncherInput:
    """Return the files that a launcher's tool gets on two nodes with four GPUs each."""
    return launcher_input(Job(loaded(tmp_path, text), 8, 2, 4, device), command, launcher)


def refusal(tmp_path: Path, launcher: str, text: str, device: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        given(tmp_path, launcher, text, device=device)
    return caught.value.render()


@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate", "lightning", "megatron"])
def test_nothing_is_generated_for_keys_that_are_not_set(tmp_path, launcher):
    assert given(tmp_path, launcher, "name: mine") == LauncherInput()


def test_the_keys_that_a_user_has_set(tmp_path):
    job = Job(load_config("quickstart", layers=False), 8, 2, 4, "cuda")
    assert launcher_input(job, ("train.py",), "accelerate") == LauncherInput()
    assert launcher_input(job, ("train.py",), "megatron") == LauncherInput()
    assert job.typed == ()
    config = loaded(tmp_path, "train: {steps: 5}\nlaunch: {env: {A: b}}\nparallel: {zero: 2}")
    assert Job(config, 1, 1, 1, "cpu").typed == ("parallel.zero", "train.steps")


def test_deepspeed(tmp_path):
    text = "train: {device_batch_size: 4}"
    assert given(tmp_path, "deepspeed", text, ("train.py",)) == LauncherInput()
    assert given(tmp_path, "deepspeed", text).files == {
        DS_CONFIG: '{\n  "train_micro_batch_size_per_gpu": 4\n}\n'
    }
    text = """
train: {device_batch_size: 4, global_batch_size: 64, steps: 100, grad_clip: 0.5}
optimizer: {lr: 1.0e-3, lr_scale: sqrt, lr_scale_base: 2}
parallel: {zero: 2, offload: true}
precision: {dtype: fp16}
"""
    said(given(tmp_path, "deepspeed", text).files[DS_CONFIG])


@pytest.mark.parametrize("parallel", ["dp_shard: -1", "dp_shard: 1, dp_replicate: -1", "offload: true"])
def test_zero_stages(tmp_path, parallel):
    text = f"train: {{global_batch_size: 64}}\nparallel: {{{parallel}}}"
    said(given(tmp_path, "deepspeed", text).files[DS_CONFIG])


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    text = "train: {device_batch_size: 4, global_batch_size: 40}"
    for launcher in ("deepspeed", "accelerate", "megatron"):
        said(refusal(tmp_path, launcher, text))


@pytest.mark.parametrize("text", cases(__file__, "test_deepspeed_refuses"))
def test_deepspeed_refuses(tmp_path, text):
    said(refusal(tmp_path, "deepspeed", text))


def test_accelerate_ddp(tmp_path):
    text = "train: {device_batch_size: 4, global_batch_size: 64}\nprecision: {dtype: bf16}"
    found = given(tmp_path, "accelerate", text, device="cpu")
    said(found.files[ACCELERATE_CONFIG])
    assert found.env == {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    alone = given(tmp_path, "accelerate", "train: {global_batch_size: 64}")
    assert alone == LauncherInput(), "accelerate has no word for a batch size alone"


def test_the_config_comes_after_the_launcher(tmp_path):
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    text = f"train: {{device_batch_size: 4, global_batch_size: 64}}\nlaunch: {{env: {{{name}: '9'}}}}"
    facts = Facts(Machine(2, 0, (), "no GPU"), LOCAL)
    plan = make_plan(loaded(tmp_path, f"device: cpu\n{text}"), facts, Workload(DS, "accelerate"))
    assert plan.environment.variables == {name: "9"}


def test_accelerate_fsdp(tmp_path):
    text = "parallel: {dp_shard: 4, dp_replicate: 2, zero: 2, offload: true, activation_checkpointing: full}"
    said(given(tmp_path, "accelerate", text).files[ACCELERATE_CONFIG])
    said(refusal(tmp_path, "accelerate", "parallel: {dp_shard: -1}", device="cpu"))
    said(refusal(tmp_path, "accelerate", "parallel: {pp: 2}"))
    said(refusal(tmp_path, "accelerate", "parallel: {activation_checkpointing: pointwise}"))


def test_accelerate_reads_what_is_generated(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    for text, device, expected in (
        ("precision: {dtype: bf16}", "cpu", ("multi_gpu", "bf16", None)),
        ("precision: {dtype: fp32}", "cuda", ("multi_gpu", "no", None)),
        ("parallel: {dp_shard: -1, zero: 2}", "cuda", ("use_fsdp", "no", False)),
    ):
        file = tmp_path / ACCELERATE_CONFIG
        file.write_text(given(tmp_path, "accelerate", text, device=device).files[file.name])
        argv = [f"--config_file={file}", "--num_machines=2", "--num_processes=8", "train.py"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
        kind, precision, reshards = expected
        assert getattr(args, kind)
        assert (args.mixed_precision, args.num_processes) == (precision, 8)
        assert reshards is None or args.fsdp_reshard_after_forward is reshards


def test_lightning_fills_in_what_the_command_asks_for(tmp_path):
    names = ("num_nodes", "devices", "accelerator", "strategy", "precision", "max_steps", "batch_size")
    names = (*names, "accumulate_grad_batches", "gradient_clip_val", "lr")
    command = tuple(f"--{name}={{{name}}}" for name in names)
    text = "train: {device_batch_size: 4, global_batch_size: 64}\nprecision: {dtype: bf16}"
    values = given(tmp_path, "lightning", text, command).values
    assert tuple(values) == names
    assert tuple(values.values()) == ("2", "4", "gpu", "ddp", "bf16-mixed", "200", "4", "2", "1", "0.0003")
    sharded = given(tmp_path, "lightning", "parallel: {dp_shard: -1}", ("t.py", "{strategy}", "{other}"))
    assert sharded.values == {"strategy": "fsdp"}


def test_megatron(tmp_path):
    text = """
seed: 1
data: {seq_len: 2048}
parallel: {tp: 2, pp: 2, sequence_parallel: true, activation_checkpointing: full}
train: {device_batch_size: 8, global_batch_size: 32, steps: 1000, grad_clip: null}
optimizer: {lr: 1.0e-4, betas: [0.9, 0.98]}
precision: {dtype: bf16}
"""
    said(given(tmp_path, "megatron", text).files[MEGATRON_ARGS])  # a device batch has 4 microbatches
    text = "parallel: {tp: 2}"
    assert given(tmp_path, "megatron", text).files == {MEGATRON_ARGS: "--tensor-model-parallel-size 2\n"}
    flags = "--expert-model-parallel-size 2\n--expert-tensor-parallel-size 1\n"
    found = given(tmp_path, "megatron", text.replace("tp: 2", "tp: 2, ep: 2")).files[MEGATRON_ARGS]
    assert found == f"--tensor-model-parallel-size 2\n{flags}"


def test_megatron_refuses_a_flag_that_the_command_has(tmp_path):
    job = Job(loaded(tmp_path, "train: {steps: 5}"), 8, 2, 4, "cuda")
    for words in (("--train-iters", "9"), ("--train-iters=9",)):
        with pytest.raises(ConfigError, match="--train-iters is in the command, but a config key"):
            launcher_input(job, ("pretrain_gpt.py", *words), "megatron")
    said(refusal(tmp_path, "megatron", "parallel: {offload: true}"))
    said(refusal(tmp_path, "megatron", "parallel: {activation_checkpointing: pointwise}"))


@pytest.mark.parametrize("case", cases(__file__, "test_a_key_without_effect_that_was_typed_is_warned_of"))
def test_a_key_without_effect_that_was_typed_is_warned_of(case):
    """A case is a launcher, its command, and the settings that were typed."""
    launcher, command, typed = case.split(" | ")
    config = load_config(None, overrides=typed.split(), environ={}, layers=False)
    plan = make_plan(config, FACTS, Workload(tuple(command.split()), launcher))
    said("\n".join(text for text in plan.warnings if "effect" in text))


def test_a_key_without_effect_of_a_file_or_the_environment_is_not_warned_of(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 3\ntrain: {steps: 5}")
    for overrides, flags, effect in [
        ((), {}, None),
        (("seed=4",), {}, "seed has"),  # the value is the file's, but it was typed for this run
        ((), {"seed": ("seed=4", 4), "train.steps": ("config['train.steps']", 4)}, "seed, train.steps have"),
        ((), {"seed": ("--sweep seed=4", 4)}, None),  # the command contains {seed}
    ]:
        config = load_config(
            tmp_path / "run.yaml",
            overrides=overrides,
            flags=flags,
            environ={"TRAINKIT_SEED": "9"},
            cwd=tmp_path,
        )
        warnings = make_plan(config, FACTS, Workload(("x.py",))).warnings
        found = [text.partition(" no effect")[0] for text in warnings if "effect" in text]
        assert found == ([] if effect is None else [effect])
    trained = load_config(None, overrides=["seed=4"], environ={}, layers=False)
    assert not [text for text in make_plan(trained, FACTS).warnings if "effect" in text]
