"""Commands that take another command after ``--``."""

from __future__ import annotations

import click

from trainkit.errors import UsageError

_KEY = "trainkit.trailing_command"


class WithTrailingCommand(click.Command):
    """A command whose arguments end at ``--``; what follows is given by `trailing_command`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            command, args = args[cut + 1 :], args[:cut]
            if not command:
                raise UsageError(
                    "there is no command after --", hint="for example: -- python train.py --lr 0.1"
                )
            ctx.meta[_KEY] = tuple(command)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND …]"]


def trailing_command() -> tuple[str, ...] | None:
    """The argv that was typed after ``--``; None when there was no ``--``."""
    found: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    return found
