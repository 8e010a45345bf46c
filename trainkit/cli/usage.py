"""What was wrong with a command line, as an error with a hint that can be typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from shlex import join, quote

import click

from trainkit.errors import EXIT_FAILED, TrainkitError, UsageError

SIMILAR = 0.75
"""`sumbit` is like `submit` (0.83); `wait` is not like `watch` (0.67)."""
PROGRAM = re.compile(r"(.*/)?(python[0-9.]*|torchrun|accelerate|deepspeed)|.*\.py")
SETTING = re.compile(r"-*(?P<key>[A-Za-z_]+(\.[A-Za-z_]+)+)=(?P<value>.+)")
DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"
"""What a word processor or a web page makes of ``--``."""
OTHER_COMMANDS = {
    **dict.fromkeys(("status", "ls"), ("ls", "list", "ps", "queue", "show")),
    **{"cancel": ("kill", "stop", "scancel"), "prune": ("delete", "rm")},
    **{"submit": ("train", "start", "launch", "sbatch"), "logs": ("tail", "cat", "output")},
    **{"resume": ("continue", "restart"), "check": ("validate",)},
    **{"--help": ("help",), "--version": ("version",)},
}
"""Command -> those of other programs that mean the same."""
DELETES = "a run is a folder: `rm -r` deletes one that has ended, `trainkit cancel RUN` ends one that runs"
RESUMES = "`trainkit resume RUN` starts a run again from its newest checkpoint"
KEEPS_LOGS = "`trainkit logs RUN` shows what a run prints; the files are in its run folder"
OTHER_WAYS = {
    **dict.fromkeys(("--resume", "--ckpt_path", "--ckpt-path", "--continue", "--restart"), RESUMES),
    **dict.fromkeys(("--resume_from_checkpoint", "--resume-from-checkpoint"), RESUMES),
    **dict.fromkeys(("--output", "--error", "-o", "-e", "--log-dir", "--logdir"), KEEPS_LOGS),
    **dict.fromkeys(("--local", "--here"), "did you mean --backend local?"),
    **dict.fromkeys(("--dependency", "-d"), "`--after RUN` waits for another run"),
    **dict.fromkeys(("-v", "-V"), "did you mean --version?"),
}
"""Option of other programs -> what to type instead, where that is no option of the same command."""
SBATCH_OPTIONS = (
    *("begin", "bb", "contiguous", "core-spec", "deadline", "delay-boot", "distribution", "exclusive"),
    *("gres-flags", "hold", "licenses", "mem-per-cpu", "mem-per-gpu", "mincpus", "nice", "nodelist"),
    *("priority", "switches", "threads-per-core", "tmp", "wckey"),
)
"""Options of sbatch that have no key of their own: `resources.extra` takes them."""
OTHER_NAMES = {
    "--nodes": ("-N", "--nnodes", "--num_machines", "--num-machines"),
    "--gpus-per-node": (
        *("-n", "--ntasks", "--ntasks-per-node", "--gpus", "--gres"),
        *("--nproc", "--nproc_per_node", "--nproc-per-node", "--num_processes", "--procs"),
    ),
    "--name": ("-J", "--job-name"),
    "--time": ("-t", "--walltime"),
    "--partition": ("-p",),
    "--account": ("-A",),
    "--qos": ("-q",),
    "--constraint": ("-C",),
    "--lines": ("-n", "--tail"),
    "--follow": ("-f",),
}
"""Option -> those of Slurm's commands and of launchers that mean the same."""


