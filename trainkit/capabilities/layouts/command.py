"""Implements ``trainkit plan``, which lists the layouts that fit and recommends one."""

from __future__ import annotations

import math
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.capabilities.layouts.effective_time import (
    FAILURES_PER_NODE_DAY,
    SAVE_S,
    Assumed,
    EffectiveTime,
    effective_time,
)
from trainkit.cli.help import as_command, option, terminal_width
from trainkit.cli.options import COUNT, config_options, json_option
from trainkit.cli.output import json_text
from trainkit.cluster.machine import detect_machine
from trainkit.errors import EXIT_FAILED, EXIT_OK, ConfigError, UsageError
from trainkit.formats import plural, size
from trainkit.launch.config_request import ConfigRequest
from trainkit.plan.gpus import RESTART_S

if TYPE_CHECKING:
    from trainkit.capabilities.layouts.choices import Choice, Hardware
    from trainkit.config import LoadedConfig
    from trainkit.plan.model_shape import ModelShape


@as_command(
    "trainkit plan models/8b --gpus 8 --gpu-type h100",
    "trainkit plan models/70b --nodes 8 --gpus-per-node 8 --gpu-type h100 --limit 3",
    "trainkit plan models/7b --gpus 4 --gpu-type a100-40gb --set data.seq_len=2048 --all",
    "trainkit plan quickstart --gpus 2 --gpu-type rtx4090 --profile balanced --json",
)
@config_options()
@option("--gpus N", "Total number of GPUs; must be a multiple of the number of GPUs per node.", type=COUNT)
@option(
    "--gpu-type TYPE", "GPU type to plan for; default: the type that the run would use.", name="planned_type"
)
@option("--all", "Also list layouts that do not fit.", name="show_all")
@option("--limit N", "Maximum number of layouts to list.", type=COUNT, default=10, show_default=True)
@option(
    "--failures-per-node-day RATE",
    "Expected failures per node and day, used to estimate the effective training time.",
    type=click.FloatRange(min=0, min_open=True),
    default=FAILURES_PER_NODE_DAY,
    show_default=True,
)
@option(
    "--restart-s S",
    "Expected time in seconds from a failure to the next step.",
    type=click.FloatRange(min=0),
    default=RESTART_S,
    show_default=True,
)
@option(
    "--save-s S",
    "Expected time in seconds that each checkpoint save blocks training.",
    type=click.FloatRange(min=0, min_open=True),
    default=SAVE_S,
    show_default=True,
)
@json_option("trainkit.capabilities.layouts.advice:LayoutsJson")
def command(
    request: ConfigRequest,
    gpus: int | None,
    planned_type: str | None,
    show_all: bool,
    limit: int,
    as_json: bool,
    **assumed: float,
) -> int:
    """List the parallel layouts with which the model of CONFIG can be trained, fastest first.

    Memory refers to the GPU that needs the most, and is shown in GiB, or in MiB with the suffix M. The table
    shows the maximum of each category of memory, and the peak, which is less than the sum because the maxima
    occur at different times. The column batch shows samples per pass x passes per step. The column sent shows
    the amount of data that a GPU sends in a step. The column time shows an estimate relative to the first
    row. All layouts have the same global batch size. A star marks the layout of the config. The exit code is
    1 if no layout fits.
    """
    if gpus is not None and {"resources.nodes", "resources.gpus_per_node"} <= set(request.flags):
        raise UsageError(
            "--gpus conflicts with --nodes and --gpus-per-node",
            hint="use either --gpus or the other two options",
        )
    for name, value in assumed.items():
        if not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')}: is {value}", hint="specify a finite number")
    loaded = request.load()
    hardware = _hardware(loaded, gpus, planned_type)
    planned = _Planned(request, loaded, _shape(loaded), hardware, Assumed(**assumed))
    if as_json:
        click.echo(json_text(planned.to_dict(show_all, limit)))
    else:
        planned.show(show_all, limit)
    return EXIT_OK if planned.best is not None else EXIT_FAILED


def _hardware(loaded: LoadedConfig, gpus: int | None, gpu_type: str | None) -> Hardware:
    from trainkit.capabilities.layouts.choices import find_hardware
    from trainkit.cluster.target import LOCAL, make_target

    # Query Slurm only if the type or the number of GPUs was not given.
    is_given = (gpu_type or loaded.config.resources.gpu_type) is not None and gpus is not None
    target = LOCAL if is_given else make_target(loaded)
    return find_hardware(loaded.config, detect_machine(), target, gpu_type, gpus)


def _shape(loaded: LoadedConfig) -> ModelShape:
    """Return the dimensions of the model; read the data only if it determines the vocabulary size."""
    from trainkit.data.checks import inspect_data
    from trainkit.plan.model_shape import resolve_model_shape

    unknown, simulate = (
        "and its memory use is unknown",
        "`trainkit check --simulate-world N` simulates a step of",
    )
    loaded.require_decoder(
        (unknown, "`trainkit plan` requires the task causal_lm"),
        (unknown, f"{simulate} your own architecture"),
    )
    vocab_size = loaded.config.model.vocab_size
    if vocab_size is None:
        facts = inspect_data(loaded.config.data)
        if facts.problems:
            raise ConfigError([loaded.problem(*problem) for problem in facts.problems])
        vocab_size = facts.vocab_size
    try:
        return resolve_model_shape(loaded.config.model, vocab_size)
    except ConfigError as error:
        raise ConfigError(loaded.located(error.problems)) from None


