"""Renders templates with jinja2; a project's templates/ override the shipped ones of the same name."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UsageError
from trainkit.resources import shipped_templates
from trainkit.slurm.quoting import comment, directive, quote, words

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES_FOLDER = "templates"
LENGTH_HINT = "{# starts a comment of the template: write bash's ${#name} as ${{ '{#' }}name}"
_UNDEFINED = re.compile(r"'(?P<name>\w+)' is undefined")


def render(name: str, context: Mapping[str, Any], project: Path) -> str:
    """Render `name` from ``project/templates/``, or else from the shipped templates.

    The text has no trailing spaces and no repeated empty lines. Filters: `quote` for one word of bash,
    `words` for several, `directive` for a value in an ``#SBATCH`` line, `comment` for text after ``#``,
    `verbatim` for lines that must not change. Raises UsageError with file and line for a template that cannot
    be rendered.
    """
    from jinja2 import TemplateError

    folders = _folders(project)
    used: dict[str, Path] = {}
    environment = _environment(folders, used)
    try:
        text = environment.get_template(name).render(context)
    except UsageError as error:
        message = f"{_place(error, folders)}{error.message}"
        raise UsageError(message, hint=error.hint) from error
    except TemplateError as error:
        raise _template_error(error, folders, used, context) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the template {name}: {error}") from error
    except Exception as error:
        # Raised by an expression of the template, such as a division by zero.
        place = _place(error, folders)
        if not place:
            raise
        raise UsageError(f"{place}{type(error).__name__}: {error}", _shadow_hint(folders, used)) from error
    return _with_verbatim(_tidy(text))


def _folders(project: Path) -> list[Path]:
    """The template folders, the project's first; in a checkout of trainkit both are the same folder."""
    own, shipped = project / TEMPLATES_FOLDER, shipped_templates()
    return [own, shipped] if own.is_dir() and not own.samefile(shipped) else [shipped]


def _environment(folders: list[Path], used: dict[str, Path]) -> Environment:
    """A jinja2 environment in which a template can reach and change nothing but its own text.

    Loading a template adds it to `used`.
    """
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Loader(FileSystemLoader):
        """Records the loaded templates, and ends each with a newline."""

        def get_source(self, environment: Environment, template: str) -> Any:
            source, path, is_current = super().get_source(environment, template)
            used[template] = Path(path)
            # Else the last line of a partial would join the line after its include.
            return source if source.endswith("\n") else f"{source}\n", path, is_current

    environment = ImmutableSandboxedEnvironment(
        loader=Loader(folders),
        undefined=StrictUndefined,
        autoescape=False,  # shell scripts, not HTML: each value goes through its own filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        quote=quote, words=words, directive=directive, comment=comment, verbatim=_verbatim
    )
    return environment


def _verbatim(value: str) -> str:
    # Hides the lines from `_tidy` as hexadecimal between NULs, which no other filter lets through.
    if "\0" in value:
        raise UsageError(f"{value!a} cannot be written in a script: it contains a NUL character")
    return f"\0{value.encode(errors='surrogatepass').hex()}\0"


def _tidy(text: str) -> str:
    """Remove trailing spaces and repeated empty lines; end with one newline."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def _with_verbatim(text: str) -> str:
    return re.sub(
        "\0([0-9a-f]*)\0", lambda match: bytes.fromhex(match[1]).decode(errors="surrogatepass"), text
    )


def _place(error: BaseException, folders: list[Path]) -> str:
    """``FILE:LINE: `` of the template that raised an error; empty when none did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if any(Path(frame.filename).is_relative_to(folder) for folder in folders):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _shadow_hint(folders: list[Path], used: Mapping[str, Path]) -> str:
    if len(folders) < 2 or not any(path.is_relative_to(folders[0]) for path in used.values()):
        return ""
    return f"it overrides the template in {folders[-1]}; compare the two, or remove yours"


def _template_error(
    error: Exception, folders: list[Path], used: Mapping[str, Path], context: Mapping[str, Any]
) -> UsageError:
    from jinja2 import TemplateNotFound, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        # For an unclosed tag, jinja2 sets the name to the file.
        message = f"{error.filename or error.name}:{error.lineno}: {error.message}"
        is_length = "comment tag" in str(error.message)
        return UsageError(message, LENGTH_HINT if is_length else _shadow_hint(folders, used))
    place = _place(error, folders)
    if isinstance(error, TemplateNotFound):
        searched = " or ".join(map(str, folders))
        return UsageError(f"{place}there is no template {error.name!r} in {searched}")
    match = _UNDEFINED.fullmatch(str(error.args[0] if error.args else ""))
    if match is None:
        return UsageError(f"{place}{error}", _shadow_hint(folders, used))
    from difflib import get_close_matches

    close = get_close_matches(match["name"], context, 1)
    known = f"did you mean {close[0]}?" if close else f"available: {', '.join(sorted(context))}"
    return UsageError(f"{place}{match['name']!r} is undefined", known)
