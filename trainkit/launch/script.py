"""Render the batch script for a Slurm job from a plan, a config and a run folder."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import __version__
from trainkit.backend import JobScript, backend_named
from trainkit.config import RunConfig
from trainkit.errors import UsageError
from trainkit.folders import shipped_templates
from trainkit.formats import plural
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.launch.environment import JobEnvironment, find_interpreter, make_job_environment
from trainkit.launch.secrets import refuse_leaks
from trainkit.plan.launch import LaunchPlan
from trainkit.quoting import comment, directive, quote, words
from trainkit.run.record import CodeCopy
from trainkit.run.rundir import STARTS_FOLDER, RunDir
from trainkit.run.submitted import SUBMITTED_VARIABLE
from trainkit.shipped import TASKS

if TYPE_CHECKING:
    from jinja2 import Environment


def script_for(
    run: RunDir,
    attempt: int,
    plan: LaunchPlan,
    config: RunConfig,
    cwd: Path,
    code: CodeCopy | None,
    submitted: str,
    array: str | None = None,
) -> JobScript:
    """Return the batch script for an attempt; `cwd` is the working directory at submission.

    `submitted` is the result of `submitted_hash` or `submitted_group_hash`. `code` describes the code copy;
    None if there is no copy. With `array`, such as ``0-9%4``, `run` is the folder of a group, and each array
    task finds its own run in the group. Templates in ``cwd/templates`` override the built-in templates.
    Raises UsageError if a value cannot be written to a script or is a secret.
    """
    backend = backend_named(plan.backend)
    assert backend.template is not None
    environment = _job_environment(run, plan, config, cwd, code)
    agent = (*environment.rank_python, "-m", "trainkit.job.node.agent", str(run.path))
    parts = backend.script_parts(run, attempt, plan, (*environment.srun_options, *agent), array)
    context = {
        "version": __version__,
        "summary": _summary(run, plan),
        "directives": parts.directives,
        "workdir": environment.workdir,
        "other_workdir": _other_workdir(run, plan, code),
        "starts": str(run.path / STARTS_FOLDER),
        "restarts": parts.restarts,
        "run_dir": str(run.path),
        "is_array": array is not None,
        "per": plan.per,
        "submitted_variable": SUBMITTED_VARIABLE,
        "submitted": submitted,
        "step": parts.step[:-1],
        "supervisor": (*environment.host_python, "-m", "trainkit.job.supervisor"),
        "environment": environment,
    }
    text = render(backend.template, context, cwd)
    script = JobScript(text, parts.directives, text, parts.step, environment.host_python)
    script = backend.finish_script(run, script)
    refuse_leaks(script.text, str(run.script_file), config.secrets, os.environ)
    return script


def _other_workdir(run: RunDir, plan: LaunchPlan, code: CodeCopy | None) -> str | None:
    """Return a working directory to use if the working directory at submission no longer exists.

    Returns None if the job needs files in the original working directory.
    """
    if plan.workload.is_command:
        return None  # A COMMAND runs in its code copy, if any, and needs no fallback
    return str(run.path) if code is None else code.workdir


def _job_environment(
    run: RunDir, plan: LaunchPlan, config: RunConfig, cwd: Path, code: CodeCopy | None
) -> JobEnvironment:
    launch = config.launch
    interpreter, _ = find_interpreter(launch, cwd)
    if plan.workload.is_command and launch.container is None:
        # The environment of a COMMAND may not contain trainkit, so its agent uses the current interpreter.
        ours: Any = {"argv": (sys.executable,), "options": PYTHON_OPTIONS}
        interpreter = replace(interpreter, **ours, host_argv=ours["argv"], host_options=ours["options"])
    workdir, python_path, folders = str(cwd), list[str](), [str(cwd)]
    if code is not None:
        folders.append(code.code)  # The code copy may be in the group's folder.
        python_path = code.import_path
        workdir = code.workdir if plan.workload.is_command else workdir
    if not plan.workload.is_command:
        folders += _data_paths(config)
    return make_job_environment(
        launch,
        interpreter,
        run_dir=str(run.path),
        workdir=workdir,
        cwd=str(cwd),
        slurm_version=() if plan.slurm is None else plan.slurm.version,
        env=plan.environment.variables,
        python_path=python_path,
        folders=folders,
        program=plan.environment.container_program,
        gpus=plan.device == "cuda",
    )


def _data_paths(config: RunConfig) -> list[str]:
    """Return the paths that a container must mount: texts or shards, tokenizer, cache and initial weights."""
    data = config.data
    listed = [[value] if isinstance(value, str) else value or [] for value in (data.source, data.val_source)]
    named = [*listed[0], *listed[1], data.tokenizer, data.cache_dir, config.model.init_from]
    if config.model.hf is not None:
        folder = Path(config.model.hf)
        # The files of a downloaded model are symlinks to the folder `blobs`, which is next to `snapshots`.
        named.append(str(folder.parents[1] if folder.parent.name == "snapshots" else folder))
    if config.task in TASKS:
        files = (config.task_args.get(name) for name in TASKS[config.task].paths)
        named += [str(Path(file).parent) for file in files if isinstance(file, str)]
    paths = [Path(name) for name in named if name is not None]
    return [str(path) for path in paths if path.is_absolute() and path.exists()]


def _summary(run: RunDir, plan: LaunchPlan) -> str:
    each = plural(plan.workers_per_node, "worker")
    spare = f", and {plan.spare_nodes} spare" if plan.spare_nodes else ""
    return f"{run.name}: {plan.shown_nodes} with {each} each{spare}, one Slurm task per {plan.per}"


TEMPLATES_FOLDER = "templates"


def render(name: str, context: Mapping[str, object], project: Path) -> str:
    """Render the template `name` from ``project/templates/`` or, if it is missing there, the built-in one.

    The rendered text has no trailing spaces and no repeated empty lines. The following filters are available
    in templates:

    - `quote` for one bash argument
    - `words` for several bash arguments
    - `directive` for a value in an ``#SBATCH`` line
    - `comment` for text after ``#``
    - `verbatim` for lines that must not change

    Raises UsageError with the file and line if a template cannot be rendered.
    """
    from jinja2 import TemplateNotFound, TemplateSyntaxError, UndefinedError

    folders = _folders(project)
    environment = _environment(folders)
    try:
        text = environment.get_template(name).render(context)
    except UsageError as error:
        raise UsageError(f"{_place(error, folders)}{error.message}", hint=error.hint) from error
    except TemplateSyntaxError as error:
        # For an unclosed comment (`{#`), jinja2 sets the error's `name` to the path of the file and leaves
        # `filename` unset.
        message = f"{error.filename or error.name}:{error.lineno}: {error.message}"
        raise UsageError(message, hint=f"the files in {TEMPLATES_FOLDER}/ are Jinja templates") from error
    except TemplateNotFound as error:
        searched = " or ".join(map(str, folders))
        message = f"{_place(error, folders)}there is no template {error.name!r} in {searched}"
        raise UsageError(message, hint="check the name after `extends` or `include`") from error
    except Exception as error:
        # An expression in the template failed, for example because of an undefined name or a division by
        # zero.
        place = _place(error, folders) or f"{name}: "
        names = (
            f"variables in templates: {', '.join(sorted(context))}"
            if isinstance(error, UndefinedError)
            else ""
        )
        own = f"{TEMPLATES_FOLDER}/ overrides the templates in {folders[-1]}" if len(folders) > 1 else ""
        hint = "; ".join(filter(None, (names, own)))
        raise UsageError(f"{place}{type(error).__name__}: {error}", hint) from error
    return re.sub(
        "\0([0-9a-f]*)\0", lambda found: bytes.fromhex(found[1]).decode(errors="surrogatepass"), _tidy(text)
    )


def _folders(project: Path) -> list[Path]:
    """Return the template folders; the project's folder comes first.

    If the project is trainkit itself, both folders are identical.
    """
    own, shipped = project / TEMPLATES_FOLDER, shipped_templates()
    return [own, shipped] if own.is_dir() and not own.samefile(shipped) else [shipped]


def _environment(folders: list[Path]) -> Environment:
    """Return a sandboxed jinja2 environment, where templates cannot execute arbitrary code."""
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Loader(FileSystemLoader):
        """Loads templates, and appends a newline to a template that does not end in one."""

        def get_source(self, environment: Environment, template: str) -> Any:
            source, path, is_current = super().get_source(environment, template)
            # Without a final newline, the last line of an included template would be joined with the line
            # after the include.
            return source if source.endswith("\n") else f"{source}\n", path, is_current

    environment = ImmutableSandboxedEnvironment(
        loader=Loader(folders),
        undefined=StrictUndefined,
        autoescape=False,  # The output is a shell script, and templates quote each value with a filter.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        quote=quote, words=words, directive=directive, comment=comment, verbatim=_verbatim
    )
    return environment


def _verbatim(value: str) -> str:
    # Hex-encode the lines between NULs so that `_tidy` does not change them. The NULs are unambiguous,
    # because no other filter outputs NULs.
    if "\0" in value:
        message = f"{value!a} cannot be written in a script: it contains a NUL character"
        raise UsageError(message, hint="remove it")
    return f"\0{value.encode(errors='surrogatepass').hex()}\0"


def _tidy(text: str) -> str:
    """Remove trailing spaces and repeated empty lines, and end the text with a single newline."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def _place(error: BaseException, folders: list[Path]) -> str:
    """Return ``FILE:LINE: `` for the template that raised an error; "" if no template raised it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if any(Path(frame.filename).is_relative_to(folder) for folder in folders):
            return f"{frame.filename}:{frame.lineno}: "
    return ""
