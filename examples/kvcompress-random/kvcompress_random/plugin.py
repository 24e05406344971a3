"""What the entry point names; imports no torch, since `kvcompress --help` imports it too."""

from typing import TYPE_CHECKING

from kvcompress import hookimpl

if TYPE_CHECKING:
    from kvcompress import Policy


@hookimpl
def kvcompress_policies() -> "list[type[Policy]]":
    """The classes, imported only when a policy is asked for."""
    from kvcompress_random.policy import RandomPolicy

    return [RandomPolicy]
