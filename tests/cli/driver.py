"""`trainkit` with a small script in the place of the trainer: ``python driver.py WORKER ARG …``."""

import dataclasses
import sys

from trainkit.cli import launch
from trainkit.cli.main import main

real_plan_for = launch.plan_for


def plan_for(loaded, *args, **kwargs):
    return dataclasses.replace(
        real_plan_for(loaded, *args, **kwargs), command=(sys.executable, "-u", sys.argv[1])
    )


if __name__ == "__main__":
    launch.plan_for = plan_for
    sys.exit(main(sys.argv[2:]))
