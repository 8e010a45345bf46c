"""Call the code of capabilities that takes part in training on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainkit.capability import GoBack, NewEvent, TrainedModel, TrainerHook
from trainkit.formats import JsonObject
from trainkit.plan.launch import LaunchPlan
from trainkit.shipped import load
from trainkit.trainer.build import BuiltModel
from trainkit.trainer.checkpoint.state import state_prefix
from trainkit.trainer.distributed import World


def trained_model(built: BuiltModel, world: World) -> TrainedModel:
    """Describe a model to the hooks of capabilities."""

    def weights_changed() -> None:
        # FSDP would otherwise reuse the gathered copies of weights that a forward pass left behind.
        for part in built.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        built.update_scales()

    return TrainedModel(built.weights, world, weights_changed)


class TrainerHooks:
    """The hooks of all capabilities in a plan."""

    def __init__(self, plan: LaunchPlan, model: TrainedModel) -> None:
        found = ((name, load(name).trainer_hook(plan, model)) for name in plan.parts)
        self._own: dict[str, TrainerHook] = {name: hook for name, hook in found if hook is not None}

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name in checkpoints and the tensor of each state."""
        for name, hook in self._own.items():
            for own_name, tensor in hook.state_tensors():
                yield f"{state_prefix(name)}{own_name}", tensor

    def saved(self) -> dict[str, JsonObject]:
        """Return the values of each hook that checkpoints contain as JSON."""
        return {name: values for name, hook in self._own.items() if (values := hook.saved())}

    def begin(self, step: int, loaded: Collection[str], saved: Mapping[str, JsonObject] = {}) -> None:
        """Start all hooks; `loaded` contains the prefixes of the states that were in the checkpoint.

        `saved` contains the values of `saved` in the checkpoint.
        """
        for name, hook in self._own.items():
            if name in saved:
                hook.load(saved[name])
            hook.begin(step, is_loaded=state_prefix(name) in loaded)

    def after_step(self, step: int, *, has_updated: bool, loss: float) -> Iterator[NewEvent]:
        """Yield the events of all hooks after a step."""
        for hook in self._own.values():
            yield from hook.after_step(step, has_updated=has_updated, loss=loss)

    def go_back(self) -> GoBack | None:
        """Return the first request of a hook to go back to an earlier checkpoint, or None."""
        return next((found for hook in self._own.values() if (found := hook.go_back()) is not None), None)

    def other_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return the weights of all hooks on which validation is repeated; see `TrainerHook`."""
        return {suffix: use for hook in self._own.values() for suffix, use in hook.other_weights().items()}
