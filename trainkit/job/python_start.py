"""Prepares each Python interpreter in a job before any other code runs; called by `startup/sitecustomize.py`.

The preparation protects a rank's child processes from stop signals, and redirects imports to the copy of the
code. The preparation also runs startup code that capabilities define for ranks. trainkit may not be installed
for this interpreter, so only the standard library is imported, and other files are loaded by path.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FOLDER = __file__.rpartition("/")[0]


def load(name: str, folder: str = FOLDER) -> ModuleType:
    """Load a module from the folder of `trainkit.job`, or from a capability's `folder`."""
    own_name = f"trainkit_{folder.rpartition('/')[2]}_{name}"
    if (loaded := sys.modules.get(own_name)) is not None:
        return loaded
    module = sys.modules[own_name] = type(sys)(own_name)
    module.__file__ = f"{folder}/{name}.py"
    SourceFileLoader(own_name, module.__file__).exec_module(module)
    return module


def prepare() -> None:
    """Prepare this interpreter according to the job's environment variables."""
    if os.environ.get("TRAINKIT_JOB_AGENT_PID") and is_main_interpreter():
        spare_what_a_rank_starts()
    if os.environ.get("TRAINKIT_JOB_CODE_SOURCE"):
        sys.meta_path.insert(
            0, CopyFinder(os.environ["TRAINKIT_JOB_CODE_SOURCE"], os.environ["TRAINKIT_JOB_CODE_COPY"])
        )


def is_main_interpreter() -> bool:
    """Return whether this is the main interpreter, which is the only interpreter that may handle signals."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        return bool(module.get_current() == module.get_main())
    return True


def spare_what_a_rank_starts() -> None:
    """Protect a rank's children from stop signals.

    If a rank started this process, protect the process itself.
    """
    module = load("spare_children")
    own_pid, parent_pid, agent = str(os.getpid()), str(os.getppid()), os.environ[module.AGENT_VARIABLE]
    is_below_rank = os.environ.get(module.RANK_PID_VARIABLE, own_pid) != own_pid
    # A launcher that runs directly below the agent does not forward stop signals. Of the programs that a rank
    # may start, only torchrun forwards stop signals to its children.
    may_hear_twice = not is_below_rank or "TORCHELASTIC_RESTART_COUNT" in os.environ
    if parent_pid != agent and may_hear_twice and module.LAUNCHER_PID_VARIABLE not in os.environ:
        load("handlers").hear_once(int(agent), module.own_handlers)
    if is_below_rank:
        module.spare_this_process()
        prepare_for_capabilities(is_rank=False)
    # A launcher that starts only one process, such as accelerate, does not set RANK.
    elif "RANK" in os.environ or os.environ.get(module.LAUNCHER_PID_VARIABLE) == parent_pid:
        module.spare_children()
        prepare_for_capabilities(is_rank=True)
        answer_for_flight_records()
    elif agent == parent_pid:
        # Shield the launcher from Slurm's SIGTERM. The launcher would forward the signal to ranks that Slurm
        # has already signalled.
        os.environ[module.LAUNCHER_PID_VARIABLE] = own_pid
        module.spare_this_process(even_with_handler=True)


def answer_for_flight_records() -> None:
    """Make torch write this rank's flight record to a file whenever the agent writes to a pipe.

    torch aborts a rank that cannot create the pipe, for example in a container without access to the run
    folder.
    """
    prefix = os.environ.get("TRAINKIT_JOB_FLIGHT_RECORDS", "")
    if os.access(prefix.rpartition("/")[0], os.W_OK):
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", prefix)


def prepare_for_capabilities(*, is_rank: bool) -> None:
    """Run the startup code of capabilities in a rank, or in a process started by a rank."""
    for file in filter(None, os.environ.get("TRAINKIT_JOB_AT_START", "").split(os.pathsep)):
        folder, _, name = file[: -len(".py")].rpartition("/")
        load(name, folder).prepare(load, is_rank=is_rank)


class CopyFinder:
    """Imports modules from the copy of the code instead of the original folder.

    For a package installed with ``pip install -e``, a line in a .pth file or a finder points to the original
    folder. Some finders of editable installations are consulted before the finder that reads PYTHONPATH.
    """

    def __init__(self, source: str, copy: str) -> None:
        self.source, self.copy = source, copy

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        file = None if spec is None else self.counterpart(spec.origin or "")
        if spec is None or file is None:
            return spec
        folders = spec.submodule_search_locations
        if folders is not None:
            folders = [self.counterpart(folder) or folder for folder in folders]
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, file, submodule_search_locations=folders) or spec

    def counterpart(self, path: str) -> str | None:
        """Return the copy of a file or folder, or None if there is no copy, as for installed packages."""
        if not path.startswith(f"{self.source}/") or path.startswith(f"{sys.prefix}/"):
            return None
        copied = self.copy + path[len(self.source) :]
        return copied if os.access(copied, os.F_OK) else None


if __name__ == "trainkit_python_start":
    prepare()
