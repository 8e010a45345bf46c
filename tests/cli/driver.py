"""`trainkit` with a small script in place of the trainer: ``python driver.py WORKER ARG …``."""

import dataclasses
import gc
import sys


def run():
    from trainkit.cli.main import main
    from trainkit.launch import plan_run as module
    from trainkit.plan.workload import Workload

    real_plan_run = module.plan_run

    def plan_run(loaded, *args, **kwargs):
        workload = Workload((sys.executable, "-u", sys.argv[1]))
        return dataclasses.replace(real_plan_run(loaded, *args, **kwargs), workload=workload)

    module.plan_run = plan_run
    return main(sys.argv[2:])


if __name__ == "__main__":
    gc.set_threshold(100_000)  # the program sets this threshold too
    code = run()
    gc.freeze()
    sys.exit(code)
