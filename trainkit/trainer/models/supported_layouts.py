"""Refuses layouts that an architecture of the user does not support, before any rank trains.

``python -m trainkit.trainer.models.supported_layouts`` reads a config as JSON from stdin and prints a line
``problems: `` with a JSON list: empty, or with its problem ``[key, message, hint]``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

from trainkit.config.running import ParallelConfig
from trainkit.config.schema import RunConfig
from trainkit.data.checks import tokenizer_vocab_size
from trainkit.errors import Problem
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.schedules import num_stages, stage_layers
from trainkit.trainer.models import ARCHITECTURES, UnsupportedArchitecture, load_architecture
from trainkit.trainer.models.model import Model, StageSpec

PREFIX = "problems: "


def refuse_unsupported_layout(config: RunConfig, architecture: type[Model]) -> None:
    """Raise UnsupportedArchitecture for context or pipeline parallelism that it does not support."""
    name, parallel, seq_len = config.model.architecture, config.parallel, config.data.seq_len
    if name in ARCHITECTURES or parallel.cp == parallel.pp == 1:
        return
    shape = resolve_model_shape(config.model, tokenizer_vocab_size(config.data))
    with torch.device("meta"):
        whole = architecture(shape, seq_len, None)
        if parallel.cp > 1:
            _refuse_without_attention(name, whole, parallel)
        if parallel.pp > 1:
            _refuse_uncut(name, whole, parallel, seq_len)


def _refuse_without_attention(name: str, whole: Model, parallel: ParallelConfig) -> None:
    """Without an `attend` to replace, a rank would use only its own slice of the sequence."""
    attentions = list(whole.attentions)
    found = f"is {parallel.cp}, but"
    hint = "context parallelism replaces `attend` of the modules in `attentions`; use parallel.cp 1"
    if not attentions:
        raise _refusal("parallel.cp", f"{found} {name} has no module in `attentions`", hint)
    for index, layer in enumerate(whole.layers):
        modules = set(layer.modules())
        if not any(attention in modules for attention in attentions):
            raise _refusal(
                "parallel.cp", f"{found} layer {index} of {name} has no module in `attentions`", hint
            )
    for attention in attentions:
        if not callable(getattr(attention, "attend", None)):
            kind = type(attention).__name__
            raise _refusal("parallel.cp", f"{found} {kind} in `attentions` of {name} has no `attend`", hint)


def _refuse_uncut(name: str, whole: Model, parallel: ParallelConfig, seq_len: int) -> None:
    """The stages must divide the layers and parameters of the whole model."""
    stages = num_stages(parallel.pp, parallel.pp_schedule)
    found = f"is {parallel.pp}, but {name} cannot be cut into {stages} stages:"
    hint = "create only the layers of `stage`, see trainkit/trainer/models/decoder.py; or use parallel.pp 1"
    owners: Counter[str] = Counter()
    for index, layers in enumerate(stage_layers(whole.shape.num_layers, stages)):
        spec = StageSpec(layers, index == 0, index == stages - 1)
        model = type(whole)(whole.shape, seq_len, spec)
        if len(model.layers) != len(layers):
            message = f"stage {index} has {len(model.layers)} layers instead of {len(layers)}"
            raise _refusal("parallel.pp", f"{found} {message}", hint)
        # Under their own names: tied parameters are in two stages.
        owners.update(parameter for parameter, _ in model.named_parameters(remove_duplicate=False))
    expected = {parameter for parameter, _ in whole.named_parameters(remove_duplicate=False)}
    for parameter in sorted(expected | owners.keys()):
        if parameter not in expected:
            raise _refusal("parallel.pp", f"{found} the whole model has no parameter {parameter}", hint)
        if owners[parameter] != 1:
            message = f"parameter {parameter} is in {owners[parameter]} stages"
            raise _refusal("parallel.pp", f"{found} {message}", hint)


def _refusal(key: str, message: str, hint: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(Problem(key, message, hint=hint))


def find_problem(config: RunConfig) -> Problem | None:
    """The problem of a config whose architecture must be refused; None without one.

    Raises whatever the file of the architecture raises.
    """
    try:
        refuse_unsupported_layout(config, load_architecture(config.model.architecture))
    except UnsupportedArchitecture as error:
        return error.problem
    return None


def main() -> None:
    """Print the problem of the config on stdin."""
    found = find_problem(RunConfig.model_validate(json.load(sys.stdin)))
    # On a line of its own: the file of the architecture may print too.
    print("\n" + PREFIX + json.dumps([] if found is None else [[found.key, found.message, found.hint]]))


if __name__ == "__main__":
    main()
