"""Trains any causal language model in transformers, or low-rank adapters for it (config key `model.hf`)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.adapters import apply_lora, check_targets, is_independent, keeps_base, lora_config, require
from trainkit.config.hf_model import CONFIG_NAME
from trainkit.config.schema import RunConfig
from trainkit.data.sources import has_validation
from trainkit.errors import FatalError, UsageError
from trainkit.formats import JsonObject
from trainkit.safetensors import StoredWeights
from trainkit.task import Loss, Samples, Task, TokenSamples, parameters_on_meta
from trainkit.trainer.models.model import matches, set_tensor
from trainkit.trainer.parallel.tensor import STYLES, find_styles
from trainkit.trainer.quantization import quantize_linears, restore_linears
from trainkit.trainer.user_code import TaskError, errors_of_user

log = getLogger(__name__)
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def import_transformers() -> Any:
    """Import transformers in offline mode, because compute nodes often have no internet."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


class HFCausalLM(Task):
    """Trains a transformers model on next-token prediction."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        require("transformers", "model.hf", "hf")
        if config.model.lora is not None:
            require("peft", "model.lora", "peft")
        if config.model.quantize is not None:
            require("bitsandbytes", "model.quantize", "qlora")
        assert config.model.hf is not None
        self._folder = Path(config.model.hf)
        self._weights = None if config.model.from_scratch else StoredWeights(self._folder)
        self._names: dict[str, str] = {}
        """Maps the names of parameters to their names in the safetensors files."""
        self._flops: float | None = None

    @property
    def base_fingerprint(self) -> str:
        """Return a digest of config.json and, if checkpoints exclude frozen weights, of the weight files."""
        digest = hashlib.sha256((self._folder / CONFIG_NAME).read_bytes())
        if self.rereads_frozen and self._weights is not None:
            digest.update(self._weights.fingerprint.encode())
        if self.config.model.quantize is not None:
            digest.update(self.config.model.quantize.encode())
        return digest.hexdigest()

    @property
    def rereads_frozen(self) -> bool:
        """Return whether each start reads frozen weights from the weight files instead of a checkpoint."""
        lora = self.config.model.lora
        return lora is not None and keeps_base(lora)

    def train_dataset(self) -> Samples:
        return TokenSamples(self.config.data)

    def val_dataset(self) -> Samples | None:
        return TokenSamples(self.config.data, "val") if has_validation(self.config.data) else None

    def build_model(self) -> nn.Module:
        transformers = import_transformers()
        self._check_positions(transformers.AutoConfig.from_pretrained(self._folder, **LOCAL))
        if self._weights is None:
            return self._counted(create_model(self._folder))
        adapted, why = self._on_meta(self._weights)
        if adapted is not None and not why:
            return self._quantized(self._counted(adapted))
        self._refuse_quantized(why)
        log.warning(f"each process reads all weights in {self._folder}, because {why}")
        model, lora = read_whole(self._folder), self.config.model.lora
        return self._counted(model if lora is None else self._adapted(model, lora))

    def _on_meta(self, weights: StoredWeights) -> tuple[nn.Module | None, str]:
        """Return the model on the meta device and "", or None and why each rank must read all weights."""
        lora = self.config.model.lora
        with parameters_on_meta():
            model = create_model(self._folder)
        found, why = find_stored(model, weights)
        if lora is not None and not is_independent(lora):
            check_targets(model, lora_config(lora, task_type="CAUSAL_LM"), str(self._folder))
            why = why or "the initial values of model.lora depend on the weights"
        if why:
            return None, why
        adapted: nn.Module = model if lora is None else self._adapted(model, lora)
        params = list(adapted.named_parameters(remove_duplicate=False))
        self._names = {name: found[param] for name, param in params if param in found}
        copied = (name for name, param in params if param.is_meta and param not in found)
        return adapted, "".join(f"model.lora copies {name}" for name in islice(copied, 1))

    @torch.no_grad()
    def build_adapters(self) -> nn.Module:
        """Return the model with its adapters for an export; only tensors that peft saves are allocated.

        Trained parameters are not loaded.
        """
        import peft

        adapted = None if self._weights is None else self._on_meta(self._weights)[0]
        if adapted is None:
            return self.build_model()
        tensors = adapted.state_dict(keep_vars=True)
        exported = {id(item) for item in peft.get_peft_model_state_dict(adapted, tensors).values()}
        for name, param in list(adapted.named_parameters()):
            if id(param) in exported and param.is_meta:
                value = torch.empty_like(param, device="cpu")
                if not param.requires_grad:
                    value.copy_(self.read_weight(name, slice(None)))
                set_tensor(adapted, name, nn.Parameter(value, param.requires_grad))
        return adapted

    def check(self) -> None:
        """Raise TrainkitError for any problem with the model that can be found without its weights."""
        config = self.config
        if config.model.lora is not None:
            lora_config(config.model.lora)
        if self._weights is not None:
            with errors_of_user(config, "the model in model.hf cannot be built", but=OSError):
                self._refuse_quantized(self._on_meta(self._weights)[1])
        if config.parallel.tp > 1:
            with torch.device("meta"):
                model = create_model(self._folder)
            find_styles(self, config, model, config.parallel.tp)

    def _check_positions(self, settings: Any) -> None:
        """Raise FatalError if samples are longer than the model's table of position embeddings."""
        limit, seq_len = getattr(settings, "max_position_embeddings", None), self.config.data.seq_len
        is_rotary = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_theta", None)
        if not isinstance(limit, int) or seq_len <= limit:
            return
        if not is_rotary:
            raise FatalError(
                f"data.seq_len is {seq_len}, but the model {self._folder} has only {limit} positions",
                hint=f"set data.seq_len to at most {limit}",
            )
        log.warning(
            f"data.seq_len is {seq_len}, which exceeds the {limit} positions that the "
            f"config of {self._folder} specifies"
        )

    def _adapted(self, model: nn.Module, lora: JsonObject) -> nn.Module:
        return apply_lora(model, lora_config(lora, task_type="CAUSAL_LM"), str(self._folder), wraps=True)

    def _quantized(self, model: nn.Module) -> nn.Module:
        """Quantize the frozen linear layers except the head if `model.quantize` is set; return the model."""
        if self.config.model.quantize is None:
            return model
        before = sum(param.numel() for param in model.parameters())
        heads = model.get_output_embeddings()  # type: ignore[operator]
        if not quantize_linears(model, set(heads.modules())):
            self._refuse_quantized("the model has no frozen nn.Linear")
        left = sum(param.numel() for param in model.parameters())
        log.info(f"{before - left:,} of {before:,} parameters are quantized to 4 bits")
        return model

    def _refuse_quantized(self, why: str) -> None:
        """Raise FatalError if `model.quantize` is set, but is not supported for the reason `why`."""
        name = self.config.model.quantize
        if why and name is not None:
            raise FatalError(
                f"model.quantize is {name}, which {self._folder} does not support: {why}",
                hint="remove model.quantize, or change model.lora",
            )

    def _counted(self, model: nn.Module) -> nn.Module:
        """Compute the model's FLOPs per sample, and return the model."""
        embeddings = {id(item.weight) for item in model.modules() if isinstance(item, nn.Embedding)}
        settings: Any = model.config
        heads = model.get_output_embeddings()  # type: ignore[operator]
        counted = [p for p in model.parameters() if id(p) not in embeddings or p is heads.weight]
        is_sparse = any("expert" in name for name, _ in model.named_modules())
        sizes: Any = [getattr(settings, name, None) for name in ("num_hidden_layers", "hidden_size")]
        if not is_sparse and all(isinstance(size, int) for size in sizes):
            # Frozen weights need no weight gradient, which saves a third of the FLOPs.
            per_token = sum((6 if p.requires_grad else 4) * p.numel() for p in counted)
            seq_len = self.config.data.seq_len
            self._flops = float(seq_len * (per_token + 12 * math.prod(sizes) * seq_len))
        return model

    def read_weight(self, name: str, rows: slice) -> Tensor:
        assert self._weights is not None
        return self._weights.read(self._names[name], (rows,))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str]:
        """Return transformers' own tensor-parallel plan for the model; raise TaskError if no plan fits."""
        tp, settings, own = self.config.parallel.tp, cast(Any, model.config), cast(Any, model)
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(settings, key, None)
            if isinstance(heads, int) and heads % tp:
                raise _no_split(
                    tp, f"does not divide {key} {heads} of {self._folder}", "use a divisor of this number"
                )
        names = {module: name for name, module in model.named_modules()}
        embedding, head = own.get_input_embeddings(), own.get_output_embeddings()
        plan = {
            name: style
            for name, style in (own.tp_plan or {}).items()
            if any(matches(name, path) for module, path in names.items() if module is not embedding)
        }
        unknown = next((f"{style} for {name}" for name, style in plan.items() if style not in STYLES), None)
        if unknown is not None or not plan:
            found = f"has {unknown} in its tensor-parallel plan" if unknown else "has no tensor-parallel plan"
            kind = type(model).__name__
            raise _no_split(tp, f"{kind} does not support: it {found}", "use parallel.dp_shard")
        divides = embedding.num_embeddings % tp == 0 and embedding.padding_idx is None
        if divides:
            plan[names[embedding]] = "rowwise"
        elif head is not None and (head.weight is embedding.weight or head.out_features % tp):
            plan.pop(names[head], None)
        return plan

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        labels = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(total, labels.numel())

    @property
    def flops_per_sample(self) -> float | None:
        return self._flops


