"""The `trainkit` program, and ``python -m trainkit``."""

import sys

from trainkit.cli.main import main


def program() -> int:
    """Run the command of the command line; returns its exit code."""
    return main()


if __name__ == "__main__":
    sys.exit(program())
