"""What compression costs and saves, measured against the plain model.

Two things are measured in turn, never one after the other, since machines are shared; every ratio
comes with the spread of its repetitions.
"""

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch

from kvcompress import ComposedPolicy, CompressedCache, Policy, press
from kvcompress.errors import EvaluationError, PolicyConfigError
from kvcompress.models import load
from kvcompress.tensors import scoring_bytes
from kvcompress.testing import PolicyContractError, check_policy, scores
from kvcompress.timing import clock
from kvcompress_eval.measure import cache_of, forward, random_ids, timed_run
from kvcompress_eval.memory import Allocations, Memory
from kvcompress_eval.ratios import Ratio, compare, in_turn

QUESTION_TOKENS = 20
ANSWER_TOKENS = 16
LAYERS = 3
"""Of the models on which contracts are tried."""
ROOM = 8
"""Rows beside those that a policy always keeps, where contracts are tried."""


def check_contracts(policy: Policy) -> bool:
    """Refuse to measure a policy that is wrong: the contract suite on its rule with a small budget.

    Returns:
        False if it always keeps too many rows to be tried on the suite's short prompts.

    Raises:
        EvaluationError: It breaks a contract.
    """
    try:
        check_policy(_small(policy))
    except PolicyContractError as error:
        raise EvaluationError(f"{policy} is not measured, since it is wrong. {error}") from None
    except (PolicyConfigError, ValueError):
        return False
    return True


def _small(policy: Policy) -> Policy:
    """The same rule for short prompts and a model of few layers."""
    if isinstance(policy, ComposedPolicy):
        prefill, decode = _small(policy.prefill), _small(policy.decode)
        if policy.scope == "all" and isinstance(decode.capacity, int):
            # Its budget must not be below the prompt's.
            most = max(prefill.at("capacity", 0), decode.capacity)
            decode = decode.model_copy(update={"capacity": most})
        return ComposedPolicy(prefill=prefill, decode=decode, scope=policy.scope)
    single = {
        name: value[0]
        for name in policy.per_layer
        if isinstance(value := getattr(policy, name), tuple)
    }
    small = policy.model_copy(update={**single, "protect": ()})
    if small.keep_ratio is not None:
        return small
    while True:
        # Of some policies, what they always keep is a share of the capacity.
        fixed = max(small.fixed_tokens(layer, LAYERS) for layer in range(LAYERS))
        if fixed + ROOM >= small.at("capacity", 0):
            return small
        small = small.model_copy(update={"capacity": fixed + ROOM})


def _seconds(call: Callable[[], Any]) -> float:
    started = clock()
    call()
    return clock() - started


def decode_ratio(model: Any, policy: Any, length: int, steps: int) -> Ratio:
    """A decode step after compressing `length` tokens / one from a plain cache of as many rows.

    One prefill each, then single steps in turn. The plain cache is cut to what the compressed one
    holds before every step, so that only the policy and the hosting differ. A policy that evicts
    every so many tokens is timed over as many, `steps` times.
    """
    ids = random_ids(model, length)
    compressed = CompressedCache(model, policy, prompt_length=length)
    interval: int = getattr(policy.part("decode"), "interval", 1)

    def step(cache: Any) -> float:
        return 1000 * _seconds(lambda: forward(model, ids[:, :1], cache))

    with torch.inference_mode():
        forward(model, ids, compressed)
        held = _held(compressed)
        dense = cache_of(forward(model, ids[:, : held + 1]))

        def plain_step() -> float:
            # Also when the compressed cache goes first, both steps start from equal caches.
            if rows < dense.get_seq_length():
                dense.crop(rows - dense.get_seq_length())
            return step(dense)

        pairs = []
        for number in range(steps * interval + 3):
            rows = _held(compressed)
            pairs.append(in_turn(1, lambda: step(compressed), plain_step, first=number))
    # The first steps pay for growing the buffers. Every step between two evictions counts alike.
    blocks = [pairs[i : i + interval] for i in range(3, len(pairs), interval)]
    ours, plain = ([fmean(pair[who][0] for pair in block) for block in blocks] for who in (0, 1))
    name = f"decode after {length} -> {held} with {policy} / plain from as many rows"
    return compare(name, "ms/token", ours, plain)


def _held(cache: Any) -> int:
    """Rows of the layer that holds most."""
    held: int = max(layer.held_tokens for layer in cache.report().layers)
    return held


def prefill_ratio(model: Any, policy: Any, length: int, repeats: int) -> Ratio:
    """Prefill with compression / plain prefill of the same prompt, in turn."""
    ids = random_ids(model, length)

    def pressed() -> None:
        with press(model, policy):
            forward(model, ids)

    with torch.inference_mode():
        forward(model, ids[:, :64])
        ours, plain = in_turn(
            repeats,
            lambda: _seconds(pressed),
            lambda: _seconds(lambda: forward(model, ids)),
        )
    return compare(f"prefill of {length} with {policy} / plain prefill", "s", ours, plain)


