"""The layout that a config itself asks for, on hardware that it need not name. Pure."""

from __future__ import annotations

from trainkit.config.loaded import LoadedConfig
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.batch import make_batch
from trainkit.plan.choices import Choice
from trainkit.plan.hardware import Hardware
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.layout import make_layout
from trainkit.plan.layout_rules import layout_problems
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.workload import Workload, workload_of


def own_choice(
    loaded: LoadedConfig, shape: ModelShape, hardware: Hardware
) -> tuple[Choice | None, list[Problem]]:
    """What the config asks for, or everything because of which that cannot be on so many GPUs."""
    config = loaded.config
    train, seq_len = config.train, config.data.seq_len
    try:
        layout, _ = make_layout(config.parallel, hardware.num_gpus)
        batch = make_batch(train.device_batch_size, train.global_batch_size, layout.dp, seq_len)
    except ConfigError as error:
        found = error.problems
    else:
        size, steps = batch.device_batch_size, batch.accumulation_steps
        found = list(layout_problems(layout, config.parallel, shape, size, seq_len, steps))
        if not found:
            return Choice(workload_of(config, shape, layout, batch), hardware), []
    return None, [loaded.problem(problem.key, problem.message, problem.hint) for problem in found]


def base_workload(config: RunConfig, shape: ModelShape, own: Choice | None) -> Workload:
    """What other layouts begin from: as many samples at once as the config asks for, at most."""
    if own is not None:
        work = own.work
    else:
        train, parallel = config.train, config.parallel
        layout = Layout(tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
        work = workload_of(config, shape, layout, Batch(train.device_batch_size, 1, 0, 0))
    return work.one_microbatch()
