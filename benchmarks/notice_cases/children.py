"""A rank with many children of a kind: prints how each of them ended after a notice to the whole step.

    python children.py KIND COUNT

Prints `ready` when all children are, and after SIGTERM a line for each outcome with its number. A child of a
kind that hears the notice ends by itself; the rank ends all others a second later, as their parents do.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

READY = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); "
BLOCK = "import signal, os; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); "
HANDLER = "import signal, os, time, sys; signal.signal(15, lambda *_: None); "
C_PROGRAM = """
import ctypes
libc, pid = ctypes.CDLL(None), ctypes.c_int()
argv = (ctypes.c_char_p * 4)(b"/bin/sh", b"-c", b"echo ready; exec sleep 300", None)
environ = (ctypes.c_char_p * 1)(None)
"""
WAIT = "; sys.exit(os.WTERMSIG(os.waitpid(pid.value, 0)[1]))"
HEARS = {
    "sigwait": BLOCK + READY + "sys.exit(signal.sigwait({15}))",
    "sigwaitinfo": BLOCK + READY + "sys.exit(signal.sigwaitinfo({15}).si_signo)",
    "sigtimedwait": BLOCK + READY + "sys.exit(signal.sigtimedwait({15}, 300).si_signo)",
    "signalfd": BLOCK
    + READY
    + "import ctypes; mask = (ctypes.c_ulong * 16)(1 << 14)\n"
    + "sys.exit(os.read(ctypes.CDLL(None).signalfd(-1, mask, 0), 128)[0])",
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
    + "sys.exit(os.read(ours, 1)[0])",
    "asyncio": "import asyncio, signal, os\nasync def main():\n"
    + " asyncio.get_running_loop().add_signal_handler(15, lambda: os._exit(15))\n "
    + READY
    + "await asyncio.sleep(300)\nasyncio.run(main())",
    "handler in C": "import ctypes, time; libc = ctypes.CDLL(None)\n"
    + "libc.signal(15, ctypes.cast(libc._exit, ctypes.c_void_p)); "
    + READY
    + "time.sleep(300)",
    "os.system": HANDLER + "sys.exit(os.WTERMSIG(os.system('echo ready; exec sleep 300')) or 99)",
    "os.popen": HANDLER + "sys.exit(-(os.popen('echo ready >&2; exec sleep 300').close() >> 8))",
    "system in C": HANDLER + C_PROGRAM + "sys.exit(libc.system(b'echo ready; exec sleep 300'))",
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
    + "sys.exit(-program.wait())",
    "asyncio subprocess": HANDLER
    + "import asyncio\nasync def main():\n"
    + " program = await asyncio.create_subprocess_shell('echo ready; exec sleep 300')\n"
    + " return -await program.wait()\nsys.exit(asyncio.run(main()))",
    "own sitecustomize": "import sys, signal, time, os; assert sys.is_own; "
    + "signal.signal(15, lambda n, _: os._exit(n)); "
    + READY
    + "time.sleep(300)",
}
"""Kinds of Pythons that end with 15 of a notice, or of the end of the program that they have started."""
OLD = "import signal, time, os; signal.signal(15, lambda n, _: os._exit(n)); " + READY + "time.sleep(300)"


def ready(number: int = 0) -> None:
    os.write(1, b"ready\n")


def default(queue: "multiprocessing.Queue[int] | None" = None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready()


def waits() -> None:
    default()
    time.sleep(300)


def sigwaits() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {15})
    ready()
    os._exit(signal.sigwait({15}))


class Endless:
    """A dataset."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def first_lines(processes: list["subprocess.Popen[str]"]) -> None:
    for one in processes:
        assert one.stdout is not None
        line = one.stdout.readline()
        if line != "ready\n":
            print("not ready:", repr(line), one.communicate(), flush=True)


def codes(processes: list["subprocess.Popen[str]"]) -> list[str]:
    """How Pythons that hear the notice have ended, with all that they have printed."""
    deadline_s = time.monotonic() + 20
    while any(one.poll() is None for one in processes) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    found = [f"{one.poll()}" for one in processes]
    for one in processes:
        one.kill()
    printed = [one.communicate() for one in processes]
    return [f"{code} {text}" if text else code for code, (text, _) in zip(found, printed, strict=True)]


def programs(kind: str, count: int) -> list["subprocess.Popen[str]"]:
    environ, python, body = dict(os.environ), sys.executable, HEARS.get(kind, OLD)
    if kind == "own sitecustomize":
        folder = tempfile.mkdtemp()
        Path(folder, "sitecustomize.py").write_text("import sys; sys.is_own = True")
        environ["PYTHONPATH"] = f"{environ.get('PYTHONPATH', '')}:{folder}"
    elif kind not in HEARS:
        python = shutil.which(kind) or kind
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [subprocess.Popen([python, "-c", body], env=environ, text=True, **pipes) for _ in range(count)]


def main(kind: str, count: int) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    kept: object = None
    children: list[object] = []
    method = kind.split()[-1]
    if kind.startswith("DataLoader"):
        from torch.utils.data import DataLoader

        kept = iter(DataLoader(Endless(), num_workers=count, multiprocessing_context=method))
        next(kept)
        children = list(kept._workers)
    elif kind.startswith("Pool"):
        kept = multiprocessing.get_context(method).Pool(count, default)
        kept.map(time.sleep, [0.05] * count)
        children = list(kept._pool)
    elif kind.startswith(("Process", "sigwaits")):
        body = sigwaits if kind.startswith("sigwaits") else waits
        children = [multiprocessing.get_context(method).Process(target=body) for _ in range(count)]
        for one in children:
            one.start()
        time.sleep(0.5)
    else:
        children = programs(kind, count)
        first_lines(children)
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    time.sleep(1)
    if children and isinstance(children[0], subprocess.Popen):
        outcomes = codes(children)
    else:
        alive = [one.is_alive() for one in children]
        for one in children:
            one.terminate()
        for one in children:
            one.join(20)
        outcomes = [
            f"{'lived' if lived else 'ended'}, {one.exitcode}"
            for lived, one in zip(alive, children, strict=True)
        ]
    for outcome, number in sorted(Counter(outcomes).items()):
        print(f"outcome: {number} x {outcome}", flush=True)
    print(f"heard: {len(asked)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
