"""Runs the `trainkit` program; also available as ``python -m trainkit``."""

import gc
import os
import sys


def program() -> int:
    """Run the command given on the command line; return its exit code."""
    try:
        # Importing libraries allocates many objects and frees few, so garbage collection would take 7 % of a
        # dry run. Garbage collection still runs in commands that run for hours.
        gc.set_threshold(100_000)
        _open_closed_streams()
        from trainkit.cli.main import main

        code = main()
        # Skip Python's final garbage collection, which takes a tenth of a short command and is useless before
        # exit.
        gc.freeze()
        return code
    except KeyboardInterrupt:  # raised outside of the command, which handles interrupts itself
        print("\ninterrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the shell has closed (`>&-`).

    Otherwise, the next file that is opened would get the stream's descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            # A printed path may contain bytes that are not UTF-8.
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(program())
