"""Compares the JSON Schemas with docs/schemas/, and checks the JSON output of commands with them."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TypedDict

import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.golden.__main__ import RUNS, unpack
from tests.support.json_outputs import checked
from tests.support.said import said
from tools.reference import DOCS, all_commands, breaking_change, schema_page, schema_text
from trainkit.capabilities.programs.json_schema import schema_of
from trainkit.capabilities.programs.outputs import outputs
from trainkit.cli.main import main
from trainkit.cli.options import OutputOption
from trainkit.run.files import INLINE, LEFT_OUT, OPTIONAL, UNLIMITED

NAMES = sorted(outputs())
OF_EACH_RUN = (
    *("status {run}", "watch {run}", "report {run}", "cancel {run}", "compare {run} runs/finished"),
    *("diagnose {run}", "diagnose {run} --attempt 1"),
)
OF_RUNS_WITH_CHECKPOINTS = ("ckpt ls {run}", "ckpt verify {run}", "ckpt prune {run} --keep-last 1 --dry-run")
GROUPS = ("array", "bench", "sweep")
WITH_CHECKPOINTS = ("cancelled", "crashed", "finished", "own-loop", "restarted", "supervisor-died")
OTHERS = (
    *("status", "watch", "status runs/finished --metric loss", "compare runs/bench", "compare runs/sweep"),
    *("bench settings --collect runs/bench", "check quickstart", "plan quickstart --gpus 2 --gpu-type h100"),
    *("bench settings quickstart --sweep data.num_workers=0,2 --dry-run", "drill quickstart --list"),
    *("bench layouts quickstart --gpus-per-node 2 --dry-run", "env", "init", "init --task mine"),
    *("submit quickstart --backend local --dry-run", "data validate text.txt", "data validate stdlib.none"),
    *("data prepare text.txt --out shards", "data validate shards", "doctor --quick", "status nothing"),
    *("check quickstart --set train.steps=none", "sync runs/finished", "stacks runs/finished"),
    *("plan models/8b --gpus 1 --gpu-type rtx4090", "data show runs/finished --step 2"),
    *("status runs/array/2", "diagnose runs/sweep/1", "ckpt ls runs/sweep/0"),
)


def output_of(line: str) -> str:
    """Return the name of the output of a command line."""
    first, second = line.split()[:2] if " " in line else (line, "")
    return f"{first}-{second}" if first in ("bench", "ckpt", "data") else first


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project folder with all recorded runs."""
    folder = tmp_path_factory.mktemp("recorded") / "project"
    unpack(folder)
    return folder


LINES = [
    *(line.format(run=f"runs/{run}") for run in RUNS if run not in GROUPS for line in OF_EACH_RUN),
    *(line.format(run=f"runs/{run}") for run in GROUPS for line in OF_EACH_RUN[:3]),
    *(line.format(run=f"runs/{run}") for run in WITH_CHECKPOINTS for line in OF_RUNS_WITH_CHECKPOINTS),
    *OTHERS,
]


@pytest.mark.parametrize("line", LINES)
def test_outputs(line, project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    code = main([*shlex.split(line), "--json"])
    text = capsys.readouterr().out
    is_error = text.startswith('{"error"')
    assert not is_error or code != 0
    checked("error" if is_error else output_of(line), text)


def test_a_key_without_a_schema_is_found():
    value = {"error": "no", "hint": "", "exit_code": 1}
    assert checked("error", json.dumps(value)) == value
    for wrong in ({"error": "no", "hint": ""}, {**value, "new": 1}, {**value, "exit_code": "1"}):
        with pytest.raises(ValidationError):
            checked("error", json.dumps(wrong))


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_frozen(name):
    """`python -m tools.reference` refuses to write a schema that breaks programs without a new version."""
    text = (DOCS / schema_page(name)).read_text()
    assert text == schema_text(name)
    Draft202012Validator.check_schema(json.loads(text))
    version = outputs()[name].version
    assert (json.loads(text)["version"], json.loads(text)["$id"]) == (
        version,
        f"urn:trainkit:{name}:{version}",
    )


def test_docs_contain_no_other_schema():
    assert sorted(file.stem for file in (DOCS / "schemas").iterdir()) == NAMES


def test_every_command_with_json_has_a_schema():
    with_json = {
        path.removeprefix("trainkit ").replace(" ", "-")
        for path, command in all_commands().items()
        if any("--json" in item.opts for item in command.params)
    }
    assert with_json | {"error"} == {*NAMES}
    options = (item for command in all_commands().values() for item in command.params)
    assert all(isinstance(item, OutputOption) for item in options if "--json" in item.opts)


class Base(TypedDict):
    first: int
    """A number or None."""


class Both(Base, total=False):
    """Two keys.

    More about them.
    """

    second: list[str] | None


@dataclasses.dataclass
class Inner:
    inner: float


@dataclasses.dataclass
class Outer:
    one: Inner = dataclasses.field(metadata=INLINE)
    none: int = dataclasses.field(metadata=LEFT_OUT)
    both: Both = dataclasses.field(metadata=OPTIONAL)
    """The keys."""
    most: float = dataclasses.field(metadata=UNLIMITED)


def test_a_schema_follows_from_the_type():
    assert schema_of(Outer) == {
        "$ref": "#/$defs/Outer",
        "$defs": {
            "Both": {
                "type": "object",
                "description": "Two keys.",
                "properties": {
                    "first": {"type": "integer", "description": "A number or null."},
                    "second": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["first"],
            },
            "Outer": {
                "type": "object",
                "properties": {
                    "inner": {"type": "number"},
                    "both": {"$ref": "#/$defs/Both", "description": "The keys."},
                    "most": {"type": ["number", "null"]},
                },
                "required": ["inner", "most"],
            },
        },
    }
    assert schema_of(int, dict[str, bool]) == {
        "anyOf": [{"type": "object", "additionalProperties": {"type": "boolean"}}, {"type": "integer"}]
    }
    assert schema_of(tuple[int, str])["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    with pytest.raises(TypeError, match="complex"):
        schema_of(complex)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda record: None, None),
        (lambda record: record["properties"].update(new={}), None),
        (lambda record: record["properties"]["first"].update(description="another"), None),
        (lambda record: record["properties"].pop("second"), "Both.second"),
        (lambda record: record["properties"]["first"].update(type=["integer", "null"]), "Both.first"),
        (lambda record: record["required"].clear(), "Both.first"),
        (lambda record: record.update(type="array"), "Both"),
    ],
)
def test_what_breaks_programs(change, where):
    after = json.loads(json.dumps(schema_of(Both)))
    change(after["$defs"]["Both"])
    assert breaking_change(schema_of(Both), after) == where


def test_another_type_of_the_value_breaks_programs():
    assert breaking_change(schema_of(Both), schema_of(list[Both])) == "the type of the value"
    assert breaking_change(schema_of(int), schema_of(int, str)) == "the type of the value"
    assert breaking_change(schema_of(list[Both]), schema_of(list[Both])) is None


@pytest.mark.parametrize("name", ["ckpt-ls", "ckpt ls"])
def test_the_command_prints_a_schema(name, capsys):
    assert main(["schema", "--output", name]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((DOCS / schema_page("ckpt-ls")).read_text())


def test_an_unknown_output_is_refused(capsys):
    assert main(["schema", "--output", "statuses"]) == 2
    said(capsys.readouterr().err)
