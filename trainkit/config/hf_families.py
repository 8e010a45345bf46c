"""Describes the families of models in transformers that trainkit's decoder can compute.

A `Family` maps keys of the `model` section to entries of config.json, and module names of the decoder to
module names in transformers. Reading a config.json, loading weights and exporting a model use the same
descriptions, so a new family needs only one entry in `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trainkit.config.rope import ROPE_SCALINGS, scaling_keys
from trainkit.formats import JsonObject

NEEDS: dict[str, object] = {"attention_dropout": 0.0, "mlp_bias": False}
"""Maps an entry of config.json to the only value that the decoder supports, in every family."""
REQUIRED = object()
"""Default of an entry that every config.json contains."""
EXPERTS = "moe."
"""Prefix of the keys of `model.moe` in a `Family`."""
BALANCING = ("bias_rate", "aux_coef")
"""Entries of `model.moe` that control how a run balances the load, and are not properties of the model."""
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Values in the list `layer_types` of config.json."""
ROPE_BASE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate"}
"""Keys in the rope section of config.json that do not depend on the type of the scaling."""


class Entry(NamedTuple):
    """An entry of config.json that contains the value of one key of the `model` section."""

    names: tuple[str, ...]
    """The names of the entry; the first name that config.json contains is read, and all names are written."""
    default: object = REQUIRED
    """The value in transformers if config.json does not contain the entry."""
    read: Callable[[object], object] = lambda value: value
    write: Callable[[object], object] = lambda value: value
    """Returns None for a value that no model of the family has."""

    def find(self, content: JsonObject) -> object:
        """Return the entry's value in config.json, or the default; raise KeyError if there is neither."""
        found = next((content[name] for name in self.names if name in content), self.default)
        if found is REQUIRED:
            raise KeyError(self.names[0])
        return found


SIZES: dict[str, Entry] = {
    "dim": Entry(("hidden_size",)),
    "num_layers": Entry(("num_hidden_layers",)),
    "num_heads": Entry(("num_attention_heads",)),
    "ffn_dim": Entry(("intermediate_size",)),
    "norm_eps": Entry(("rms_norm_eps",)),
}
"""Maps keys of the `model` section to entries that all families have."""
OPTIONS: dict[str, object] = {
    "sliding_window": None,
    "full_attention_every": None,
    "rope_local_theta": None,
    "query_pre_attn_scalar": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
    "activation": "silu",
    "post_norms": False,
    "zero_centered_norms": False,
    "scale_embeddings": False,
    "qkv_bias": False,
    "qk_norm": False,
    "moe": None,
}
"""Maps keys of the `model` section to the values in families that do not mention the key."""
MODEL_KEYS = (*SIZES, "num_kv_heads", "head_dim", "rope_theta", "rope_scaling", *OPTIONS, "tie_embeddings")
"""Keys of the `model` section whose values come from config.json."""
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
    "moe.experts.gate": "mlp.experts.{}.gate_proj",
    "moe.experts.up": "mlp.experts.{}.up_proj",
    "moe.experts.down": "mlp.experts.{}.down_proj",
}
"""Maps module names in a decoder block to the names in most families, and parameter names of experts to
templates for the number of the expert."""
ROUTER_BIAS = "moe.router.bias"
"""Key of `Family.modules` for the biases with which routers choose experts."""
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_SWIGLU: dict[str, object] = {"hidden_act": "silu", "attention_bias": False}


