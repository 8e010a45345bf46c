"""Trains any causal language model of the transformers library, or low-rank adapters of one: `model.hf`."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.config.hf_model import CONFIG_NAME
from trainkit.config.schema import RunConfig
from trainkit.data.cache import has_validation
from trainkit.errors import EXIT_NO_RESTART, Problem, TrainkitError, UsageError
from trainkit.safetensors import StoredWeights, WeightsError
from trainkit.task import Loss, Samples, Task, TokenSamples, parameters_on_meta
from trainkit.trainer.load_task import TaskError, errors_of_user
from trainkit.trainer.nf4 import quantize_linears, restore_linears
from trainkit.trainer.parallel.tensor import matches
from trainkit.trainer.parallel.tensor_plan import STYLES, find_styles

log = getLogger(__name__)
ADAPTER = "default"
"""The name of the adapter in peft."""
LOCAL = {"local_files_only": True, "trust_remote_code": False}
LORA_HINT = "it has the arguments of peft.LoraConfig, such as r, lora_alpha and target_modules"
UNSUPPORTED = ("layer_replication", "ensure_weight_tying")
"""Arguments of LoraConfig with which several modules share parameters."""
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


def import_transformers() -> Any:
    """The library, which asks no server: compute nodes often have no internet."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


class HFCausalLM(Task):
    """Next-token prediction with a model of transformers."""

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
        """Names in the files by the names of parameters."""
        self._flops: float | None = None

    @property
    def base_fingerprint(self) -> str:
        """A digest of config.json and, if checkpoints lack the frozen weights, of their files."""
        digest = hashlib.sha256((self._folder / CONFIG_NAME).read_bytes())
        if self.rereads_frozen and self._weights is not None:
            digest.update(self._weights.fingerprint.encode())
        if self.config.model.quantize is not None:
            digest.update(self.config.model.quantize.encode())
        return digest.hexdigest()

    @property
    def rereads_frozen(self) -> bool:
        """Whether the frozen weights are those of the files at every start, so that checkpoints need none."""
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
            return self._counted(_create(self._folder))
        with parameters_on_meta():
            model = _create(self._folder)
        lora = self.config.model.lora
        found, why = self._find_stored(model)
        if not why and lora is not None:
            why = "" if _is_independent(lora) else "the initial values of model.lora depend on it"
        if not why:
            adapted = model if lora is None else self._adapted(model, lora)
            self._names = {
                name: found[param]
                for name, param in adapted.named_parameters(remove_duplicate=False)
                if param in found
            }
            why = _find_copied(adapted, found)
            if not why:
                return self._quantized(self._counted(adapted))
        self._refuse_quantized(why)
        log.warning(f"each process reads all of {self._folder}: {why}")
        model = self._read_whole(transformers)
        return self._counted(model if lora is None else self._adapted(model, lora))

    def check_model(self) -> None:
        """Raise TrainkitError for files or adapters that do not fit the model; reads no weights."""
        lora = self.config.model.lora
        with errors_of_user(self.config, "its model cannot be built", but=OSError), parameters_on_meta():
            model = _create(self._folder)
        found, why = self._find_stored(model)
        self._refuse_quantized(why)
        if lora is None:
            return
        if _is_independent(lora):
            self._refuse_quantized(_find_copied(self._adapted(model, lora), found))
        else:
            _check_targets(model, lora_config(lora), self._folder)
            self._refuse_quantized("the initial values of model.lora depend on it")

    @torch.no_grad()
    def build_adapters(self) -> nn.Module:
        """The model of a run with `model.lora`, in which only what peft saves has memory, for an export.

        Parameters that are trained have no values yet.
        """
        import peft

        lora = self.config.model.lora
        assert lora is not None
        if not _is_independent(lora):
            return self.build_model()
        with parameters_on_meta():
            model = _create(self._folder)
        found, _ = self._find_stored(model)
        adapted = self._adapted(model, lora)
        tensors = adapted.state_dict(keep_vars=True)
        exported = {id(item) for item in peft.get_peft_model_state_dict(adapted, tensors).values()}
        for name, param in list(adapted.named_parameters()):
            if id(param) not in exported or not param.is_meta:
                continue
            if not param.requires_grad and param not in found:
                return self.build_model()  # the embedding of a model whose files have other names
            value = torch.empty_like(param, device="cpu")
            if not param.requires_grad:
                assert self._weights is not None
                value.copy_(self._weights.read(found[param]))
            owner, _, leaf = name.rpartition(".")
            setattr(adapted.get_submodule(owner), leaf, nn.Parameter(value, param.requires_grad))
        return adapted

    def _find_stored(self, model: Any) -> tuple[dict[nn.Parameter, str], str]:
        """The names in the files by parameter, and why they cannot be used; fills the buffers."""
        assert self._weights is not None
        found = {}
        saved, prefix = model.state_dict(), f"{model.base_model_prefix}."
        buffers = [(name, item) for name, item in model.named_buffers() if name in saved]
        for name, tensor in [*model.named_parameters(), *buffers]:
            names = (name, name.removeprefix(prefix))
            stored = next((item for item in names if item in self._weights), None)
            if stored is None:
                return {}, f"it has no {name}"
            if self._weights.shape(stored) != tuple(tensor.shape):
                shapes = f"{list(self._weights.shape(stored))}, not {list(tensor.shape)}"
                raise WeightsError(f"{stored} in {self._folder} has shape {shapes} as in its config.json")
            if isinstance(tensor, nn.Parameter):
                found[tensor] = stored
            else:
                tensor.copy_(self._weights.read(stored))
        return found, ""

    def _read_whole(self, transformers: Any) -> Any:
        """The model as transformers reads it; raises WeightsError if the files lack a part of it."""
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **LOCAL
        )
        missing = sorted(found["missing_keys"]) + sorted(str(item) for item in found["mismatched_keys"])
        if missing:
            raise WeightsError(
                f"{self._folder} has no weights for {missing[0]}",
                hint="save the whole model with `AutoModelForCausalLM…save_pretrained`",
            )
        model.config.use_cache = False
        return model

    def _check_positions(self, settings: Any) -> None:
        """Raise TrainkitError if samples are longer than a table of positions."""
        limit, seq_len = getattr(settings, "max_position_embeddings", None), self.config.data.seq_len
        is_rotary = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_theta", None)
        if not isinstance(limit, int) or seq_len <= limit:
            return
        if not is_rotary:
            raise TrainkitError(
                f"data.seq_len is {seq_len}, but {self._folder} has {limit} positions",
                hint=f"set data.seq_len to at most {limit}",
                exit_code=EXIT_NO_RESTART,
            )
        log.warning(
            f"data.seq_len is {seq_len}, longer than the {limit} tokens that {self._folder} was made for"
        )

    def _adapted(self, model: nn.Module, lora: dict[str, Any]) -> nn.Module:
        import peft

        settings = lora_config(lora)
        try:
            _check_targets(model, settings, self._folder)
            adapted: nn.Module = peft.get_peft_model(model, settings)
        except (TypeError, ValueError, re.error) as error:
            raise TrainkitError(
                f"model.lora does not fit {self._folder}: {error}", hint=LORA_HINT, exit_code=EXIT_NO_RESTART
            ) from error
        for module in adapted.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                parts = [getattr(module, name) for name in module.adapter_layer_names]
                if any(param.is_meta for part in parts for param in part.parameters()):
                    for part in parts:
                        part.to_empty(device="cpu")
                    module.reset_lora_parameters(ADAPTER, settings.init_lora_weights)
        return adapted

    def _quantized(self, model: nn.Module) -> nn.Module:
        """The model, whose frozen linear layers but the head have 4 bits if `model.quantize` is set."""
        if self.config.model.quantize is None:
            return model
        before = sum(param.numel() for param in model.parameters())
        heads = model.get_output_embeddings()  # type: ignore[operator]
        if not quantize_linears(model, set(heads.modules())):
            self._refuse_quantized("it has no frozen nn.Linear")
        left = sum(param.numel() for param in model.parameters())
        log.info(f"{before - left:,} of {before:,} parameters have 4 bits")
        return model

    def _refuse_quantized(self, why: str) -> None:
        """Raise TrainkitError (exit code 78) if there is a reason why each process needs the whole model."""
        name = self.config.model.quantize
        if why and name is not None:
            raise TrainkitError(
                f"model.quantize is {name}, which {self._folder} does not support: {why}",
                hint="remove model.quantize, or change model.lora",
                exit_code=EXIT_NO_RESTART,
            )

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
        return self._weights.read(self._names[name], (rows,))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str]:
        """The plan of transformers for its own model; raises TaskError if it has none that fits."""
        tp, settings, own = self.config.parallel.tp, cast(Any, model.config), cast(Any, model)
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(settings, key, None)
            if isinstance(heads, int) and heads % tp:
                raise _no_split(tp, f"does not divide {key} {heads} of {self._folder}", "use a divisor of it")
        names = {module: name for name, module in model.named_modules()}
        embedding, head = own.get_input_embeddings(), own.get_output_embeddings()
        plan = {
            name: style
            for name, style in (own.tp_plan or {}).items()
            if any(matches(name, path) for module, path in names.items() if module is not embedding)
        }
        unknown = next((f"{style} for {name}" for name, style in plan.items() if style not in STYLES), None)
        if unknown is not None or not plan:
            found = f"has {unknown} in its plan" if unknown else "has no plan"
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


