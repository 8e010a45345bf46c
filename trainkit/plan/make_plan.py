"""Makes the launch plan for a config and a target, with the reason for every derived value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainkit.backend import backend_named
from trainkit.cluster.machine import Machine
from trainkit.config.loaded import LoadedConfig
from trainkit.config.schema import RunConfig, capabilities_of
from trainkit.config.training import DECODER
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError, KeyProblem, Problem
from trainkit.formats import memory_mib, size
from trainkit.plan.facts import Facts
from trainkit.plan.gpus import gpu_names, gpu_problems, known_gpu, unchecked_memory
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.launch_draft import LaunchDraft, StepDraft
from trainkit.plan.layout_rules import batch_problems, layout_problems
from trainkit.plan.memory import check_gpu_memory, checkpoint_bytes, muon_cost, muon_text, state_bytes
from trainkit.plan.model_shape import resolve_model_shape, vocabulary_note
from trainkit.plan.optimizer_state import optimizer_note
from trainkit.plan.step_work import StepWork, compiles, work_of
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.files import to_json
from trainkit.shipped import load


def make_plan(loaded: LoadedConfig, facts: Facts, workload: Workload = TRAINER) -> LaunchPlan:
    """Return the plan for a config after checking the model and the memory.

    For a command, there is no model or data to check. A command's layout and batch are planned only if its
    launcher passes their values to a tool. Raises ConfigError with all problems found.
    """
    plan, problems = None, []
    try:
        plan = _draft(loaded, facts).plan(workload)
    except ConfigError as error:
        problems += error.problems
    found_there = [] if facts.environment is None else [*facts.environment.problems]
    for name in capabilities_of(loaded.config):
        found_there += load(name).problems(loaded, facts)
    if not workload.is_command:
        config, uses_gpus = loaded.config, plan is not None and plan.device == "cuda"
        gpus = gpu_names(config, facts.machine, facts.target) if uses_gpus else []
        problems += map(_problem, facts.missing)
        if facts.data is not None:
            plan, found = _with_model(config, facts.data, facts.machine, gpus, plan)
            problems += found
        if plan is not None and not problems:
            found_there += gpu_problems(gpus, config, facts, plan.device)
    problems += map(_problem, found_there)
    if plan is None or problems:
        raise ConfigError(loaded.located(problems))
    return plan


def with_parts(plan: LaunchPlan, loaded: LoadedConfig, facts: Facts) -> LaunchPlan:
    """Add the plan parts of the capabilities that the config uses, with their reasons and warnings."""
    reasons, warnings, parts = dict(plan.reasons), list(plan.warnings), dict(plan.parts)
    for name in capabilities_of(loaded.config):
        planned = load(name).plan(loaded, facts, plan)
        reasons = _inserted(reasons, planned.reasons, planned.follows)
        warnings += planned.warnings
        if planned.part is not None:
            parts[name] = to_json(planned.part)
    return replace(plan, reasons=reasons, warnings=tuple(warnings), parts=parts)


def _inserted(reasons: dict[str, str], new: Mapping[str, str], follows: str | None) -> dict[str, str]:
    """Insert new reasons after the reason named `follows`, or at the end."""
    names = list(reasons)
    place = len(names) if follows is None else names.index(follows) + 1
    return {**{name: reasons[name] for name in names[:place]}, **new, **reasons, **new}


def _problem(found: KeyProblem) -> Problem:
    key, message, hint = found
    return Problem(key, message, hint=hint)


def problems(loaded: LoadedConfig, facts: Facts, workload: Workload = TRAINER) -> list[Problem]:
    """Return every problem that a config has with the given machine, data and environment."""
    try:
        make_plan(loaded, facts, workload)
    except ConfigError as error:
        return error.problems
    return []


def _with_model(
    config: RunConfig, data: DataFacts, machine: Machine, gpus: list[str], plan: LaunchPlan | None
) -> tuple[LaunchPlan | None, list[Problem]]:
    """Check the model and data; return the plan with the results added, and the problems found.

    `gpus` is the result of `gpu_names`.
    """
    model = config.model
    problems = [*map(_problem, data.problems)]
    if config.uses_transformers:
        if model.vocab_size is not None and not problems and data.vocab_size > model.vocab_size:
            message = f"has {data.vocab_size} tokens, but {model.hf} has only {model.vocab_size}"
            problems.append(_problem(("data.tokenizer", message, "use the tokenizer of the model")))
        return plan, problems
    shape, notes = None, {"mixture": data.mixture, "optimizer": optimizer_note(config.optimizer)}
    try:
        shape = resolve_model_shape(model, data.vocab_size)
        notes["vocabulary"] = None if problems else vocabulary_note(model, data.vocab_size)
    except ConfigError as error:
        problems += error.problems
    if plan is None:
        return None, problems
    reasons = {name: note for name, note in notes.items() if note is not None}
    plan = replace(plan, reasons={**plan.reasons, **reasons})
    if config.precision.float8:
        problems += _float8_problems(config, plan)
    if config.precision.float8 == "gather" and plan.layout.shards == 1:
        unsharded = (
            "precision.float8: gather has the same effect as true, because the weights are not sharded"
        )
        plan = replace(plan, warnings=(*plan.warnings, unsharded))
    is_elsewhere = plan.device == "cpu" and config.device != "cpu"
    if config.optimizer.name == "muon" and config.optimizer.ns_precision == "tf32x3" and is_elsewhere:
        message = f"is tf32x3, but the run would use CPUs: {plan.reasons['device']}"
        problems.append(Problem("optimizer.ns_precision", message, hint="use fp32: CPUs have no TF32"))
    if shape is not None:
        work = work_of(config, shape, plan.layout, plan.batch, plan.device)
        plan, found = _check_model(config, machine, gpus, plan, work)
        problems += found
    return plan, problems


def _draft(loaded: LoadedConfig, facts: Facts) -> LaunchDraft:
    machine, target = facts.machine, facts.target
    if target.node_sizes is not None:
        return StepDraft(loaded, machine, target)
    return backend_named(target.backend).draft(loaded, machine, target)


def _float8_problems(config: RunConfig, plan: LaunchPlan) -> Iterator[Problem]:
    value = str(config.precision.float8).lower()
    if plan.device == "cpu":
        if config.device != "cpu":  # Config validation has already rejected float8 with `device: cpu`.
            message = f"is {value}, but the run would use CPUs: {plan.reasons['device']}"
            yield Problem("precision.float8", message, hint="float8 requires a GPU")
    elif not compiles(config.parallel, plan.layout, plan.device):
        message = (
            f"is {value}, but the decoder blocks are not compiled, so scaling to float8 would take more "
            "time than it saves"
        )
        hint = "remove parallel.compile: false; with pp > 1, use gpipe, 1f1b or interleaved_1f1b"
        yield Problem("precision.float8", message, hint=hint)


def _check_model(
    config: RunConfig, machine: Machine, gpus: list[str], plan: LaunchPlan, work: StepWork
) -> tuple[LaunchPlan, list[Problem]]:
    """Return the plan with a memory estimate added, and all problems that prevent training the model."""
    if config.model.architecture != DECODER:
        # For a custom architecture, the memory use and the other layout rules are unknown.
        return plan, [*batch_problems(work)]
    if found := [*layout_problems(work)]:
        return plan, found
    saved = checkpoint_bytes(work)
    plan = replace(plan, checkpoint_bytes=saved)
    if (update := muon_cost(work, 0)) is not None:
        plan = replace(plan, reasons={**plan.reasons, "optimizer": muon_text(work, update)})
    if plan.device != "cuda":
        return plan, [*_host_problems(config, plan, work, machine)]
    gpu = known_gpu(gpus, config.resources)
    if gpu is None:
        plan = replace(plan, warnings=(*plan.warnings, unchecked_memory(gpus)))
    else:
        reason, problem = check_gpu_memory(work, gpu)
        plan = replace(plan, reasons={**plan.reasons, "memory": reason})
        if problem is not None:
            return plan, [problem]
    return plan, [*_staging_problems(config, plan, saved, machine)]


def _staging_problems(config: RunConfig, plan: LaunchPlan, saved: int, machine: Machine) -> Iterator[Problem]:
    """Yield a problem if nodes have too little memory to save `saved` bytes asynchronously."""
    resources, layout = config.resources, plan.layout
    need = saved * plan.workers_per_node * layout.dp_replicate / layout.world_size
    if not plan.is_job:
        key, have = "checkpoint.async", machine.memory
        value = f"is true, and this machine has {size(have or 0)}"
    else:
        # Without resources.mem, the job gets the default memory of the partition, which is unknown.
        mib = memory_mib(resources.mem or "0")
        key, have = "resources.mem", None if mib is None else int(mib * 2**20)
        value = f"is {resources.mem}"
    if config.checkpoint.async_save and have is not None and need > have:
        message = f"{value}, but saving in the background needs {size(need)} of memory per node"
        yield Problem(key, message, hint="set checkpoint.async: false, which saves without a copy in memory")


def _host_problems(
    config: RunConfig, plan: LaunchPlan, work: StepWork, machine: Machine
) -> Iterator[Problem]:
    """Yield a problem if the run's processes on this machine need more memory than the machine has.

    Only weights, gradients and optimizer state are counted, because every run needs them. Exhausting the
    memory could make the kernel kill unrelated processes.
    """
    state = state_bytes(work) * plan.layout.dp_replicate
    if not plan.is_here:
        state //= plan.num_nodes  # The processes of other nodes do not run on this machine.
    if not plan.is_job and machine.memory is not None and state > machine.memory:
        what = f"is {config.model.preset}: weights, gradients and optimizer state take {size(state)}"
        message = f"{what}, but this machine has {size(machine.memory)}"
        yield Problem(
            "model.preset", message, hint="`trainkit plan --gpus N --gpu-type T` shows which layouts fit"
        )