@dataclass(frozen=True)
class Family:
    """A family of models in transformers."""

    model_type: str
    class_name: str
    """The name of the class in transformers, without ``ForCausalLM``."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Maps keys to the values that all models of the family have, where they differ from `OPTIONS`."""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    """Maps keys to entries of config.json, in addition to `SIZES`."""
    needs: Mapping[str, object] = field(default_factory=lambda: _SWIGLU)
    """Maps other entries of config.json to the only value that the decoder supports, which is also the
    default value in transformers."""
    head_dim: int | None = None
    """The default of `head_dim`; None divides `hidden_size` by the number of heads."""
    is_tied: bool = False
    """The default of `tie_word_embeddings`."""
    rope_theta: float = 10_000.0
    """The default base of the rotary position embedding."""
    local_rope_theta: float | None = None
    """The default base in blocks with a sliding window, if it has its own entry in config.json."""
    layer_types: int | None = None
    """The default of `model.full_attention_every` in families that list the type of each layer."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Maps module names in a block to the names in transformers, where they differ from `BLOCK`."""
    rotary_factor: float = 1.0
    """The default of `partial_rotary_factor`, which must be 1.0 for the decoder."""
    unlike_more: Callable[[JsonObject], str] = lambda content: ""
    """Returns a reason why the decoder does not support the model of a config.json, or an empty string."""

    @property
    def has_experts(self) -> bool:
        """Return whether the models of the family have experts."""
        return any(key.startswith(EXPERTS) for key in self.entries)

    @property
    def has_router_biases(self) -> bool:
        """Return whether files of transformers contain the biases with which routers choose experts."""
        return ROUTER_BIAS in self.modules

    @property
    def block_modules(self) -> Mapping[str, str]:
        """Map module names in a decoder block to the names in transformers."""
        return {**BLOCK, **self.modules}

    def values(self, content: JsonObject) -> JsonObject:
        """Return the values of `MODEL_KEYS` in a config.json for which `unlike` returns no reason."""
        entries = {**SIZES, **self.entries}
        found = {**OPTIONS, **self.fixed}
        found |= {key: entry.read(entry.find(content)) for key, entry in entries.items()}
        experts = {key.removeprefix(EXPERTS): found.pop(key) for key in [*found] if key.startswith(EXPERTS)}
        if self.has_experts:
            # Do not balance the load, as transformers does not by default.
            found["moe"] = {**experts, **dict.fromkeys(BALANCING, 0.0)}
        if found["sliding_window"] is not None and (every := self._full_attention_every(content)) == 1:
            found["sliding_window"] = None
        elif found["sliding_window"] is not None:
            found["full_attention_every"] = every
            found["rope_local_theta"] = self._local_rope(content).get("rope_theta")
        rope, heads = self._rope(content), content["num_attention_heads"]
        head_dim = content.get("head_dim") or self.head_dim
        is_default = head_dim is None or head_dim * heads == content["hidden_size"]
        return {
            **found,
            "num_kv_heads": content.get("num_key_value_heads") or heads,
            "head_dim": None if is_default else head_dim,
            "rope_theta": float(rope["rope_theta"] or 0.0),
            "rope_scaling": _rope_scaling(rope),
            "tie_embeddings": bool(content.get("tie_word_embeddings", self.is_tied)),
        }

    def unlike(self, content: JsonObject) -> str:
        """Return the reason why the decoder does not support a model of this family; empty if it does."""
        required = [entry.names for entry in {**SIZES, **self.entries}.values() if entry.default is REQUIRED]
        missing = [names[0] for names in required if all(content.get(name) is None for name in names)]
        if missing:
            return f"config.json has no {missing[0]}"
        for name, needed in {**NEEDS, **self.needs}.items():
            found = content.get(name, needed)
            if found != needed and (found or needed):  # null means the same as 0 or false
                return f"{name} is {found}"
        for entry in self.entries.values():
            found = entry.find(content)
            if found and entry.write(entry.read(found)) != found:
                return f"{entry.names[0]} is {found}"
        return self._unlike_windows(content) or self.unlike_more(content) or _unlike_rope(self._rope(content))

    def _unlike_windows(self, content: JsonObject) -> str:
        entry = self.entries.get("sliding_window")
        window = None if entry is None else entry.find(content)
        try:
            every = self._full_attention_every(content)
        except ValueError:
            return "layer_types repeats no pattern in which only the last layer has full attention"
        types, expected = content.get("layer_types"), 1 if window is None else None
        if types and self.layer_types is None and every != expected:
            return f"layer_types is {', '.join(sorted({*types}))}, but sliding_window is {window}"
        local = self._local_rope(content)
        if local and window is None:
            return "sliding_window is None"
        kind = _rope_type(local)
        return f"rope_type of {WINDOWED} is {kind}" if kind != "default" else ""

    def _full_attention_every(self, content: JsonObject) -> int | None:
        """Return the value of `model.full_attention_every`; raise ValueError if no value is possible."""
        types = content.get("layer_types")
        if not types:
            every: int | None = content.get("sliding_window_pattern", self.layer_types)
            return every
        every = types.index(FULL) + 1 if FULL in types else None
        if list(types) != layer_types(len(types), every):
            raise ValueError
        return every

    def _rope(self, content: JsonObject) -> JsonObject:
        """Return the rotary embedding's base and scaling from a transformers 4 or 5 config.json."""
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        rope = (rope.get(FULL) or {}) if {FULL, WINDOWED} & {*rope} else rope
        factor = content.get("partial_rotary_factor", self.rotary_factor)
        theta = content.get("rope_theta", self.rope_theta)
        return {"rope_theta": theta, "partial_rotary_factor": factor, **rope}

    def _local_rope(self, content: JsonObject) -> JsonObject:
        """Return the base and scaling in blocks with a sliding window; empty if they are not separate."""
        if self.local_rope_theta is None:
            return {}
        rope = (content.get("rope_parameters") or {}).get(WINDOWED) or {}
        return {"rope_theta": content.get("rope_local_base_freq", self.local_rope_theta), **rope}

    def differences(self, values: JsonObject) -> Iterator[str]:
        """Yield the values of the `model` section that no model of this family has.

        Both the family and the values must have experts, or neither.
        """
        own, experts = {**OPTIONS, **self.fixed}, values["moe"] or {}
        given = {**values, **{f"{EXPERTS}{name}": value for name, value in experts.items()}}
        of_layers = {"full_attention_every": self.layer_types, "rope_local_theta": self.local_rope_theta}
        for key, entry in self.entries.items():
            if given.get(key) is not None and entry.write(given[key]) is None:
                yield f"model.{key}: {json.dumps(given[key])}"
        for key in own:
            is_read = key in self.entries or key == "moe" or of_layers.get(key) is not None
            if not is_read and key in given and given[key] != own[key]:
                yield f"model.{key}: {json.dumps(given[key])}"
        if self.local_rope_theta and values["rope_scaling"] and values["rope_local_theta"] is None:
            yield "model.rope_scaling without model.rope_local_theta"

    def content(self, values: JsonObject) -> JsonObject:
        """Return the entries of config.json for values without `differences`, except the vocabulary size."""
        head_dim = values["head_dim"] or values["dim"] // values["num_heads"]
        given = {**values, "query_pre_attn_scalar": values["query_pre_attn_scalar"] or head_dim}
        given |= {f"{EXPERTS}{name}": value for name, value in (values["moe"] or {}).items()}
        scaling = values["rope_scaling"]
        found: JsonObject = {
            "architectures": [f"{self.class_name}ForCausalLM"],
            "model_type": self.model_type,
            **self.needs,
            **_written(SIZES, given),
            "num_key_value_heads": values["num_kv_heads"],
            "head_dim": head_dim,
            "rope_theta": values["rope_theta"],
            "rope_scaling": None if scaling is None else _rope_entry(scaling),
            "tie_word_embeddings": values["tie_embeddings"],
            **_written(self.entries, given),
        }
        if self.rotary_factor != 1.0:
            found["partial_rotary_factor"] = 1.0
        if self.layer_types is not None:
            every = values["full_attention_every"] if values["sliding_window"] else 1
            found["layer_types"] = layer_types(values["num_layers"], every)
        if self.local_rope_theta is not None:
            found["rope_local_base_freq"] = values["rope_local_theta"] or values["rope_theta"]
        return found


