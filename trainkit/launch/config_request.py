"""Describe the config that a command or Python call requests, and the values that it overrides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.plan.workload import TRAINER, Workload, name_of

if TYPE_CHECKING:
    from trainkit.cluster.target import Target
    from trainkit.config import LoadedConfig
    from trainkit.launch.repeat import RepeatedRun

FLAGS = {
    "nodes": "resources.nodes",
    "gpus_per_node": "resources.gpus_per_node",
    "time": "resources.time",
    "slice": "resources.slice",
    "time_min": "resources.time_min",
    "max_gpu_hours": "resources.max_gpu_hours",
    "partition": "resources.partition",
    "clusters": "resources.clusters",
    "account": "resources.account",
    "qos": "resources.qos",
    "constraint": "resources.constraint",
    "cluster": "launch.cluster",
    "gpu_type": "resources.gpu_type",
    "per": "launch.per",
    "name": "name",
    "backend": "launch.backend",
    "note": "note",
}
"""Maps an argument of a command or Python function to its config key."""


@dataclass(frozen=True)
class ConfigRequest:
    """A config to load and its command-line overrides."""

    path: str
    """The config file as typed, or the name of a built-in config. If CONFIG was omitted, the value is the
    name of the default config or an empty string."""
    profile: str | None
    overrides: tuple[str, ...]
    flags: dict[str, tuple[str, object]]
    """Maps a dotted key to the command-line flag, as the user typed it, and its value."""
    argv: tuple[str, ...] = ()
    """The COMMAND after ``--``; determines the default name of the run."""
    chooses_nodes: bool = False
    """True if ``--nodes auto`` is given."""
    repeats: RepeatedRun | None = None
    """A run whose config is loaded instead of a config file and its layers."""

    def load(self, target: Target | None = None) -> LoadedConfig:
        """Load the config with all its layers; raise a ConfigError that lists every problem.

        On a host without Slurm, the function does not search for a cluster, so the `defaults` of cluster
        profiles do not apply.
        """
        if self.repeats is not None:
            from trainkit.launch.repeat import load_again

            found = self.repeats
            return load_again(found.run, found.plan, self.overrides, self.flags, self.profile)
        from trainkit.cluster.target import load_with_cluster
        from trainkit.config import load_config
        from trainkit.config.yamlfile import entry_at

        load = load_config if target is not None and not target.finds_cluster else load_with_cluster
        name = name_of(self.argv)
        return load(
            self.path or None,
            profile=self.profile,
            overrides=self.overrides,
            flags=self.flags,
            defaults=() if name is None else (entry_at(("name",), name, "the command"),),
        )

    def load_to_plan(self, workload: Workload | None = None, target: Target | None = None) -> LoadedConfig:
        """Load the config for a command that plans a run of `workload`, which defaults to the trainer.

        If the config is invalid, the ConfigError also lists problems found by planning a run with the valid
        values.
        """
        from trainkit.config import InvalidConfig

        try:
            return self.load(target)
        except InvalidConfig as error:
            from trainkit.launch.plan_run import planning_error

            raise planning_error(error, workload or TRAINER, target=target) from None
