"""How trainkit starts its own modules as processes."""

from __future__ import annotations

import sys

# Without -P (Python 3.11) the folder that a job was submitted from comes first on the path of modules, and a
# user's `queue.py` there would take the place of the standard library's.
PYTHON_OPTIONS = ("-u", "-P") if sys.version_info >= (3, 11) else ("-u",)


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The argv that runs one of trainkit's modules with this interpreter."""
    return (sys.executable, *PYTHON_OPTIONS, "-m", module, *arguments)
