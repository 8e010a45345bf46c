"""Architectures: each is one file with a subclass of `Model`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.rundir import RunDir, copied_file
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import Model

ARCHITECTURES: dict[str, type[Model]] = {"llama": Decoder}


def architecture(name: str, run: RunDir | None = None) -> type[Model]:
    """The class that `model.architecture` names: one of ours, or FILE.py:CLASS.

    Of a run it is taken from the copy of the code: what was edited since it was submitted was not asked for.
    Raises TrainkitError (exit code 78) when there is no such file or class in it.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    file, _, class_name = name.rpartition(":")
    path = Path(file).absolute() if run is None else copied_file(run, file)
    spec = importlib.util.spec_from_file_location(f"trainkit_architecture_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _unknown(name, f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise _unknown(name, f"{path} has no class {class_name} that is a Model")
    return found


def _unknown(name: str, why: str) -> TrainkitError:
    return TrainkitError(
        f"model.architecture is {name}, but {why}",
        hint="a subclass of trainkit.trainer.models.model.Model; trainkit/trainer/models/decoder.py is one",
        exit_code=EXIT_NO_RESTART,
    )
