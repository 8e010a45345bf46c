"""`trainkit check`: every problem of a config, at once."""

from __future__ import annotations

import json

import click

from trainkit.cli.options import ConfigRequest, config_options, examples, json_option


@click.command(
    epilog=examples(
        "trainkit check configs/quickstart.yaml",
        "trainkit check configs/quickstart.yaml --nodes 2 --show-origin",
        "trainkit check configs/quickstart.yaml --set train.steps=100 --json",
    )
)
@config_options
@click.option("--show-origin", is_flag=True, help="Print every value with where it came from.")
@json_option
def command(request: ConfigRequest, show_origin: bool, as_json: bool) -> None:
    """Check CONFIG against the schema, this machine, the model's shape and the data.

    Prints what was derived and why; every problem is listed at once, with exit code 2.
    """
    from trainkit.config.origin_table import origin_lines
    from trainkit.plan.check import check_config
    from trainkit.plan.machine import detect_machine

    loaded = request.load()
    plan = check_config(loaded, detect_machine())
    if as_json:
        config = loaded.config.model_dump(mode="json", by_alias=True)
        value = {"config": config, "origins": loaded.origins, "plan": plan.to_dict()}
        click.echo(json.dumps(value, ensure_ascii=False))
        return
    if show_origin:
        click.echo("\n".join(origin_lines(loaded)) + "\n")
    for name, reason in plan.reasons.items():
        click.echo(f"{name}: {reason}")
    click.echo(f"{request.path}: no problems", err=True)
