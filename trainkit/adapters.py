"""Adds peft's low-rank adapters to a model as configured in `model.lora`."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch
from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.errors import FatalError
from trainkit.extras import install_line
from trainkit.formats import JsonObject

ADAPTER = "default"
"""Name under which peft stores the adapter."""
HINT = "use the arguments of peft.LoraConfig, such as r, lora_alpha and target_modules"
UNSUPPORTED = ("layer_replication", "ensure_weight_tying")
"""LoraConfig arguments that make several modules share parameters."""
NEEDS_WEIGHTS = ("use_dora", "use_qalora", "loftq_config", "eva_config", "corda_config", "lora_ga_config")
"""LoraConfig arguments that make the initial adapters depend on the weights of the model."""


def require(module: str, key: str, extra: str) -> None:
    """Raise FatalError if the module required by a config key is not installed."""
    if importlib.util.find_spec(module) is None:
        raise FatalError(
            f"{key} needs {module}, which is not installed",
            hint=f"`{install_line(extra)}`",
        )


def add_adapters(module: nn.Module, config: RunConfig) -> None:
    """Add the adapters configured in ``model.lora`` to a module in place, and freeze its other parameters.

    Does nothing if ``model.lora`` is not set. Parameters outside of `module` remain trainable. Raises
    FatalError if the configured adapters do not fit `module`.
    """
    lora = config.model.lora
    if lora is None:
        return
    require("peft", "model.lora", "peft")
    name = type(module).__name__
    settings = lora_config(lora)
    if settings.modules_to_save:
        raise FatalError(
            f"model.lora.modules_to_save is {settings.modules_to_save}, but task is {config.task}",
            hint="remove modules_to_save: the task determines which other parameters are trained",
        )
    is_on_meta = any(param.is_meta for param in module.parameters())
    if is_on_meta and not is_independent(lora):
        raise FatalError(
            f"model.lora is {lora}, which requires the weights of {name} in memory",
            hint="build the model without parameters_on_meta",
        )
    apply_lora(module, settings, name, wraps=False)


def lora_config(lora: JsonObject, task_type: str | None = None) -> Any:
    """Create peft's LoraConfig; raise FatalError for arguments that peft or trainkit rejects."""
    import peft

    for name in UNSUPPORTED:
        if lora.get(name):
            raise FatalError(
                f"model.lora.{name} is set, which trainkit does not support",
                hint="parameters shared between modules cannot be sharded layer by layer",
            )
    try:
        return peft.LoraConfig(task_type=task_type, **lora)
    except (TypeError, ValueError) as error:
        raise FatalError(f"model.lora is {lora}: {error}", hint=HINT) from error


def apply_lora(model: nn.Module, settings: Any, name: str, *, wraps: bool) -> nn.Module:
    """Add adapters to a model in place, and return the model.

    With `wraps`, returns a `PeftModel` that contains the model. Saving a `PeftModel` saves only the adapters.
    If the weights are on the meta device, the adapters are still allocated and initialized. Raises FatalError
    if peft cannot add the adapters. The message refers to the model as `name`.
    """
    import peft

    try:
        check_targets(model, settings, name)
        if wraps:
            model = peft.get_peft_model(model, settings)
        else:
            peft.inject_adapter_in_model(settings, model, ADAPTER)
    except (TypeError, ValueError, re.error) as error:
        raise FatalError(f"model.lora does not fit {name}: {error}", hint=HINT) from error
    for layer in adapted_layers(model).values():
        parts = [getattr(layer, part) for part in layer.adapter_layer_names]
        if any(param.is_meta for part in parts for param in part.parameters()):
            for part in parts:
                part.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, settings.init_lora_weights)
    return model


def check_targets(module: nn.Module, settings: Any, model: str) -> None:
    """Raise FatalError if `target_modules` contains a name that matches no module."""
    targets = settings.target_modules
    if targets is None or targets == "all-linear":
        return  # without a list, peft chooses the target modules or raises an error
    # In peft, a string is a pattern for the full module name, and a list contains suffixes of names.
    if isinstance(targets, str):
        patterns = {targets: targets}
    else:
        patterns = {end: rf"(.*\.)?{re.escape(end)}" for end in targets}
    for target, pattern in patterns.items():
        if not any(re.fullmatch(pattern, name) for name, _ in module.named_modules()):
            # Only modules that directly own a weight matrix can have adapters.
            found = {
                name.rpartition(".")[2]
                for name, part in module.named_modules()
                if any(param.dim() > 1 for param in part.parameters(recurse=False))
            }
            raise FatalError(
                f"model.lora.target_modules has {target}, which matches no module of {model}",
                hint=f"modules with weights: {', '.join(sorted(found))}",
            )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return a mapping from name to module for the modules of a model that have low-rank adapters."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into the weights in place, and restore the original module names."""
    for name, layer in adapted_layers(model).items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())


def is_independent(lora: JsonObject) -> bool:
    """Return whether the initial adapters are independent of the weights of the model."""
    return lora.get("init_lora_weights", True) in (True, "gaussian") and keeps_base(lora)


def keeps_base(lora: JsonObject) -> bool:
    """Return whether peft leaves the original weights of the model unchanged."""
    is_simple = lora.get("init_lora_weights", True) in (True, False, "gaussian")
    return is_simple and not any(lora.get(key) for key in NEEDS_WEIGHTS)
