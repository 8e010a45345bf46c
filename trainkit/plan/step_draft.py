"""The plan of a run in a Slurm step that is there already: its shape is what srun was told."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.plan.draft import Draft


@dataclass
class StepDraft(Draft):
    """A plan for the nodes of a step, of which this machine is the first."""

    node_sizes: tuple[int, ...] = ()

    def workers_per_node(self, device: str) -> int:
        count, num_gpus = max(self.node_sizes), self.machine.num_gpus
        self.reasons["workers_per_node"] = f"{','.join(map(str, self.node_sizes))}: what the step has"
        if device == "cuda" and count > num_gpus:
            message = f"is {count} in this step, but this node shows {num_gpus} GPUs"
            hint = "srun --gpus-per-node gives the step GPUs; device: cpu needs none"
            self.problem("resources.gpus_per_node", message, hint)
        return count

    def refuse_a_crowd(self, device: str, world_size: int) -> None:
        """Slurm has started the tasks already."""

    def threads_per_worker(self, world_size: int) -> int | None:
        asked = self.loaded.config.resources.cpus_per_gpu
        self.reasons["threads_per_worker"] = (
            "the cores that Slurm gave to a task"
            if asked == "auto"
            else f"resources.cpus_per_gpu: {asked} was asked for"
        )
        return None if asked == "auto" else asked
