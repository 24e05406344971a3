"""What must hold on a device before anything is timed on it."""

from typing import Any

import torch
from transformers import PreTrainedModel

from headline.devices import Device
from headline.shapes import Shape, build, random_ids
from kvcompress import press
from kvcompress.session import cache_argument
from kvcompress.testing import oracle, record, tiny_model

LENGTH, CAPACITY, NEW = 120, 40, 12
TOLERANCE = 1e-3
"""Largest difference of logits from the oracle's, in float32."""
HALF_TOLERANCE = 0.05
"""In bfloat16, for logits of about 1: kernels may add up in another order from strided storage."""

SMALL = (
    f"snapkv:capacity={CAPACITY}:window_size=8",
    f"snapkv:capacity={CAPACITY}:window_size=8+h2o:capacity={CAPACITY}",
    f"h2o:capacity={CAPACITY}",
)


class CheckFailedError(Exception):
    """Answers on this device are wrong, so their times mean nothing."""


def check(device: Device, attn: str) -> list[str]:
    """Compare answers of small models with what they must be.

    Args:
        device: Where.
        attn: The attention implementation that will be timed.

    Returns:
        What was compared, for the record.

    Raises:
        CheckFailedError: Something differs.
    """
    done = []
    model = tiny_model("llama", attn="sdpa", num_hidden_layers=2)
    torch.nn.Module.to(model, device.torch)
    for policy in SMALL:
        _against_oracle(model, policy)
        done.append(f"float32, {policy}: tokens and logits of the oracle")
    worst = _nothing_to_evict(model, TOLERANCE)
    done.append(f"float32, capacity above the length: {_differs(worst)} the plain model")
    half = build(Shape.smoke, device, attn)
    worst = _nothing_to_evict(half, HALF_TOLERANCE)
    done.append(f"bfloat16, capacity above the length: {_differs(worst)} the plain model")
    _really_compressed(half)
    done.append(f"bfloat16, {SMALL[0]}: holds its capacity, and logits of the prompt stay")
    return done


def _differs(worst: float) -> str:
    return f"logits within {worst:.2g} of" if worst else "bit for bit the logits of"


def _generate(model: PreTrainedModel) -> Any:
    ids = random_ids(model, 2, LENGTH)
    generate: Any = model.generate
    return generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def _against_oracle(model: PreTrainedModel, policy: str) -> None:
    with press(model, policy) as session, record(session) as evictions:
        ours = _generate(model)
    gone = evictions.evicted(0)
    if not gone:
        raise CheckFailedError(f"{policy} evicted nothing of a prompt of {LENGTH}.")
    with oracle(model, evictions):
        theirs = _generate(model)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours.logits, theirs.logits, strict=True))
    # Comparisons with NaN are false: it must not pass either.
    if not worst <= TOLERANCE or not torch.equal(ours.sequences, theirs.sequences):
        raise CheckFailedError(
            f"{policy} on {model.device}: logits differ by {worst:.3g} from the uncompressed model "
            f"with the evicted rows masked out; at most {TOLERANCE} is float noise."
        )


def _nothing_to_evict(model: PreTrainedModel, tolerance: float) -> float:
    """The largest difference; none in the prompt's logits, in which the storage has no part."""
    plain = _generate(model)
    with press(model, "snapkv:capacity=4096"):
        ours = _generate(model)
    differences, prompt = [], plain.sequences.shape[1] - NEW
    for number, (a, b) in enumerate(zip(ours.logits, plain.logits, strict=True)):
        differences.append(float((a - b).abs().max()))
        # From where rounding chose another token on, they are answers to different texts.
        if not torch.equal(ours.sequences[:, prompt + number], plain.sequences[:, prompt + number]):
            break
    worst = max(differences)
    if differences[0] != 0 or not worst <= tolerance:
        raise CheckFailedError(
            f"On {model.device} in {model.dtype}, a cache of which nothing is evicted gives logits "
            f"that differ from a plain one's by {worst:.3g} (by {differences[0]:.3g} after the "
            f"prompt). Allowed are {tolerance}, and nothing after the prompt."
        )
    return worst


def _really_compressed(model: PreTrainedModel) -> None:
    plain = _generate(model)
    with press(model, SMALL[0]) as session:
        ours = _generate(model)
    if not torch.equal(ours.logits[0], plain.logits[0]):
        raise CheckFailedError(
            f"{SMALL[0]} on {model.device}: logits after the prompt are not the plain model's."
        )
    rows = ours[cache_argument(model)].layers[0].keys.shape[2]
    held = {layer.held_tokens for layer in session.report().layers}
    if held != {CAPACITY + NEW - 1} or rows != CAPACITY + NEW - 1:
        raise CheckFailedError(
            f"{SMALL[0]} holds {sorted(held)} rows (keys: {rows}) after {NEW} tokens, not "
            f"{CAPACITY + NEW - 1}."
        )
