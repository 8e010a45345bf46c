"""Checks whether the values of a config contradict each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from trainkit.config.loaded import LoadedConfig
from trainkit.config.optimizers import OPTIMIZERS, OWN, is_own, kind_of
from trainkit.config.schema import RunConfig, capabilities_of
from trainkit.config.training import DECODER, TRANSFORMERS, OptimizerConfig, ScheduleConfig
from trainkit.errors import KeyProblem, Problem
from trainkit.folders import INTERPOLATION
from trainkit.formats import NO_TOKENIZER, RESERVED_NAME, plural, shown_value, time_limit_s
from trainkit.shipped import load

LOOKS_SECRET = re.compile(
    rf"(key|{NO_TOKENIZER}token|secret|password|passwd|passphrase|credential)s?$", re.IGNORECASE
)


_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>"[^"]*"|'[^']*'|\S+)""")
MIN_SECRET_CHARS = 8
"""Minimum length of a secret; shorter values, such as ``1``, ``yes`` or ``offline``, are not considered
secrets."""


def written_secrets(text: str, names: Collection[str]) -> list[str]:
    """Return the names of variables to which `text` assigns a literal secret.

    A variable is reported if its name is in `names` or looks like the name of a secret. References such as
    ``$NAME`` and values shorter than `MIN_SECRET_CHARS` are not reported.
    """
    return [
        found["name"]
        for found in _ASSIGNMENT.finditer(text)
        if (found["name"] in names or LOOKS_SECRET.search(found["name"]))
        and len(value := found["value"].strip("\"'")) >= MIN_SECRET_CHARS
        and not value.startswith(("$", "`"))
    ]


MAY_BE_SECRET = ("launch.env.", "launch.setup")
"""Prefixes of keys whose values are omitted from error messages, because the values may be secrets and the
messages are logged. The values are also omitted from the origins of problems, because a flag's origin is the
text that the user typed."""


def contradictions(loaded: LoadedConfig) -> Iterator[Problem]:
    """Yield a problem for every contradiction between values of a config."""
    config = loaded.config
    used = [load(name) for name in capabilities_of(config)]
    found = itertools.chain(
        _name(config),
        _nodes(config),
        _times(config),
        _length(config, loaded.origins),
        _schedule(loaded),
        _variables(config),
        _secrets(config),
        _precision(config),
        _experts(config),
        _optimizer(loaded),
        _stages(config),
        _document_mask(config),
        _z_loss(config),
        _pattern(config),
        _keep(config),
        _best_metric(config, [name for capability in used for name in capability.metrics(config)]),
        *(capability.contradictions(config) for capability in used),
        _hf(config),
    )
    hidden = (*MAY_BE_SECRET, *(key for capability in used for key in capability.may_be_secret))
    for item in found:
        problem = loaded.problem(*item)
        if item[0].startswith(hidden) and problem.line is None:
            problem = replace(problem, origin=problem.origin.partition("=")[0])
        yield problem


def _name(config: RunConfig) -> Iterator[KeyProblem]:
    name = config.name
    if RESERVED_NAME.fullmatch(name):
        message = (
            f"is {name}, which commands interpret as {'the newest run' if name == 'last' else 'a job id'}"
        )
        yield "name", message, f"choose another name, such as run-{name}"


def _nodes(config: RunConfig) -> Iterator[KeyProblem]:
    resources = config.resources
    if resources.spare_nodes and not isinstance(resources.nodes, int):
        message = f"is {resources.spare_nodes}, but resources.nodes is {resources.nodes}"
        hint = (
            "remove resources.spare_nodes: if resources.nodes is a range, the nodes above the minimum serve "
            "as spare nodes"
        )
        yield "resources.spare_nodes", message, hint


