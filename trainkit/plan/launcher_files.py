"""What a launcher's own tool gets from the config: its config file, its flags, or values for the command.

Only keys that the user set are passed on, so that every other default stays that of the tool.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError, Problem
from trainkit.formats import JsonObject
from trainkit.plan.batch import DEVICE, GLOBAL, BatchRequest, make_batch, scaled_lr
from trainkit.plan.launch import ACCELERATE_CONFIG, DS_CONFIG, MEGATRON_ARGS, Batch, Layout
from trainkit.plan.layout_rules import make_layout
from trainkit.plan.model_shape import resolve_model_shape

SECTIONS = ("seed", "model", "data", "train", "optimizer", "schedule", "precision", "parallel")
"""The keys and sections that can reach a launcher."""
ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
MIN_DS_WARMUP = 2
ANY_VOCABULARY = 1
"""The size of the vocabulary is passed on only if it was set, so that no tokenizer is read."""


@dataclass(frozen=True)
class Job:
    """What a generated file depends on besides the keys that were set."""

    loaded: LoadedConfig
    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str

    def has(self, *keys: str) -> bool:
        """Whether the user set one of these keys or a key of these sections."""
        return any(
            self.loaded.set_by_user(key) for key in self.loaded.origins for name in keys if _is_in(key, name)
        )

    def batch(self, layout: Layout) -> Batch | None:
        """The batch of one step; None unless the user set one of its sizes."""
        if not self.has(DEVICE, GLOBAL):
            return None
        return make_batch(BatchRequest.of(self.loaded), layout, self.loaded.config.data.seq_len)

    def lr(self, layout: Layout) -> float:
        """The peak learning rate, scaled as the config says."""
        optimizer = self.loaded.config.optimizer
        return scaled_lr(optimizer.lr, optimizer.lr_scale, layout.dp, optimizer.lr_scale_base)[0]


@dataclass(frozen=True)
class LauncherInput:
    """What the tool of a launcher gets."""

    files: dict[str, str] = field(default_factory=dict)
    """Name in the run folder -> text."""
    env: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """Placeholder in the command -> its value."""


def keys_set_by_user(loaded: LoadedConfig) -> tuple[str, ...]:
    """The keys that may reach a launcher and that the user set, sorted."""
    return tuple(
        sorted(
            key
            for key in loaded.origins
            if loaded.set_by_user(key) and any(_is_in(key, section) for section in SECTIONS)
        )
    )


def launcher_input(job: Job, command: Sequence[str], launcher: str) -> LauncherInput:
    """What a launcher's tool gets for a command.

    Raises ConfigError for values that the tool has no counterpart for.
    """
    make = {
        "accelerate": _accelerate,
        "deepspeed": _deepspeed,
        "lightning": _lightning,
        "megatron": _megatron,
    }.get(launcher)
    return LauncherInput() if make is None else make(job, command)


def describe_input(given: LauncherInput, launcher: str) -> str | None:
    """Describe in a line what a tool gets; None if nothing."""
    parts = [f"{name} in the run folder" for name in given.files]
    parts += [f"{name}={value}" for name, value in given.env.items()]
    parts += [f"{{{name}}} is {value}" for name, value in given.values.items() if value]
    return f"{launcher} gets {', '.join(parts)}" if parts else None


def _is_in(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _refuse(loaded: LoadedConfig, problems: Iterator[tuple[str, str, str]]) -> None:
    found = [loaded.problem(*problem) for problem in problems]
    if found:
        raise ConfigError(found)


def _unsupported_degrees(job: Job, tool: str, keys: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for key in keys:
        degree = getattr(job.loaded.config.parallel, key)
        if degree > 1 and job.has(f"parallel.{key}"):
            hint = f"remove parallel.{key}, or use the built-in trainer"
            yield f"parallel.{key}", f"is {degree}, which --launcher {tool} does not pass on", hint


# accelerate


def _accelerate(job: Job, command: Sequence[str]) -> LauncherInput:
    """The file of ``accelerate launch --config_file``; see ClusterConfig in accelerate's config_args.py."""
    _refuse(job.loaded, _accelerate_problems(job))
    parallel = job.loaded.config.parallel
    sharded = job.has("parallel.dp_shard") and parallel.dp_shard != 1
    layout = make_layout(parallel, job.world_size)[0] if sharded else Layout(dp_shard=job.world_size)
    batch = job.batch(layout)
    env = {}
    if batch is not None and job.has(DEVICE) and job.has(GLOBAL):
        # accelerate launch has no key for it except with DeepSpeed; Accelerator reads the variable.
        env[ACCUMULATION_VARIABLE] = str(batch.accumulation_steps)
    if not (sharded or job.has("precision.dtype")):
        # accelerate then reads the user's own default file, if there is one.
        return LauncherInput(env=env)
    several = "MULTI_GPU" if job.world_size > 1 else "'NO'"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else several}",
    ]
    if job.has("precision.dtype"):
        dtype = job.loaded.config.precision.dtype
        lines.append(f"mixed_precision: '{'no' if dtype == 'fp32' else dtype}'")
    if job.device == "cpu":
        lines.append("use_cpu: true")
    if sharded:
        lines += ["fsdp_config:", "  fsdp_version: 2"]
        if job.has("parallel.zero"):
            lines.append(f"  fsdp_reshard_after_forward: {_yaml(parallel.zero == 3)}")
        if job.has("parallel.offload"):
            lines.append(f"  fsdp_offload_params: {_yaml(parallel.offload)}")
        if job.has("parallel.activation_checkpointing"):
            full = parallel.activation_checkpointing == "full"
            lines.append(f"  fsdp_activation_checkpointing: {_yaml(full)}")
        if layout.dp_replicate > 1:
            lines += [
                "parallelism_config:",
                f"  parallelism_config_dp_replicate_size: {layout.dp_replicate}",
                f"  parallelism_config_dp_shard_size: {layout.dp_shard}",
            ]
    return LauncherInput(files={ACCELERATE_CONFIG: "\n".join(lines) + "\n"}, env=env)