def _create(folder: Path) -> Any:
    """The model of a config.json, with random weights in float32."""
    transformers = import_transformers()
    settings = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    settings.use_cache = False
    factory = transformers.AutoModelForCausalLM
    return factory.from_config(settings, dtype=torch.float32, trust_remote_code=False)


def _no_split(tp: int, message: str, hint: str) -> TaskError:
    return TaskError(Problem("parallel.tp", f"is {tp}, which {message}", hint=hint))


def _find_copied(model: nn.Module, found: Collection[nn.Parameter]) -> str:
    """Say which parameter starts as a copy of one in the files `found`; empty if none does."""
    copied = (name for name, param in model.named_parameters() if param.is_meta and param not in found)
    name = next(copied, None)
    return "" if name is None else f"model.lora copies {name}"


def _check_targets(model: nn.Module, settings: Any, folder: Path) -> None:
    """Raise TrainkitError (exit code 78) if adapters are for a module that the model does not have."""
    targets = settings.target_modules
    if targets is None or targets == "all-linear":
        return  # peft knows the modules, or raises
    names = [name for name, _ in model.named_modules()]
    ends = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_adaptable(module)}
    for target in [targets] if isinstance(targets, str) else targets:
        # As in peft, a string is a pattern for the whole name, and a list has the ends of names.
        if isinstance(targets, str):
            is_known = any(re.fullmatch(target, name) for name in names)
        else:
            is_known = any(f".{name}".endswith(f".{target}") for name in names)
        if not is_known:
            last = target.rpartition(".")[2]
            closest = sorted(ends, key=lambda end: (-SequenceMatcher(None, last, end).ratio(), end))
            raise TrainkitError(
                f"model.lora.target_modules has {target}, which matches no module of {folder}",
                hint=f"the modules with weights are called {', '.join(closest)}",
                exit_code=EXIT_NO_RESTART,
            )


