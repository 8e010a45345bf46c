"""Adds hints to command-line errors, usually a corrected command that the user can type."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from shlex import join, quote

import click

from trainkit.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, TrainkitError, UsageError

SIMILAR = 0.75
"""Minimum similarity of a suggestion to the typed word. For example, the similarity is 0.83 for `sumbit` and
`submit`, and 0.67 for `wait` and `watch`."""
PROGRAM = re.compile(r"(\S*/)?(python[0-9.]*|torchrun|accelerate|deepspeed|wandb|bash|sh)|\S*\.(py|sh)")
SETTING = re.compile(r"-*(?P<key>[A-Za-z_]+(\.[A-Za-z_]+)+)=(?P<value>.+)")
DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"
"""Dashes that word processors and web pages substitute for ``--``."""
OTHER_COMMANDS = {
    "ls": ("list", "ps", "queue", "show", "status"),
    "status": ("ls", "list", "ps", "queue", "squeue", "sacct", "show", "jobs", "runs", "info", "describe"),
    **{"watch": ("top", "htop", "monitor", "dashboard"), "ui": ("tensorboard", "board", "wandb")},
    "wait": ("await", "poll", "block", "join"),
    **{"cancel": ("kill", "stop", "scancel", "abort", "terminate"), "prune": ("delete", "rm")},
    **{"submit": ("train", "start", "launch", "sbatch", "fit"), "run": ("exec", "srun", "torchrun")},
    **{"logs": ("tail", "cat", "output", "less"), "shell": ("salloc", "bash", "interactive")},
    **{"resume": ("continue", "restart", "retry", "rerun"), "check": ("validate", "lint")},
    **{
        "submit --dry-run": ("dry-run", "dryrun", "dry_run", "preview"),
        "schema": ("config", "keys", "options"),
    },
    **{"submit --sweep KEY=VALUE,VALUE": ("sweep", "multirun", "agent"), "ckpt verify": ("verify",)},
    **{"ckpt ls": ("checkpoint", "checkpoints", "ckpts"), "ckpt export": ("export", "convert")},
    **{"export": ("convert", "save"), "prepare": ("tokenize", "tokenize"), "validate": ("check", "verify")},
    **{"ckpt prune": ("prune", "clean"), "data prepare": ("prepare", "tokenize", "tokenize")},
    **{"generate": ("infer", "chat", "predict"), "bench": ("benchmark", "tune"), "compare": ("diff",)},
    **{"doctor": ("gpu", "gpus", "nodes", "sinfo", "nvidia-smi", "test"), "attach": ("ssh",)},
    **{"diagnose": ("explain", "why", "errors", "inspect"), "stacks": ("py-spy", "stack")},
    **{"--help": ("help", "man", "usage", "?", "/?", "/help"), "--version": ("version", "ver")},
}
"""Maps a command to the names that other programs use for a similar command."""
MOVES = "a run is a folder: use `mv` or `cp -r` to move or copy the folder after the run has stopped"
DELETES = "a run is a folder: `trainkit cancel RUN` stops a run, and `rm -r` deletes a stopped run"
RESUMES = "`trainkit resume {run}` restarts a run from its newest checkpoint"
RESUME_OPTIONS = (
    "--resume --resume-from --resume-from-checkpoint --resume-run --resume-path --auto-resume --ckpt"
    " --ckpt-path --checkpoint --from-checkpoint --load --load-checkpoint --load-from-checkpoint --restore"
    " --restart --continue --continue-from"
)
"""Options that other programs use to resume a run."""
KEEPS_LOGS = "`trainkit logs RUN` prints the output of a run; the run folder contains the log files"
HERE = "`cd` to the working directory of the run before you submit the run"
IS_SET = "trainkit sets this option itself; omit it"
IS_HERE = "`trainkit run` always uses this machine; omit this option"
ASKS_NOTHING = "trainkit never asks for confirmation; omit this option"
WRITES_ACCELERATE = (
    "trainkit writes the accelerate config itself: `trainkit submit --launcher accelerate -- train.py`"
)
OWN_LIGHTNING = "write your LightningCLI after --: `trainkit submit --launcher lightning -- main.py {args}`"
RENDEZVOUS = "trainkit chooses the address, the port and the ranks itself; omit this option"
BY_HAND = (
    "omit this option; on several hosts without Slurm, start `torchrun … -m trainkit run CONFIG` on each host"
)
OTHER_WAYS = {
    **dict.fromkeys(("--output", "--error", "-o", "-e", "--log-dir", "--logdir"), KEEPS_LOGS),
    **dict.fromkeys(("--local", "--here"), "did you mean --backend local?"),
    **dict.fromkeys(("--dependency", "-d"), "to wait for another run, use `--after RUN`"),
    **dict.fromkeys(("-v", "-V", "--v"), "did you mean `trainkit --version`?"),
    "--parsable": "to print the job id, use `--json`",
    "--pty": "to start a shell in an allocation, use `trainkit shell`",
    "--input": "to pass standard input to a COMMAND, use `trainkit submit -- COMMAND < FILE`",
    "--export": "to set an environment variable of the job, use `--set launch.env.NAME=VALUE`",
    "--nodefile": "to choose the nodes, use `--set resources.extra.nodelist=NODE,NODE`",
    **dict.fromkeys(("--open-mode", "--label", "--multi-prog", "--kill-on-bad-exit", "--overlap"), IS_SET),
    **dict.fromkeys(("--chdir", "-D", "--workdir", "--cwd", "--working-dir"), HERE),
    **dict.fromkeys(("--yes", "-y", "--force", "--overwrite", "--no-input"), ASKS_NOTHING),
    **dict.fromkeys(("--wait", "-W"), "to wait until the run has finished, use `--follow`"),
    **dict.fromkeys(("--quiet", "--silent"), "diagnostics go to stderr; `2>/dev/null` hides them"),
    **dict.fromkeys(
        ("--sweep_id", "--sweep-id", "--count"),
        "for one run per value, use `--sweep KEY=VALUE,VALUE`",
    ),
    "--verbose": "to see where an error comes from, use `trainkit --debug COMMAND …`",
    "--wrap": "write your own program after --: `trainkit submit -- COMMAND`",
    **dict.fromkeys(
        ("--standalone", "--rdzv_backend", "--rdzv-backend", "--rdzv_id", "--rdzv-id"), RENDEZVOUS
    ),
    **dict.fromkeys(("--rdzv_endpoint", "--rdzv-endpoint", "--master_addr", "--master_port"), RENDEZVOUS),
    **dict.fromkeys(
        ("--node_rank", "--machine_rank", "--main_process_ip", "--main_process_port"), RENDEZVOUS
    ),
    **dict.fromkeys(("--node-rank", "--master-addr", "--master-port"), BY_HAND),
    **dict.fromkeys(("--max_restarts", "--max-restarts"), "did you mean --set requeue.max_crashes=…?"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "`--set requeue.max=N` limits the restarts of a run"),
    **dict.fromkeys(("--use_deepspeed", "--deepspeed"), "did you mean --launcher deepspeed?"),
}
"""Maps options of other programs to hints; the trainkit command has no equivalent options."""
SBATCH_OPTIONS = (
    "acctg-freq batch bb bbf begin cluster-constraint container contiguous core-spec cores-per-socket"
    " deadline delay-boot distribution exclusive extra-node-info get-user-env gid gres-flags hint hold"
    " kill-on-invalid-dep licenses mcs-label mem-per-cpu mem-per-gpu mincpus nice nodelist ntasks-per-core"
    " ntasks-per-socket overcommit oversubscribe power prefer priority propagate reboot sockets-per-node"
    " spread-job switches thread-spec threads-per-core tmp uid use-min-nodes wckey"
)
"""sbatch options without a config key; use `resources.extra` to set them."""
SRUN_OPTIONS = (
    "accel-bind bcast compress cpu-bind gpu-bind mem-bind mpi network task-epilog task-prolog unbuffered"
)
"""srun options without a config key; use `launch.srun_extra` to set them."""
KILLS = ("-9", "-f", "--force", "--kill", "-s", "--signal")
"""Options of `kill` and `scancel` that kill a job immediately."""
SBATCH_SHORT = {"-w": "nodelist", "-L": "licenses", "-H": "hold", "-b": "begin", "-s": "oversubscribe"}
SBATCH_KEYS = {"-x": "exclude", "-M": "clusters"}
"""Maps short sbatch options to config keys; further short options are in SBATCH_SHORT."""
SLURM_ALONE = ("--time", "--partition", "--account", "--qos", "--constraint", "--mem", "--exclusive")
"""Slurm job options that have no effect on a run in the foreground."""
WORD_IS_VALUE = ("bf16", "fp16", "fp32", "cpu")
"""Options of other programs, such as `--bf16`, whose name is a value of a trainkit config key."""
OTHER_NAMES = {
    "--nodes": ("-N", "--nnodes", "--num_machines", "--num-machines"),
    "--gpus-per-node": (
        "-n",
        "-G",
        "--ntasks",
        "--ntasks-per-node",
        "--gpus",
        "--gres",
        "--gpus-per-task",
        "--num-gpus",
        "--nproc",
        "--nproc_per_node",
        "--nproc-per-node",
        "--num_processes",
        "--procs",
    ),
    "--name": ("-J", "--job-name"),
    "--time": ("-t", "--walltime"),
    "--partition": ("-p",),
    "--account": ("-A",),
    "--qos": ("-q",),
    "--constraint": ("-C",),
    "--lines": ("-n", "--tail"),
    "--follow": ("-f",),
    "--run-dir": ("--output_dir", "--output-dir", "--save_dir", "--save-dir", "--out-dir", "--rundir"),
    "--help": ("-?", "--usage"),
    "--dry-run": ("--dry", "--simulate", "--test", "--preview"),
    "--out": ("-o", "--output", "--to", "--output-dir", "--output_dir"),
    "--all": ("-a",),
}
"""Maps a trainkit option to its equivalents in Slurm's commands and in launchers."""


