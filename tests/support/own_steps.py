"""Provides a task that customizes all of a step: optimizers in turns, a schedule, an EMA and a state."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from tests.support.tasks import Points
from trainkit.config.schema import RunConfig
from trainkit.task import Loss, Samples, Task


def network(inputs: int, outputs: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 24), nn.GELU())

    return nn.Sequential(
        nn.Linear(inputs, 24), nn.Sequential(block(), nn.Dropout(0.1), block()), nn.Linear(24, outputs)
    )


class Adversaries(Task):
    """A generator and a discriminator, with an average of the generator and a custom state."""

    def __init__(self, config: RunConfig, *, together: bool = False, every: int = 1) -> None:
        super().__init__(config)
        self.together, self.every = together, every
        self.history = torch.zeros(3)
        self.best: tuple[float, str | None] = (float("inf"), None)

    def build_model(self) -> nn.Module:
        generator = network(8, 16)
        average = copy.deepcopy(generator).requires_grad_(False)
        return nn.ModuleDict({"g": generator, "d": network(16, 1), "average": average})

    def train_dataset(self) -> Samples:
        return Points(100, 0)

    def val_dataset(self) -> Samples:
        return Points(21, 1)

    def optimizers(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, Optimizer | LRScheduler]:
        own = {name: [p for key, p in parameters.items() if key.startswith(f"{name}.")] for name in "dg"}
        sgd = SGD(own["g"], lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01)
        return {"d": Adam(own["d"], lr=2e-3, betas=(0.5, 0.9)), "g": CosineAnnealingLR(sgd, T_max=20)}

    def turns(self) -> Sequence[str]:
        if self.together:
            return []
        return ["d", "d", "g"] if self.step % self.every == 0 else ["d"]

    def loss_for(self, optimizer: str, model: nn.Module, batch: Any) -> Loss:
        assert isinstance(model, nn.ModuleDict)
        real, count = batch["x"], batch["weight"].sum()
        fake = model["g"](torch.randn(len(real), 8, device=real.device))
        if optimizer == "d":
            score = F.softplus(-model["d"](real)) + F.softplus(model["d"](fake.detach()))
            return Loss((score[:, 0] * batch["weight"]).sum(), count, {"real": model["d"](real).sum()})
        score = F.softplus(-model["d"](fake))[:, 0]
        return Loss((score * batch["weight"]).sum(), count, {"spread": (fake.std(), 1)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert isinstance(model, nn.ModuleDict)
        generator = model["g" if model.training else "average"]
        error = generator(batch["x"][:, :8]) - batch["x"] * model["d"](batch["x"])
        return Loss(error.square().sum(), len(error))

    def after_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        for name, average in parameters.items():
            if name.startswith("average."):
                average.lerp_(parameters[f"g.{name.removeprefix('average.')}"], 0.1)
        parameters["d.0.weight"].clamp_(-0.3, 0.3)
        self.history = torch.cat((self.history[1:], torch.rand(1)))
        self.best = min(self.best, (self.history.sum().item(), f"step {self.step}"))

    def state_dict(self) -> Mapping[str, object]:
        return {"history": self.history, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history, self.best = state["history"], state["best"]
