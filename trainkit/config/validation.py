"""Turns pydantic's validation errors into problems, and checks config values against each other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from pydantic import ValidationError

from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import MAIL_TYPES, WEBHOOK_VARIABLE
from trainkit.config.schema import all_keys, allowed_values, is_known, meant, sections, show_value
from trainkit.config.suggest import value_hint
from trainkit.config.training import DECODER, TRANSFORMERS
from trainkit.config.yamlfile import Entry
from trainkit.errors import Problem
from trainkit.formats import RESERVED_NAME, plural, time_limit_s


def unknown_keys(entry: Entry) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """The unknown sections and keys of a tree."""
    for name, inner in entry.value.items():
        if not is_known((name,)):
            yield (name,), inner
        elif name in sections() and inner.is_mapping:
            for key, value in inner.value.items():
                if not is_known((name, key)):
                    yield (name, key), value


def without(entry: Entry, paths: list[tuple[str, ...]]) -> Entry:
    """The tree without the entries at `paths`, each of one or two keys."""
    kept: dict[str, Entry] = {}
    for name, inner in entry.value.items():
        if (name,) in paths:
            continue
        if inner.is_mapping:
            values = {key: value for key, value in inner.value.items() if (name, key) not in paths}
            inner = Entry(values, inner.origin)
        kept[name] = inner
    return Entry(kept, entry.origin)


def unknown_problem(path: tuple[str, ...], entry: Entry) -> Problem:
    """The problem of an unknown key, with the closest key as the hint."""
    match = meant(path)
    own = ", ".join(sections()[path[0]]) if len(path) > 1 else ""
    other = f"{path[0]} has {own}" if own else "`trainkit schema` prints every key"
    hint = f"did you mean {match}?" if match else other
    if "." in path[-1] and path[-1] in all_keys():
        section, _, leaf = path[-1].partition(".")
        hint = f'write "{section}:" and, indented on the next line, "{leaf}:"'
    if match and entry.origin.startswith("TRAINKIT_"):
        hint = f"did you mean TRAINKIT_{match.upper().replace('.', '__')}?"
    return Problem(".".join(path), "unknown key", entry.origin, hint)


def validation_problems(error: ValidationError, entry: Entry) -> list[Problem]:
    """One problem for each key whose value is invalid."""
    problems: dict[tuple[str, ...], Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        location = tuple(str(part) for part in item["loc"])
        path = location[:2] if location[0] in sections() else location[:1]
        if path in problems:
            continue
        found = entry.find(path)
        if not is_known(path) or found is None:
            problems[path] = unknown_problem(path, found or entry)
            continue
        origin = next((item.origin for _, item in found.leaves()), found.origin)
        value = found.plain()
        is_number = item["type"] == "string_type" and isinstance(value, int | float)
        shown = found.typed if is_number and found.typed else show_value(value)
        message = f"must be {allowed_values(path)}, not {shown}"
        problems[path] = Problem(".".join(path), message, origin, value_hint(path, found, origin))
    return list(problems.values())


LOOKS_SECRET = re.compile(r"(key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)


_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>"[^"]*"|'[^']*'|\S+)""")
MIN_SECRET_CHARS = 8
"""Shorter values, such as ``1``, ``yes`` or ``offline``, are not secrets."""


def written_secrets(text: str, names: Collection[str]) -> list[str]:
    """The variables that `text` assigns a literal secret: those in `names` or with a telling name.

    References such as ``$NAME`` and values shorter than `MIN_SECRET_CHARS` are not reported.
    """
    return [
        found["name"]
        for found in _ASSIGNMENT.finditer(text)
        if (found["name"] in names or LOOKS_SECRET.search(found["name"]))
        and len(value := found["value"].strip("\"'")) >= MIN_SECRET_CHARS
        and not value.startswith(("$", "`"))
    ]