def _times(config: RunConfig) -> Iterator[KeyProblem]:
    resources = config.resources
    total_s, slice_s, least_s, job_s = (
        None if time is None else time_limit_s(time)
        for time in (resources.time, resources.slice, resources.time_min, resources.job_time)
    )
    if resources.slice is not None:
        key = "resources.slice"
        if total_s is None:
            message = f"is {resources.slice}, but resources.time sets no limit"
            yield key, message, "set resources.time to the total time of all slices"
        elif slice_s is None or slice_s > total_s:
            message = f"is {resources.slice}, which exceeds the {resources.time} in resources.time"
            yield (
                key,
                message,
                "resources.time limits the total time of all slices; use --set resources.slice=null to "
                "disable slices",
            )
        if "timeout" not in config.requeue.on:
            message = f"is {resources.slice}, but requeue.on does not include timeout"
            yield key, message, "add timeout to requeue.on, because every slice is requeued at its time limit"
    if resources.time_min is not None and (job_s is None or least_s is None or least_s > job_s):
        key = "slice" if resources.slice else "time"
        limit = "sets no limit" if job_s is None else f"is {resources.job_time}"
        message = f"is {resources.time_min}, but resources.{key} {limit}"
        yield "resources.time_min", message, f"set resources.time_min to at most resources.{key}"


def _hf(config: RunConfig) -> Iterator[KeyProblem]:
    model = config.model
    if model.init_include and model.init_from is None:
        message = "is set, but model.init_from is null"
        yield "model.init_include", message, "set model.init_from to a run folder"
    if model.init_weights is not None and model.init_from is None:
        message = f"is {model.init_weights}, but model.init_from is null"
        yield "model.init_weights", message, "set model.init_from to a run folder"
    uses = {
        "model.from_scratch": model.from_scratch,
        "model.quantize": model.quantize is not None,
        "model.architecture": config.uses_transformers,
        "model.lora": model.lora is not None,
    }
    needs_hf = [key for key, is_used in uses.items() if is_used]
    if config.has_user_task:
        message = f"is set, but task is {config.task}, which builds its model itself"
        # Tasks support LoRA adapters too, so model.lora is allowed.
        yield from ((key, message, f"remove {key}") for key in needs_hf if key != "model.lora")
        return
    if model.hf is None:
        yield from (
            (key, "is set, but model.hf is null", "set model.hf to the model's folder") for key in needs_hf
        )
        return
    if model.lora is not None and not config.uses_transformers:
        message = f"is set, but model.architecture is {model.architecture}"
        yield "model.lora", message, "set model.architecture to transformers, as adapters require"
    if model.quantize is not None and model.lora is None:
        message = f"is {model.quantize}, but model.lora is null"
        yield "model.quantize", message, "quantized weights are frozen: set model.lora too"
    if model.lora is not None and model.from_scratch:
        yield (
            "model.lora",
            "is set, but model.from_scratch is true",
            "remove model.lora or model.from_scratch",
        )
    if not config.uses_transformers:
        return
    if config.parallel.tp > 1 and model.lora is not None:
        message = (
            f"is {config.parallel.tp}, but model.lora is set, and adapters do not support tensor parallelism"
        )
        yield "parallel.tp", message, "use parallel.dp_shard instead of parallel.tp"
    if isinstance(config.data.source, dict):
        hint = "mixtures require trainkit's own decoder; combine the texts in one dataset"
        yield "data.source", "is a mixture, but model.architecture is transformers", hint
    if model.dropout:
        message = f"is {model.dropout:g}, which transformers models ignore"
        yield "model.dropout", message, f"set the dropout in config.json of {model.hf}"


