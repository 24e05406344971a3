"""The one list of the built-in policies."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcompress.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvcompress.policy import Policy


@hookimpl
def kvcompress_policies() -> "Iterable[type[Policy]]":
    """The classes."""
    from kvcompress_policies.snapkv import SnapKVPolicy

    return [SnapKVPolicy]