def first_token_ratio(model: Any, policy: Any, length: int, repeats: int) -> Ratio:
    """Time to the first token of `generate`, compressed / plain, in turn."""
    ids = random_ids(model, length)

    def first(chosen: Any) -> float:
        return timed_run(model, ids, chosen, max_new_tokens=1).prefill_seconds

    timed_run(model, ids[:, :64], None, max_new_tokens=1)
    ours, plain = in_turn(repeats, lambda: first(policy), lambda: first(None))
    return compare(f"first token of {length} with {policy} / plain", "s", ours, plain)


def scoring_ratio(model: Any, policy: Any, length: int) -> Ratio:
    """Temporary memory of scoring one layer's prompt / the bound, `tensors.scoring_bytes`."""
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    made = [
        torch.randn(1, each, length, head_dim, dtype=model.dtype, device=model.device)
        for each in (heads, kv_heads, kv_heads)
    ]
    with Allocations(*made) as memory:
        scores(policy, *made)
    peak, bound = memory.peak / 2**20, scoring_bytes() / 2**20
    return compare(f"scoring {length} rows with {policy} / its bound", "MiB", [peak], [bound])


def question_ratio(model: Any, policy: Any, length: int, repeats: int) -> Ratio:
    """Ten questions about one context through forks / its prefill and ten decodes.

    Both sides read the context once. Then one asks the same cache ten times; the other decodes each
    answer from a cache that is its own, made before the clock runs.

    Raises:
        EvaluationError: The answers differ.
    """
    ids = random_ids(model, length + 10 * QUESTION_TOKENS)
    context, questions = ids[:, :length], ids[:, length:].split(QUESTION_TOKENS, dim=1)
    options = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
    ours, plain = list[float](), list[float]()
    with press(model, policy) as session:
        for turn in range(repeats):

            def prefill() -> tuple[float, Any]:
                made = []
                read = partial(session.prefill, context, chunk_size=512, lookahead=0, hold_back=0)
                return _seconds(lambda: made.append(read())), made[0]

            def ask(cache: Any, question: Any, fork: bool, answers: list[Any]) -> None:
                answers.append(session.ask(cache, question, fork=fork, **options))

            def forked() -> list[Any]:
                seconds, cache = prefill()
                answers: list[Any] = []
                for question in questions:
                    seconds += _seconds(partial(ask, cache, question, True, answers))
                ours.append(seconds)
                return answers

            def separate() -> list[Any]:
                seconds, cache = prefill()
                answers: list[Any] = []
                for question in questions:
                    own = copy.deepcopy(cache)
                    seconds += _seconds(partial(ask, own, question, False, answers))
                plain.append(seconds)
                return answers

            both = [call() for call in ((forked, separate) if turn % 2 else (separate, forked))]
            if not all(map(torch.equal, *both)):
                raise EvaluationError(
                    f"{policy}: a fork answers differently than a cache of its own. This is a "
                    "fault of kvcompress or of the policy; please report it."
                )
    name = f"10 questions on {length} with {policy}, forked / prefill and 10 decodes"
    return compare(name, "s", ours, plain)


def memory_ratios(options: dict[str, Any], policy: str, repeats: int) -> list[Ratio]:
    """Peak and lasting memory of a prefill, each in a process of its own."""

    def grown(pressed: str | None) -> dict[str, float]:
        child = json.dumps({**options, "policy": pressed})
        command = [sys.executable, "-m", "kvcompress_eval.bench", child]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result

    ours, plain = in_turn(repeats, lambda: grown(policy), lambda: grown(None))
    return [
        compare(
            f"{title} a prefill of {options['length']} with {policy} / plain prefill",
            "MiB",
            [each[key] for each in ours],
            [each[key] for each in plain],
        )
        for key, title in (("peak", "peak memory of"), ("lasting", "memory held after"))
    ]


def _child(options: dict[str, Any]) -> dict[str, float]:
    """Memory that one prefill needs above what the loaded model takes, in MiB."""
    torch.set_num_threads(options["threads"])
    model, _ = load(options["model"], device=options["device"])
    ids = random_ids(model, options["length"])
    policy = options["policy"]
    with torch.inference_mode():
        forward(model, ids[:, :64])
        gc.collect()
        memory = Memory(model.device)
        if policy is None:
            output = forward(model, ids)
        else:
            with press(model, policy):
                output = forward(model, ids)
        result = {"peak": memory.peak()}
        cache = cache_of(output)
        del output
        gc.collect()
        result["lasting"] = memory.lasting()
        assert cache.get_seq_length() == options["length"]
    return result


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]))))
