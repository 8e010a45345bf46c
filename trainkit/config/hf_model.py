"""Finds the folder of a Hugging Face model, and reads config values from the model's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from trainkit.config.training import DECODER, TRANSFORMERS
from trainkit.errors import UsageError
from trainkit.folders import shown_path, typed_path
from trainkit.formats import JsonObject

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Maps keys of the `model` section to keys in config.json, for models that trainkit's decoder supports."""
DERIVED = (
    *(
        "num_kv_heads",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "qkv_bias",
        "qk_norm",
        "moe",
        "tie_embeddings",
    ),
)
"""Other keys of the `model` section whose values come from config.json."""
QWEN3_HEAD_DIM = 128
"""Default value of `head_dim` for Qwen3 models in transformers; other models divide `hidden_size`."""
WINDOWS = {"mistral": 4096, "mixtral": None}
"""Default values of `sliding_window` in transformers."""
DOTS1_WINDOWS = {"sliding_window": 4096, "max_window_layers": 62}
"""Default values for Dots1 models in transformers; layers from `max_window_layers` on have a window."""
GLM_ROTARY_FACTOR = 0.5
"""Default value of `partial_rotary_factor` for GLM models with experts in transformers."""
SIGMOID_FAMILIES = ("dots1", "glm4_moe")
"""Families whose routers have sigmoid scores and biases, and whose blocks have shared experts."""
EXPERT_FAMILIES = ("qwen3_moe", "mixtral", *SIGMOID_FAMILIES)
SIGMOID_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared": "n_shared_experts",
    "first_dense": "first_k_dense_replace",
    "norm_topk": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
"""Maps entries of `model.moe` to keys in config.json, for the families in `SIGMOID_FAMILIES`."""
BALANCING = ("bias_rate", "aux_coef")
"""Entries of `model.moe` that control how a run balances the load, and are not properties of the model."""
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor"),
    ),
}
"""Maps each type of `rope_scaling` to its required and its optional keys."""
ROPE_BASE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate"}
"""Keys in the rope section of config.json that do not depend on the type of the scaling."""


class HFModel(NamedTuple):
    """A Hugging Face model on disk."""

    folder: Path
    architecture: str
    """``llama`` if trainkit's decoder supports the model, else ``transformers``."""
    values: JsonObject
    """Maps keys of the `model` section to values from config.json; only `vocab_size` for ``transformers``."""
    reason: str
    """Why trainkit's decoder does not support the model; empty if it does."""

    @property
    def tokenizer(self) -> Path | None:
        """Return the path of the model's tokenizer.json, or None if the file does not exist."""
        file = self.folder / TOKENIZER_NAME
        return file if file.is_file() else None


def find_hf_model(name: str, cwd: Path) -> HFModel:
    """Find a model by its folder, or by its Hub name in the local cache; nothing is downloaded.

    Raises UsageError if the model is not found, its config.json cannot be read, or its weights are quantized.
    """
    folder = _find_folder(name, cwd)
    file = folder / CONFIG_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"is {name}, but {shown_path(folder)} has no {CONFIG_NAME}",
            hint="specify a folder written by `save_pretrained` or `hf download`",
        ) from None
    except (OSError, ValueError) as error:
        message = f"is {name}, but {shown_path(file)} cannot be read: {error}"
        raise UsageError(message, hint="download it again") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        message = f"is {name}, but {shown_path(file)} does not specify a model_type"
        raise UsageError(message, hint="specify a folder written by `save_pretrained`")
    if content.get("quantization_config"):
        hint = "use the original, unquantized model"
        raise UsageError(f"is {name}, which has quantized weights according to {shown_path(file)}", hint=hint)
    try:
        reason = _unlike_decoder(content)
        values = _decoder_values(content) if not reason else {}
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        message = f"is {name}, but {shown_path(file)} is damaged: {error}"
        raise UsageError(message, hint="download it again") from None
    if isinstance(content.get("vocab_size"), int):
        values["vocab_size"] = content["vocab_size"]
    return HFModel(folder, TRANSFORMERS if reason else DECODER, values, reason)


def _find_folder(name: str, cwd: Path) -> Path:
    folder = typed_path(name, cwd)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:
        raise UsageError(
            f"is {name}, which cannot be read: {error.strerror}", hint="check the path"
        ) from None
    if not HUB_NAME.fullmatch(name):
        hint = (
            "specify a folder, or a model that `hf download` has downloaded from the Hub, such as org/model"
        )
        raise UsageError(f"is {name}, but there is no such folder", hint=hint)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UsageError(
            f"is {name}, which is neither a folder nor a downloaded model",
            hint=f"run `hf download {name}` on a host with internet access; compute nodes read the "
            f"same HF_HOME",
        ) from None


