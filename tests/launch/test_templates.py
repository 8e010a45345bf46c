"""Templates: which one is taken, what a rendered script looks like, and errors that lead to their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import UsageError
from trainkit.folders import shipped_templates
from trainkit.launch import script as templates
from trainkit.launch.script import JobEnvironment, render

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


def test_shipped_template_without_any_of_the_project(tmp_path: Path) -> None:
    assert render(PARTIAL, CONTEXT, tmp_path).startswith("umask 077")


def test_partial_of_the_project_takes_the_place_of_the_shipped_one(project: Path) -> None:
    write(project, "{% include 'partials/environment.sh.j2' %}\necho {{ x }}\n", "outer.j2")
    write(project, "echo mine", PARTIAL)
    assert render("outer.j2", {"x": 1}, project) == "echo mine\necho 1\n"


def test_template_of_the_project_uses_shipped_partials(project: Path) -> None:
    write(project, "echo before\n{% include 'partials/environment.sh.j2' %}", "outer.j2")
    assert render("outer.j2", CONTEXT, project).startswith("echo before\numask 077")


def test_a_checkout_of_trainkit_overrides_nothing() -> None:
    assert templates._folders(shipped_templates().parent) == [shipped_templates()]


def test_nothing_outside_of_templates_is_taken(project: Path) -> None:
    (project / "secret.j2").write_text("x")
    assert "there is no template '../secret.j2'" in refusal(project, "../secret.j2").message


def test_text_is_tidy_but_not_what_is_verbatim(project: Path) -> None:
    write(project, "\n\na   \n{% if true %}\n\n\n\nb {{ '' }}\n{% endif %}\n{{ line | verbatim }}\n\n\n")
    line = "cat <<X\n\n\n\nkept   \nX \\ "
    assert render("mine.j2", {"line": line}, project) == f"a\n\nb\n{line}\n"


def test_verbatim_text_is_no_template(project: Path) -> None:
    write(project, "{{ line | verbatim }}\n{{ more | verbatim }}\n")
    lines = {"line": "{{ more }} {% raw %} \\1 \\g<0>", "more": "second"}
    assert render("mine.j2", lines, project) == "{{ more }} {% raw %} \\1 \\g<0>\nsecond\n"


def test_filters(project: Path) -> None:
    write(project, "# {{ a | comment }}\n#SBATCH --x={{ a | directive }}\n{{ a | quote }} {{ b | words }}\n")
    text = render("mine.j2", {"a": "it's", "b": ["x y", 2]}, project)
    assert text == "# it's\n#SBATCH --x=\"it's\"\n'it'\"'\"'s' 'x y' 2\n"


def test_undefined_name_leads_to_its_line(project: Path) -> None:
    path = write(project, "one\ntwo {{ workdri | quote }}\n")
    error = refusal(project, workdir="/w", run_dir="/r")
    assert error.message == f"{path}:2: UndefinedError: 'workdri' is undefined"


def test_undefined_attribute_in_an_included_template(project: Path) -> None:
    write(project, "{% include 'partials/x.j2' %}")
    path = write(project, "\n\n{{ environment.modulse }}", "partials/x.j2")
    error = refusal(project, **CONTEXT)
    assert error.message.startswith(f"{path}:3: ")
    assert "has no attribute 'modulse'" in error.message
    assert str(shipped_templates()) in error.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{% if x %}\n", ":2: Unexpected end of template"),
        ("a\n{{ x | qoute }}", ":2: No filter named 'qoute'."),
        ("a\n\n{{ 1 / 0 }}", ":3: ZeroDivisionError: division by zero"),
        (
            "a\n{{ x | directive }}",
            ":2: 'a\\nb' cannot be written in an #SBATCH line: it contains a line break",
        ),
        ("a\n{{ none | quote }}", ":2: NoneType 'None' cannot be written in a script"),
        ("a\n{% include 'gone.j2' %}", ":2: there is no template 'gone.j2' in "),
    ],
)
def test_errors_lead_to_their_line(project: Path, text: str, message: str) -> None:
    path = write(project, text)
    assert f"{path}{message}" in refusal(project, x="a\nb").message


def test_length_of_bash_is_a_comment_of_jinja(project: Path) -> None:
    path = write(project, "\necho ${#name}\n")
    error = refusal(project)
    assert error.message == f"{path}:2: Missing end of comment tag"
    write(project, "echo ${{ '{#' }}name}\n")
    assert render("mine.j2", {}, project) == "echo ${#name}\n"


def test_unreadable_template(project: Path) -> None:
    (project / "templates" / "mine.j2").write_bytes(b"\xff")
    assert refusal(project).message.startswith("mine.j2: UnicodeDecodeError: ")


def test_a_changed_template_is_rendered_as_it_is_now(tmp_path: Path) -> None:
    own = tmp_path / "templates" / "mine.j2"
    own.parent.mkdir()
    own.write_text("one {{ word }}\n")
    assert render("mine.j2", {"word": "a"}, tmp_path) == "one a\n"
    own.write_text("two {{ word }}\n")
    assert render("mine.j2", {"word": "a"}, tmp_path) == "two a\n"
    own.write_text("{{ word\n")
    with pytest.raises(UsageError, match=r"mine\.j2:1: "):
        render("mine.j2", {"word": "a"}, tmp_path)


def test_what_is_written_as_it_is_may_be_known_when_the_template_is_compiled(tmp_path: Path) -> None:
    """jinja2 applies filters to what does not change only once."""
    own = tmp_path / "templates" / "mine.j2"
    own.parent.mkdir()
    own.write_text("{{ 'echo  ${#x}  ' | verbatim }}\n{{ line | verbatim }}\n")
    for line in ("a  ", "caf\u00e9 \udcff"):
        assert render("mine.j2", {"line": line}, tmp_path) == f"echo  ${{#x}}  \n{line}\n"


@pytest.mark.parametrize(
    "expression", ["''.__class__.__mro__", "environment.__init__.__globals__", "words.__code__"]
)
def test_a_template_reaches_no_internals_of_python(project: Path, expression: str) -> None:
    path = write(project, f"one\n{{{{ {expression} | string }}}}")
    with pytest.raises(UsageError, match="unsafe") as caught:
        render("mine.j2", {**CONTEXT, "words": test_filters}, project)
    assert caught.value.message.startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    "expression",
    ["plan.update({'nodes': 9})", "hosts.append('evil')", "plan.pop('nodes')", "hosts.clear()"],
)
def test_a_template_cannot_change_what_is_run(project: Path, expression: str) -> None:
    """The plan that it describes is the one that the job reads."""
    path = write(project, f"one\ntwo {{{{ {expression} }}}}")
    context: dict[str, Any] = {"plan": {"nodes": 2}, "hosts": ["a"]}
    error = refusal(project, **context)
    assert error.message.startswith(f"{path}:2: ")
    assert "unsafe" in error.message
    assert context == {"plan": {"nodes": 2}, "hosts": ["a"]}