def _is_adaptable(module: nn.Module) -> bool:
    """Whether a module has a matrix of its own."""
    return any(param.dim() > 1 for param in module.parameters(recurse=False))


def lora_config(lora: dict[str, Any]) -> Any:
    """The config of peft; raises TrainkitError (exit code 78) for what it or trainkit does not take."""
    import peft

    for name in UNSUPPORTED:
        if lora.get(name):
            raise TrainkitError(
                f"model.lora.{name} is set, which trainkit does not support",
                hint="shared parameters cannot be sharded layer by layer",
                exit_code=EXIT_NO_RESTART,
            )
    try:
        return peft.LoraConfig(task_type="CAUSAL_LM", **lora)
    except (TypeError, ValueError) as error:
        raise TrainkitError(
            f"model.lora is {lora}: {error}", hint=LORA_HINT, exit_code=EXIT_NO_RESTART
        ) from error


def _is_independent(lora: dict[str, Any]) -> bool:
    """Whether the initial values of adapters do not depend on the weights that they adapt."""
    return lora.get("init_lora_weights", True) in (True, "gaussian") and keeps_base(lora)


def keeps_base(lora: dict[str, Any]) -> bool:
    """Whether peft leaves the weights of the model as they are."""
    is_simple = lora.get("init_lora_weights", True) in (True, False, "gaussian")
    return is_simple and not any(lora.get(key) for key in NEEDS_WEIGHTS)


def find_hf_problem(config: RunConfig) -> Problem | None:
    """The problem of `model.hf` that can be seen without its weights; None without one."""
    assert config.model.hf is not None
    try:
        if config.uses_transformers:
            task = HFCausalLM(config)
            if config.model.lora is not None:
                lora_config(config.model.lora)
            if not config.model.from_scratch:
                task.check_model()
        elif not config.model.from_scratch:
            StoredWeights(Path(config.model.hf))
        if config.uses_transformers and config.parallel.tp > 1:
            with torch.device("meta"):
                model = _create(Path(config.model.hf))
            find_styles(HFCausalLM(config), config, model, config.parallel.tp)
    except TaskError as error:
        return error.problem
    except TrainkitError as error:
        key, _, message = error.message.partition(" ")
        if key.startswith(("model.lora", "model.hf", "model.quantize")):
            return Problem(key, message, hint=error.hint)
        return Problem("model.hf", error.message, hint=error.hint)
    return None


def save_pretrained(model: Any, folder: Path, dtype: torch.dtype, *, merge: bool) -> None:
    """Write a model as transformers does, or its adapters as peft does; `merge` adds them to the model."""
    is_adapted = hasattr(model, "merge_and_unload")
    if merge and not is_adapted:
        raise UsageError("--merge is for runs with model.lora", hint="remove --merge")
    if merge:
        # With the weights to which the adapters were trained.
        restore_linears(model)
        try:
            model = model.merge_and_unload()
        except RuntimeError as error:
            raise UsageError(f"the adapters cannot be merged: {error}", hint="remove --merge") from None
    model.config.use_cache = True
    model.to(dtype).save_pretrained(folder)
