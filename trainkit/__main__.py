"""The `trainkit` program, and ``python -m trainkit``."""

import gc
import os
import sys
from contextlib import suppress


def program() -> int:
    """Run the command that was typed and end with its exit code, as fast as it can be done.

    Almost all that is made while modules load stays until the end. To look through it for garbage again and
    again, and to take it apart piece by piece at exit, is a fifth of the time that `submit` takes; and more
    while a process beside shares the memory, since such a look writes to all of it.
    """
    gc.set_threshold(250_000)
    from trainkit.cli.main import main

    code = main()
    if "multiprocessing" in sys.modules:  # gives back at exit what other processes shared
        return code
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # `main` has told what cannot be written
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(program())
