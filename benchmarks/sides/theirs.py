"""The worker with kvpress: `python -m sides.theirs`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

from kvpress import (
    DecodingPress,
    KnormPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from sides.worker import Decoding, Side, serve


class Theirs(Side):
    """Presses, whose hooks are on the model while their context is open."""

    def versions(self) -> dict[str, str]:
        """Of kvpress."""
        return {"kvpress": version("kvpress")}

    @contextmanager
    def compressing(
        self, method: str, keep: int, length: int, interval: int | None
    ) -> Iterator[None]:
        """The press of this name with the ratio that leaves `keep` of `length` rows."""
        # Half a row more, since it is rounded down.
        ratio = 1 - (keep + 0.5) / length
        attention = self.model.config._attn_implementation
        if method == "h2o":
            self.model.set_attn_implementation("eager")  # the press reads attention maps
        try:
            with _press(method, ratio, min(32, keep // 2))(self.model):
                yield
        finally:
            self.model.set_attn_implementation(attention)

    def stepping(self, state: Decoding) -> AbstractContextManager[Any]:
        """A press that acts while decoding.

        It forgets its count when the context ends, so a block should be a whole interval.
        """
        if state.interval is None:
            return nullcontext()
        assert state.method is not None
        made: AbstractContextManager[Any] = DecodingPress(
            base_press=_press(state.method, 0.0, 8),
            compression_interval=state.interval,
            target_size=state.keep,
        )(self.model)
        return made

    def held(self, cache: Any) -> int:
        """Rows of the layer that holds most."""
        return max(int(layer.keys.shape[2]) for layer in cache.layers)


def _press(method: str, ratio: float, window: int) -> Any:
    if method in ("snapkv", "snapkv_decoding"):
        return SnapKVPress(compression_ratio=ratio, window_size=window, kernel_size=5)
    if method == "streaming_llm":
        return StreamingLLMPress(compression_ratio=ratio, n_sink=4)
    presses = {"knorm": KnormPress, "tova": TOVAPress, "h2o": ObservedAttentionPress}
    return presses[method](compression_ratio=ratio)


if __name__ == "__main__":
    serve(Theirs())