def create_model(folder: Path) -> Any:
    """Return the model described by a config.json, with random weights in float32."""
    transformers = import_transformers()
    settings = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    settings.use_cache = False
    factory = transformers.AutoModelForCausalLM
    return factory.from_config(settings, dtype=torch.float32, trust_remote_code=False)


def read_whole(folder: Path) -> Any:
    """Return the model as loaded by transformers; raise FatalError if weights are missing from the files."""
    model, found = import_transformers().AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **LOCAL
    )
    missing = sorted(found["missing_keys"]) + sorted(str(item) for item in found["mismatched_keys"])
    if missing:
        raise FatalError(
            f"{folder} has no weights for {missing[0]}",
            hint="save the whole model with `AutoModelForCausalLM…save_pretrained`",
        )
    model.config.use_cache = False
    return model


def find_stored(model: Any, weights: StoredWeights) -> tuple[dict[nn.Parameter, str], str]:
    """Map each parameter to its name in the weight files, and load the model's buffers from the files."""
    found = {}
    saved, prefix = model.state_dict(), f"{model.base_model_prefix}."
    buffers = [(name, item) for name, item in model.named_buffers() if name in saved]
    for name, tensor in [*model.named_parameters(), *buffers]:
        names = (name, name.removeprefix(prefix))
        stored = next((item for item in names if item in weights), None)
        if stored is None:
            return {}, f"the weight files contain no {name}"
        if weights.shape(stored) != tuple(tensor.shape):
            shapes = f"{list(weights.shape(stored))}, but its config.json implies {list(tensor.shape)}"
            raise FatalError(f"{stored} in {weights.folder} has shape {shapes}")
        if isinstance(tensor, nn.Parameter):
            found[tensor] = stored
        else:
            tensor.copy_(weights.read(stored))
    return found, ""


def _no_split(tp: int, message: str, hint: str) -> TaskError:
    return TaskError("parallel.tp", f"is {tp}, which {message}", hint)


def save_pretrained(model: Any, folder: Path, dtype: torch.dtype, *, merge: bool) -> None:
    """Save a model as transformers does, or adapters as peft does; `merge` merges adapters into weights."""
    is_adapted = hasattr(model, "merge_and_unload")
    if merge and not is_adapted:
        raise UsageError("--merge applies only to runs with model.lora", hint="remove --merge")
    if merge:
        # Merge the adapters into the same weights as in training.
        restore_linears(model)
        try:
            model = model.merge_and_unload()
        except RuntimeError as error:
            raise UsageError(f"the adapters cannot be merged: {error}", hint="remove --merge") from None
    model.config.use_cache = True
    model.to(dtype).save_pretrained(folder)
