"""Runs when a Python interpreter starts in a job: PYTHONPATH of every rank begins with this folder.

Python imports the first module of this name that it finds, so the next one is imported from here.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader

FOLDER = __file__.rpartition("/")[0]


def spare_what_a_rank_starts() -> None:
    """Have a rank spare its children, and a process that a rank has started spare itself."""
    module = type(sys)("trainkit_spare_children")
    SourceFileLoader(module.__name__, f"{FOLDER}/../spare_children.py").exec_module(module)
    own_pid, parent_pid = str(os.getpid()), str(os.getppid())
    if os.environ.get(module.RANK_PID_VARIABLE, own_pid) != own_pid:
        module.spare_this_process()
    # A launcher of a single process, such as accelerate, gives it no RANK.
    elif "RANK" in os.environ or os.environ.get(module.LAUNCHER_PID_VARIABLE) == parent_pid:
        module.spare_children()
    elif os.environ[module.AGENT_VARIABLE] == parent_pid:
        # A launcher would pass on the SIGTERM that Slurm has sent to its ranks as well.
        os.environ[module.LAUNCHER_PID_VARIABLE] = own_pid
        module.spare_this_process(even_with_handler=True)


def import_next() -> None:
    """Import the module of this name that Python would have found without this folder."""
    sys.path[:] = [folder for folder in sys.path if folder.rstrip("/") != FOLDER]
    own = sys.modules.pop(__name__)
    try:
        import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


if __name__ == "sitecustomize":
    if os.environ.get("TRAINKIT_JOB_AGENT_PID"):
        spare_what_a_rank_starts()
    import_next()