class CommandGroup(click.Group):
    """A group of commands that suggests the closest command if a command is unknown."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        is_option = args[0].startswith("-")
        if args[0] not in known and not is_option and self.get_command(ctx, args[0]) is None:
            hint = _command_hint(args, known, ctx.command_path)
            raise UsageError(f"unknown command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)


def _command_hint(args: Sequence[str], known: Sequence[str], program: str) -> str:
    """Return a hint for `args[0]`, an unknown command of `program`."""
    from trainkit.formats import near

    name, is_top = args[0].lower(), "submit" in known
    if name in ("rm", "rmdir", "delete", "del", "remove", "erase", "purge", "trash") and "prune" not in known:
        return DELETES
    if is_top and name in ("mv", "move", "rename", "cp", "copy"):
        return MOVES
    if "prune" in known and name not in OTHER_COMMANDS["prune"] and _is_run(args[0]):
        return f"did you mean `{program} ls {quote(args[0])}`?"
    if name == program:
        return f"did you mean `{join(args)}`?"
    if is_top and args[:2] == ["accelerate", "config"]:
        return WRITES_ACCELERATE
    if is_top and args[:2] in (["wandb", "sweep"], ["wandb", "agent"]):
        name = args[1]
    if is_top and name == "fit" and len(args) > 1:
        return OWN_LIGHTNING.format(args=join(args))
    same = (
        own
        for own, others in OTHER_COMMANDS.items()
        if name in others and (own.split()[0] in known or own[0] == "-")
    )
    starts = [own for own in known if own.startswith(name)]
    meant = next(same, None) or near(name, known, SIMILAR) or (starts[0] if len(starts) == 1 else None)
    if meant == "--help" and args[1:2] and args[1] in known:
        meant = f"{args[1]} --help"
    if meant is None and is_top:
        meant = _meant_by_operand(args)
    return f"did you mean `{program} {meant}`?" if meant else f"`{program} --help` lists the commands"


def _meant_by_operand(args: Sequence[str]) -> str | None:
    """Return the command that was probably omitted before a program, a config or a run."""
    from trainkit.folders import find_shipped_config

    if PROGRAM.fullmatch(args[0]):
        return f"submit {_with_dashes(args, 0)}"
    if args[0].endswith((".yaml", ".yml")) or find_shipped_config(args[0]) is not None:
        return f"submit {join(args)}"
    return f"status {quote(args[0])}" if _is_run(args[0]) else None


def _is_run(name: str) -> bool:
    from trainkit.run.registry import find_run

    with suppress(TrainkitError):
        find_run(name)
        return True
    return False


def from_click(error: click.ClickException, args: Sequence[str]) -> TrainkitError:
    """Convert a click error to a TrainkitError, which is usually a usage error with exit code 2."""
    message, hint = error.format_message().rstrip("."), ""
    message = message[:1].lower() + message[1:]
    context = error.ctx if isinstance(error, click.UsageError) else None
    takes_command = args[:1] in (["submit"], ["run"]) and "--" not in args
    args = args[: args.index("--")] if "--" in args else args  # Arguments after -- are part of the COMMAND.
    if isinstance(error, click.NoSuchOption):
        known = _option_names(error.ctx)
        # Click parses -help as the four options -h -e -l -p.
        word = next((word for word in args if word[:1] == "-" and f"-{word}" in known), None)
        message = f"unknown option {word or error.option_name}"
        hint = f"did you mean -{word}?" if word else _option_hint(error, args)
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"{_name(error.param)} is missing"
        examples = (context.command.epilog or "" if context else "").splitlines()
        found = [line.strip() for line in examples if line.startswith("  trainkit ")]
        hint = f"for example `{found[0]}`" if found else ""
    elif isinstance(error, click.BadOptionUsage):
        is_flag = any(word.startswith(f"{error.option_name}=") for word in args)
        message = f"{error.option_name} {'takes no' if is_flag else 'needs a'} value"
        hint = "`--help` describes every option" if error.option_name == "--help" else ""
    elif isinstance(error, click.BadParameter) and error.param is not None:
        message, hint = _bad_value(error.param, args) or (message, "")
    if isinstance(error, click.UsageError) and takes_command and (first := _program_at(args, context)):
        hint = f"write your own program after --: `trainkit {_with_dashes(args, first)}`"
    if isinstance(error, click.UsageError) and not hint:
        named = ["trainkit", *(word for word in args[:1] if not word.startswith("-"))]
        path = " ".join(named) if context is None else context.command_path
        hint = _word_hint(args) or f"see `{path} --help`"
    return TrainkitError(message, hint, error.exit_code or EXIT_FAILED)


def _options(context: click.Context | None) -> list[click.Option]:
    params = [] if context is None else context.command.params
    return [item for item in params if isinstance(item, click.Option)]


def _option_names(context: click.Context | None) -> list[str]:
    names = [name for item in _options(context) for name in item.opts]
    return names + ([] if context is None else context.help_option_names)


def _program_at(args: Sequence[str], context: click.Context | None) -> int:
    """Return the index of the user's program in the command line, or 0 if there is none."""
    with_value = {name for item in _options(context) if not item.is_flag for name in item.opts}
    found = (index for index, word in enumerate(args) if PROGRAM.fullmatch(word) and "=" not in word)
    return next((index for index in found if args[index - 1] not in with_value), 0)