class CommandGroup(click.Group):
    """A group that names the command which was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            hint = _command_hint(args[0], known, ctx.command_path)
            raise UsageError(f"unknown command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)


def _command_hint(name: str, known: Sequence[str], program: str) -> str:
    """What to type in place of an unknown command of `program`."""
    from trainkit.formats import near

    if name in ("rm", "delete", "remove") and "prune" not in known:
        return DELETES
    if "prune" in known and name not in OTHER_COMMANDS["prune"]:
        from trainkit.run.registry import find_run

        with suppress(TrainkitError):
            find_run(name)
            return f"did you mean `{program} ls {quote(name)}`?"
    same = (
        own for own, others in OTHER_COMMANDS.items() if name in others and (own in known or own[0] == "-")
    )
    meant = near(name.lower(), known, SIMILAR) or next(same, None)
    return f"did you mean `{program} {meant}`?" if meant else f"`{program} --help` lists the commands"


def from_click(error: click.ClickException, args: Sequence[str]) -> TrainkitError:
    """Convert a click error; most are usage errors and exit with 2."""
    message, hint = error.format_message().rstrip("."), ""
    message = message[:1].lower() + message[1:]
    context = error.ctx if isinstance(error, click.UsageError) else None
    takes_command = args[:1] in (["submit"], ["run"]) and "--" not in args
    args = args[: args.index("--")] if "--" in args else args  # what follows is not trainkit's
    if isinstance(error, click.NoSuchOption):
        message = f"unknown option {error.option_name}"
        hint = _option_hint(error, args)
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"{_name(error.param)} is missing"
        examples = (context.command.epilog or "" if context else "").splitlines()
        found = [line.strip() for line in examples if line.startswith("  trainkit ")]
        hint = f"for example `{found[0]}`" if found else ""
    elif isinstance(error, click.BadOptionUsage):
        is_flag = any(word.startswith(f"{error.option_name}=") for word in args)
        message = f"{error.option_name} {'takes no' if is_flag else 'needs a'} value"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        message, hint = _bad_value(error.param, args) or (message, "")
    if isinstance(error, click.UsageError) and takes_command and (first := _program_at(args, context)):
        hint = f"a program of your own comes after --: `{_with_dashes(args, first)}`"
    if isinstance(error, click.UsageError) and not hint:
        named = ["trainkit", *(word for word in args[:1] if not word.startswith("-"))]
        path = " ".join(named) if context is None else context.command_path
        hint = _word_hint(args) or f"see `{path} --help`"
    return TrainkitError(message, hint, error.exit_code or EXIT_FAILED)


def _options(context: click.Context | None) -> list[click.Option]:
    params = [] if context is None else context.command.params
    return [item for item in params if isinstance(item, click.Option)]


def _program_at(args: Sequence[str], context: click.Context | None) -> int:
    """The index of the program in a command line, 0 without one; the value of an option is none."""
    with_value = {name for item in _options(context) if not item.is_flag for name in item.opts}
    found = (index for index, word in enumerate(args) if PROGRAM.fullmatch(word) and "=" not in word)
    return next((index for index in found if args[index - 1] not in with_value), 0)


def _with_dashes(args: Sequence[str], first: int) -> str:
    """The command that was meant, where the ``--`` before a program was forgotten."""
    own, program = args[:first], args[first:]
    # The launchers start Python themselves.
    python = ["python"] if program[0].endswith(".py") and "--launcher" not in own else []
    return join(["trainkit", *own, "--", *python, *program])


def _name(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else str(param.human_readable_name)


def _word_hint(args: Sequence[str]) -> str:
    """A word of the command line that is an option or a setting, written in another way."""
    rest = args[1:]
    if rest and rest[-1] == "help":
        return f"did you mean `trainkit {join(args[:-1])} --help`?"
    if args[:1] == ["status"] and len(rest) > 1 and not any(word.startswith("-") for word in rest):
        return f"`trainkit compare {join(rest)}` shows several runs side by side"
    if args[:1] == ["init"] and len(rest) == 1 and rest[0].isidentifier():
        return f"did you mean --task {rest[0]}?"
    if sum(word.endswith((".yaml", ".yml")) for word in rest) > 1:
        files = [word for word in rest if word.endswith((".yaml", ".yml"))]
        return f"a config that contains `extends: [{', '.join(files)}]` combines them"
    for word in args:
        if word[:1] in DASHES:
            return f"{word} begins with a dash that is not -: write --{word.lstrip(DASHES + '-')}"
        if (found := SETTING.fullmatch(word)) is not None:
            return _setting_hint(found)
    return ""


def _setting_hint(found: re.Match[str], known: Sequence[str] = ("--set",)) -> str:
    """The option for ``key=value``: several values of a key that takes one are a sweep."""
    from trainkit.config.suggest import accepts

    path, value = tuple(found["key"].split(".")), found["value"]
    is_sweep = "--sweep" in known and "," in value and not accepts(path, value)
    return f"did you mean {'--sweep' if is_sweep else '--set'} {quote(found['key'] + '=' + value)}?"


def _option_hint(error: click.NoSuchOption, args: Sequence[str]) -> str:
    """The option that was meant, by its name here, or the key of the config that has no option."""
    from difflib import get_close_matches

    known = [name for item in _options(error.ctx) for name in item.opts]
    typed = next((word for word in args if word[:1] == "-" and f"-{word}" in known), error.option_name)
    if typed != error.option_name:
        return f"did you mean -{typed}?"
    same = [name for name in known if typed in OTHER_NAMES.get(name, ())]
    close = same or get_close_matches(typed.lower(), known, cutoff=SIMILAR)
    if close:
        return f"did you mean {' or '.join(sorted(close))}?"
    if typed in ("--config", "-c", "--file") and error.ctx is not None:
        named = quote(_typed([typed], args) or "CONFIG")
        return f"CONFIG has no option: `{error.ctx.command_path} {named}`"
    if typed in OTHER_WAYS and (typed not in ("-v", "-V") or "--version" in known):
        return OTHER_WAYS[typed]
    if typed.lstrip("-") in SBATCH_OPTIONS and "--set" in known:
        extra = f"resources.extra.{typed.lstrip('-')}"
        following = _typed([typed], args)
        is_flag = following is None or following.startswith("-")
        return f"did you mean --set {quote(extra + '=' + ('true' if is_flag else str(following)))}?"
    if typed == "--dry-run" and args[0] == "run":
        return "`trainkit submit --backend local --dry-run …` shows what would run"
    loose = (
        word for before, word in zip(["", *args], args, strict=False) if before not in ("--set", "--sweep")
    )
    if "--set" in known and (found := next(filter(None, map(SETTING.fullmatch, loose)), None)):
        return _setting_hint(found, known)
    if "--set" in known:
        from trainkit.config.schema import OTHER_KEYS, all_keys
        from trainkit.config.suggest import nearest

        word = typed.lstrip("-").replace("-", "_")
        key = OTHER_KEYS.get(word) or next((key for key in all_keys() if key.endswith(f".{word}")), None)
        if key is not None:
            value = _typed([typed], args)
            if value is not None:
                value = nearest(tuple(key.split(".")), value) or value
            return f"did you mean --set {quote(f'{key}={value}') if value is not None else f'{key}=…'}?"
    return ""


def _typed(names: Sequence[str], args: Sequence[str]) -> str | None:
    """The last value that was typed for an option with these names."""
    value = None
    for word, following in zip(args, [*args[1:], None], strict=True):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else following
    return value


def _bad_value(param: click.Parameter, args: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with a number or choice, in the words of a config's problems, and what was meant."""
    from trainkit.config.schema import allowed_values, schema_words
    from trainkit.config.suggest import GRES, readings

    kind, name = param.type, _name(param)
    # An argument with a choice is the only one of its command.
    value = _typed(param.opts, args) if isinstance(param, click.Option) else args[-1]
    choices: Sequence[str] = ()
    if key := getattr(kind, "config_key", ()):
        words = ", or ".join((allowed_values(key), *getattr(kind, "others", ())))
    elif isinstance(kind, click.IntRange | click.FloatRange):
        bounds = {"exclusiveMinimum" if kind.min_open else "minimum": kind.min}
        bounds |= {"exclusiveMaximum" if kind.max_open else "maximum": kind.max}
        whole = isinstance(kind, click.IntRange)
        schema = {key: bound for key, bound in bounds.items() if bound is not None}
        words = schema_words({"type": "integer" if whole else "number", **schema})
    elif isinstance(kind, click.Choice):
        choices = [str(choice) for choice in kind.choices]
        words = schema_words({"enum": choices})
    else:
        return None
    if value is None:
        return None

    def accept(text: str) -> bool:
        try:
            kind(text, param)
        except click.BadParameter:
            return False
        return True

    meant = next(filter(accept, readings(value, choices)), None)
    message = f"{name} {value}: must be {words}"
    if name == "--gpus-per-node" and (gres := GRES.fullmatch(value)) and gres[2]:
        return message, f"did you mean {name} {gres[2]} --gpu-type {gres[1]}?"
    return message, "" if meant is None else f"did you mean {name} {quote(meant)}?"
