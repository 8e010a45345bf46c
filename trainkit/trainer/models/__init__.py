"""Load a built-in or user-defined model architecture, and check that it supports the layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from trainkit.config.schema import RunConfig
from trainkit.data.checks import tokenizer_vocab_size
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import num_stages, stage_layers
from trainkit.run.record import copied_file
from trainkit.run.rundir import RunDir
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.experts import Experts
from trainkit.trainer.models.model import Model, StageSpec
from trainkit.trainer.user_code import TaskError, import_file

ARCHITECTURES: dict[str, type[Model]] = {"llama": Decoder}


def load_architecture(name: str, run: RunDir | None = None) -> type[Model]:
    """Return the class that `model.architecture` specifies, either as a built-in name or as FILE.py:CLASS.

    If `run` is given, the file is loaded from the run's code snapshot, so that later edits have no effect.
    Raises TaskError if the file or class does not exist, or if the class is not a complete subclass of
    `Model`.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    file, _, class_name = name.rpartition(":")
    path = Path(file).absolute() if run is None else copied_file(run, file)
    if not path.is_file():
        raise _unknown(name, f"there is no file {path}")
    found = getattr(import_file(path, as_script=False), class_name, None)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise _unknown(name, f"{path} does not define {class_name} as a subclass of Model")
    # `Model` cannot be an ABC, because `nn.Module` has a different metaclass, so look for unimplemented
    # methods here.
    missing = [key for key in dir(Model) if getattr(getattr(found, key), "__isabstractmethod__", False)]
    if missing:
        raise _unknown(name, f"{class_name} does not define {', '.join(missing)}")
    return found


def _unknown(name: str, reason: str) -> TaskError:
    hint = "use a subclass of trainkit.trainer.models.model.Model, as in trainkit/trainer/models/decoder.py"
    return TaskError("model.architecture", f"is {name}, but {reason}", hint)


def refuse_unsupported_layout(config: RunConfig, architecture: type[Model]) -> None:
    """Raise TaskError for context or pipeline parallelism that the architecture does not support."""
    name, parallel, seq_len = config.model.architecture, config.parallel, config.data.seq_len
    if name in ARCHITECTURES or parallel.cp == parallel.pp == parallel.ep == 1:
        return
    shape = resolve_model_shape(config.model, tokenizer_vocab_size(config.data))
    with torch.device("meta"):
        whole = architecture(shape, seq_len, None)
        if parallel.cp > 1:
            # Context parallelism replaces the `attend` method; without this method, a rank would attend only
            # to its own slice of the sequence.
            replaced = {item for item in whole.attentions if callable(getattr(item, "attend", None))}
            hint = "define `attend`, which context parallelism replaces, or set parallel.cp to 1"
            for index, layer in enumerate(whole.layers):
                if not replaced & set(layer.modules()):
                    found = f"layer {index} of {name} has no module in `attentions` with `attend`"
                    raise TaskError("parallel.cp", f"is {parallel.cp}, but {found}", hint)
            for item in set(whole.attentions) - replaced:
                found = f"a {type(item).__name__} in `attentions` of {name} has no `attend`"
                raise TaskError("parallel.cp", f"is {parallel.cp}, but {found}", hint)
        if parallel.ep > 1 and not any(isinstance(module, Experts) for module in whole.modules()):
            hint = "use trainkit.trainer.models.experts.Experts, or set parallel.ep to 1"
            raise TaskError("parallel.ep", f"is {parallel.ep}, but {name} has no module Experts", hint)
        if parallel.pp == 1:
            return
        stages = num_stages(parallel.pp, parallel.pp_schedule)
        counts: Counter[str] = Counter()
        for index, layers in enumerate(stage_layers(shape.num_layers, stages)):
            part = architecture(shape, seq_len, StageSpec(layers, index == 0, index == stages - 1))
            # Count tied parameters under all their names, because two names may belong to different stages.
            counts.update(parameter for parameter, _ in part.named_parameters(remove_duplicate=False))
        expected = Counter(parameter for parameter, _ in whole.named_parameters(remove_duplicate=False))
    wrong = min((counts - expected) + (expected - counts), default=None)
    if wrong is not None:
        found = f"{name} cannot be cut into {stages} stages: parameter {wrong} is in {counts[wrong]} of them"
        hint = (
            "create only the layers of `stage`, like trainkit/trainer/models/decoder.py, or "
            "set parallel.pp to 1"
        )
        raise TaskError("parallel.pp", f"is {parallel.pp}, but {found}", hint)
