"""The worker with kvcompress: `python -m sides.ours`."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvcompress_eval.bench import check_contracts

from kvcompress import __version__, policy_from, press
from kvcompress.models import source_of
from sides.worker import Decoding, Side, serve

POLICIES = {
    "snapkv": "snapkv:capacity={keep}:window_size={window}:kernel_size=5",
    "snapkv_decoding": "snapkv_decoding:capacity={keep}:window_size=8:interval={interval}",
    "streaming_llm": "streaming_llm:capacity={keep}:n_sink=4:interval={interval}",
    "knorm": "knorm:capacity={keep}",
    "tova": "tova:capacity={keep}",
    "h2o": "h2o:capacity={keep}",
}


class Ours(Side):
    """Policies; a cache goes on evicting by itself."""

    def versions(self) -> dict[str, str]:
        """Of kvcompress."""
        return {"kvcompress": __version__}

    def locate(self, name: str) -> str:
        """Where a model is that both sides can load."""
        return source_of(name)

    def check(self) -> list[str]:
        """The policies, once each has passed the contract suite with a small budget.

        Raises:
            EvaluationError: One breaks a contract; its times would mean nothing.
        """
        for text in POLICIES.values():
            check_contracts(policy_from(text.format(keep=512, interval=16, window=32)))
        return list(POLICIES)

    def compressing(
        self, method: str, keep: int, length: int, interval: int | None
    ) -> AbstractContextManager[Any]:
        """`press` with the policy."""
        window = min(32, keep // 2)
        text = POLICIES[method].format(keep=keep, interval=interval or 1, window=window)
        return press(self.model, text)

    def stepping(self, state: Decoding) -> AbstractContextManager[Any]:
        """Nothing: the policy travels with the cache."""
        return nullcontext()

    def held(self, cache: Any) -> int:
        """Rows of the layer that holds most."""
        return max(int(layer.keys.shape[2]) for layer in cache.layers)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    serve(Ours())
