"""The help page of a command: its options under headings, and examples at the end; and how it warns."""

from __future__ import annotations

import click

SECTIONS = {
    "What": (
        *("--set", "--profile", "--name", "--sweep", "--array", "--step", "--steps", "--seed", "--only"),
        *("--layout", "--collect", "--rank", "--node", "--attempt", "--all", "--list", "--keep-last"),
        *("--tokenizer", "--text-key", "--val-fraction", "--task", "--simulate-world"),
        *("--format", "--dtype", "--merge", "--tool"),
        *("--max-tokens", "--temperature", "--top-k", "--top-p"),
    ),
    "Where": (
        *("--nodes", "--gpus-per-node", "--gpus", "--gpu-type", "--backend", "--per", "--cluster"),
        *("--device", "--node-rank", "--master-addr", "--master-port", "--port"),
        *("--partition", "--account", "--qos", "--constraint", "--time", "--run-dir", "--dir", "--as"),
    ),
    "How": (
        *("--submit", "--launcher", "--no-snapshot", "--new-code", "--after", "--workers", "--warmup"),
        *("--repeats", "--at-once"),
        *("--quick", "--now", "--wait", "--estimate", "--keep", "--task-smoke", "--test-only", "--dry-run"),
        "--test-notification",
    ),
    "Output": (
        "--follow",
        "--interval",
        "--once",
        "--lines",
        "--limit",
        "--show-origin",
        "--compare",
        "--out",
        "--json",
        "--help",
    ),
}
"""Heading -> its options, in the order in which they are listed."""


def examples(*lines: str) -> str:
    """The epilog of a command's help: examples that run as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    click.echo(f"warning: {text}", err=True)


class Command(click.Command):
    """A command whose help lists options under headings: what, where, how, output."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
        by_name = {name: item for item in options for name in item.opts}
        for heading, names in SECTIONS.items():
            records = [by_name[name].get_help_record(ctx) for name in names if name in by_name]
            shown = [record for record in records if record is not None]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


class Group(click.Group):
    """A group of commands whose help lists options under headings."""

    command_class = Command
