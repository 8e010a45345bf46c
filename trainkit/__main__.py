"""Runs the `trainkit` program; also available as ``python -m trainkit``."""

import gc
import os
import sys


def program() -> int:
    """Run the command given on the command line, and return its exit code."""
    try:
        # Importing libraries allocates many objects and frees few, so garbage collection with default
        # thresholds would take 7 % of a dry run. With this threshold, garbage collection still runs in
        # long-running commands.
        gc.set_threshold(100_000)
        _open_closed_streams()
        from trainkit.cli.main import main

        code = main()
        # Exclude all objects from Python's final garbage collection, which takes a tenth of a short command's
        # time and is useless before exit.
        gc.freeze()
        return code
    except KeyboardInterrupt:  # raised outside of the command, because commands handle interrupts themselves
        print("\ninterrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the shell has closed (`>&-`).

    If a standard stream remained closed, the next file to be opened would get the stream's descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            # Do not fail for a printed path that contains bytes other than UTF-8.
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(program())
