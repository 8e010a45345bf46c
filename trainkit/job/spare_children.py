"""Protects processes started by a rank from stop signals, regardless of which library starts the processes.

Slurm signals all processes in a step, not only the ranks. On a preemption, SIGTERM would therefore also kill
DataLoader workers, which would raise an error in the rank during its save. Therefore, each process started by
a rank gets a filter in front of every stop signal's default action or inherited handler. The filter drops
signals sent by Slurm, but passes on signals from other senders, such as the rank's ``Process.terminate()``.

The filter is a signal handler in machine code, not in Python, for two reasons. Unlike a blocked or ignored
signal, the filter does not survive `exec`, so other programs do not inherit it. Unlike a Python handler, the
filter also sees which process sent the signal. The filter is otherwise invisible; for example, `getsignal`
returns the same value as without the filter. A process that installs its own handler for a signal, or that
blocks and waits for the signal, receives it unfiltered.

This module imports only the standard library, because `trainkit.job.startup` loads it in the interpreter of
any script. This module has few imports, because every Python interpreter in a job loads it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

NOTICES = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
MARKS: dict[int, int] = {signal.SIGTERM: 56, signal.SIGUSR2: 57, signal.SIGINT: 58}
"""Maps each stop signal to a real-time signal that also gets the filter as long as the process has no handler
of its own for the stop signal. From the real-time signals in /proc, the agent can tell which stop signals a
process handles itself."""
AGENT_VARIABLE = "TRAINKIT_JOB_AGENT_PID"
LAUNCHER_PID_VARIABLE = "TRAINKIT_JOB_LAUNCHER_PID"
RANK_PID_VARIABLE = "TRAINKIT_JOB_RANK_PID"
"""The environment variable with the pid of the rank that receives stop signals. Processes below this rank are
protected from stop signals."""

TORCH_HANDLERS = "torch.utils.data._utils.signal_handling"
PAGE, READ_WRITE, READ_EXECUTE, PRIVATE_ANONYMOUS = 4096, 3, 5, 0x22
SA_SIGINFO, SA_ONSTACK, SA_RESTART = 0x4, 0x08000000, 0x10000000
SIGACTION = 152
"""The size of a `struct sigaction` in bytes: handler, 128-byte mask, flags and a pointer."""
FLAGS = slice(136, 140)

_before_fork = _thread._local()
_filter: Filter | None = None
"""The filter of this process, or None if the process is not protected."""


def spare_children() -> None:
    """Protect the processes forked by this rank from stop signals."""
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
    _register()


def spare_this_process(*, even_with_handler: bool = False) -> None:
    """Protect this process, which a rank or an agent started, and the processes it will fork.

    If the process installs its own handler for a signal, the handler receives the signal unfiltered, unless
    `even_with_handler` is set.
    """
    global _filter
    _register()
    _filter = _new_filter()
    if _filter is not None:
        _filter.even_with_handler = even_with_handler
        _filter.install(is_new_program=True)


def own_handlers(caught: Collection[int]) -> set[int]:
    """Return the signals that a process handles itself, given the signals that /proc lists as caught."""
    return {*caught} - {number for number, mark in MARKS.items() if mark in caught}


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name` once the module has been imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


class _AfterImport:
    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:
                    self._act(module)

            loader.exec_module = exec_module
        return spec


def _register() -> None:
    if _signal.signal.__name__ == "signal_and_filter":
        return
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_spare_forked)
    # `signal.signal` looks up this function on every call, so replacing it works even in code that has
    # imported `signal.signal` already.
    _signal.signal = _with_filter(_signal.signal)
    after_import(TORCH_HANDLERS, _filter_before_torch)


def _block() -> None:
    """Block stop signals before a fork, so that they cannot kill the child before it is protected."""
    # Create the filter before the fork, because another thread may hold an import lock during the fork.
    _before_fork.filter = _new_filter()
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _spare_forked() -> None:
    global _filter
    _filter = _before_fork.filter
    if _filter is not None:
        _filter.even_with_handler = False
        _filter.install(is_new_program=False)
    _unblock()


def _with_filter(call: Callable[..., Any]) -> Callable[..., Any]:
    def signal_and_filter(number: int, handler: object, /) -> object:
        if _filter is None or number not in NOTICES:
            return call(number, handler)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
        try:
            before = call(number, handler)
            _filter.follow(number, handler)
            return before
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return signal_and_filter


def _filter_before_torch(module: Any) -> None:
    """Put the filter in front of the handler that torch installs in a DataLoader worker."""
    install = module._set_worker_signal_handlers

    def install_and_filter() -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
        install()
        if _filter is not None:
            _filter.put_before(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    module._set_worker_signal_handlers = install_and_filter


@lru_cache(None)
def _new_filter() -> Filter | None:
    """Return a filter for this process, or None on failure. A failure is reported once per rank."""
    agent = os.environ.get(AGENT_VARIABLE, "") or os.environ[RANK_PID_VARIABLE]
    try:
        return Filter(_ancestors(int(agent)))
    except (ImportError, OSError) as error:
        if os.environ.get(RANK_PID_VARIABLE) == str(os.getpid()) and "SLURM_JOB_ID" in os.environ:
            text = (
                f"trainkit: a preemption may kill child processes of this rank before the rank saves: {error}"
            )
            os.write(2, f"{text}\n".encode(errors="replace"))
        return None


class Filter:
    """Signal handlers that drop signals from `senders` and pass on signals from any other process."""

    def __init__(self, senders: Sequence[int]) -> None:
        from ctypes import CDLL, c_void_p, cast

        machine = os.uname().machine if sys.platform == "linux" and sys.maxsize > 2**32 else sys.platform
        if machine not in MACHINES:
            raise OSError(f"no signal filter exists for {machine}")
        self._libc, self._senders, self._code = CDLL(None), senders, MACHINES[machine]
        self._libc.mmap.restype = c_void_p
        self._calls = [cast(self._libc[name], c_void_p).value or 0 for name in ("signal", "raise")]
        self._addresses: dict[int, int] = {}
        """Maps each handler to the address of the filter in front of it."""
        self._inherited: dict[int, Any] = {}
        self.even_with_handler = False
        self._before(int(signal.SIG_DFL))

    def install(self, *, is_new_program: bool) -> None:
        """Install the filter. In a new program, the filter is installed only in front of default actions."""
        for number in NOTICES:
            handler = self._inherited[number] = _signal.getsignal(number)
            if not is_new_program or _is_default(number, handler):
                self.put_before(number)

    def follow(self, number: int, handler: object) -> None:
        """After a call of `signal.signal`, reinstall the filter or leave the signal to the new handler."""
        is_own = not _is_default(number, handler) and handler != self._inherited[number]
        if not is_own or self.even_with_handler:
            self.put_before(number)
        elif self._action(MARKS[number])[0] in self._addresses.values():
            self._libc.signal(MARKS[number], None)

    def put_before(self, number: int) -> None:
        """Put the filter in front of a signal's current action."""
        handler, action = self._action(number)
        if handler == signal.SIG_IGN or handler in self._addresses.values():
            return
        flags = int.from_bytes(action[FLAGS], sys.byteorder) if handler else SA_RESTART
        action[:8] = self._before(handler).to_bytes(8, sys.byteorder)
        action[FLAGS] = (flags | SA_SIGINFO | SA_ONSTACK).to_bytes(4, sys.byteorder)
        self._libc.sigaction(int(number), action, None)
        mark = MARKS.get(number, 0)
        if mark and self._action(mark)[0] == signal.SIG_DFL:
            self.put_before(mark)

    def _action(self, number: int) -> tuple[int, Any]:
        """Return the address of a signal's current handler, and the whole `struct sigaction`."""
        from ctypes import create_string_buffer

        action: Any = create_string_buffer(SIGACTION)
        self._libc.sigaction(int(number), None, action)
        return int.from_bytes(action[:8], sys.byteorder), action

    def _before(self, handler: int) -> int:
        """Return the address of a filter in front of a handler.

        Raises OSError if this process may not allocate executable memory.
        """
        from ctypes import c_long, c_void_p, memmove

        if handler not in self._addresses:
            code = self._code(self._senders, handler, *self._calls)
            # The memory is never unmapped, because the filter is in use until the process exits.
            address = self._libc.mmap(None, PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, c_long(0))
            if address in (None, c_void_p(-1).value):
                raise OSError("no memory for a signal filter")
            memmove(address, code, len(code))
            if self._libc.mprotect(c_void_p(address), PAGE, READ_EXECUTE) != 0:
                raise OSError("a signal filter needs executable memory, which this system does not allow")
            self._addresses[handler] = address
        return self._addresses[handler]