def contradictions(loaded: LoadedConfig) -> Iterator[Problem]:
    """Every contradiction between values of a config."""
    name = loaded.config.name
    if RESERVED_NAME.fullmatch(name):
        message = f"is {name}, which commands take for {'the newest run' if name == 'last' else 'a job id'}"
        yield loaded.problem("name", message, f"choose another, such as run-{name}")
    yield from _nodes(loaded)
    yield from _times(loaded)
    yield from _length(loaded)
    yield from _decay(loaded)
    yield from _secrets(loaded)
    yield from _precision(loaded)
    yield from _state_dtype(loaded)
    yield from _adamw_8bit(loaded)
    yield from _stages(loaded)
    yield from _document_mask(loaded)
    yield from _pattern(loaded)
    yield from _best_metric(loaded)
    yield from _tracking_uri(loaded)
    yield from _notify(loaded)
    if loaded.config.model.init_include and loaded.config.model.init_from is None:
        message = "is set, but model.init_from is null"
        yield loaded.problem("model.init_include", message, "set model.init_from to a run folder")
    yield from _hf(loaded)


def _nodes(loaded: LoadedConfig) -> Iterator[Problem]:
    resources = loaded.config.resources
    if resources.spare_nodes and not isinstance(resources.nodes, int):
        message = f"is {resources.spare_nodes}, but resources.nodes is {resources.nodes}"
        hint = "remove it: of a range, the nodes above the fewest are the spare ones"
        yield loaded.problem("resources.spare_nodes", message, hint)


def _times(loaded: LoadedConfig) -> Iterator[Problem]:
    resources = loaded.config.resources
    total_s, job_s = (
        None if time is None else time_limit_s(time) for time in (resources.time, resources.job_time)
    )
    if resources.slice is not None:
        slice_s = time_limit_s(resources.slice)
        if total_s is None:
            message = f"is {resources.slice}, but resources.time limits nothing"
            yield loaded.problem("resources.slice", message, "set it to the time of all slices together")
        elif slice_s is None or slice_s > total_s:
            message = f"is {resources.slice}, which is more than the {resources.time} of resources.time"
            hint = "resources.time is that of all slices together; --set resources.slice=null for none"
            yield loaded.problem("resources.slice", message, hint)
        if "timeout" not in loaded.config.requeue.on:
            message = f"is {resources.slice}, but requeue.on does not include timeout"
            yield loaded.problem("resources.slice", message, "add it: every slice ends with its time limit")
    if resources.time_min is not None:
        least_s, key = time_limit_s(resources.time_min), "slice" if resources.slice else "time"
        if job_s is None or least_s is None or least_s > job_s:
            limit = "sets no limit" if job_s is None else f"is {resources.job_time}"
            message = f"is {resources.time_min}, but resources.{key} {limit}"
            yield loaded.problem("resources.time_min", message, f"set it to less than resources.{key}")


def _hf(loaded: LoadedConfig) -> Iterator[Problem]:
    config, model = loaded.config, loaded.config.model
    uses = {
        "model.from_scratch": model.from_scratch,
        "model.quantize": model.quantize is not None,
        "model.architecture": config.uses_transformers,
        "model.lora": model.lora is not None,
    }
    needs_hf = [key for key, is_used in uses.items() if is_used]
    if config.has_user_task:
        message = f"is set, but task is {config.task}, which builds its model itself"
        for key in needs_hf:
            if key != "model.lora":  # tasks have adapters too
                yield loaded.problem(key, message, f"remove {key}")
        return
    if model.hf is None:
        for key in needs_hf:
            yield loaded.problem(key, "is set, but model.hf is null", "set model.hf to the model's folder")
        return
    if model.lora is not None and not config.uses_transformers:
        message = f"is set, but model.architecture is {model.architecture}"
        yield loaded.problem("model.lora", message, "adapters need model.architecture: transformers")
    if model.quantize is not None and model.lora is None:
        message = f"is {model.quantize}, but model.lora is null"
        yield loaded.problem("model.quantize", message, "quantised weights are frozen: set model.lora too")
    if model.lora is not None and model.from_scratch:
        yield loaded.problem("model.lora", "is set, but model.from_scratch is true", "remove one of them")
    if not config.uses_transformers:
        return
    if config.parallel.tp > 1 and model.lora is not None:
        message = f"is {config.parallel.tp}, but model.lora is set, whose adapters cannot be split"
        yield loaded.problem("parallel.tp", message, "remove parallel.tp; use dp_shard")
    if isinstance(config.data.source, dict):
        hint = "mixtures require trainkit's own decoder; write the texts to one dataset"
        yield loaded.problem("data.source", "is a mixture, but model.architecture is transformers", hint)
    if model.dropout:
        message = f"is {model.dropout:g}, which models of transformers do not use"
        yield loaded.problem("model.dropout", message, f"set the dropout in config.json of {model.hf}")