def layer_types(num_layers: int, full_attention_every: int | None) -> list[str]:
    """Return the entry `layer_types` of config.json."""
    every = full_attention_every or num_layers + 1
    return [WINDOWED if layer % every else FULL for layer in range(1, num_layers + 1)]


def closest_family(values: JsonObject) -> tuple[Family, list[str]]:
    """Return the family with the fewest differences from the values of `MODEL_KEYS`, and the differences."""
    alike = [family for family in FAMILIES.values() if family.has_experts == (values["moe"] is not None)]
    found = [(family, list(family.differences(values))) for family in alike]
    return min(found, key=lambda item: len(item[1]))


def _written(entries: Mapping[str, Entry], values: JsonObject) -> JsonObject:
    return {name: entry.write(values[key]) for key, entry in entries.items() for name in entry.names}


def _rope_type(rope: JsonObject) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _unlike_rope(rope: JsonObject) -> str:
    """Return the reason why the decoder does not support a rotary embedding; empty if it does."""
    kind = _rope_type(rope)
    if rope["partial_rotary_factor"] != 1.0:
        return f"partial_rotary_factor is {rope['partial_rotary_factor']}"
    if not isinstance(rope["rope_theta"], int | float):
        return "the model has several rotary embeddings"
    if kind == "default":
        return ""
    if kind not in ROPE_SCALINGS:
        return f"rope_type is {kind}"
    keys = scaling_keys(kind)
    absent = [key for key, is_required in keys.items() if is_required and rope.get(key) is None]
    if absent:
        return f"rope_scaling has no {absent[0]}"
    if not rope.get("truncate", True):
        return "rope_scaling has truncate: false"
    given = {key for key, value in rope.items() if value is not None}
    others = sorted(given - {*keys} - ROPE_BASE_KEYS) if kind == "yarn" else []
    return f"rope_scaling has {others[0]}" if others else ""


