"""The commands that this package adds to the command line."""

from kvcompress.hookspecs import hookimpl


@hookimpl
def kvcompress_commands(app: object) -> None:
    """None yet."""