def doubts(loaded: LoadedConfig, trains: bool) -> Iterator[str]:
    """What is allowed, but seldom meant; `trains` is false for a COMMAND, which has its own schedule."""
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
            f" {time}:00 is {plural(int(minutes), 'hour')}"
        )
    if re.fullmatch(r"[1-9]\d{0,2}", mem := config.resources.mem or ""):
        yield f"resources.mem is {mem}, which Slurm reads as {mem} MB; {mem}G is {mem} GB"
    if not trains:
        return
    if steps is not None and warmup > steps and loaded.set_by_user("schedule.warmup_steps"):
        yield (
            f"schedule.warmup_steps is {warmup}, but train.steps is {steps}: the learning rate ends at"
            f" {steps / warmup:.0%} of optimizer.lr"
        )
    if config.checkpoint.every_steps is None and config.checkpoint.every_minutes is None:
        yield (
            "checkpoint.every_steps and checkpoint.every_minutes are null: after a crash or a lost node the"
            " run starts again from its first step"
        )


LOSSES = ("val_loss", "loss")


def _best_metric(loaded: LoadedConfig) -> Iterator[Problem]:
    config, metric = loaded.config, loaded.config.checkpoint.best_metric
    if metric is None or metric in LOSSES:
        return
    key, message = "checkpoint.best_metric", f"is {metric}, "
    if not config.has_user_task:
        message += f"but task is {config.task}, which has the metrics {' and '.join(LOSSES)}"
        yield loaded.problem(key, message, "use one of these, or null")
    elif metric.startswith("val_") and config.train.eval_every is None:
        message += "but train.eval_every is null: there is no validation"
        yield loaded.problem(key, message, "set train.eval_every")


_NOT_GROUPS = ("time", "attempt", "source")
"""The keys of a record in metrics.jsonl that are not found by the pattern."""


def _pattern(loaded: LoadedConfig) -> Iterator[Problem]:
    pattern = loaded.config.logging.pattern
    if pattern in (None, "auto"):
        return
    hint = r"for example 'step (?P<step>\d+) loss (?P<loss>\S+)'"
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        yield loaded.problem("logging.pattern", f"is no regular expression: {error}", hint)
        return
    if "step" not in groups:
        yield loaded.problem("logging.pattern", f"is {pattern!r}, which has no group step", hint)
    for name in _NOT_GROUPS:
        if name in groups:
            message = f"is {pattern!r}, whose group {name} would replace the {name} of each record"
            yield loaded.problem("logging.pattern", message, "rename the group")