def _yaml(value: bool) -> str:
    return "true" if value else "false"


def _accelerate_problems(job: Job) -> Iterator[tuple[str, str, str]]:
    parallel = job.loaded.config.parallel
    yield from _unsupported_degrees(job, "accelerate", ("tp", "pp", "cp"))
    if parallel.activation_checkpointing == "selective" and job.has("parallel.activation_checkpointing"):
        hint = "use full or none, or choose the layers in the script"
        yield "parallel.activation_checkpointing", "is selective, which accelerate does not have", hint
    sharded = job.has("parallel.dp_shard") and parallel.dp_shard != 1
    if sharded and job.device == "cpu":
        message = f"is {parallel.dp_shard}, but accelerate shards models on GPUs only"
        yield "parallel.dp_shard", message, "remove it: each process then has the whole model"
    if not sharded and parallel.offload and job.has("parallel.offload"):
        hint = "set parallel.dp_shard: -1"
        yield "parallel.offload", "is true, but accelerate offloads sharded parameters only", hint


# DeepSpeed


def _deepspeed(job: Job, command: Sequence[str]) -> LauncherInput:
    """The file for ``{ds_config}`` in a command; the keys are those of DeepSpeed's configuration JSON."""
    if not any("{ds_config}" in word for word in command):
        return LauncherInput()
    loaded = job.loaded
    _refuse(loaded, _deepspeed_problems(job))
    layout = Layout(dp_shard=job.world_size)
    config, batch = loaded.config, job.batch(layout)
    assert batch is not None
    value: JsonObject = {}
    if job.has(DEVICE):
        value["train_micro_batch_size_per_gpu"] = batch.device_batch_size
    if job.has(GLOBAL) and config.train.global_batch_size is not None:
        value["train_batch_size"] = batch.global_batch_size
    if len(value) == 2:
        value["gradient_accumulation_steps"] = batch.accumulation_steps
    if job.has("precision.dtype") and config.precision.dtype != "fp32":
        value[config.precision.dtype] = {"enabled": True, **_loss_scale(job)}
    if job.has("train.grad_clip") and config.train.grad_clip is not None:
        value["gradient_clipping"] = config.train.grad_clip
    if job.has("parallel.dp_shard", "parallel.zero", "parallel.offload"):
        value["zero_optimization"] = _zero(job)
    if job.has("optimizer"):
        optimizer = config.optimizer
        params: JsonObject = {
            "lr": job.lr(layout),
            "betas": list(optimizer.betas),
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        }
        if job.device == "cpu" and not config.parallel.offload:
            params["torch_adam"] = True  # its own kernel for parameters on the device is for GPUs
        value["optimizer"] = {"type": "AdamW", "params": params}
    if job.has("schedule"):
        value["scheduler"] = _ds_schedule(job, job.lr(layout))
    return LauncherInput(files={DS_CONFIG: json.dumps(value, indent=2) + "\n"})


