"""Start children of several kinds in a rank, and print how they end after a stop signal to the whole step.

    python children.py COUNT KIND...

Prints `all are ready`, and after SIGTERM a line for each outcome of a kind. A child that handles the stop
signal ends by itself. The rank ends the workers of `SPARED` after the last signal.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

READY = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); "
BLOCK = "import signal, os; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); "
HANDLER = "import signal, os, time, sys; signal.signal(15, lambda *_: None); "
C_PROGRAM = """
import ctypes
libc, pid = ctypes.CDLL(None), ctypes.c_int()
argv = (ctypes.c_char_p * 4)(b"/bin/sh", b"-c", b"echo ready; exec sleep 300", None)
environ = (ctypes.c_char_p * 1)(None)
"""
WAIT = "; os._exit(os.WTERMSIG(os.waitpid(pid.value, 0)[1]))"
HEARS = {
    "sigwait": BLOCK + READY + "os._exit(signal.sigwait({15}))",
    "sigwaitinfo": BLOCK + READY + "os._exit(signal.sigwaitinfo({15}).si_signo)",
    "sigtimedwait": BLOCK + READY + "os._exit(signal.sigtimedwait({15}, 300).si_signo)",
    "signalfd": BLOCK
    + READY
    + "import ctypes; mask = (ctypes.c_ulong * 16)(1 << 14)\n"
    + "os._exit(os.read(ctypes.CDLL(None).signalfd(-1, mask, 0), 128)[0])",
    "sigwait in a thread": BLOCK
    + READY
    + "import threading\n"
    + "waits = threading.Thread(target=lambda: os._exit(signal.sigwait({15})))\n"
    + "waits.start(); waits.join()",
    "pending, then unblocked": BLOCK
    + "import time; signal.signal(15, lambda n, _: os._exit(n)); "
    + READY
    + "\nwhile True: time.sleep(0.1); signal.pthread_sigmask(1, {15}); signal.pthread_sigmask(0, {15})",
    "handler": "import signal, os, time; signal.signal(15, lambda n, _: os._exit(n)); "
    + READY
    + "time.sleep(300)",
    "wakeup fd": "import signal, os; ours, theirs = os.pipe(); os.set_blocking(theirs, False)\n"
    + "signal.set_wakeup_fd(theirs); signal.signal(15, lambda *_: None); "
    + READY
    + "os._exit(os.read(ours, 1)[0])",
    "asyncio": "import asyncio, signal, os\nasync def main():\n"
    + " asyncio.get_running_loop().add_signal_handler(15, lambda: os._exit(15))\n "
    + READY
    + "await asyncio.sleep(300)\nasyncio.run(main())",
    "handler in C": "import ctypes, time; libc = ctypes.CDLL(None)\n"
    + "libc.signal(15, ctypes.cast(libc._exit, ctypes.c_void_p)); "
    + READY
    + "time.sleep(300)",
    "os.system": HANDLER + "os._exit(os.WTERMSIG(os.system('echo ready; exec sleep 300')) or 99)",
    "os.popen": HANDLER + "os._exit(-(os.popen('echo ready >&2; exec sleep 300').close() >> 8))",
    "system in C": HANDLER + C_PROGRAM + "os._exit(libc.system(b'echo ready; exec sleep 300'))",
    "posix_spawn in C": HANDLER
    + C_PROGRAM
    + "libc.posix_spawn(ctypes.byref(pid), argv[0], None, None, argv, environ)"
    + WAIT,
    "fork and exec in C": HANDLER
    + C_PROGRAM
    + "pid.value = libc.fork() or libc.execve(argv[0], argv, environ)"
    + WAIT,
    "subprocess": HANDLER
    + "import subprocess; program = subprocess.Popen('echo ready; exec sleep 300', shell=True); "
    + "os._exit(-program.wait())",
    "asyncio subprocess": HANDLER
    + "import asyncio\nasync def main():\n"
    + " program = await asyncio.create_subprocess_shell('echo ready; exec sleep 300')\n"
    + " return -await program.wait()\nos._exit(asyncio.run(main()))",
    "own sitecustomize": "import sys, signal, time, os; assert sys.is_own; "
    + "signal.signal(15, lambda n, _: os._exit(n)); "
    + READY
    + "time.sleep(300)",
}
"""Kinds of Python children that exit with 15 after a stop signal, or after the end of the program that they
started."""
QUIET_S = 2.0
PYENV = Path.home() / ".pyenv/versions"
OLD_PYTHONS = {
    f"Python {version}": str(found[-1])
    for version in ("2.7", "3.6", "3.7", "3.13")
    if (found := sorted(PYENV.glob(f"{version}.*/bin/python")))
}
"""Python versions other than this one that pyenv has installed."""
SPARED = {
    "DataLoader, fork": "lived, 0",
    "DataLoader, spawn": "lived, 0",
    "Pool, fork": "lived, -15",
    "Pool, spawn": "lived, -15",
    "Pool, forkserver": "lived, -15",
    "Process, fork": "lived, -15",
    "Process, spawn": "lived, -15",
    "Process with sigwait, fork": "ended, 15",
    "Process with sigwait, spawn": "ended, 15",
}
"""Workers, and how they end in a job of trainkit; workers of torch return 0 if their parent signals them."""
OLD = "import signal, time, os; signal.signal(15, lambda n, _: os._exit(n)); " + READY + "time.sleep(300)"


def initialize() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def waits(ready: Any) -> None:
    initialize()
    ready.release()
    time.sleep(300)


def sigwaits(ready: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {15})
    ready.release()
    os._exit(signal.sigwait({15}))


class Endless:
    """A dataset without an end."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def programs(kind: str, count: int) -> list[Any]:
    environ = dict(os.environ)
    if kind == "own sitecustomize":
        folder = tempfile.mkdtemp()
        Path(folder, "sitecustomize.py").write_text("import sys; sys.is_own = True")
        environ["PYTHONPATH"] = f"{environ.get('PYTHONPATH', '')}:{folder}"
    python = OLD_PYTHONS.get(kind, sys.executable)
    return [
        subprocess.Popen(
            [python, "-c", HEARS.get(kind, OLD)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(count)
    ]


def workers(kind: str, count: int) -> tuple[list[Any], Any]:
    """Start workers of a kind; return the workers, and the objects that keep them alive."""
    name, method = kind.split(", ")
    context: Any = multiprocessing.get_context(method)
    if name == "DataLoader":
        from torch.utils.data import DataLoader

        batches: Any = iter(DataLoader(Endless(), num_workers=count, multiprocessing_context=method))
        next(batches)
        return list(batches._workers), batches
    if name == "Pool":
        pool = context.Pool(count, initialize)
        pool.map(time.sleep, [0.1] * count)
        return list(pool._pool), pool
    ready = context.Semaphore(0)
    started = [
        context.Process(target=waits if name == "Process" else sigwaits, args=(ready,)) for _ in range(count)
    ]
    for one in started:
        one.start()
    for _ in started:
        ready.acquire()
    return started, ready


def end_of_programs(started: list[Any]) -> list[str]:
    """Return how Python children have ended by themselves, with their output after `ready`."""
    deadline_s = time.monotonic() + 30
    while any(one.poll() is None for one in started) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    found = [str(one.poll()) for one in started]
    for one in started:
        one.kill()
    return [f"{code} {one.communicate()[0]}".strip() for code, one in zip(found, started, strict=True)]


def end_of_workers(started: list[Any], *, is_pool: bool) -> list[str]:
    """Return whether workers live, and their exit codes after `terminate`."""
    alive = [one.is_alive() for one in started]
    for one in started:
        one.terminate()
    deadline_s = time.monotonic() + 30
    codes: list[int | None] = [None]
    while None in codes and time.monotonic() < deadline_s:
        time.sleep(0.05)
        # A thread of a Pool waits for its workers. If two threads wait for one worker, one of them gets no
        # exit code or a wrong one.
        codes = [one._popen.returncode if is_pool else one.exitcode for one in started]
    return [f"{'lived' if lived else 'ended'}, {code}" for lived, code in zip(alive, codes, strict=True)]


def main(count: int, kinds: list[str]) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pythons = {kind: programs(kind, count) for kind in kinds if kind not in SPARED}
    for kind, started in pythons.items():
        for one in started:
            if (line := one.stdout.readline()) != "ready\n":
                print(f"{kind} begins with {line!r}", flush=True)
    others = {kind: workers(kind, count) for kind in kinds if kind in SPARED}
    print("all are ready", flush=True)
    while not asked:
        time.sleep(0.01)
    heard = 0
    while heard < len(asked):  # the kernel merges a signal of a parent with a pending signal of Slurm
        heard = len(asked)
        time.sleep(QUIET_S)
    found = {
        kind: end_of_workers(started, is_pool=kind.startswith("Pool"))
        for kind, (started, _) in others.items()
    }
    found |= {kind: end_of_programs(started) for kind, started in pythons.items()}
    for kind in kinds:
        for outcome, number in sorted(Counter(found[kind]).items()):
            print(f"{kind}: {number} x {outcome}", flush=True)
    print(f"signals of the rank: {len(asked)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