def _tracking_uri(loaded: LoadedConfig) -> Iterator[Problem]:
    mlflow = loaded.config.logging.trackers.get("mlflow")
    uri = getattr(mlflow, "tracking_uri", None) or ""
    if uri.startswith("file:"):
        message = "has a tracking_uri of a file store, which MLflow 3 does not write any more"
        hint = "name the folder without file: to have a SQLite store in it"
        yield loaded.problem("logging.mlflow", message, hint)
    if "@" in urlsplit(uri).netloc:
        message = "has a tracking_uri with a user or password, but the config is written to the run folder"
        hint = "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the shell instead"
        problem = loaded.problem("logging.mlflow", message, hint)
        # The origin of a flag contains the value as typed, and errors end up in logs.
        yield replace(problem, origin="--set logging.mlflow") if uri in problem.origin else problem


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _notify(loaded: LoadedConfig) -> Iterator[Problem]:
    notify, resources = loaded.config.notify, loaded.config.resources
    if notify.webhook is not None and not _VARIABLE.fullmatch(notify.webhook):
        # Most likely it is the URL: neither the message nor the origin may show it.
        message = "is not the name of an environment variable"
        hint = f"export {WEBHOOK_VARIABLE}=URL in the shell that submits, and leave notify.webhook out"
        problem = loaded.problem("notify.webhook", message, hint)
        is_flag = problem.origin.startswith("--set ")
        yield replace(problem, origin="--set notify.webhook") if is_flag else problem
    if notify.mail is None:
        return
    for key in ("mail_user", "mail_type"):
        if getattr(resources, key) is not None:
            message, hint = f"is set, and so is resources.{key}", "remove one of them"
            yield loaded.problem("notify.mail", message, hint)
    if not any(event in MAIL_TYPES for event in notify.on):
        message = f"is set, but notify.on has none of the events that Slurm knows: {', '.join(MAIL_TYPES)}"
        yield loaded.problem("notify.mail", message, "add one of them, or remove notify.mail")


def _precision(loaded: LoadedConfig) -> Iterator[Problem]:
    config = loaded.config
    if config.precision.tf32 and config.precision.dtype != "fp32":
        message = f"is true, but precision.dtype is {config.precision.dtype}"
        yield loaded.problem("precision.tf32", message, "remove it: TF32 is for fp32, and slower")
    if not config.precision.float8:
        return
    value = str(config.precision.float8).lower()
    key, name = config.model_source
    if key == "task" or name == TRANSFORMERS:
        hint = "float8 requires trainkit's own decoder"
        yield loaded.problem("precision.float8", f"is {value}, but {key} is {name}", hint)
    if config.device == "cpu":
        yield loaded.problem("precision.float8", f"is {value}, but device is cpu", "float8 requires a GPU")
    if config.precision.dtype != "bf16":
        message = f"is {value}, but precision.dtype is {config.precision.dtype}"
        yield loaded.problem("precision.float8", message, "float8 requires precision.dtype: bf16")
    if config.parallel.tp > 1:
        message = f"is {value}, but parallel.tp is {config.parallel.tp}"
        hint = "float8 with tensor parallelism is not supported yet"
        yield loaded.problem("precision.float8", message, hint)
    if value == "gather" and config.parallel.offload:
        hint = "precision.float8: true gathers in bf16, as offload requires"
        yield loaded.problem("precision.float8", "is gather, but parallel.offload is true", hint)


def _stages(loaded: LoadedConfig) -> Iterator[Problem]:
    """The degrees that only a `Model` of trainkit supports."""
    config = loaded.config
    if config.has_decoder:
        return
    name = config.model_source[1]
    reasons = {
        "pp": f"only models of trainkit can be cut into stages, not that of {name}",
        "cp": f"only models of trainkit can split a sequence over ranks, not that of {name}",
    }
    for key, why in reasons.items():
        degree = getattr(config.parallel, key)
        if degree > 1:
            hint = "use parallel.dp_shard or tp; model.architecture llama, or FILE.py:CLASS, supports it"
            yield loaded.problem(f"parallel.{key}", f"is {degree}, but {why}", hint)


def _document_mask(loaded: LoadedConfig) -> Iterator[Problem]:
    config = loaded.config
    if not config.data.document_mask:
        return
    reasons = {
        "cp": "context parallelism splits a sample over ranks; use parallel.dp_shard or parallel.tp",
        "pp": "only the first stage of a pipeline gets the tokens; use parallel.dp_shard or parallel.tp",
    }
    for key, reason in reasons.items():
        degree = getattr(config.parallel, key)
        if degree > 1:
            yield loaded.problem("data.document_mask", f"is true, but parallel.{key} is {degree}", reason)
    key, name = config.model_source
    if name != DECODER:
        message = f"is true, but {key} is {name}, which masks attention itself"
        yield loaded.problem("data.document_mask", message, "remove data.document_mask")