def _rope(content: JsonObject) -> tuple[float | None, JsonObject]:
    """Return the base and the scaling of the rotary embedding from a transformers 4 or 5 config.json."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    return rope.get("rope_theta", content.get("rope_theta", 10_000.0)), rope


def _unlike_decoder(content: JsonObject) -> str:
    """Return the reason why trainkit's decoder does not support the model; empty if it does."""
    model_type = content["model_type"]
    if model_type not in ("llama", "mistral", "qwen2", "qwen3", *EXPERT_FAMILIES):
        return f"model_type is {model_type}"
    is_sigmoid, is_glm = model_type in SIGMOID_FAMILIES, model_type == "glm4_moe"
    needed_keys = (*SIZES.values(), *(SIGMOID_KEYS.values() if is_sigmoid else ()))
    missing = [key for key in needed_keys if content.get(key) is None]
    if missing:
        return f"config.json has no {missing[0]}"
    theta, rope = _rope(content)
    kind = rope.get("rope_type", rope.get("type", "default"))
    has_windows = any(item != "full_attention" for item in content.get("layer_types") or ())
    if model_type in ("mistral", "mixtral"):
        has_windows = has_windows or content.get("sliding_window", WINDOWS[model_type]) is not None
    if model_type == "dots1":
        windows = {**DOTS1_WINDOWS, **content}
        after_layers = (
            windows["sliding_window"] and windows["num_hidden_layers"] > windows["max_window_layers"]
        )
        has_windows = has_windows or bool(after_layers)
    if is_glm:
        rope = {"partial_rotary_factor": content.get("partial_rotary_factor", GLM_ROTARY_FACTOR), **rope}
    expected = {
        "hidden_act": (content.get("hidden_act", "silu"), "silu"),
        "attention_dropout": (content.get("attention_dropout", 0.0), 0.0),
        "mlp_bias": (content.get("mlp_bias", False), False),
        # Qwen2 and GLM have biases only for queries, keys and values, but `attention_bias` in Llama also adds
        # a bias to the output projection.
        "attention_bias": (
            content.get("attention_bias", False) and model_type not in ("qwen2", "glm4_moe"),
            False,
        ),
        "use_sliding_window": (content.get("use_sliding_window", False), False),
        "sliding_window": (has_windows, False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    if model_type in ("qwen3_moe", "mixtral"):
        dense = content.get("mlp_only_layers") or []
        expected |= {
            "decoder_sparse_step": (content.get("decoder_sparse_step", 1), 1),
            "mlp_only_layers": (dense, list(range(len(dense)))),
            "router_jitter_noise": (content.get("router_jitter_noise", 0.0), 0.0),
        }
    if is_sigmoid:
        expected |= {"n_group": (content.get("n_group", 1), 1)}
    for key, (found, needed) in expected.items():
        if found != needed:
            return f"{key} is {found}"
    if not isinstance(theta, int | float):
        return "the model has several rotary embeddings"
    if kind == "default":
        return ""
    if kind not in ROPE_KEYS:
        return f"rope_type is {kind}"
    required, optional = ROPE_KEYS[kind]
    absent = [key for key in required if rope.get(key) is None]
    if absent:
        return f"rope_scaling has no {absent[0]}"
    if not rope.get("truncate", True):
        return "rope_scaling has truncate: false"
    given = {key for key, value in rope.items() if value is not None}
    others = sorted(given - {*required, *optional} - ROPE_BASE_KEYS) if kind == "yarn" else []
    return f"rope_scaling has {others[0]}" if others else ""


def _rope_scaling(rope: JsonObject) -> JsonObject | None:
    """Return the value of `model.rope_scaling`, or None without a scaling."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ROPE_KEYS:
        return None
    values = {key: float(rope[key]) for keys in ROPE_KEYS[kind] for key in keys if rope.get(key) is not None}
    return values if kind == "llama3" else {"type": kind, **values}


def _head_dim(content: JsonObject) -> int | None:
    """Return the size of an attention head, or None if the size is the default value of `model.head_dim`."""
    default = QWEN3_HEAD_DIM if content["model_type"] == "qwen3" else None
    found = content.get("head_dim") or default
    return (
        None if found is None or found * content["num_attention_heads"] == content["hidden_size"] else found
    )


def _decoder_values(content: JsonObject) -> JsonObject:
    kind, (theta, rope) = content["model_type"], _rope(content)
    return {
        **{key: content[theirs] for key, theirs in SIZES.items()},
        "num_kv_heads": content.get("num_key_value_heads") or content["num_attention_heads"],
        "rope_theta": float(theta or 0.0),
        "rope_scaling": _rope_scaling(rope),
        "head_dim": _head_dim(content),
        "qkv_bias": kind == "qwen2" or (kind == "glm4_moe" and content.get("attention_bias", False)),
        "qk_norm": kind in ("qwen3", "qwen3_moe", "dots1") or content.get("use_qk_norm", False),
        "tie_embeddings": bool(content.get("tie_word_embeddings", False)),
        **({"moe": _experts(content)} if kind in EXPERT_FAMILIES else {}),
    }


def _experts(content: JsonObject) -> JsonObject:
    """Return the value of `model.moe`, without balancing the load, as transformers trains by default."""
    if content["model_type"] in SIGMOID_FAMILIES:
        return {
            **{key: content[theirs] for key, theirs in SIGMOID_KEYS.items()},
            "top_k": content["num_experts_per_tok"],
            "expert_ffn_dim": content["moe_intermediate_size"],
            "score": "sigmoid",
            **dict.fromkeys(BALANCING, 0.0),
        }
    is_mixtral = content["model_type"] == "mixtral"
    return {
        "num_experts": content["num_experts"] if "num_experts" in content else content["num_local_experts"],
        "top_k": content["num_experts_per_tok"],
        "expert_ffn_dim": content["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        "num_shared": 0,
        "first_dense": len(content.get("mlp_only_layers") or []),
        "score": "softmax",
        "norm_topk": is_mixtral or content.get("norm_topk_prob", False),
        "scale": 1.0,
        **dict.fromkeys(BALANCING, 0.0),
    }
