"""`trainkit schema`: a JSON schema that knows every key and its sentence."""

from __future__ import annotations

import json

import pytest

from trainkit.cli.main import main


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict:  # type: ignore[type-arg]
    assert main(["schema"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


def test_sections_and_extends(schema: dict) -> None:  # type: ignore[type-arg]
    assert list(schema["properties"])[:3] == ["extends", "config_version", "name"]
    assert schema["additionalProperties"] is False
    assert "async" in schema["$defs"]["CheckpointConfig"]["properties"]


def test_every_key_has_its_sentence(schema: dict) -> None:  # type: ignore[type-arg]
    for definition in [schema, *schema["$defs"].values()]:
        for name, field in definition.get("properties", {}).items():
            assert field.get("description"), name