MAX_BF16_BETA = 0.99
"""bf16 rounds to 1 part in 256: it would lose most updates of a longer running average."""


def _state_dtype(loaded: LoadedConfig) -> Iterator[Problem]:
    optimizer = loaded.config.optimizer
    if optimizer.state_dtype == "bf16" and max(optimizer.betas) > MAX_BF16_BETA:
        message = f"is {list(optimizer.betas)}, whose small updates optimizer.state_dtype bf16 rounds away"
        hint = f"use at most {MAX_BF16_BETA}, or set optimizer.state_dtype to fp32"
        yield loaded.problem("optimizer.betas", message, hint)


ROW_PARTS = 8
"""adamw_8bit divides each row of a matrix into 8 parts and these into blocks, so that tensor parallelism over
2, 4 or 8 ranks cuts no block."""


def _adamw_8bit(loaded: LoadedConfig) -> Iterator[Problem]:
    config = loaded.config
    if config.optimizer.name != "adamw_8bit":
        return
    if config.optimizer.state_dtype == "bf16":
        message = "is bf16, but optimizer.name is adamw_8bit, which keeps the running averages in 8 bits"
        yield loaded.problem("optimizer.state_dtype", message, "remove it, or set optimizer.name to adamw")
    if ROW_PARTS % config.parallel.tp:
        message = f"is adamw_8bit, which does not support parallel.tp {config.parallel.tp}"
        yield loaded.problem("optimizer.name", message, "parallel.tp can be 1, 2, 4 or 8")


def _secrets(loaded: LoadedConfig) -> Iterator[Problem]:
    launch, secrets = loaded.config.launch, loaded.config.secrets
    for name in launch.env:
        if name in secrets or LOOKS_SECRET.search(name):
            message = "looks like a secret, but the config is written to the run folder"
            hint = f"export {name} in the shell instead; the job inherits it"
            problem = loaded.problem(f"launch.env.{name}", message, hint)
            # The origin of a flag contains the value as typed, and errors end up in logs.
            shown = problem.origin.replace(launch.env[name], "***") if launch.env[name] else problem.origin
            yield replace(problem, origin=shown)
    for line in launch.setup:
        for name in written_secrets(line, secrets):
            message = f"sets {name}, which looks like a secret, but the script is written to the run folder"
            hint = f"export {name} in the shell instead, or read it from a file: {name}=$(cat FILE)"
            problem = loaded.problem("launch.setup", message, hint)
            yield replace(problem, origin="--set launch.setup") if name in problem.origin else problem


def _length(loaded: LoadedConfig) -> Iterator[Problem]:
    train = loaded.config.train
    if train.steps is None and train.epochs is None:
        yield loaded.problem("train.steps", "is null, and so is train.epochs", "set one of them")
    if train.steps is not None and train.epochs is not None:
        message = f"is {train.epochs:g} and train.steps is {train.steps}: only one of them can be set"
        hint = f"set one of them to null; train.steps comes from {loaded.origins['train.steps']}"
        yield loaded.problem("train.epochs", message, hint)


def _decay(loaded: LoadedConfig) -> Iterator[Problem]:
    schedule, steps = loaded.config.schedule, loaded.config.train.steps
    if schedule.decay_steps is None:
        return
    if schedule.name != "wsd":
        message = f"is {schedule.decay_steps}, but schedule.name is {schedule.name}"
        yield loaded.problem("schedule.decay_steps", message, "only wsd uses schedule.decay_steps")
    elif steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        message = (
            f"is {schedule.decay_steps}: with schedule.warmup_steps {schedule.warmup_steps} "
            f"that exceeds train.steps {steps}"
        )
        yield loaded.problem("schedule.decay_steps", message, "null uses a fifth of the run")
