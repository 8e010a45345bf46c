"""Tests templates: which one is used, the rendered script, and errors that name their line."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.folders import shipped_templates
from trainkit.launch import script as templates
from trainkit.launch.environment import JobEnvironment
from trainkit.launch.script import render

PARTIAL = "partials/environment.sh.j2"
CONTEXT = {"environment": JobEnvironment("/w", ("python3",), ("python3",))}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "templates" / "partials").mkdir(parents=True)
    return tmp_path


def write(project: Path, text: str, name: str = "mine.j2") -> Path:
    path = project / "templates" / name
    path.write_text(text)
    return path


def refusal(project: Path, name: str = "mine.j2", **context: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        render(name, context, project)
    return caught.value


def test_which_template_is_taken(project):
    assert render(PARTIAL, CONTEXT, project).startswith("umask 077")
    write(project, "{% include 'partials/environment.sh.j2' %}\necho {{ x }}\n", "outer.j2")
    assert render("outer.j2", {**CONTEXT, "x": 1}, project).startswith("umask 077")
    write(project, "echo mine", PARTIAL)
    assert render("outer.j2", {"x": 1}, project) == "echo mine\necho 1\n"
    # A checkout of trainkit overrides nothing, and no file from outside of the folder is used.
    assert templates._folders(shipped_templates().parent) == [shipped_templates()]
    (project / "secret.j2").write_text("x")
    said(refusal(project, "../secret.j2").message)


VERBATIM = "{{ y }} {% raw %} \\1 \\g<0>"
TIDY = "\n\na   \n{% if true %}\n\n\n\nb {{ '' }}\n{% endif %}\n{{ x | verbatim }}\n\n\n"
FILTERS = "# {{ x | comment }}\n#SBATCH --x={{ x | directive }}\n{{ x | quote }} {{ y | words }}\n"


@pytest.mark.parametrize(
    ("template", "x", "y", "text"),
    [
        # Text is tidied, except for verbatim text, which is not treated as a template either.
        (TIDY, "cat <<X\n\n\n\nkept   \nX \\ ", "", "a\n\nb\ncat <<X\n\n\n\nkept   \nX \\ \n"),
        ("{{ x | verbatim }}\n{{ y | verbatim }}\n", VERBATIM, "second", f"{VERBATIM}\nsecond\n"),
        (FILTERS, "it's", ["x y", 2], "# it's\n#SBATCH --x=\"it's\"\n'it'\"'\"'s' 'x y' 2\n"),
        ("echo ${{ '{#' }}name}\n", "", "", "echo ${#name}\n"),
        # jinja2 applies filters to constants only once, when it compiles a template.
        ("{{ 'echo  ${#x}  ' | verbatim }}\n{{ x | verbatim }}\n", "a  ", "", "echo  ${#x}  \na  \n"),
        ("{{ 'echo' | verbatim }}\n{{ x | verbatim }}\n", "caf\u00e9 \udcff", "", "echo\ncaf\u00e9 \udcff\n"),
    ],
)
def test_text_and_filters(project, template, x, y, text):
    write(project, template)
    assert render("mine.j2", {"x": x, "y": y}, project) == text


@pytest.mark.parametrize(
    "text",
    [
        *("one\ntwo {{ workdri | quote }}\n", "a\n{% if x %}\n", "a\n{{ x | qoute }}", "a\n\n{{ 1 / 0 }}"),
        *("a\n{{ x | directive }}", "a\n{{ none | quote }}", "a\n{% include 'gone.j2' %}"),
        "\necho ${#name}\n",
    ],
)
def test_errors_lead_to_their_line(project, text):
    path = write(project, text)
    said(refusal(project, x="a\nb").message.replace(str(shipped_templates()), "SHIPPED"))
    path.write_bytes(b"\xff")
    assert refusal(project).message.startswith("mine.j2: UnicodeDecodeError: ")


def test_undefined_attribute_in_an_included_template(project):
    write(project, "{% include 'partials/x.j2' %}")
    path = write(project, "\n\n{{ environment.modulse }}", "partials/x.j2")
    error = refusal(project, **CONTEXT)
    assert error.message.startswith(f"{path}:3: ")
    said(error.message)
    assert str(shipped_templates()) in error.hint


def test_a_changed_template_is_rendered_as_it_is_now(project):
    for text in ("one", "two"):
        write(project, f"{text} {{{{ word }}}}\n")
        assert render("mine.j2", {"word": "a"}, project) == f"{text} a\n"
    path = write(project, "{{ word\n")
    assert refusal(project, word="a").message.startswith(f"{path}:1: ")


UNSAFE = (
    *("''.__class__.__mro__", "environment.__init__.__globals__", "words.__code__"),
    *("plan.update({'nodes': 9})", "hosts.append('evil')", "plan.pop('nodes')", "hosts.clear()"),
)


@pytest.mark.parametrize("expression", UNSAFE)
def test_a_template_reaches_no_internals_of_python(project, expression):
    """The job reads the same plan that the template describes."""
    path = write(project, f"one\n{{{{ {expression} | string }}}}")
    context: dict[str, Any] = {"plan": {"nodes": 2}, "hosts": ["a"], "words": test_text_and_filters}
    error = refusal(project, **CONTEXT, **context)
    assert error.message.startswith(f"{path}:2: ")
    assert "unsafe" in error.message
    assert (context["plan"], context["hosts"]) == ({"nodes": 2}, ["a"])