def doubts(loaded: LoadedConfig, trains: bool) -> Iterator[str]:
    """Yield warnings about values that are valid but probably unintended.

    `trains` is False for a COMMAND, which defines its own training schedule.
    """
    config, steps = loaded.config, loaded.config.train.steps
    warmup = config.schedule.warmup_steps
    for key in ("time", "slice", "time_min"):
        time = getattr(config.resources, key) or ""
        if not re.fullmatch(r"\d+:\d+", time):
            continue
        minutes, seconds = time.split(":")
        read = f"{plural(int(minutes), 'minute')} and {int(seconds)} s"
        yield (
            f"resources.{key} is {time}, which Slurm reads as {read};"
            f" use {time}:00 for {plural(int(minutes), 'hour')}"
        )
    if re.fullmatch(r"[1-9]\d{0,2}", mem := config.resources.mem or ""):
        yield f"resources.mem is {mem}, which Slurm reads as {mem} MB; use {mem}G for {mem} GB"
    texts = {"note": config.note, **{f"launch.env.{name}": text for name, text in config.launch.env.items()}}
    texts |= {f"resources.{name}": value for name, value in config.resources if isinstance(value, str)}
    for key, text in texts.items():
        if (found := INTERPOLATION.search(text or "")) is not None:
            yield f"{key} contains {found[0]}, which trainkit does not evaluate"
    if not trains:
        return
    if steps is not None and warmup > steps and loaded.set_by_user("schedule.warmup_steps"):
        yield (
            f"schedule.warmup_steps is {warmup}, but train.steps is {steps}: the learning rate only reaches"
            f" {steps / warmup:.0%} of optimizer.lr"
        )
    schedule = config.schedule
    decays = schedule.name != "constant" and not schedule.is_own and (steps is None or steps > warmup)
    if decays and schedule.min_lr_ratio == 0:
        yield (
            "schedule.min_lr_ratio is 0: the learning rate of the last step is 0, so the last step has no "
            "effect; use a small ratio such as 0.001"
        )
    stop = config.train.stop_at_step
    if steps is not None and stop is not None and stop >= steps:
        yield f"train.stop_at_step is {stop}, but train.steps is {steps}, so train.stop_at_step has no effect"
    warmup_steps = sum(stage.steps for stage in config.train.batch_warmup)
    if steps is not None and warmup_steps >= steps:
        yield (
            f"train.batch_warmup has {plural(warmup_steps, 'step')}, but train.steps is {steps}, so no step "
            "has train.global_batch_size samples"
        )
    yield from _keep_warnings(config)
    if config.checkpoint.every_steps is None and config.checkpoint.every_minutes is None:
        yield (
            "checkpoint.every_steps and checkpoint.every_minutes are null: after a crash or the loss of a "
            "node, the run restarts from the first step"
        )


def _keep(config: RunConfig) -> Iterator[KeyProblem]:
    checkpoint = config.checkpoint
    keep, own = checkpoint.keep, checkpoint.model_fields_set
    if keep is not None and "keep_last" in own:
        last = shown_value(checkpoint.keep_last)
        message = f"is set, but checkpoint.keep_last is {last}: only one of them can be set"
        hint = f"remove checkpoint.keep_last, and set last: {last} in checkpoint.keep"
        yield "checkpoint.keep", message, hint
    if keep is not None and keep.best > 1 and checkpoint.best_metric is None:
        message = f"has best: {keep.best}, but checkpoint.best_metric is null"
        yield "checkpoint.keep", message, "set checkpoint.best_metric, or remove best from checkpoint.keep"


