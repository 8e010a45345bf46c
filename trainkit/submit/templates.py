"""Renders templates; one that lies in the project takes the place of the shipped one of the same name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UsageError
from trainkit.resources import shipped_templates
from trainkit.submit.quoting import comment, directive, quote, words

if TYPE_CHECKING:
    from types import CodeType

    from jinja2 import BytecodeCache, Environment
    from jinja2.bccache import Bucket

TEMPLATES_FOLDER = "templates"
LENGTH_HINT = "{# begins a comment of the template: write bash's ${#name} as ${{ '{#' }}name}"
_UNDEFINED = re.compile(r"'(?P<name>\w+)' is undefined")


@dataclass(frozen=True)
class UsedTemplate:
    """A template or partial that went into a text."""

    name: str
    """Below templates/, for example ``partials/environment.sh.j2``."""
    path: Path
    own: bool
    """Whether it is the project's and not the shipped one."""


@dataclass(frozen=True)
class Rendered:
    """A text and the templates that it was made of, in the order of their use."""

    text: str
    templates: tuple[UsedTemplate, ...]

    @property
    def own_templates(self) -> tuple[UsedTemplate, ...]:
        """Those that the project has put in the place of shipped ones."""
        return tuple(template for template in self.templates if template.own)


def render(name: str, context: Mapping[str, Any], project: Path) -> Rendered:
    """Render `name` from ``project/templates/``, or else from the templates that ship.

    No template ends a line with spaces or leaves several empty lines in a row. Filters: `quote` a word of
    bash, `words` several, `directive` a value in an ``#SBATCH`` line, `comment` behind a ``#``, `verbatim`
    the user's own lines exactly as they are.
    Raises UsageError with file and line for a template that cannot be rendered.
    """
    from jinja2 import TemplateError

    library = _Library(project / TEMPLATES_FOLDER, shipped_templates())
    environment = _environment(library)
    try:
        text = environment.get_template(name).render(context)
    except UsageError as error:
        message = f"{_place(error, library)}{error.message}"
        raise UsageError(message, hint=error.hint) from error
    except TemplateError as error:
        raise _refusal(error, library, context) from error
    except Exception as error:
        # An expression of the template: a wrong type, a division by zero.
        place = _place(error, library)
        if not place:
            raise
        raise UsageError(f"{place}{type(error).__name__}: {error}", hint=library.hint()) from error
    return Rendered(_restored(_tidy(text)), tuple(library.used.values()))


def compile_ahead(names: Iterable[str], project: Path) -> None:
    """Compile templates that will be rendered; what is wrong with one is said when it is rendered."""
    from jinja2 import TemplateError

    environment = _environment(_Library(project / TEMPLATES_FOLDER, shipped_templates()))
    for name in names:
        with suppress(TemplateError, UsageError):
            environment.get_template(name)


@cache
def _compiled() -> BytecodeCache:
    """What was compiled in this process, by the text of each template."""
    from jinja2 import BytecodeCache

    class Memory(BytecodeCache):
        def __init__(self) -> None:
            self.codes: dict[tuple[str, str], CodeType | None] = {}

        def load_bytecode(self, bucket: Bucket) -> None:
            bucket.code = self.codes.get((bucket.key, bucket.checksum))

        def dump_bytecode(self, bucket: Bucket) -> None:
            self.codes[bucket.key, bucket.checksum] = bucket.code

    return Memory()


class _Library:
    """Finds templates and remembers which were used."""

    def __init__(self, own: Path, shipped: Path) -> None:
        # In a checkout of trainkit the shipped templates are the project's: nothing is overridden.
        self.folders = [(shipped, False)] if _is_same(own, shipped) else [(own, True), (shipped, False)]
        self.used: dict[str, UsedTemplate] = {}

    def load(self, name: str) -> tuple[str, str, Callable[[], bool]] | None:
        """What jinja2's FunctionLoader asks for; None when there is no such template."""
        for folder, own in self.folders:
            path = folder / name
            if ".." in Path(name).parts or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read {path}: {error}") from error
            self.used[name] = UsedTemplate(name, path, own)
            # Otherwise the last line of a partial and what follows it would become one command.
            whole = text if text.endswith("\n") else f"{text}\n"
            return whole, str(path), lambda: True
        return None

    def hint(self) -> str:
        """What to do about a template that fails."""
        own = [template for template in self.used.values() if template.own]
        if not own:
            return ""
        return f"it takes the place of the one in {self.folders[-1][0]}; compare them, or remove yours"


def _is_same(folder: Path, other: Path) -> bool:
    try:
        return folder.samefile(other)
    except OSError:
        return False


def _environment(library: _Library) -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(library.load),
        bytecode_cache=_compiled(),
        undefined=StrictUndefined,
        autoescape=False,  # scripts, not HTML; every value goes through a filter of its own
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def verbatim(value: str) -> str:
        # A text with NUL cannot come from anywhere else: the other filters refuse it.
        if "\0" in value:
            raise UsageError(f"{value!a} cannot be written into a script: it has a NUL character")
        # Nothing that `_tidy` would change; of the value alone, since jinja2 keeps what it knows beforehand.
        return f"\0{value.encode(errors='surrogatepass').hex()}\0"

    environment.filters.update(
        quote=quote, words=words, directive=directive, comment=comment, verbatim=verbatim
    )
    return environment


def _tidy(text: str) -> str:
    """No trailing spaces, no more than one empty line in a row, one newline at the end."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def _restored(text: str) -> str:
    return re.sub(
        "\0([0-9a-f]*)\0", lambda match: bytes.fromhex(match[1]).decode(errors="surrogatepass"), text
    )


def _place(error: BaseException, library: _Library) -> str:
    """``FILE:LINE: `` of the template that an error came from; empty when it did not come from one."""
    import traceback

    files = {str(template.path) for template in library.used.values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _refusal(error: Exception, library: _Library, context: Mapping[str, Any]) -> UsageError:
    from jinja2 import TemplateNotFound, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        # For a tag that is not closed jinja2 has the file in the place of the name.
        message = f"{error.filename or error.name}:{error.lineno}: {error.message}"
        is_length = "comment tag" in str(error.message)
        return UsageError(message, hint=LENGTH_HINT if is_length else library.hint())
    place = _place(error, library)
    if isinstance(error, TemplateNotFound):
        folders = " or ".join(str(folder) for folder, _ in library.folders)
        return UsageError(f"{place}there is no template {error.name!r} in {folders}")
    match = _UNDEFINED.fullmatch(str(error.args[0] if error.args else ""))
    if match is None:
        return UsageError(f"{place}{error}", hint=library.hint())
    from difflib import get_close_matches

    close = get_close_matches(match["name"], context, 1)
    known = f"did you mean {close[0]}?" if close else f"it can use: {', '.join(sorted(context))}"
    return UsageError(f"{place}{match['name']!r} is undefined", hint=known)
