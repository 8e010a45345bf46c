"""The `trainkit` program, and ``python -m trainkit``."""

import gc
import sys

from trainkit.cli.main import main


def program() -> int:
    """Run the command of the command line; returns its exit code."""
    code = main()
    # Python's last garbage collection takes a tenth of a short command, and the memory is freed anyway.
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(program())
