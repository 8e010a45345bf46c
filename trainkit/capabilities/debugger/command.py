"""Implements ``trainkit debug``, which connects this terminal to a rank that is waiting at breakpoint()."""

from __future__ import annotations

import os
import socket
import struct
import sys

from trainkit.capabilities.debugger.rank_debugger import AT_PROMPT, CHOSEN_FILE, RUNNING
from trainkit.capabilities.stacks.command import running_attempt
from trainkit.cli.help import as_command, option
from trainkit.cli.options import INDEX, run_argument
from trainkit.errors import UsageError, print_note
from trainkit.formats import rank_list
from trainkit.run.files import read_object, write_atomic
from trainkit.run.process import own_host
from trainkit.run.registry import find_run
from trainkit.run.rundir import AttemptDir


@as_command("trainkit debug last", "trainkit debug last --rank 5")
@run_argument
@option("--rank R", "Rank to debug; default: 0.", type=INDEX, default=0)
def command(run_name: str, rank: int) -> None:
    """Debug a rank of RUN that waits at breakpoint(), with Python's debugger in this terminal.

    All other ranks continue and ignore breakpoint(). In the debugger, `c` continues the run until the next
    breakpoint(), and `q` stops the run. While the run continues, Ctrl-C exits the debugger but does not stop
    the run. To start a run with a terminal for one of its ranks, use `trainkit run --debug`.
    """
    attach(running_attempt(find_run(run_name, acts=True)), rank)


def attach(attempt: AttemptDir, rank: int) -> None:
    """Connect this terminal to a rank waiting at breakpoint(), until the rank or the user ends the session.

    If the rank is on another host, `trainkit debug` is started on that host. Raises UsageError if the rank is
    not waiting at breakpoint().
    """
    from trainkit.capabilities.shell.shell import require_terminal, run_next_to, running_job

    run, folder = attempt.run, attempt.path / "debugger"
    records = [(int(file.stem.split("-")[1]), read_object(file)) for file in folder.glob("rank-*.json")]
    own = [record for number, record in records if number == rank]
    record = next((record for record in own if record.get("socket")), {})
    if not record:
        problem = "is already being debugged" if own else "is not at a breakpoint()"
        hint = f"`trainkit stacks {run.quoted} --rank {rank}` shows what the rank is doing"
        if others := sorted({number for number, _ in records} - {rank}):
            hint = f"{rank_list(others)} of this run may be waiting at a breakpoint()"
        raise UsageError(f"rank {rank} {problem}", hint=hint)
    require_terminal(f"read the output of the rank in {attempt.rank_log(rank)}, or use a terminal")
    print_note(f"{run.shown}: rank {rank} of attempt {attempt.number}")
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(record["socket"]))
        except OSError as error:
            if own_host() == record["node"]:
                message = f"rank {rank} cannot be reached: {error}"
                raise UsageError(
                    message, hint=f"`trainkit status {run.quoted}` shows whether the run is still active"
                ) from None
            entry, job = running_job(run)
            again = (sys.executable, "-m", "trainkit", "debug", str(run.path), "--rank", str(rank))
            run_next_to(job, entry.other_cluster, str(record["node"]), again)
        peer = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if peer != os.geteuid():
            hint = "run `trainkit debug` as that user, because the process can read everything that you type"
            raise UsageError(f"the process of rank {rank} belongs to user {peer}", hint=hint)
        write_atomic(folder / CHOSEN_FILE, str(rank))
        terminal = os.open(os.ttyname(0), os.O_RDWR | os.O_NOCTTY)
        socket.send_fds(client, [AT_PROMPT], [terminal])
        state = AT_PROMPT
        while state:
            try:
                state = client.recv(1)
            except KeyboardInterrupt:
                if state == RUNNING:
                    print(f"\ndetached from rank {rank}, which continues until its next breakpoint()")
                    return
                print("\ntype `c` to continue the run or `q` to stop it", flush=True)
