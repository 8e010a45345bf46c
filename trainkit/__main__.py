"""The `trainkit` program, and ``python -m trainkit``."""

import gc
import sys


def program() -> int:
    """Run the command of the command line; returns its exit code."""
    # Loading libraries allocates much and frees little: garbage collections would take 7 % of a dry run. A
    # command that runs for hours still collects.
    gc.set_threshold(100_000)
    try:
        from trainkit.cli.main import main
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    code = main()
    # Python's last garbage collection takes a tenth of a short command, and the memory is freed anyway.
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(program())
