"""The `trainkit` program, and ``python -m trainkit``."""

import gc
import os
import sys


def program() -> int:
    """Run the command of the command line; returns its exit code."""
    try:
        # Loading libraries allocates much and frees little: garbage collections would take 7 % of a dry run.
        # A command that runs for hours still collects.
        gc.set_threshold(100_000)
        _open_closed_streams()
        from trainkit.cli.main import main

        code = main()
        # Python's last garbage collection takes a tenth of a short command, and the memory is freed anyway.
        gc.freeze()
        return code
    except KeyboardInterrupt:  # outside of the command itself, which may have more to say
        print("\ninterrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Put /dev/null where the shell has closed a stream (`>&-`), or the next file would be in its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            # A path that is not UTF-8 may be printed there too.
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(program())
