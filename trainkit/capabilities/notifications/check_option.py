"""Implements the option ``trainkit check --test-notification``, which sends a test message to the webhook."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainkit.capability import Choice
from trainkit.cli.help import AddedOption, option
from trainkit.errors import UsageError

if TYPE_CHECKING:  # imported only for type checkers, to keep `trainkit check --help` fast
    from trainkit.config.schema import RunConfig


def check_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add the option --test-notification to a command."""

    @functools.wraps(function)
    def command(test_notification: bool, choices: Sequence[Choice] = (), **others: object) -> None:
        function(choices=(*choices, SendTest()) if test_notification else choices, **others)

    text = "Send a test message to the webhook that notify.webhook configures."
    typed: Callable[..., None] = option("--test-notification", text, cls=AddedOption, is_flag=True)(command)
    return typed


class SendTest(Choice):
    """The command-line option that sends a test message to a config's webhook."""

    def try_out(self, config: RunConfig) -> str:
        from trainkit.capabilities.notifications.notifier import send_test

        name = config.notify.webhook
        url = os.environ.get(name or "")
        if not url:
            message = (
                "notify.webhook is null"
                if name is None
                else f"the environment variable {name} is not set in this shell"
            )
            raise UsageError(
                f"--test-notification requires a webhook, but {message}",
                hint=f"run `export {name or 'NAME'}=URL`, and set notify.webhook to the name of the variable",
            )
        return f"the URL in {name} has accepted a test message (HTTP {send_test(url, config.name)})"