def _with_dashes(args: Sequence[str], first: int) -> str:
    """Return the command line with the missing ``--`` inserted before the user's program."""
    own, program = [word for word in args[:first] if word.strip(DASHES + "-")], args[first:]
    launcher = program[0].rpartition("/")[2]
    script = next((at for at, word in enumerate(program) if word.endswith(".py")), 0)
    if launcher in ("torchrun", "accelerate", "deepspeed") and script and "--launcher" not in own:
        own, program = [*own, "--launcher", launcher], program[script:]
    # With --launcher, the launcher itself starts Python.
    python = ["python"] if program[0].endswith(".py") and "--launcher" not in own else []
    shell = ["bash"] if program[0].endswith(".sh") else []
    return join([*own, "--", *python, *shell, *program])


def _name(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else str(param.human_readable_name)


def _word_hint(args: Sequence[str]) -> str:
    """Return a hint for an argument that is a misspelled option or setting."""
    rest = args[1:]
    if (cut := _cut_setting(args)) is not None:
        return cut[2]
    if args[:1] in (["cancel"], ["watch"], ["logs"], ["diagnose"], ["resume"]) and all(map(_is_run, rest)):
        return f"specify only one run: `trainkit {join(args[:2])}`"
    if (
        args[:1] in (["status"], ["report"])
        and len(rest) > 1
        and not any(word.startswith("-") for word in rest)
    ):
        return f"to see several runs side by side, use `trainkit compare {join(rest)}`"
    if args[:1] == ["init"] and len(rest) == 1 and (task := _task_name(rest[0])).isidentifier():
        return f"did you mean --task {task}?"
    if sum(word.endswith((".yaml", ".yml")) for word in rest) > 1:
        files = [word for word in rest if word.endswith((".yaml", ".yml"))]
        return f"to combine the files, write a config with `extends: [{', '.join(files)}]`"
    from trainkit.config.schema import all_keys, meant

    for word, value in itertools.pairwise(rest):
        if word in all_keys() and not value.startswith("-"):
            return f"did you mean --set {quote(f'{word}={value}')}?"
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key.isidentifier() and (path := meant((key,))):
            return f"did you mean --set {quote(f'{path}={value}')}?"
    for word in args:
        if word and word[0] in DASHES:
            return f"{word} does not begin with ASCII hyphens: write --{word.lstrip(DASHES + '-')}"
        if (found := SETTING.fullmatch(word)) is not None:
            return _setting_hint(found)
    return ""


def _task_name(word: str) -> str:
    return "" if word.startswith("-") else re.sub(r"\W+", "_", word.removesuffix(".py").lower())


_NUMBER = r"[-+]?[\d.]+(?:[eE][-+]?\d+)?"
_LOOSE = re.compile(rf"=|=?{_NUMBER}(?:,+{_NUMBER})*,*|[a-z_.]+=\S+")
"""Matches a stray equals sign, numbers, or a setting that a space separates from its option."""


def _cut_setting(args: Sequence[str]) -> tuple[str, str, str] | None:
    """Find an argument that is part of a ``--set`` or ``--sweep`` setting but is split off by a space.

    Returns the argument, the complete setting and a hint.
    """
    for at, word in enumerate(args):
        option, equals, text = word.partition("=")
        if option not in ("--set", "--sweep"):
            continue
        rest = list(args[at + 1 :] if equals else args[at + 2 :])
        text = text if equals else next(iter(args[at + 1 :]), "")
        key, _, value = text.partition("=")
        if not rest or rest[0].startswith("-") or not key:
            continue
        whole = " ".join([option, text, rest[0]])
        if not value:  # The user typed --set KEY VALUE or --set KEY = VALUE.
            found = next((one.lstrip("=") for one in rest[:2] if one.lstrip("=")), "")
            from trainkit.config.schema import is_known, meant

            path = tuple(key.split("."))
            key = key if is_known(path) else meant(path) or key
            return (rest[0], whole, f"did you mean {option} {quote(f'{key}={found}')}?") if found else None
        loose = list(itertools.takewhile(_LOOSE.fullmatch, rest))
        if loose and "=" in loose[0].lstrip("="):
            return loose[0], whole, f"did you mean {option} {quote(loose[0])}?"
        if loose:
            several = ",".join(part for one in (value, *loose) for part in one.split(",") if part)
            return loose[0], whole, f"did you mean --sweep {quote(f'{key}={several}')}?"
    return None


def cut_setting(args: Sequence[str], config: str | None) -> TrainkitError | None:
    """Return an error if CONFIG is ``help`` or part of the preceding setting; else None."""
    if config == "help" and args[-1:] == ["help"]:
        return UsageError("help: no such file or shipped config", hint=_help_hint(args))
    found = _cut_setting(args[: args.index("--")] if "--" in args else args)
    if found is None or found[0] != config:
        return None
    return UsageError(
        f"{found[1]}: a setting must be a single argument, with its values separated by commas", hint=found[2]
    )


def as_typed(error: TrainkitError, args: Sequence[str]) -> TrainkitError:
    """Return the error with the corrected command line as its hint, if a correction is known."""
    from trainkit.run.registry import RunInOtherFolder

    if isinstance(error, RunInOtherFolder) and error.only is not None:
        words, end = list(args), args.index("--") if "--" in args else len(args)
        at = max((at for at in range(1, end) if args[at] == error.typed), default=None)
        if at is None:
            return error
        words[at] = str(error.only)
        return UsageError(error.message, hint=f"`{join(['trainkit', *words])}` uses this run")
    asks_help = len(args) > 1 and args[-1] == "help" and "--" not in args
    if asks_help and error.exit_code == EXIT_USAGE and not isinstance(error, ConfigError):
        return UsageError(error.message, hint=_help_hint(args))
    return error


def _help_hint(args: Sequence[str]) -> str:
    return f"did you mean `{join(['trainkit', *args[:-1]])} --help`?"


def _setting_hint(found: re.Match[str], known: Sequence[str] = ("--set",)) -> str:
    """Return a hint for ``key=value``.

    If a single-valued key has several values, the hint suggests ``--sweep``.
    """
    from trainkit.config.schema import is_known, meant
    from trainkit.config.suggest import accepts, other_key_says

    path, value = tuple(found["key"].split(".")), found["value"]
    if not is_known(path):
        if said := other_key_says(path[-1]):
            return said
        path = tuple((meant(path) or found["key"]).split("."))
    is_sweep = "--sweep" in known and "," in value and not accepts(path, value)
    return f"did you mean {'--sweep' if is_sweep else '--set'} {quote('.'.join(path) + '=' + value)}?"


def _option_hint(error: click.NoSuchOption, args: Sequence[str]) -> str:
    """Return a hint for an unknown option: the option or config key that was probably meant."""
    from difflib import get_close_matches

    known, typed = _option_names(error.ctx), error.option_name
    value, program = _typed([typed], args), "" if error.ctx is None else error.ctx.command_path
    if "--json" in known and value == "json":
        return "did you mean --json?"
    if typed in ("--run", "--run-name", "--name") and _takes_run(error.ctx):
        return f"RUN is an argument, not an option: `{program} {quote(value or 'RUN')}`"
    if moved := _of_another_command(typed, error.ctx, args):
        return moved
    if error.ctx is not None and error.ctx.command.name == "cancel" and typed in KILLS:
        return "did you mean --now?"
    if same := [name for name in known if typed in OTHER_NAMES.get(name, ())]:
        return f"did you mean {_with_value(sorted(same), value)}?"
    if typed == "-c" and "--set" in known and (value or "").isdigit():
        return f"did you mean --set resources.cpus_per_gpu={value}?"
    if args[1:2] == ["fit"]:
        return OWN_LIGHTNING.format(args=join(args[1:]))
    if typed in ("--config", "-c", "--file", "--model") and _names_config(typed, value):
        return f"CONFIG is an argument, not an option: `{program} {quote(value or 'CONFIG')}`"
    if typed in ("--env", "-e", "--export") and "--set" in known and "=" in (value or ""):
        return f"did you mean --set {quote(f'launch.env.{value}')}?"
    if typed.replace("_", "-") in RESUME_OPTIONS.split() and args[0] in ("submit", "run"):
        is_run = value is not None and not value.startswith("-") and _is_run(value)
        return RESUMES.format(run=quote(value) if is_run else "RUN")  # type: ignore[arg-type]
    if args[0] == "run" and typed in ("--local", "--here", "--backend", *SLURM_ALONE):
        return IS_HERE
    if typed.startswith("--trainer.") and "--set" in known:
        of_trainer = _key_hint("--" + typed.removeprefix("--trainer."), value, (), known)
        return of_trainer or OWN_LIGHTNING.format(args=join(args[1:]))
    if typed in OTHER_WAYS:
        return OTHER_WAYS[typed]
    if typed == "--dry-run" and args[0] == "run":
        return "`trainkit submit --backend local --dry-run …` shows what would run"
    if "--set" in known and (found := _key_hint(typed, value, args, known)):
        return found
    starts = [name for name in known if len(typed) > 3 and name.startswith(typed)]
    close = starts or get_close_matches(typed.lower().replace("_", "-"), known, cutoff=SIMILAR)
    return f"did you mean {' or '.join(sorted(close))}?" if close else ""


def _takes_run(context: click.Context | None) -> bool:
    params = [] if context is None else context.command.params
    return any(isinstance(item, click.Argument) and "RUN" in item.human_readable_name for item in params)


def _of_another_command(typed: str, context: click.Context | None, args: Sequence[str]) -> str:
    """Return a hint if a command's option precedes the command, or if a global option follows the command."""
    from difflib import get_close_matches

    if context is None:
        return ""
    root = context.find_root()
    if context is root and isinstance(root.command, click.Group):
        name = next((word for word in args if word in root.command.list_commands(root)), "")
        command = root.command.get_command(root, name)
        if command is not None and any(typed in item.opts for item in command.params):
            rest = list(args)
            rest.remove(name)
            return f"write the options of a command after the command: `{join(['trainkit', name, *rest])}`"
    elif meant := get_close_matches(
        typed, [name for item in root.command.params for name in item.opts], 1, 0.9
    ):
        rest = [word for word in args if word != typed]
        return f"write this option before the command: `{join(['trainkit', meant[0], *rest])}`"
    return ""


def _with_value(names: Sequence[str], value: str | None) -> str:
    """Return the trainkit options that replace another program's option.

    For ``--gres gpu:a100:4``, an option for the GPU type is included.
    """
    *kind, count = (value or "").removeprefix("gpu:").split(":")
    if names == ["--gpus-per-node"] and value != count and count.isdigit() and len(kind) < 2:
        return " ".join([*(f"--gpu-type {one}" for one in kind), f"--gpus-per-node {count}"])
    return " or ".join(names)


def _names_config(typed: str, value: str | None) -> bool:
    from trainkit.folders import find_shipped_config

    return typed != "--model" or find_shipped_config(value or "") is not None


def _key_hint(typed: str, value: str | None, args: Sequence[str], known: Sequence[str]) -> str:
    """Return a hint for another program's option, with the config key and a valid value."""
    from trainkit.config.schema import all_keys, other_names, sections
    from trainkit.config.suggest import accepts, nearest, other_key_says

    name = SBATCH_SHORT.get(typed, typed.lstrip("-"))
    is_of_sbatch = name in SBATCH_OPTIONS.split()
    if is_of_sbatch or name in SRUN_OPTIONS.split():
        extra = f"{'resources.extra' if is_of_sbatch else 'launch.srun_extra'}.{name}"
        is_flag = value is None or value.startswith("-")
        return f"did you mean --set {quote(extra + '=' + ('true' if is_flag else str(value)))}?"
    loose = (
        word for before, word in zip(["", *args], args, strict=False) if before not in ("--set", "--sweep")
    )
    if found := next(filter(None, map(SETTING.fullmatch, loose)), None):
        return _setting_hint(found, known)
    word = SBATCH_KEYS.get(typed, typed).lstrip("-").replace("-", "_")
    if said := other_key_says(word) or other_key_says(word.removeprefix("use_")):
        return said
    keys = [*all_keys(), *sections()]
    key = other_names().get(word) or next(
        (key for key in keys if key in (word, f"{key.partition('.')[0]}.{word}")), None
    )
    if key is None:
        return ""
    if (option := f"--{key.rpartition('.')[2].replace('_', '-')}") in known:
        return f"did you mean {option}?"
    path = tuple(key.split("."))
    if key in sections():
        inner = [(key, name) for name in sections()[key]]
        path = next((one for one in inner if value and not value.isdigit() and nearest(one, value)), ())
        if not path:
            return ""
    if word in WORD_IS_VALUE:
        value = word
    if accepts(path, "true") and not accepts(path, "x") and (value is None or value.startswith("-")):
        value = "true"
    key, meant = ".".join(path), None if value is None else nearest(path, value)
    if value is not None and meant is None and accepts(path, value):
        meant = value
    return f"did you mean --set {quote(f'{key}={meant}') if meant is not None else f'{key}=…'}?"


def _typed(names: Sequence[str], args: Sequence[str]) -> str | None:
    """Return the last value that the user typed for any of the options `names`."""
    value = None
    for word, following in zip(args, [*args[1:], None], strict=True):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else following
    return value


def _bad_value(param: click.Parameter, args: Sequence[str]) -> tuple[str, str] | None:
    """Return a message and a hint for an invalid number or choice, in the style of config problems."""
    from trainkit.config.schema import allowed_values, schema_words
    from trainkit.config.suggest import readings
    from trainkit.folders import INTERPOLATION, NOT_EVALUATED

    kind, name = param.type, _name(param)
    # A command that takes a choice as its argument takes no further arguments, so the invalid value comes
    # last.
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
    if INTERPOLATION.search(value):
        return message, f"{NOT_EVALUATED}: specify the value itself"
    if value == "all" and name == "--rank":
        return message, "did you mean --all?"
    if (counted := _with_value([name], value)) != name:
        return message, f"did you mean {counted}?"
    return message, "" if meant is None else f"did you mean {name} {quote(meant)}?"