def _keep_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each part of `checkpoint.keep` that keeps other steps than a user might expect."""
    keep, every_steps, steps = config.checkpoint.keep, config.checkpoint.every_steps, config.train.steps
    if keep is None:
        return
    if keep.every is not None and (every_steps is None or keep.every % every_steps):
        yield (
            f"checkpoint.keep.every is {keep.every}, which is not a multiple of checkpoint.every_steps "
            f"({shown_value(every_steps)}): the first checkpoint at or after each multiple is kept"
        )
    late = [step for step in keep.at if steps is not None and step > steps]
    if late:
        yield (
            f"checkpoint.keep.at contains {', '.join(map(str, late))}, but train.steps is {steps}: no "
            "checkpoint is saved there"
        )


LOSSES = ("val_loss", "loss")


def _best_metric(config: RunConfig, added: Collection[str]) -> Iterator[KeyProblem]:
    """Yield a problem if there is no such metric; `added` contains the metrics of capabilities."""
    key, metric, known = "checkpoint.best_metric", config.checkpoint.best_metric, (*LOSSES, *added)
    if metric is None or metric in LOSSES:
        return
    if metric not in known and not config.has_user_task:
        shown = f"{', '.join(known[:-1])} and {known[-1]}"
        message = f"is {metric}, but task is {config.task}, which has the metrics {shown}"
        yield key, message, f"use {', '.join(known)} or null"
    elif metric.startswith("val_") and config.train.eval_every is None:
        yield (
            key,
            f"is {metric}, but train.eval_every is null, so there is no validation",
            "set train.eval_every",
        )


_NOT_GROUPS = ("time", "attempt", "source")
"""Keys of metrics.jsonl records; the capture groups of `logging.pattern` must not overwrite these keys."""


def _pattern(config: RunConfig) -> Iterator[KeyProblem]:
    key, pattern = "logging.pattern", config.logging.pattern
    if pattern in (None, "auto"):
        return
    hint = r"for example 'step (?P<step>\d+) loss (?P<loss>\S+)'"
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        yield key, f"is not a valid regular expression: {error}", hint
        return
    if "step" not in groups:
        yield key, f"is {pattern!r}, which has no group named step", hint
    for name in _NOT_GROUPS:
        if name in groups:
            message = f"is {pattern!r}, whose group {name} would replace the {name} of each record"
            yield key, message, "rename the group"


def _precision(config: RunConfig) -> Iterator[KeyProblem]:
    dtype = config.precision.dtype
    if config.precision.tf32 and dtype != "fp32":
        yield (
            "precision.tf32",
            f"is true, but precision.dtype is {dtype}",
            "remove precision.tf32, which applies only to fp32 training",
        )
    if not config.precision.float8:
        return
    key, value = "precision.float8", str(config.precision.float8).lower()
    source, name = config.model_source
    if source == "task" or name == TRANSFORMERS:
        yield key, f"is {value}, but {source} is {name}", "float8 requires trainkit's own decoder"
    if config.device == "cpu":
        yield key, f"is {value}, but device is cpu", "float8 requires a GPU"
    if dtype != "bf16":
        yield key, f"is {value}, but precision.dtype is {dtype}", "float8 requires precision.dtype: bf16"
    if config.parallel.tp > 1:
        message = f"is {value}, but parallel.tp is {config.parallel.tp}"
        yield key, message, "float8 with tensor parallelism is not supported yet"
    if value == "gather" and config.parallel.offload:
        hint = "use precision.float8: true, which gathers the weights in bf16, as parallel.offload requires"
        yield key, "is gather, but parallel.offload is true", hint


def _experts(config: RunConfig) -> Iterator[KeyProblem]:
    if config.model.moe is None:
        return
    source, name = config.model_source
    if name != DECODER:
        hint = "remove model.moe, because only trainkit's own decoder has experts"
        yield "model.moe", f"is set, but {source} is {name}", hint
    if config.precision.float8:
        hint = "remove precision.float8, because the products of experts do not support float8 yet"
        yield "precision.float8", f"is {str(config.precision.float8).lower()}, but model.moe is set", hint


def _stages(config: RunConfig) -> Iterator[KeyProblem]:
    """Yield a problem for each parallel degree that is set but supported only by a trainkit `Model`."""
    does = {
        "pp": "be split into pipeline stages",
        "cp": "split a sequence over ranks",
        "ep": "divide experts over ranks",
    }
    for key, what in {} if config.has_decoder else does.items():
        degree = getattr(config.parallel, key)
        if degree > 1:
            message = f"is {degree}, but only trainkit's own models can {what}, not {config.model_source[1]}"
            hint = "use parallel.dp_shard or parallel.tp, or set model.architecture to llama or FILE.py:CLASS"
            yield f"parallel.{key}", message, hint


def _document_mask(config: RunConfig) -> Iterator[KeyProblem]:
    if not config.data.document_mask:
        return
    reasons = {
        "cp": "context parallelism splits a sample over ranks; use parallel.dp_shard or parallel.tp",
        "pp": "only the first stage of a pipeline receives the tokens; use parallel.dp_shard or parallel.tp",
    }
    for degree, reason in reasons.items():
        value = getattr(config.parallel, degree)
        if value > 1:
            yield "data.document_mask", f"is true, but parallel.{degree} is {value}", reason
    source, name = config.model_source
    if name != DECODER:
        message = f"is true, but {source} is {name}, which masks attention itself"
        yield "data.document_mask", message, "remove data.document_mask"


def _z_loss(config: RunConfig) -> Iterator[KeyProblem]:
    if config.train.z_loss and not config.has_decoder:
        source, name = config.model_source
        message = f"is {config.train.z_loss:g}, but {source} is {name}, which computes the loss itself"
        yield "train.z_loss", message, "remove train.z_loss"


MAX_BF16_BETA = 0.99
"""Maximum beta for bf16 optimizer state; bf16 rounds to 1 part in 256, so a higher beta would lose most
updates."""
ROW_PARTS = 8
"""Number of chunks into which adamw_8bit divides each row of a matrix."""


WRITTEN_OUT = ("lr", "lr_scale", "lr_scale_base", "weight_decay", "state_dtype")
"""Keys that apply to every optimizer or have always been accepted. The config of a run contains all of them,
and the default values of other keys."""


def _optimizer(loaded: LoadedConfig) -> Iterator[KeyProblem]:
    config = loaded.config
    optimizer, tp = config.optimizer, config.parallel.tp
    name, kind = optimizer.name, kind_of(optimizer.name)
    kinds = {**OPTIMIZERS, "FILE.py:CLASS": OWN}
    unused = {key for other in kinds.values() for key in other.keys} - kind.keys
    default, sets = OptimizerConfig(), {key for key in unused if loaded.set_by_user(f"optimizer.{key}")}
    if all(loaded.set_by_user(f"optimizer.{key}") for key in WRITTEN_OUT):
        sets = set()  # the config of a run
    for key in sorted(unused):
        value = getattr(optimizer, key)
        if value == getattr(default, key) and (key not in sets or key in WRITTEN_OUT):
            continue
        why = "whose state always has 8 bits" if kind.has_8bit_state else "which does not use this key"
        *others, last = [other for other, its in kinds.items() if key in its.keys]
        users = f"{', '.join(others)} or {last}" if others else last
        message = f"is {shown_value(value)}, but optimizer.name is {name}, {why}"
        yield (
            f"optimizer.{key}",
            message,
            f"remove optimizer.{key}, or set optimizer.name to {users}",
        )
    factors = {"betas": optimizer.betas, "momentum": (optimizer.momentum,)}
    for key in sorted(factors.keys() & kind.keys):
        if optimizer.state_dtype == "bf16" and max(factors[key]) > MAX_BF16_BETA:
            value = shown_value(getattr(optimizer, key))
            message = f"is {value}, but optimizer.state_dtype is bf16, which rounds away small updates"
            hint = f"use at most {MAX_BF16_BETA}, or set optimizer.state_dtype to fp32"
            yield f"optimizer.{key}", message, hint
    if "nesterov" in kind.keys and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov", "is true, but optimizer.momentum is 0", "set optimizer.momentum above 0"
    if is_own(name) and (pp := config.parallel.pp) > 1:
        message = f"is {pp}, but optimizer.name is {name}, which does not support pipeline stages"
        yield "parallel.pp", message, "use parallel.dp_shard or parallel.tp"
    if name == "muon":
        yield from _muon(config)
    if kind.has_8bit_state and ROW_PARTS % tp:
        message = f"is {name}, which does not support parallel.tp {tp}"
        yield "optimizer.name", message, "set parallel.tp to 1, 2, 4 or 8"


def _muon(config: RunConfig) -> Iterator[KeyProblem]:
    optimizer, key = config.optimizer, "optimizer.name"
    if not config.has_decoder:
        hint = "set optimizer.name to adamw, because muon updates only the models of trainkit"
        if config.has_user_task:
            hint = "remove optimizer.name, and return torch.optim.Muon from the method optimizers of the task"
        yield key, f"is muon, but {' is '.join(config.model_source)}", hint
    if config.parallel.offload:
        message = "is muon, but parallel.offload is true, which keeps the matrices on the host"
        yield key, message, "use parallel.dp_shard to save memory, or set optimizer.name to adamw"
    if optimizer.ns_precision == "tf32x3" and config.device == "cpu":
        yield "optimizer.ns_precision", "is tf32x3, but device is cpu", "use fp32: CPUs have no TF32"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_BASH = (
    "BASHOPTS",
    "BASHPID",
    "BASH_ALIASES",
    "BASH_ARGC",
    "BASH_ARGV",
    "BASH_CMDS",
    "BASH_COMMAND",
    "BASH_LINENO",
    "BASH_SOURCE",
    "BASH_VERSINFO",
    "DIRSTACK",
    "EPOCHREALTIME",
    "EPOCHSECONDS",
    "EUID",
    "FUNCNAME",
    "GROUPS",
    "HISTCMD",
    "LINENO",
    "PPID",
    "RANDOM",
    "SHELLOPTS",
    "SRANDOM",
    "UID",
    "_",
)
"""Variables that bash itself sets. Assigning to such a variable in the batch script fails or has no
effect."""


def _variables(config: RunConfig) -> Iterator[KeyProblem]:
    for name, value in config.launch.env.items():
        key = f"launch.env.{name}"
        if not _VARIABLE.fullmatch(name):
            message = f"{name!r} is not a valid environment variable name"
            yield key, message, "use letters, digits and _, and do not begin with a digit"
        elif name in OF_BASH:
            yield key, "is a variable that bash itself sets in the job", "choose another name"
        elif "\0" in value:
            yield key, "has a NUL character, which an environment variable cannot contain", "remove it"


def _secrets(config: RunConfig) -> Iterator[KeyProblem]:
    for name in config.launch.env:
        if name in config.secrets or LOOKS_SECRET.search(name):
            message = "looks like a secret, but the config is written to the run folder"
            yield (
                f"launch.env.{name}",
                message,
                f"export {name} in the shell instead; the job inherits the variable",
            )
    for line in config.launch.setup:
        for name in written_secrets(line, config.secrets):
            message = f"sets {name}, which looks like a secret, but the script is written to the run folder"
            hint = f"export {name} in the shell instead, or read the value from a file: {name}=$(cat FILE)"
            yield "launch.setup", message, hint


def _length(config: RunConfig, origins: Mapping[str, str]) -> Iterator[KeyProblem]:
    train = config.train
    if train.steps is None and train.epochs is None:
        yield "train.steps", "is null, and so is train.epochs", "set either train.steps or train.epochs"
    if train.steps is not None and train.epochs is not None:
        message = f"is {train.epochs:g} and train.steps is {train.steps}: only one of them can be set"
        hint = (
            "set train.steps or train.epochs to null; the value of train.steps comes from "
            f"{origins['train.steps']}"
        )
        yield "train.epochs", message, hint


def _schedule(loaded: LoadedConfig) -> Iterator[KeyProblem]:
    schedule, steps = loaded.config.schedule, loaded.config.train.steps
    key, ratio = "schedule.min_lr_ratio", schedule.min_lr_ratio
    # The config of a run contains the values of all keys.
    is_of_run = all(loaded.set_by_user(f"schedule.{name}") for name in ScheduleConfig.model_fields)
    is_set = loaded.set_by_user(key) and not is_of_run
    if schedule.is_own and (is_set or ratio != ScheduleConfig().min_lr_ratio):
        message = f"is {ratio:g}, but schedule.name is {schedule.name}, which does not use this key"
        yield key, message, "remove schedule.min_lr_ratio; your own function returns the final learning rate"
    key = "schedule.decay_steps"
    if schedule.decay_steps is None:
        return
    if schedule.name != "wsd":
        message = f"is {schedule.decay_steps}, but schedule.name is {schedule.name}"
        yield key, message, "only the wsd schedule uses schedule.decay_steps"
    elif steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        message = (
            f"is {schedule.decay_steps}, which together with schedule.warmup_steps {schedule.warmup_steps} "
            f"exceeds train.steps {steps}"
        )
        yield key, message, "use null to decay over the last fifth of the run"