def _loss_scale(job: Job) -> dict[str, int]:
    precision, found = job.loaded.config.precision, {}
    if precision.dtype == "fp16" and job.has("precision.init_loss_scale"):
        found["initial_scale_power"] = int(math.log2(precision.init_loss_scale))
    if precision.dtype == "fp16" and job.has("precision.loss_scale_growth_interval"):
        found["loss_scale_window"] = precision.loss_scale_growth_interval
    return found


def _zero(job: Job) -> JsonObject:
    parallel = job.loaded.config.parallel
    if parallel.dp_shard == 1:
        return {"stage": 0}
    value: JsonObject = {"stage": parallel.zero}
    if parallel.offload:
        value["offload_optimizer"] = {"device": "cpu"}
        if parallel.zero == 3:
            value["offload_param"] = {"device": "cpu"}
    return value


def _ds_schedule(job: Job, lr: float) -> JsonObject:
    schedule, steps = job.loaded.config.schedule, job.loaded.config.train.steps
    params: JsonObject = {"warmup_num_steps": schedule.warmup_steps, "warmup_type": "linear"}
    if schedule.name == "cosine":
        params = {"total_num_steps": steps, **params, "cos_min_ratio": schedule.min_lr_ratio}
        return {"type": "WarmupCosineLR", "params": params}
    params |= {"warmup_min_lr": 0.0, "warmup_max_lr": lr}
    if schedule.name == "linear":
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **params}}
    return {"type": "WarmupLR", "params": params}


def _deepspeed_problems(job: Job) -> Iterator[tuple[str, str, str]]:
    config = job.loaded.config
    parallel, schedule = config.parallel, config.schedule
    yield from _unsupported_degrees(job, "deepspeed", ("tp", "pp", "cp"))
    if not job.has(DEVICE, GLOBAL):
        hint = f"set {DEVICE} or {GLOBAL}, for example --set {DEVICE}=8"
        yield DEVICE, "is not set, and {ds_config} needs a batch size: DeepSpeed has no default", hint
    elif not job.has(DEVICE) and config.train.global_batch_size is None:
        yield GLOBAL, "is null, so {ds_config} has no batch size", f"set {DEVICE}"
    if parallel.dp_shard not in (-1, 1, job.world_size):
        message = f"is {parallel.dp_shard}, but ZeRO shards over all {job.world_size} processes"
        yield "parallel.dp_shard", message, "set it to -1, or to 1 for replicas"
    elif parallel.dp_replicate not in (-1, 1) and parallel.dp_shard != 1:
        message = f"is {parallel.dp_replicate}, but ZeRO shards over all processes"
        yield "parallel.dp_replicate", message, "remove it, or set parallel.dp_shard: 1 for replicas"
    if parallel.offload and parallel.dp_shard == 1:
        yield (
            "parallel.offload",
            "is true, but DeepSpeed offloads what it shards",
            "set parallel.dp_shard: -1",
        )
    if config.optimizer.name != "adamw" and job.has("optimizer"):
        message = f"is {config.optimizer.name}, which DeepSpeed does not have"
        yield "optimizer.name", message, "use adamw"
    if math.log2(config.precision.init_loss_scale) % 1 and job.has("precision.init_loss_scale"):
        message = f"is {config.precision.init_loss_scale:g}, but DeepSpeed needs a power of 2"
        yield "precision.init_loss_scale", message, "for example 65536"
    if not job.has("schedule"):
        return
    if schedule.name == "wsd":
        yield "schedule.name", "is wsd, which DeepSpeed does not have", "use cosine, linear or constant"
    if schedule.name == "linear" and schedule.min_lr_ratio != 0:
        message = f"is {schedule.min_lr_ratio:g}, but DeepSpeed's linear decay ends at 0"
        yield "schedule.min_lr_ratio", message, "set it to 0, or use cosine"
    if schedule.name in ("linear", "constant") and not job.has("optimizer"):
        message = f"is {schedule.name}, which DeepSpeed needs the learning rate for"
        yield "schedule.name", message, "set optimizer.lr"
    if schedule.name != "constant" and (config.train.steps is None or not job.has("train.steps")):
        yield "train.steps", "is not set, but the schedule needs a number of steps", "set train.steps"
    if schedule.warmup_steps < MIN_DS_WARMUP:
        message = f"is {schedule.warmup_steps}, but DeepSpeed warms up over at least {MIN_DS_WARMUP} steps"
        yield "schedule.warmup_steps", message, f"set it to {MIN_DS_WARMUP} or more"


