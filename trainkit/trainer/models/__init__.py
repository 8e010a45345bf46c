"""Model architectures, one file with a subclass of `Model` each, and the loader for your own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from trainkit.errors import EXIT_NO_RESTART, Problem, TrainkitError
from trainkit.run.record import copied_file
from trainkit.run.rundir import RunDir
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import Model

ARCHITECTURES: dict[str, type[Model]] = {"llama": Decoder}


class UnsupportedArchitecture(TrainkitError):
    """An architecture that cannot be trained, or not with the layout of the config."""

    exit_code = EXIT_NO_RESTART

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.key} {problem.message}", problem.hint)
        self.problem = problem


def load_architecture(name: str, run: RunDir | None = None) -> type[Model]:
    """The class that `model.architecture` names: a built-in one, or FILE.py:CLASS.

    A run loads the file from its code snapshot, so later edits have no effect.
    Raises UnsupportedArchitecture if there is no such file or class, or it is not a complete `Model`.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    file, _, class_name = name.rpartition(":")
    path = Path(file).absolute() if run is None else copied_file(run, file)
    spec = importlib.util.spec_from_file_location(f"trainkit_architecture_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _unknown(name, f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise _unknown(name, f"{path} has no class {class_name} that is a Model")
    # Not an ABC, whose metaclass nn.Module does not have, so Python itself does not refuse such a class.
    missing = [key for key in dir(Model) if getattr(getattr(found, key), "__isabstractmethod__", False)]
    if missing:
        raise _unknown(name, f"{class_name} does not define {', '.join(missing)}")
    return found


def _unknown(name: str, reason: str) -> UnsupportedArchitecture:
    hint = "name a subclass of trainkit.trainer.models.model.Model; see trainkit/trainer/models/decoder.py"
    return UnsupportedArchitecture(Problem("model.architecture", f"is {name}, but {reason}", hint=hint))
