"""Passes config values to the tool, such as torchrun, that starts the ranks of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.capabilities.launchers.launcher_plan import LauncherPlan
from trainkit.capability import Capability, Planned

if TYPE_CHECKING:
    from trainkit.capability import Ranks
    from trainkit.config.loaded import LoadedConfig
    from trainkit.job.rank_env import RankEnv
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.workload import Workload
    from trainkit.run.rundir import RunDir


class Launchers(Capability):
    """Supports the launchers torchrun, accelerate, DeepSpeed, Lightning and Megatron."""

    name = "launchers"

    def plan_command(self, loaded: LoadedConfig, workload: Workload, ranks: Ranks) -> Planned:
        from trainkit.capabilities.launchers.config_files import Job, describe_input, launcher_input

        job = Job(loaded, ranks.world_size, ranks.num_nodes, ranks.workers_per_node, ranks.device)
        given = launcher_input(job, workload.argv, workload.launcher)
        reasons, warnings = dict[str, str](), list[str]()
        if (description := describe_input(given, workload.launcher)) is not None:
            reasons["launcher"] = description
            kept = [key for key in sorted(loaded.origins) if key.startswith(("model.", "schedule."))]
            if own := [key for key in kept if loaded.set_by_user(key) and key not in loaded.typed]:
                warnings.append(
                    f"{workload.launcher} does not receive the values of {', '.join(own)}: "
                    f"set them in the script"
                )
        part = LauncherPlan(given.files, given.values, job.typed)
        return Planned(
            None if part == LauncherPlan() else part, reasons, tuple(warnings), given.env, job.asked
        )

    def size_independent(self, plan: LaunchPlan) -> object:
        part = plan.part(LauncherPlan) or LauncherPlan()
        values = {name: text for name, text in part.values.items() if name not in ("num_nodes", "devices")}
        return part.files, values

    def argv(self, plan: LaunchPlan, rank: RankEnv, run: RunDir) -> tuple[str, ...]:
        from trainkit.capabilities.launchers.argv import launcher_argv

        return launcher_argv(plan, rank, run)


CAPABILITY = Launchers
