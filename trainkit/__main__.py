"""The `trainkit` program, and ``python -m trainkit``."""

import gc
import sys


def program() -> int:
    """Run the command that was typed, with few looks for garbage, and give its exit code.

    Almost all that is made while modules load stays until the end. To look through it again and again, and at
    exit once more, is a fifth of the time that `submit` takes, and more while a process beside shares the
    memory: a look writes to all of it.
    """
    gc.set_threshold(250_000)
    from trainkit.cli.main import main

    try:
        return main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(program())