class _Planned:
    """The layout choices for a config, and the methods that print them."""

    def __init__(
        self,
        request: ConfigRequest,
        loaded: LoadedConfig,
        shape: ModelShape,
        hardware: Hardware,
        assumed: Assumed,
    ) -> None:
        from trainkit.capabilities.layouts.choices import base_work, choose, configured_layout

        self.request = request
        self.loaded = loaded
        self.hardware = hardware
        self.own, self.own_problems = configured_layout(loaded, shape, hardware)
        self.base = base_work(loaded.config, shape, self.own)
        self.samples = loaded.config.train.global_batch_size
        if self.own is not None and self.samples is not None:
            self.samples = self.own.work.samples_per_step
        self.choices = choose(self.base, hardware, self.samples)
        if self.own is not None and self.own not in self.choices:
            self.choices = sorted([*self.choices, self.own], key=lambda choice: choice.rank)
        first = self.choices[0] if self.choices else None
        self.best = first if first is not None and first.fit != "no" else None
        self.effective: EffectiveTime | None = None
        shown = self.own or self.best
        # If the GPU's peak FLOP/s are unknown, only relative times can be estimated.
        if shown is not None and hardware.gpu.peak_flops is not None:
            self.effective = effective_time(loaded.config, hardware.num_nodes, shown.cost.step_s, assumed)

    def listed(self, show_all: bool, limit: int) -> list[Choice]:
        """Return the layouts to list: the best layouts, and always the config's own layout."""
        fitting = [choice for choice in self.choices if show_all or self.best is None or choice.fit != "no"]
        listed = fitting[:limit]
        return listed if self.own is None or self.own in listed else [*listed, self.own]

    def advice(self) -> list[tuple[str, Choice]]:
        """Return config changes that make the run fit, or an empty list if a layout already fits."""
        from trainkit.capabilities.layouts.advice import advise

        if self.best is not None:
            return []
        work = self.base if self.own is None else self.own.work
        return list(advise(work, self.hardware, self.samples))

    def show(self, show_all: bool, limit: int) -> None:
        """Print the table to stdout, and everything else to stderr."""
        from trainkit.capabilities.layouts.advice import headline, reason, table_lines

        hardware, listed = self.hardware, self.listed(show_all, limit)
        gpu = hardware.gpu
        nodes = plural(hardware.num_nodes, "node")
        click.echo(
            f"{self.request.path} on {nodes} x {hardware.node_size} {gpu.name}: {size(gpu.memory)} each, "
            f"{size(gpu.usable)} of it usable",
            err=True,
        )
        click.echo("\n".join(table_lines(listed, self.own, self.best, terminal_width())))
        for problem in self.own_problems:
            click.echo(f"the config's layout is not possible:\n{problem.render()}", err=True)
        if self.own is not None:
            fit = {"fits": "fits", "tight": "fits barely", "no": "does not fit"}[self.own.fit]
            click.echo(f"* the config's layout {fit}: peak {size(self.own.memory.peak)}", err=True)
        if self.best is not None:
            click.echo(f"recommended: {reason(self.best)}\n  {headline(self.best)}", err=True)
            click.echo(f"to use this layout: {self._flags(self.best)}", err=True)
            for line in [] if self.effective is None else self.effective.lines():
                click.echo(line, err=True)
            return
        click.echo("no layout fits" if self.choices else "no layout divides the batch evenly", err=True)
        for what, choice in self.advice():
            peak = size(choice.memory.peak)
            click.echo(f"would fit with a peak of {peak}: {what}: {self._flags(choice)}", err=True)

    def _flags(self, choice: Choice) -> str:
        """Return the command that submits the run with a given layout choice."""
        from trainkit.capabilities.layouts.advice import set_flags, settings

        request, hardware = self.request, choice.hardware
        typed = [] if request.profile is None else [f"--profile {quote(request.profile)}"]
        typed += [f"--set {quote(text)}" for text in request.overrides]
        flags = [*typed, f"--nodes {hardware.num_nodes}", f"--gpus-per-node {hardware.node_size}"]
        flags += set_flags(settings(choice, self.loaded.config))
        return f"trainkit submit {quote(request.path)} {' '.join(flags)}"

    def to_dict(self, show_all: bool, limit: int) -> dict[str, object]:
        """Return the plan as a JSON object that contains all amounts in bytes."""
        from trainkit.capabilities.layouts.advice import choice_dict, headline
        from trainkit.plan.model_shape import num_params

        gpu, config, best = self.hardware.gpu, self.loaded.config, self.best
        return {
            "gpu": {"name": gpu.name, "memory_bytes": gpu.memory, "usable_bytes": gpu.usable},
            "num_gpus": self.hardware.num_gpus,
            "gpus_per_node": self.hardware.node_size,
            "num_params": num_params(self.base.shape),
            "headline": None if best is None else headline(best),
            "choices": [choice_dict(choice, config, best) for choice in self.listed(show_all, limit)],
            "config": None if self.own is None else choice_dict(self.own, config, best),
            "effective_time": None if self.effective is None else asdict(self.effective),
            "config_problems": [problem.render() for problem in self.own_problems],
            "would_fit": [
                {"what": what, "num_gpus": choice.hardware.num_gpus, **choice_dict(choice, config, None)}
                for what, choice in self.advice()
            ],
        }