# Lightning

LIGHTNING_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def _lightning(job: Job, command: Sequence[str]) -> LauncherInput:
    """Values for placeholders, named like the arguments of ``lightning.Trainer``.

    A command asks for each by name, so that it also gets the config's defaults.
    """
    config, layout = job.loaded.config, Layout(dp_shard=job.world_size)

    def batch() -> Batch:
        return make_batch(BatchRequest.of(job.loaded), layout, config.data.seq_len)

    values: dict[str, Callable[[], str]] = {
        "num_nodes": lambda: str(job.num_nodes),
        "devices": lambda: str(job.workers_per_node),
        "accelerator": lambda: "cpu" if job.device == "cpu" else "gpu",
        "strategy": lambda: "fsdp" if _is_sharded(job) else "ddp",
        "precision": lambda: LIGHTNING_PRECISION[config.precision.dtype],
        "max_steps": lambda: "-1" if config.train.steps is None else str(config.train.steps),
        "batch_size": lambda: str(batch().device_batch_size),
        "accumulate_grad_batches": lambda: str(batch().accumulation_steps),
        "gradient_clip_val": lambda: "0" if config.train.grad_clip is None else f"{config.train.grad_clip:g}",
        "lr": lambda: f"{job.lr(layout):g}",
    }
    asked = [name for name in values if any(f"{{{name}}}" in word for word in command)]
    _refuse(job.loaded, _unsupported_degrees(job, "lightning", ("tp", "pp", "cp")))
    if "strategy" in asked and _is_sharded(job) and job.device == "cpu":
        message = f"is {config.parallel.dp_shard}, but Lightning shards models on GPUs only"
        hint = "remove it: each process then has the whole model"
        raise ConfigError([job.loaded.problem("parallel.dp_shard", message, hint)])
    return LauncherInput(values={name: values[name]() for name in asked})


def _is_sharded(job: Job) -> bool:
    return job.has("parallel.dp_shard") and job.loaded.config.parallel.dp_shard != 1


# Megatron


def _megatron(job: Job, command: Sequence[str]) -> LauncherInput:
    """The flags that are appended to a command, as in Megatron-LM's megatron/training/arguments.py."""
    loaded = job.loaded
    _refuse(loaded, _megatron_problems(job))
    layout = make_layout(loaded.config.parallel, job.world_size)[0]
    flags = dict(_megatron_flags(job, layout))
    typed = {word.partition("=")[0] for word in command}
    twice = [flag for flag in flags if flag in typed]
    if twice:
        message = f"{twice[0]} is in the command, and a key of the config sets it too"
        raise ConfigError([Problem("", message, hint="remove one of the two")])
    lines = [flag if value is None else f"{flag} {value}" for flag, value in flags.items()]
    return LauncherInput(files={MEGATRON_ARGS: "\n".join(lines) + "\n"} if lines else {})


