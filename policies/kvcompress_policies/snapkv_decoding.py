"""SnapKV that goes on voting while tokens are generated."""

from typing import ClassVar

from pydantic import Field

from kvcompress.policy import DecodePolicy, PositiveInt
from kvcompress_policies.snapkv import SnapKVPolicy


class SnapKVDecodingPolicy(SnapKVPolicy, DecodePolicy):
    """SnapKV when the prompt ends, and again every `interval` generated tokens over all rows held.

    At decode the window is the last `window_size` tokens, generated ones and, while there are too
    few of these, the prompt's.

    Source: arXiv:2512.12008 (SnapKV-Decoding); the vote is that of `SnapKVPolicy`.
    """

    name: ClassVar[str] = "snapkv_decoding"

    interval: PositiveInt = Field(
        default=128,
        description="Generated tokens between votes; the cache grows by at most interval - 1 "
        "beyond its budget.",
    )
