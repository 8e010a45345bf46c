"""Trains any causal language model of the transformers library, or low-rank adapters of one: `model.hf`."""

from __future__ import annotations

import importlib.util
import math
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.data.cache import has_validation
from trainkit.errors import EXIT_NO_RESTART, TrainkitError, UsageError
from trainkit.safetensors import StoredWeights, WeightsError
from trainkit.task import Loss, Samples, Task, TokenSamples, parameters_on_meta

log = getLogger(__name__)
ADAPTER = "default"
"""The name of the adapter in peft."""
NEEDS_WEIGHTS = ("use_dora", "use_qalora", "loftq_config", "eva_config", "corda_config", "lora_ga_config")
"""Arguments of LoraConfig with which the initial values of the adapters depend on the model's weights."""


def require(module: str, key: str, extra: str) -> None:
    """Raise TrainkitError (exit code 78) unless a module that a config key needs is installed."""
    if importlib.util.find_spec(module) is None:
        raise TrainkitError(
            f"{key} needs {module}, which is not installed",
            hint=f"pip install 'trainkit[{extra}]'",
            exit_code=EXIT_NO_RESTART,
        )


class HFCausalLM(Task):
    """Next-token prediction with a model of transformers."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        require("transformers", "model.hf", "hf")
        if config.model.lora is not None:
            require("peft", "model.lora", "peft")
        assert config.model.hf is not None
        self._folder = Path(config.model.hf)
        self._weights = None if config.model.from_scratch else StoredWeights(self._folder)
        self._names: dict[str, str] = {}
        """Names in the files by the names of parameters."""
        self._flops: float | None = None

    @property
    def base_fingerprint(self) -> str | None:
        """That of the weights which checkpoints do not contain; None if they contain all."""
        return None if self.config.model.lora is None or self._weights is None else self._weights.fingerprint

    def train_dataset(self) -> Samples:
        return TokenSamples(self.config.data)

    def val_dataset(self) -> Samples | None:
        return TokenSamples(self.config.data, "val") if has_validation(self.config.data) else None

    def build_model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.from_pretrained(self._folder, local_files_only=True)
        settings.use_cache = False

        def create() -> Any:
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)

        if self._weights is None:
            return self._counted(create())
        with parameters_on_meta():
            model = create()
        prefix = model.base_model_prefix
        found = {name: self._stored_name(name, prefix) for name, _ in model.named_parameters()}
        absent = [name for name, stored in found.items() if stored is None]
        lora = self.config.model.lora
        if absent or (lora is not None and not _is_independent(lora)):
            what = f"it has other names than the model: {absent[0]}" if absent else "model.lora depends on it"
            log.warning(f"each process reads all of {self._folder}: {what}")
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
            model.config.use_cache = False
        else:
            self._check_shapes(model, found)
        return self._counted(model if lora is None else self._adapted(model, lora))

    def _stored_name(self, name: str, prefix: str) -> str | None:
        assert self._weights is not None
        names = (name, name.removeprefix(f"{prefix}."))
        return next((item for item in names if item in self._weights), None)

    def _check_shapes(self, model: nn.Module, found: dict[str, str | None]) -> None:
        assert self._weights is not None
        for name, param in model.named_parameters():
            stored = found[name]
            assert stored is not None
            if self._weights.shape(stored) != tuple(param.shape):
                shapes = f"{list(self._weights.shape(stored))}, not {list(param.shape)}"
                raise WeightsError(f"{stored} in {self._folder} has shape {shapes} as in its config.json")
            self._names[name] = stored

    def _adapted(self, model: nn.Module, lora: dict[str, Any]) -> nn.Module:
        import peft

        try:
            settings = peft.LoraConfig(task_type="CAUSAL_LM", **lora)
            adapted: nn.Module = peft.get_peft_model(model, settings)
        except (TypeError, ValueError) as error:
            raise TrainkitError(
                f"model.lora does not fit {self._folder}: {error}",
                hint="it has the arguments of peft.LoraConfig, such as r, lora_alpha and target_modules",
                exit_code=EXIT_NO_RESTART,
            ) from error
        for module in adapted.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer) and any(p.is_meta for p in module.parameters()):
                for part in module.adapter_layer_names:
                    getattr(module, part).to_empty(device="cpu")
                module.reset_lora_parameters(ADAPTER, settings.init_lora_weights)
        return adapted

    def _counted(self, model: nn.Module) -> nn.Module:
        """The model, once the FLOPs of a sample are known."""
        embeddings = {id(item.weight) for item in model.modules() if isinstance(item, nn.Embedding)}
        settings: Any = model.config
        heads = model.get_output_embeddings()  # type: ignore[operator]
        counted = [p for p in model.parameters() if id(p) not in embeddings or p is heads.weight]
        is_sparse = any("expert" in name for name, _ in model.named_modules())
        sizes: Any = [getattr(settings, name, None) for name in ("num_hidden_layers", "hidden_size")]
        if not is_sparse and all(isinstance(size, int) for size in sizes):
            # Frozen weights have no gradient of their own, a third of the work.
            per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in counted)
            seq_len = self.config.data.seq_len
            self._flops = float(seq_len * (per_token + 12 * math.prod(sizes) * seq_len))
        return model

    def read_weight(self, name: str, rows: slice) -> Tensor:
        assert self._weights is not None
        return self._weights.read(self._names[plain_name(name)], (rows,))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        labels = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(total, labels.numel())

    @property
    def flops_per_sample(self) -> float | None:
        return self._flops


def plain_name(name: str) -> str:
    """The name of a parameter in the model without adapters."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace(f".modules_to_save.{ADAPTER}.", ".").replace(".original_module.", ".")


def _is_independent(lora: dict[str, Any]) -> bool:
    """Whether the initial values of adapters do not depend on the weights that they adapt."""
    is_random = lora.get("init_lora_weights", True) in (True, False, "gaussian")
    return is_random and not any(lora.get(key) for key in NEEDS_WEIGHTS)


def save_pretrained(model: Any, folder: Path, dtype: torch.dtype, *, merge: bool) -> None:
    """Write a model as transformers does, or its adapters as peft does; `merge` adds them to the model."""
    is_adapted = hasattr(model, "merge_and_unload")
    if merge and not is_adapted:
        raise UsageError("--merge is for runs with model.lora", hint="remove --merge")
    if merge:
        model = model.merge_and_unload()
    model.config.use_cache = True
    model.to(dtype).save_pretrained(folder)
