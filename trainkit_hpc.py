"""Starts the `trainkit` program, and reports another package called trainkit in place of this one."""

import sys


def program() -> int:
    """Run the command on the command line; return its exit code."""
    import trainkit

    if getattr(trainkit, "DISTRIBUTION", None) == "trainkit-hpc":
        from trainkit.__main__ import program

        return program()
    place = trainkit.__file__ or next(iter(trainkit.__path__))
    print(
        f"error: `import trainkit` finds {place}, another package called trainkit\n\n"
        "hint: uninstall the other package (`pip uninstall trainkit`) and install trainkit again, "
        "or remove its folder from PYTHONPATH",
        file=sys.stderr,
    )
    return 2
