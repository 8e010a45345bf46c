"""Describes the program that a run's ranks execute, and how trainkit expects the program to behave.

The functions have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from trainkit.formats import RESERVED_NAME

PER_RANK = ("python", "lightning")
"""Launchers that make each node's agent start the command once per rank."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
USED_BY_COMMANDS = (
    "extends",
    "config_version",
    "name",
    "note",
    "tags",
    "device",
    "resources",
    "launch",
    "requeue",
    "notify",
    "on_checkpoint",
    "logging",
)
"""The config keys and sections that affect a run of a command."""
WRAPPERS = (
    "env",
    "nice",
    "ionice",
    "nohup",
    "time",
    "timeout",
    "stdbuf",
    "setsid",
    "taskset",
    "numactl",
    "uv",
    "uvx",
    "poetry",
    "pipenv",
    "pixi",
    "hatch",
    "conda",
    "mamba",
    "micromamba",
    "apptainer",
    "singularity",
    "sudo",
    "doas",
    "runuser",
    "setpriv",
    "unshare",
    "flock",
    "chrt",
    "tini",
    "dumb-init",
    "catatonit",
    "pdm",
    "rye",
)
"""Programs that run the program given in their arguments, with the same standard input."""
STARTERS = (*WRAPPERS, "su", "script", "make", "gmake", "ninja", "just", "task", "xargs", "parallel")
"""Programs that start a training program but do not train; stop signals are meant for the training
program."""
_INTERPRETER = re.compile(
    rf"(?:python|pypy)[\d.]*|{'|'.join(SHELLS)}|fish|perl|ruby|node|julia|R|lua[\d.]*|php|cat"
)
_INPUT_FILES = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_NO_INPUT = re.compile(r"-(?:-version|-help|V|h)")


@dataclass(frozen=True)
class Workload:
    """The program that a run executes: a command, or the built-in trainer (`TRAINER`) for any task."""

    argv: tuple[str, ...] = ()
    """The command that each rank runs, or that `launcher` starts; empty for the built-in trainer."""
    launcher: str = "python"
    """How a command is started: once per rank for ``python`` and ``lightning``, else once per node."""
    signal: str = "auto"
    """The signal that asks a command to save: ``USR2``, ``TERM``, or ``auto`` for whichever it handles.
    """

    @property
    def is_command(self) -> bool:
        """Return whether the workload is a command.

        The ranks of a command might not write metrics, checkpoints, error records or stacks.
        """
        return bool(self.argv)

    @property
    def notice(self) -> str:
        """Return the signal that Slurm sends before the time limit, unless `requeue.signal` sets another."""
        # A command may not handle SIGUSR2. SIGURG is handled only by the agents, which then send the command
        # the signal that it handles.
        return "URG" if self.is_command else "USR2"

    @property
    def has_launcher(self) -> bool:
        """Return whether a launcher such as torchrun starts a node's ranks."""
        return self.launcher not in PER_RANK

    @property
    def has_two_pythons(self) -> bool:
        """Return whether the command redundantly starts with `python`: its launcher already starts Python."""
        # An interpreter with a path is allowed, because the path selects an interpreter (see
        # `command_python`).
        return self.has_launcher and re.fullmatch(r"python[\d.]*", self.argv[0]) is not None

    @property
    def reads_input(self) -> bool:
        """Return whether the command line shows that the command reads standard input.

        A command reads standard input if it contains ``-``, or an interpreter or program without a file
        argument, as in ``python3 -``, ``bash -s``, ``env X=1 python`` and ``cat``. Other commands may read
        standard input as well.
        """
        words = self.argv
        if any(word in _INPUT_FILES for word in words):
            return True
        for index, word in enumerate(words):
            name, rest = PurePath(word).name, words[index + 1 :]
            if _INTERPRETER.fullmatch(name):
                if name in SHELLS and any(
                    re.fullmatch(r"-[a-z]*s[a-z]*", option) for option in _options(rest)
                ):
                    return True
                return len(_options(rest)) == len(rest) and not any(map(_NO_INPUT.fullmatch, rest))
            if index == 0 and name not in WRAPPERS:
                return False
        return False

    @property
    def ignores_usr2(self) -> bool:
        """Return whether the processes start with SIGUSR2 ignored, so that SIGUSR2 cannot kill them.

        SIGUSR2 would kill torchrun but not the ranks that torchrun started. With proctrack/linuxproc, Slurm
        signals its tasks and their child ranks, so the SIGUSR2 before a requeue would kill a script that
        saves on SIGTERM. With ``auto``, a shell is started without ignoring SIGUSR2, because a shell cannot
        trap a signal that was ignored when the shell started.
        """
        if not self.is_command:
            return False
        is_shell = PurePath(self.argv[0]).name in SHELLS
        return self.has_launcher or self.signal == "TERM" or (self.signal == "auto" and not is_shell)

    def uses(self, key: str) -> bool:
        """Return whether a config key affects the workload, ignoring keys that a capability passes to it."""
        if not self.is_command:
            return True
        return key.partition(".")[0] in USED_BY_COMMANDS and key != "logging.tensorboard"

    def takes(self, received: str) -> bool:
        """Return whether ranks receive a stop signal unchanged, instead of the signal that they handle."""
        return not self.is_command or (received == "SIGINT" and not self.has_launcher)

    def is_finished(self, *, was_stopped: bool, is_done: bool) -> bool:
        """Return whether exit code 0 of all ranks completes the run, given whether the done file exists."""
        # After a stop signal, exit code 0 may only mean that the command has saved a checkpoint.
        return not self.is_command or is_done or not was_stopped


