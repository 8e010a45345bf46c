"""Start a command as the programs above a training do: starts.py HOW COMMAND...

- run and check: `subprocess.run` and `check_call`.
- wait: a Popen that is polled.
- conda: `conda run`, a shell whose output is printed at its end.
- apptainer: `apptainer exec` without a terminal, which forwards every signal.
"""

import os
import shlex
import signal
import subprocess
import sys
import time

how, *command = sys.argv[1:]
if how == "run":
    sys.exit(subprocess.run(command, check=False).returncode)
if how == "check":
    subprocess.check_call(command)
elif how == "wait":
    child = subprocess.Popen(command)
    while child.poll() is None:
        time.sleep(0.2)
    sys.exit(child.returncode)
elif how == "conda":
    argv = ["bash", "-c", f"export CONDA_PREFIX=/env\n{shlex.join(command)}\nexit $?"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.communicate()
    sys.stdout.buffer.write(output)
    sys.stderr.buffer.write(errors)
    sys.exit(child.returncode)
elif how == "apptainer":
    pids = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(pids[0], number))
    child = subprocess.Popen(command)
    pids.append(child.pid)
    sys.exit(child.wait())