def _rope_scaling(rope: JsonObject) -> JsonObject | None:
    """Return the value of `model.rope_scaling`, or None without a scaling."""
    kind = _rope_type(rope)
    if kind not in ROPE_SCALINGS:
        return None
    values = {key: float(rope[key]) for key in scaling_keys(kind) if rope.get(key) is not None}
    return values if kind == "llama3" else {"type": kind, **values}


def _rope_entry(scaling: JsonObject) -> JsonObject:
    """Return the entry `rope_scaling` of config.json for a value of `model.rope_scaling`."""
    values = {key: _whole(value) if "position" in key else value for key, value in scaling.items()}
    return {"rope_type": values.pop("type", "llama3"), **values}


def _names(*names: str, default: object = REQUIRED) -> Entry:
    return Entry(names, default)


def _whole(value: object) -> object:
    """Return a whole number as int, because transformers rejects 256.0 where it expects 256."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_FIRST_LAYERS = Entry(
    ("mlp_only_layers",),
    [],
    read=lambda layers: len(layers or ()),  # type: ignore[arg-type]
    write=lambda number: list(range(number)),  # type: ignore[call-overload]
)
_NO_WINDOW = {"use_sliding_window": False}
_EXPERTS_OF_LLAMA: dict[str, object] = {
    "moe.num_shared": 0,
    "moe.score": "softmax",
    "moe.scale": 1.0,
}
_SIGMOID_EXPERTS = {
    "moe.num_experts": _names("n_routed_experts"),
    "moe.top_k": _names("num_experts_per_tok"),
    "moe.expert_ffn_dim": _names("moe_intermediate_size"),
    "moe.num_shared": Entry(("n_shared_experts",), write=lambda number: number or None),
    "moe.first_dense": _names("first_k_dense_replace"),
    "moe.norm_topk": _names("norm_topk_prob"),
    "moe.scale": _names("routed_scaling_factor"),
}
_SIGMOID_MODULES = {ROUTER_BIAS: "mlp.gate.e_score_correction_bias"}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_GEMMA: dict[str, object] = {
    "activation": "gelu_tanh",
    "post_norms": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
}
_GEMMA_ENTRIES = {
    "sliding_window": _names("sliding_window", default=4096),
    "query_pre_attn_scalar": Entry(("query_pre_attn_scalar",), 256, write=_whole),
}
_GEMMA_NEEDS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}
_GEMMA_MODULES = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def _soft_caps(attention: float | None, logits: float | None) -> dict[str, Entry]:
    return {
        "attention_soft_cap": _names("attn_logit_softcapping", default=attention),
        "logit_soft_cap": _names("final_logit_softcapping", default=logits),
    }


def _windows_of_dots1(content: JsonObject) -> str:
    """Return that layers have a sliding window, which layers from `max_window_layers` on do by default."""
    window, first = content.get("sliding_window", 4096), content.get("max_window_layers", 62)
    has_windows = window is not None and content["num_hidden_layers"] > first
    return f"max_window_layers is {first}" if has_windows and not content.get("layer_types") else ""


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama"),
        Family("mistral", "Mistral", entries={"sliding_window": _names("sliding_window", default=4096)}),
        # Qwen2 has biases only for queries, keys and values, but `attention_bias` in Llama also adds a bias
        # to the output projection.
        Family("qwen2", "Qwen2", {"qkv_bias": True}, needs={"hidden_act": "silu", **_NO_WINDOW}),
        Family(
            "qwen3",
            "Qwen3",
            {"qk_norm": True},
            needs={**_SWIGLU, **_NO_WINDOW},
            head_dim=128,
        ),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            {"qk_norm": True, **_EXPERTS_OF_LLAMA},
            {
                "moe.num_experts": _names("num_experts", "num_local_experts"),
                "moe.top_k": _names("num_experts_per_tok"),
                "moe.expert_ffn_dim": _names("moe_intermediate_size"),
                "moe.norm_topk": _names("norm_topk_prob", default=False),
                "moe.first_dense": _FIRST_LAYERS,
            },
            needs={**_SWIGLU, **_NO_WINDOW, "decoder_sparse_step": 1},
        ),
        # Mixtral, unlike Qwen3-MoE, has only one kind of block, and one hidden size.
        Family(
            "mixtral",
            "Mixtral",
            {**_EXPERTS_OF_LLAMA, "moe.first_dense": 0, "moe.norm_topk": True},
            {
                "sliding_window": _names("sliding_window", default=None),
                "moe.num_experts": _names("num_local_experts"),
                "moe.top_k": _names("num_experts_per_tok"),
                "moe.expert_ffn_dim": _names("intermediate_size"),
            },
            needs={**_SWIGLU, "router_jitter_noise": 0.0},
            modules={
                "moe.router": "block_sparse_moe.gate",
                "moe.experts.gate": "block_sparse_moe.experts.{}.w1",
                "moe.experts.up": "block_sparse_moe.experts.{}.w3",
                "moe.experts.down": "block_sparse_moe.experts.{}.w2",
            },
        ),
        # The attention of GLM has biases only for queries, keys and values.
        Family(
            "glm4_moe",
            "Glm4Moe",
            {"moe.score": "sigmoid"},
            {
                **_SIGMOID_EXPERTS,
                "qk_norm": _names("use_qk_norm", default=False),
                "qkv_bias": _names("attention_bias", default=False),
            },
            needs={"hidden_act": "silu", **_ONE_GROUP},
            rotary_factor=0.5,
            modules=_SIGMOID_MODULES,
        ),
        Family(
            "dots1",
            "Dots1",
            {"qk_norm": True, "moe.score": "sigmoid"},
            _SIGMOID_EXPERTS,
            needs={**_SWIGLU, **_ONE_GROUP},
            unlike_more=_windows_of_dots1,
            modules=_SIGMOID_MODULES,
        ),
        Family(
            "gemma2",
            "Gemma2",
            _GEMMA,
            {**_GEMMA_ENTRIES, **_soft_caps(50.0, 30.0)},
            needs=_GEMMA_NEEDS,
            head_dim=256,
            is_tied=True,
            layer_types=2,
            modules=_GEMMA_MODULES,
        ),
        Family(
            "gemma3_text",
            "Gemma3",
            {**_GEMMA, "qk_norm": True},
            {**_GEMMA_ENTRIES, "logit_soft_cap": _names("final_logit_softcapping", default=None)},
            # Gemma 3 in transformers ignores this entry.
            needs={**_GEMMA_NEEDS, "attn_logit_softcapping": None},
            head_dim=256,
            is_tied=True,
            rope_theta=1_000_000.0,
            local_rope_theta=10_000.0,
            layer_types=6,
            modules=_GEMMA_MODULES,
        ),
    )
}
