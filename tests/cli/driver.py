"""`trainkit` with a small script in place of the trainer: ``python driver.py WORKER ARG …``."""

import dataclasses
import os
import sys

from trainkit.cli.main import main
from trainkit.job import hosts_run
from trainkit.submit import plan_run as module

real_plan_run = module.plan_run


def plan_run(loaded, *args, **kwargs):
    return dataclasses.replace(
        real_plan_run(loaded, *args, **kwargs), command=(sys.executable, "-u", sys.argv[1])
    )


if __name__ == "__main__":
    module.plan_run = plan_run
    if "VISIBLE_TIMEOUT_S" in os.environ:
        hosts_run.VISIBLE_TIMEOUT_S = float(os.environ["VISIBLE_TIMEOUT_S"])
    sys.exit(main(sys.argv[2:]))