TRAINER = Workload()


def _options(words: Sequence[str]) -> list[str]:
    """Return the leading words that are options."""
    return list(takewhile(lambda word: word.startswith("-"), words))


_OUT_OF_REACH = {
    **dict.fromkeys(
        ("docker", "podman", "nerdctl", "kubectl"), "only the first process in the container gets the signal"
    ),
    **dict.fromkeys(("ssh", "pdsh", "clush"), "processes on another host do not get the signal"),
    **dict.fromkeys(("tmux", "screen", "systemd-run"), "the training runs in a process outside the job"),
    **dict.fromkeys(("srun", "salloc"), "the command terminates its own step immediately"),
    "sbatch": "the command starts another job",
}
"""Maps a program to the reason why its child processes may not receive a signal."""
_PREFIXES = ("exec", "command", *WRAPPERS)
_SEPARATORS = re.compile(r"\n|;|\|\|?|&&?|[(){}]")


def out_of_reach(argv: Sequence[str]) -> str | None:
    """Return why a stop signal may not reach the processes of a command, or None if no reason is known.

    Only the command line is examined. The contents of scripts are not read.
    """
    is_shell = PurePath(argv[0]).name in SHELLS and "-c" in argv[:-1]
    script = argv[argv.index("-c") + 1] if is_shell else None
    for words in [argv] if script is None else map(str.split, _SEPARATORS.split(script)):
        names = (PurePath(word).name for word in words if "=" not in word and word[0] not in "-0123456789")
        name = next((name for name in names if name not in _PREFIXES), "")
        if name in _OUT_OF_REACH:
            return f"{name}: {_OUT_OF_REACH[name]}"
    if script is not None and re.search(r"(?<![&>])&\s*$", script):
        return "the shell exits before the process that it starts with &"
    return None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def name_of(argv: Sequence[str]) -> str | None:
    """Return the name of a command's script or program without its suffix; None if that is not a valid name.

    The name is ``train`` for ``python -u src/train.py --lr 0.1``, ``python -m mine.train`` and
    ``./train.sh``.
    """
    script = next((word for word in argv if word.endswith(".py")), None)
    if script is None and "-m" in argv[:-1]:
        script = f"{argv[argv.index('-m') + 1].rpartition('.')[2]}.py"
    if script is None and "-c" in argv:
        return None
    name = PurePath(script or next(iter(argv), "")).stem
    return name if _NAME.fullmatch(name) and not RESERVED_NAME.fullmatch(name) else None
