"""The hooks that a plugin may implement; imports no torch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from kvcompress.policy import Policy

PROJECT = "kvcompress"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvcompress_policies() -> "Iterable[type[Policy]]":  # type: ignore[empty-body]
    """The policy classes of this plugin.

    Import them inside the function: the plugin's module is loaded for `kvcompress --help` too.

        @hookimpl
        def kvcompress_policies():
            from kvcompress_random.policy import RandomPolicy
            return [RandomPolicy]
    """


@hookspec
def kvcompress_commands(app: "typer.Typer") -> None:
    """Add commands to the command line: `app.command("name")(function)`."""