def _is_default(number: int, handler: object) -> bool:
    return handler == signal.SIG_DFL or (number == signal.SIGINT and handler == signal.default_int_handler)


# if (info->si_code == SI_USER && (info->si_pid == 0 || info->si_pid is one of `senders`)) return;
# handler(number, info, context);  or by default:  signal(number, SIG_DFL); raise(number);
# A sender outside of a container has pid 0.


def _x86_64(senders: Sequence[int], handler: int, signal_: int, raise_: int) -> bytes:
    def word(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    # mov eax, [rsi+16]; then for each PID: cmp eax, PID; jne +1; ret
    tests = b"\x8b\x46\x10" + b"".join(b"\x3d" + word(pid, 4) + b"\x75\x01\xc3" for pid in (0, *senders))
    # cmp dword [rsi+8], 0; jne past the tests
    start = b"\x83\x7e\x08\x00\x0f\x85" + word(len(tests), 4) + tests
    if handler:  # mov rax, HANDLER; jmp rax
        return start + b"\x48\xb8" + word(handler, 8) + b"\xff\xe0"
    # push rbx; mov ebx, edi; xor esi, esi; mov rax, SIGNAL; call rax
    start += b"\x53\x89\xfb\x31\xf6\x48\xb8" + word(signal_, 8) + b"\xff\xd0"
    # mov edi, ebx; pop rbx; mov rax, RAISE; jmp rax
    return start + b"\x89\xdf\x5b\x48\xb8" + word(raise_, 8) + b"\xff\xe0"


def _aarch64(senders: Sequence[int], handler: int, signal_: int, raise_: int) -> bytes:
    def load(value: int) -> list[int]:  # mov x4, VALUE in four parts
        return [
            start | (value >> 16 * part & 0xFFFF) << 5
            for part, start in enumerate((0xD2800004, 0xF2A00004, 0xF2C00004, 0xF2E00004))
        ]

    # ldr w3, [x1, #16]; then for each PID: mov x4, PID; cmp w3, w4; b.ne +8; ret
    tests = [0xB9401023]
    for pid in (0, *senders):
        tests += [*load(pid), 0x6B04007F, 0x54000041, 0xD65F03C0]
    # ldr w3, [x1, #8]; cbnz w3, past the tests
    code = [0xB9400823, 0x35000003 | (len(tests) + 1) << 5, *tests]
    if handler:  # br x4
        code += [*load(handler), 0xD61F0080]
    else:
        # stp x19, x30, [sp, #-16]!; mov w19, w0; mov x1, 0; blr x4
        code += [0xA9BF7BF3, 0x2A0003F3, 0xD2800001, *load(signal_), 0xD63F0080]
        # mov w0, w19; ldp x19, x30, [sp], #16; br x4
        code += [0x2A1303E0, 0xA8C17BF3, *load(raise_), 0xD61F0080]
    return b"".join(word.to_bytes(4, "little") for word in code)


MACHINES = {"x86_64": _x86_64, "aarch64": _aarch64}


def _ancestors(pid: int) -> list[int]:
    """Return the visible ancestors of a process, closest first."""
    found: list[int] = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        found.append(pid)
    return found
