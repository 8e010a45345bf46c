"""Translates config values into a launcher's input: a config file, flags or placeholder values.

Only keys that the user set are passed on, so that the launcher's own defaults apply to all other keys. The
user's script itself chooses the model and the learning rate schedule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainkit.capabilities.launchers.launcher_plan import ACCELERATE_CONFIG, DS_CONFIG, MEGATRON_ARGS
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.batch import DEVICE, GLOBAL, BatchRequest, make_batch, scaled_lr
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.layout_rules import make_layout

SECTIONS = ("seed", "data", "train", "optimizer", "precision", "parallel")
"""Config keys and sections that can be passed on to a launcher."""
ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
RECOMPUTE = "parallel.activation_checkpointing"


@dataclass(frozen=True)
class Job:
    """Properties of a job that determine the generated files, in addition to the keys that the user set."""

    loaded: LoadedConfig
    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str
    asked: set[str] = field(default_factory=set)
    """The user-set keys that the generated files use; each call of `has` adds keys."""

    @cached_property
    def typed(self) -> tuple[str, ...]:
        """Return a sorted tuple of the user-set keys that can be passed on to a launcher."""
        known = sorted(self.loaded.origins)
        return tuple(
            key for key in known if key.partition(".")[0] in SECTIONS and self.loaded.set_by_user(key)
        )

    def has(self, *keys: str) -> bool:
        """Return whether the user set any of the given keys, or any key in the given sections."""
        found = {key for key in self.typed for name in keys if key == name or key.startswith(f"{name}.")}
        self.asked.update(found)
        return bool(found)

    def layout(self) -> Layout:
        """Return the parallel layout of the job's processes."""
        self.has(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")))
        return make_layout(self.loaded.config.parallel, self.world_size)[0]

    def batch(self, layout: Layout) -> Batch | None:
        """Return the batch sizes for one step, or None if the user set no batch size."""
        if not self.has(DEVICE, GLOBAL):
            return None
        return make_batch(BatchRequest.of(self.loaded), layout, self.loaded.config.data.seq_len)

    def lr(self, layout: Layout) -> float:
        """Return the peak learning rate, multiplied by the scale factor from lr_scale."""
        optimizer = self.loaded.config.optimizer
        self.has("optimizer.lr_scale", "optimizer.lr_scale_base")
        return scaled_lr(optimizer.lr, optimizer.lr_scale, layout.dp, optimizer.lr_scale_base)[0]

    @property
    def shards(self) -> bool:
        """Return whether the user requested sharding of parameters."""
        return self.has("parallel.dp_shard") and self.loaded.config.parallel.dp_shard != 1

    def only_set(self, *entries: tuple[str, str, object]) -> dict[str, object]:
        """Map names to values, omitting None and values whose key or section the user did not set."""
        return {name: value for key, name, value in entries if value is not None and self.has(key)}


@dataclass(frozen=True)
class LauncherInput:
    """The input for a launcher."""

    files: dict[str, str] = field(default_factory=dict)
    """Maps the name of each file in the run folder to the file's text."""
    env: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """Maps each placeholder in the command to the value that replaces it."""


def launcher_input(job: Job, command: Sequence[str], launcher: str) -> LauncherInput:
    """Return the input for the launcher that starts a command.

    Raises ConfigError for config values that the launcher does not support.
    """
    tools = {
        "accelerate": _accelerate,
        "deepspeed": _deepspeed,
        "lightning": _lightning,
        "megatron": _megatron,
    }
    return tools[launcher](job, command) if launcher in tools else LauncherInput()


def describe_input(given: LauncherInput, launcher: str) -> str | None:
    """Return a one-line description of a launcher's input, or None if there is no input."""
    parts = [f"{name} in the run folder" for name in given.files]
    parts += [f"{name}={value}" for name, value in given.env.items()]
    parts += [f"{{{name}}} is {value}" for name, value in given.values.items() if value]
    return f"{launcher} gets {', '.join(parts)}" if parts else None


def _refuse(job: Job, tool: str, problems: Iterable[tuple[str, str]], degrees: Sequence[str] = ()) -> None:
    """Raise ConfigError with the given problems, and with a problem for each of `degrees` that exceeds 1.

    A problem consists of a key and the reason why the tool does not support the key's value.
    """
    found = [*problems]
    for key in degrees:
        degree = getattr(job.loaded.config.parallel, key)
        if degree > 1 and job.has(f"parallel.{key}"):
            found.append((f"parallel.{key}", f"is {degree}, but --launcher {tool} does not forward this key"))
    hint = f"change or remove the key; you can add {tool}'s own options to the command"
    if found:
        raise ConfigError([Problem(key, message, hint=hint) for key, message in found])


# Input for accelerate


def _accelerate(job: Job, command: Sequence[str]) -> LauncherInput:
    """Return the file for ``accelerate launch --config_file``; see config_args.py in accelerate."""
    _refuse(job, "accelerate", _accelerate_problems(job), ("tp", "pp", "cp", "ep"))
    parallel, dtype = job.loaded.config.parallel, job.loaded.config.precision.dtype
    layout = job.layout() if job.shards else Layout(dp_shard=job.world_size)
    batch = job.batch(layout)
    env = {}
    if batch is not None and job.has(DEVICE) and job.has(GLOBAL):
        # The config file of `accelerate launch` has a key for gradient accumulation only for DeepSpeed, but
        # `Accelerator` reads this variable.
        env[ACCUMULATION_VARIABLE] = str(batch.accumulation_steps)
    if not (job.shards or job.has("precision.dtype")):
        # Without this config file, accelerate reads the user's default accelerate config file if it exists.
        return LauncherInput(env=env)
    several = "MULTI_GPU" if job.world_size > 1 else "'NO'"
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {'FSDP' if job.shards else several}"]
    if job.has("precision.dtype"):
        lines.append(f"mixed_precision: '{'no' if dtype == 'fp32' else dtype}'")
    if job.device == "cpu":
        lines.append("use_cpu: true")
    if job.shards:
        recompute = parallel.activation_checkpointing == "full"
        options = job.only_set(
            ("parallel.zero", "fsdp_reshard_after_forward", parallel.zero == 3),
            ("parallel.offload", "fsdp_offload_params", parallel.offload),
            (RECOMPUTE, "fsdp_activation_checkpointing", recompute),
        )
        lines += ["fsdp_config:", "  fsdp_version: 2"]
        lines += [f"  {name}: {str(value).lower()}" for name, value in options.items()]
        if layout.dp_replicate > 1:
            lines += [
                "parallelism_config:",
                f"  parallelism_config_dp_replicate_size: {layout.dp_replicate}",
                f"  parallelism_config_dp_shard_size: {layout.dp_shard}",
            ]
    return LauncherInput(files={ACCELERATE_CONFIG: "\n".join(lines) + "\n"}, env=env)


def _accelerate_problems(job: Job) -> Iterator[tuple[str, str]]:
    parallel = job.loaded.config.parallel
    if parallel.activation_checkpointing in ("pointwise", "selective") and job.has(RECOMPUTE):
        yield RECOMPUTE, f"is {parallel.activation_checkpointing}, which accelerate does not support"
    if job.shards and job.device == "cpu":
        yield "parallel.dp_shard", f"is {parallel.dp_shard}, but accelerate shards models only on GPUs"
    if not job.shards and parallel.offload and job.has("parallel.offload"):
        yield "parallel.offload", "is true, but accelerate can offload only sharded parameters"


# Input for DeepSpeed


def _deepspeed(job: Job, command: Sequence[str]) -> LauncherInput:
    """Return the file that replaces ``{ds_config}`` in a command: a DeepSpeed JSON config."""
    if not any("{ds_config}" in word for word in command):
        return LauncherInput()
    _refuse(job, "deepspeed", _deepspeed_problems(job), ("tp", "pp", "cp", "ep"))
    layout = Layout(dp_shard=job.world_size)
    config, batch = job.loaded.config, job.batch(layout)
    assert batch is not None
    dtype, parallel, optimizer = config.precision.dtype, config.parallel, config.optimizer
    is_global = job.has(GLOBAL) and config.train.global_batch_size is not None
    zero: dict[str, object] = {"stage": 0 if parallel.dp_shard == 1 else parallel.zero}
    if parallel.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if parallel.zero == 3:
            zero["offload_param"] = {"device": "cpu"}
    has_zero = job.has("parallel.dp_shard", "parallel.zero", "parallel.offload")
    params: dict[str, object] = {
        "lr": job.lr(layout),
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if job.device == "cpu" and not parallel.offload:
        params["torch_adam"] = True  # without offloading, DeepSpeed's own Adam kernel requires a GPU
    value = job.only_set(
        (DEVICE, "train_micro_batch_size_per_gpu", batch.device_batch_size),
        (GLOBAL, "train_batch_size", batch.global_batch_size if is_global else None),
        (DEVICE, "gradient_accumulation_steps", batch.accumulation_steps if is_global else None),
        ("precision.dtype", dtype, None if dtype == "fp32" else {"enabled": True}),
        ("train.grad_clip", "gradient_clipping", config.train.grad_clip),
        ("parallel", "zero_optimization", zero if has_zero else None),
        ("optimizer", "optimizer", {"type": "AdamW", "params": params}),
    )
    return LauncherInput(files={DS_CONFIG: json.dumps(value, indent=2) + "\n"})


def _deepspeed_problems(job: Job) -> Iterator[tuple[str, str]]:
    config = job.loaded.config
    parallel, optimizer = config.parallel, config.optimizer.name
    if not job.has(DEVICE) and (not job.has(GLOBAL) or config.train.global_batch_size is None):
        yield DEVICE, "is not set, but {ds_config} needs a batch size, for which DeepSpeed has no default"
    copies, shards = parallel.dp_replicate, parallel.dp_shard
    if shards not in (-1, 1, job.world_size) or (copies > 1 and shards != 1):
        message = (
            f"is {shards}, but ZeRO shards over all {job.world_size} processes; use -1, or 1 to "
            f"disable sharding"
        )
        yield "parallel.dp_shard", message
    if parallel.offload and parallel.dp_shard == 1:
        yield "parallel.offload", "is true, but DeepSpeed can offload only sharded state"
    if optimizer != "adamw" and job.has("optimizer"):
        yield "optimizer.name", f"is {optimizer}, which DeepSpeed does not support"
    if config.optimizer.groups and job.has("optimizer"):
        yield "optimizer.groups", "is set, but {ds_config} has one group of parameters"


# Input for Lightning

LIGHTNING_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def _lightning(job: Job, command: Sequence[str]) -> LauncherInput:
    """Return values for placeholders that have the names of ``lightning.Trainer`` arguments.

    Because a command requests each value by name, values that the user did not set are included with their
    defaults.
    """
    config, layout = job.loaded.config, Layout(dp_shard=job.world_size)
    train = config.train

    def batch() -> Batch:
        return make_batch(BatchRequest.of(job.loaded), layout, config.data.seq_len)

    values: dict[str, tuple[Callable[[], object], Sequence[str]]] = {
        "num_nodes": (lambda: job.num_nodes, ()),
        "devices": (lambda: job.workers_per_node, ()),
        "accelerator": (lambda: "cpu" if job.device == "cpu" else "gpu", ()),
        "strategy": (lambda: "fsdp" if job.shards else "ddp", ()),
        "precision": (lambda: LIGHTNING_PRECISION[config.precision.dtype], ["precision.dtype"]),
        "max_steps": (lambda: -1 if train.steps is None else train.steps, ["train.steps", "train.epochs"]),
        "batch_size": (lambda: batch().device_batch_size, [DEVICE, GLOBAL]),
        "accumulate_grad_batches": (lambda: batch().accumulation_steps, [DEVICE, GLOBAL]),
        "gradient_clip_val": (
            lambda: 0 if train.grad_clip is None else f"{train.grad_clip:g}",
            ["train.grad_clip"],
        ),
        "lr": (lambda: f"{job.lr(layout):g}", ["optimizer.lr"]),
    }
    """Maps each placeholder to a function that returns its value, and to the config keys on which the value
    depends."""
    asked = [name for name in values if any(f"{{{name}}}" in word for word in command)]
    problems = []
    if "strategy" in asked and job.shards and job.device == "cpu":
        message = f"is {config.parallel.dp_shard}, but Lightning shards models only on GPUs"
        problems.append(("parallel.dp_shard", message))
    _refuse(job, "lightning", problems, ("tp", "pp", "cp", "ep"))
    job.has(*(key for name in asked for key in values[name][1]))
    return LauncherInput(values={name: str(values[name][0]()) for name in asked})


# Input for Megatron


def _megatron(job: Job, command: Sequence[str]) -> LauncherInput:
    """Return the flags to append to a command; Megatron-LM's megatron/training/arguments.py defines them."""
    _refuse(job, "megatron", _megatron_problems(job))
    flags = _megatron_flags(job, job.layout())
    typed = {word.partition("=")[0] for word in command}
    twice = [flag for flag in flags if flag in typed]
    if twice:
        message = f"{twice[0]} is in the command, but a config key also sets this flag"
        raise ConfigError([Problem("", message, hint="remove the flag or the config key")])
    text = "".join(f"{flag} {value}".rstrip() + "\n" for flag, value in flags.items())
    return LauncherInput(files={MEGATRON_ARGS: text} if text else {})


def _megatron_flags(job: Job, layout: Layout) -> dict[str, object]:
    """Return the flags and their values; a flag that takes no value maps to an empty string."""
    config = job.loaded.config
    train, optimizer, dtype, batch = config.train, config.optimizer, config.precision.dtype, job.batch(layout)
    recompute = config.parallel.activation_checkpointing
    sequence = config.parallel.sequence_parallel and layout.tp > 1
    # With pipeline parallelism, trainkit splits a device batch into microbatches.
    micro = batch and batch.device_batch_size // (batch.pp_microbatches or 1)
    whole = batch and batch.global_batch_size if train.global_batch_size is not None else None
    # By default, Megatron splits the experts over the tensor-parallel ranks before `ep` divides them.
    split_experts = 1 if layout.ep > 1 and layout.tp > 1 else None
    return job.only_set(
        ("parallel.tp", "--tensor-model-parallel-size", layout.tp),
        ("parallel.pp", "--pipeline-model-parallel-size", layout.pp),
        ("parallel.cp", "--context-parallel-size", layout.cp),
        ("parallel.ep", "--expert-model-parallel-size", layout.ep),
        ("parallel.ep", "--expert-tensor-parallel-size", split_experts),
        ("parallel.sequence_parallel", "--sequence-parallel", "" if sequence else None),
        (RECOMPUTE, "--recompute-granularity", None if recompute == "none" else recompute),
        (RECOMPUTE, "--recompute-method", "uniform" if recompute == "full" else None),
        (RECOMPUTE, "--recompute-num-layers", 1 if recompute == "full" else None),
        (DEVICE, "--micro-batch-size", micro),
        (GLOBAL, "--global-batch-size", whole),
        ("precision.dtype", f"--{dtype}", None if dtype == "fp32" else ""),
        ("seed", "--seed", config.seed),
        ("data.seq_len", "--seq-length", config.data.seq_len),
        ("data.seq_len", "--max-position-embeddings", config.data.seq_len),
        ("train.steps", "--train-iters", train.steps),
        ("train.log_every", "--log-interval", train.log_every),
        ("train.eval_every", "--eval-interval", train.eval_every),
        ("train.grad_clip", "--clip-grad", train.grad_clip or 0.0),
        ("optimizer.lr", "--lr", job.lr(layout)),
        ("optimizer.weight_decay", "--weight-decay", optimizer.weight_decay),
        ("optimizer.betas", "--adam-beta1", optimizer.betas[0]),
        ("optimizer.betas", "--adam-beta2", optimizer.betas[1]),
        ("optimizer.eps", "--adam-eps", optimizer.eps),
    )


def _megatron_problems(job: Job) -> Iterator[tuple[str, str]]:
    config = job.loaded.config
    if config.optimizer.name != "adamw" and job.has("optimizer.name"):
        yield "optimizer.name", f"is {config.optimizer.name}, which Megatron does not support"
    if config.parallel.activation_checkpointing == "pointwise" and job.has(RECOMPUTE):
        yield RECOMPUTE, "is pointwise, which Megatron does not support"
    if config.parallel.offload and job.has("parallel.offload"):
        yield "parallel.offload", "is true, but --launcher megatron does not forward this key"
