"""``trainkit run``: run right here, in the foreground."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import ConfigRequest, examples, one_node_config_options
from trainkit.errors import EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from trainkit.rundir import RunDir


@click.command(
    epilog=examples(
        "trainkit run configs/quickstart.yaml",
        "trainkit run configs/quickstart.yaml --procs 2 --set train.steps=20",
        "srun --nodes=2 --ntasks-per-node=4 trainkit run configs/quickstart.yaml",
    )
)
@one_node_config_options
@click.option("--run-dir", metavar="DIR", help="Exact run folder, new or empty; default: runs/NAME.")
def command(request: ConfigRequest, run_dir: str | None) -> int:
    """Run CONFIG right here, with rank 0's output on the terminal: as one node, or as the ranks of the srun
    step that it finds itself in.

    Ctrl-C saves and ends; a second one ends at once. It ends too, after saving, when the terminal closes.
    """
    from trainkit.cli import launch
    from trainkit.cli.following import follow_run
    from trainkit.plan.cluster import Target
    from trainkit.submit.describe import describe_plan

    if "SLURM_STEP_ID" in os.environ:
        from trainkit.job.slurm_place import find_slurm_place

        place = find_slurm_place()
        if place is not None and place.num_tasks > 1:
            from trainkit.cli.run_in_step import run_in_step

            return run_in_step(request, run_dir, place)
    loaded = request.load()
    if loaded.config.resources.nodes != 1:
        raise UsageError(
            f"the config asks for {loaded.config.resources.nodes} nodes, and `run` is one",
            hint="`trainkit submit` starts several; or add --set resources.nodes=1",
        )
    plan = launch.plan_for(loaded, target=Target("local", "local: run starts it right here"))
    # Somebody watches, and wants to see what failed.
    plan = replace(plan, requeue=replace(plan.requeue, on=()))
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    forwarder = _Forwarder()
    run, value = launch.start_new_run(loaded, plan, run_dir, "run")
    forwarder.install()
    launch.print_started(value, as_json=False)
    code = follow_run(run, value["attempt"], to_stderr=False, on_poll=lambda: forwarder.forward(run))
    return EXIT_INTERRUPTED if signal.SIGINT in forwarder.received else code


class _Forwarder:
    """Passes stop signals of this process on to the supervisor; the handler only notes them."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.num_sent = 0

    def install(self) -> None:
        from trainkit.job.signals import NOTICE_SIGNALS

        for number in NOTICE_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def forward(self, run: RunDir) -> None:
        """Send what has come since the last call."""
        from trainkit.job.record import newest_entry
        from trainkit.submit.local import send

        while self.num_sent < len(self.received):
            number = self.received[self.num_sent]
            self.num_sent += 1
            if number == signal.SIGINT:
                again = self.received[: self.num_sent].count(number) > 1
                click.echo("\nending at once" if again else "\nsaving; Ctrl-C again ends at once", err=True)
            entry = newest_entry(run)
            if entry is not None:
                send(entry, number)