def _megatron_flags(job: Job, layout: Layout) -> Iterator[tuple[str, str | None]]:
    config, parallel = job.loaded.config, job.loaded.config.parallel
    degrees = {"tp": "tensor-model-parallel", "pp": "pipeline-model-parallel", "cp": "context-parallel"}
    for key, name in degrees.items():
        if job.has(f"parallel.{key}"):
            yield f"--{name}-size", str(getattr(layout, key))
    if job.has("parallel.sequence_parallel") and parallel.sequence_parallel and layout.tp > 1:
        yield "--sequence-parallel", None
    recompute = parallel.activation_checkpointing
    if job.has("parallel.activation_checkpointing") and recompute != "none":
        yield "--recompute-granularity", recompute
        if recompute == "full":
            yield from (("--recompute-method", "uniform"), ("--recompute-num-layers", "1"))
    batch = job.batch(layout)
    if batch is not None and job.has(DEVICE):
        # A microbatch of a pipeline: what trainkit divides a device batch into.
        yield "--micro-batch-size", str(batch.device_batch_size // (batch.pp_microbatches or 1))
    if batch is not None and job.has(GLOBAL) and config.train.global_batch_size is not None:
        yield "--global-batch-size", str(batch.global_batch_size)
    if job.has("precision.dtype") and config.precision.dtype != "fp32":
        yield f"--{config.precision.dtype}", None
    yield from _megatron_values(job, layout)
    if job.has("model"):
        yield from _megatron_model(job)


def _megatron_values(job: Job, layout: Layout) -> Iterator[tuple[str, str | None]]:
    """The flags that are one value of the config each, and the schedule."""
    config = job.loaded.config
    train, optimizer, precision = config.train, config.optimizer, config.precision
    values: Mapping[str, tuple[tuple[str, object], ...]] = {
        "seed": (("--seed", config.seed),),
        "data.seq_len": (
            ("--seq-length", config.data.seq_len),
            ("--max-position-embeddings", config.data.seq_len),
        ),
        "train.steps": (("--train-iters", train.steps),),
        "train.log_every": (("--log-interval", train.log_every),),
        "train.eval_every": (("--eval-interval", train.eval_every),),
        "train.grad_clip": (("--clip-grad", train.grad_clip or 0.0),),
        "optimizer.lr": (("--lr", job.lr(layout)),),
        "optimizer.weight_decay": (("--weight-decay", optimizer.weight_decay),),
        "optimizer.betas": (("--adam-beta1", optimizer.betas[0]), ("--adam-beta2", optimizer.betas[1])),
        "optimizer.eps": (("--adam-eps", optimizer.eps),),
    }
    for key, flags in values.items():
        if job.has(key):
            yield from ((flag, str(value)) for flag, value in flags if value is not None)
    if precision.dtype == "fp16" and job.has("precision.init_loss_scale"):
        yield "--initial-loss-scale", str(precision.init_loss_scale)
    if precision.dtype == "fp16" and job.has("precision.loss_scale_growth_interval"):
        yield "--loss-scale-window", str(precision.loss_scale_growth_interval)
    if job.has("schedule"):
        schedule = config.schedule
        yield "--lr-decay-style", schedule.name.upper() if schedule.name == "wsd" else schedule.name
        yield "--lr-warmup-iters", str(schedule.warmup_steps)
        if schedule.name != "constant":
            yield "--min-lr", str(schedule.min_lr_ratio * job.lr(layout))
        if schedule.name == "wsd":
            yield "--lr-wsd-decay-style", "linear"
            yield "--lr-wsd-decay-iters", str(schedule.decay_steps)


def _megatron_model(job: Job) -> Iterator[tuple[str, str | None]]:
    """The whole model: a Llama-style decoder differs from Megatron's GPT in more than its sizes."""
    model = job.loaded.config.model
    shape = resolve_model_shape(model, ANY_VOCABULARY)
    yield "--num-layers", str(shape.num_layers)
    yield "--hidden-size", str(shape.dim)
    yield "--ffn-hidden-size", str(shape.ffn_dim)
    yield "--num-attention-heads", str(shape.num_heads)
    if shape.num_kv_heads != shape.num_heads:
        yield "--group-query-attention", None
        yield "--num-query-groups", str(shape.num_kv_heads)
    yield from (("--swiglu", None), ("--normalization", "RMSNorm"), ("--norm-epsilon", str(shape.norm_eps)))
    yield "--disable-bias-linear", None
    if shape.qkv_bias:
        yield "--add-qkv-bias", None
    yield from (("--position-embedding-type", "rope"), ("--rotary-base", f"{shape.rope_theta:.0f}"))
    if not shape.tie_embeddings:
        yield "--untie-embeddings-and-output-weights", None
    yield from (("--hidden-dropout", str(shape.dropout)), ("--attention-dropout", "0.0"))
    if job.has("model.vocab_size"):
        yield "--vocab-size", str(shape.vocab_size)


def _megatron_problems(job: Job) -> Iterator[tuple[str, str, str]]:
    config = job.loaded.config
    if config.optimizer.name != "adamw" and job.has("optimizer.name"):
        message = f"is {config.optimizer.name}, which Megatron does not have"
        yield "optimizer.name", message, "use adamw"
    if config.parallel.offload and job.has("parallel.offload"):
        message = "is true, which --launcher megatron does not pass on"
        yield "parallel.offload", message, "write Megatron's own flags into the command"
    if job.has("schedule") and not job.has("optimizer.lr"):
        message = f"is {config.schedule.name}, but Megatron needs the learning rate with a schedule"
        yield "schedule.name", message, "set optimizer.lr"
    if job.has("schedule") and config.schedule.name == "wsd" and config.schedule.decay_steps is None:
        yield (
            "schedule.decay_steps",
            "is null, but Megatron has no default for it",
            "set it to a number of steps",
        )
    for key in ("hf", "lora", "init_from", "rope_scaling"):
        if getattr(config.model, key) is not None and job.has(f"model.{key}"):
            hint = "write Megatron's own flags into the command"
            yield f"model.{key}", "is set, which --launcher megatron does not pass on", hint
