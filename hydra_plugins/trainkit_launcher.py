"""Implements ``hydra/launcher=trainkit``, which runs the jobs of a Hydra multirun as a group of runs."""

# Annotations are not postponed, because Hydra executes this module before it is in sys.modules.

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from trainkit.api import Run

log = logging.getLogger(__name__)


@dataclass
class TrainkitLauncherConf:
    """Options of `trainkit.map_array`; None means the default value of an option."""

    _target_: str = "hydra_plugins.trainkit_launcher.TrainkitLauncher"
    name: str = "${hydra.job.name}"
    nodes: int | None = None
    gpus_per_node: int | None = None
    limit: int | None = None
    """Maximum number of jobs that run at the same time."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    backend: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    """Maps keys of trainkit's config, such as `resources.mem` or `launch.venv`, to their values."""


ConfigStore.instance().store(
    group="hydra/launcher", name="trainkit", node=TrainkitLauncherConf, provider="trainkit"
)


@dataclass(frozen=True)
class HydraJob:
    """One job of a multirun, which implements `trainkit.run.trial.SweeperTrial`."""

    number: int
    params: dict[str, object]
    context: HydraContext
    task: TaskFunction
    config: DictConfig
    singletons: dict[Any, Any]


def run(job: HydraJob) -> JobReturn:
    """Run a job as Hydra does, as a rank of the job's run; the run fails if the job's task fails."""
    Singleton.set_state(job.singletons)
    setup_globals()
    is_first = os.environ["RANK"] == "0"
    with open_dict(job.config):
        job.config.hydra.job.id = os.environ.get("SLURM_JOB_ID", job.config.hydra.job.id)
        if not is_first:  # The ranks of a job share one output folder.
            job.config.hydra.output_subdir = None
    done = run_job(
        hydra_context=job.context,
        task_function=job.task,
        config=job.config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        configure_logging=is_first,
    )
    done.return_value  # noqa: B018
    return done


class TrainkitLauncher(Launcher):
    """The launcher of a multirun; the sweeper calls `launch` once or, like the Optuna sweeper, many times."""

    def __init__(self, overrides: DictConfig, **options: Any) -> None:
        self.options = {name: value for name, value in options.items() if value is not None}
        self.overrides = OmegaConf.to_container(overrides, resolve=True)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from trainkit.api import map_array

        jobs = [self._job(list(item), initial_job_idx + i) for i, item in enumerate(job_overrides)]
        group = map_array(run, jobs, **self.options, **self.overrides)
        log.info("trainkit status %s: %d runs", group.path, len(jobs))
        for job, item in zip(jobs, job_overrides, strict=True):
            log.info("\t#%s : %s", job.config.hydra.job.num, " ".join(filter_overrides(item)))
        group.wait()
        return [_returned(one, job) for one, job in zip(group, jobs, strict=True)]

    def _job(self, overrides: list[str], number: int) -> HydraJob:
        """Return a job with its current config, because config files may change before the job starts."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.sweep.dir = str(Path(str(config.hydra.sweep.dir)).absolute())
            config.hydra.job.id, config.hydra.job.num = f"job_id_for_{number}", number
        return HydraJob(number, _params(overrides), self.context, self.task, config, Singleton.get_state())


def _params(overrides: list[str]) -> dict[str, object]:
    """Map each key that the overrides of a job set to its value.

    A number is kept as the text that the user wrote, and the value of a deleted key is None.
    """
    from trainkit.run.trial import as_number

    found: dict[str, object] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_hydra_override():
            continue
        value = None if override.is_delete() else override.value()
        if isinstance(value, int | float) and as_number(text := override.get_value_string().strip()) == value:
            value = text
        found[override.get_key_element().lstrip("+~")] = value
    return found


def _returned(one: "Run", job: HydraJob) -> JobReturn:
    try:
        return one.result()  # type: ignore[no-any-return]
    except Exception as error:  # Hydra itself raises the error when the value is read.
        overrides = list(job.config.hydra.overrides.task)
        return JobReturn(cfg=job.config, overrides=overrides, status=JobStatus.FAILED, _return_value=error)
