"""Describes the program that the ranks of a run execute, and the behaviour that trainkit expects of it.

All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from trainkit.formats import RESERVED_NAME

PER_RANK = ("python", "lightning")
"""Launchers with which the agent of a node starts a command once per rank."""
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
    "logging",
)
"""The keys and sections of a config that have an effect on a run of a command."""
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
"""Programs that start the program that their arguments name, with the same standard input."""
STARTERS = (*WRAPPERS, "su", "script", "make", "gmake", "ninja", "just", "task", "xargs", "parallel")
"""Programs that train nothing themselves; a stop signal is meant for the program that they start."""
_INTERPRETER = re.compile(
    rf"(?:python|pypy)[\d.]*|{'|'.join(SHELLS)}|fish|perl|ruby|node|julia|R|lua[\d.]*|php|cat"
)
_INPUT_FILES = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_NO_INPUT = re.compile(r"-(?:-version|-help|V|h)")


@dataclass(frozen=True)
class Workload:
    """The program of a run: a command, or the built-in trainer (`TRAINER`) with any task."""

    argv: tuple[str, ...] = ()
    """The command that each rank runs, or whose ranks `launcher` starts; empty for the trainer."""
    launcher: str = "python"
    """How a command starts: ``python`` and ``lightning`` once per rank; other launchers once per node."""
    signal: str = "auto"
    """The signal that asks a command to save: ``USR2``, ``TERM``, or ``auto`` for the signal that it handles.
    """

    @property
    def is_command(self) -> bool:
        """Return whether the workload is a command.

        The ranks of a command need not write metrics, checkpoints, errors and stacks.
        """
        return bool(self.argv)

    @property
    def notice(self) -> str:
        """Return the signal that Slurm sends before the time limit, unless `requeue.signal` names one."""
        # A command may not expect SIGUSR2. Only its agents handle SIGURG, and send it the signal that it
        # handles.
        return "URG" if self.is_command else "USR2"

    @property
    def has_launcher(self) -> bool:
        """Return whether a launcher such as torchrun starts the ranks of a node."""
        return self.launcher not in PER_RANK

    @property
    def has_two_pythons(self) -> bool:
        """Return whether the command begins with the interpreter that its launcher starts itself."""
        # A path is allowed, because it chooses the interpreter (see `command_python`).
        return self.has_launcher and re.fullmatch(r"python[\d.]*", self.argv[0]) is not None

    @property
    def reads_input(self) -> bool:
        """Return whether the command line shows that the command reads standard input.

        It does with a ``-`` or with a program without a script, as in ``python3 -``, ``bash -s``, ``env X=1
        python`` and ``cat``. Other commands may read standard input too.
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
        """Return whether the processes start with USR2 ignored, so that the signal does not kill them.

        USR2 would kill torchrun but not its ranks. With proctrack/linuxproc, Slurm signals its tasks and the
        ranks below them, so the USR2 of a requeue would kill a script that saves on SIGTERM. With ``auto``, a
        shell does not ignore USR2, because it cannot trap a signal that it ignored at its start.
        """
        if not self.is_command:
            return False
        is_shell = PurePath(self.argv[0]).name in SHELLS
        return self.has_launcher or self.signal == "TERM" or (self.signal == "auto" and not is_shell)

    def uses(self, key: str) -> bool:
        """Return whether a key of the config has an effect on the workload; a launcher may get other keys."""
        if not self.is_command:
            return True
        return key.partition(".")[0] in USED_BY_COMMANDS and key != "logging.tensorboard"

    def takes(self, received: str) -> bool:
        """Return whether the ranks get a stop signal as received, instead of the signal that they handle."""
        return not self.is_command or (received == "SIGINT" and not self.has_launcher)

    def is_finished(self, *, was_stopped: bool, is_done: bool) -> bool:
        """Return whether exit code 0 of all ranks ends the run; `is_done` tells if the done file exists."""
        # A command often exits with 0 after a save, too.
        return not self.is_command or is_done or not was_stopped


TRAINER = Workload()


def _options(words: Sequence[str]) -> list[str]:
    """Return the words before the first word that is no option."""
    return list(takewhile(lambda word: word.startswith("-"), words))


_OUT_OF_REACH = {
    **dict.fromkeys(
        ("docker", "podman", "nerdctl", "kubectl"), "only the first process of its container gets the signal"
    ),
    **dict.fromkeys(("ssh", "pdsh", "clush"), "processes on another host do not get the signal"),
    **dict.fromkeys(("tmux", "screen", "systemd-run"), "a process outside of the job runs it"),
    **dict.fromkeys(("srun", "salloc"), "it ends its own step at once"),
    "sbatch": "it starts another job",
}
"""Maps a program whose child processes a signal may not reach to the reason."""
_PREFIXES = ("exec", "command", *WRAPPERS)
_SEPARATORS = re.compile(r"\n|;|\|\|?|&&?|[(){}]")


def out_of_reach(argv: Sequence[str]) -> str | None:
    """Return the reason why a stop signal may not reach the processes of a command, or None.

    Only the words of the command line are checked. A script that the command names is not read.
    """
    is_shell = PurePath(argv[0]).name in SHELLS and "-c" in argv[:-1]
    script = argv[argv.index("-c") + 1] if is_shell else None
    for words in [argv] if script is None else map(str.split, _SEPARATORS.split(script)):
        names = (PurePath(word).name for word in words if "=" not in word and word[0] not in "-0123456789")
        name = next((name for name in names if name not in _PREFIXES), "")
        if name in _OUT_OF_REACH:
            return f"{name}: {_OUT_OF_REACH[name]}"
    if script is not None and re.search(r"(?<![&>])&\s*$", script):
        return "its shell ends before the process that it starts with &"
    return None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def name_of(argv: Sequence[str]) -> str | None:
    """Return the name of a command's script or program without its suffix; None if it is no valid name.

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
