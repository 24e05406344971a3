"""Draws the pictures of how policies work, from real runs: `python docs/generate/pictures.py`.

What the runs gave is in docs/pictures/measured.npz, and each picture carries a digest of what it
shows; the tests run the models again and compare.
"""

import hashlib
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from kvcompress_eval.measure import kept_share
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from policy_pages import built_in

from kvcompress import CompressedCache, LayerView, SnapKVPolicy, policy_from, press
from kvcompress.testing import record, tiny_model
from kvcompress.testing.models import random_prompt

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # the backend must be chosen first

FOLDER = Path(__file__).parent.parent / "pictures"
NUMBERS = FOLDER / "measured.npz"
Array = NDArray[Any]
Numbers = Mapping[str, Array]

HELD, GONE, BLANK = "#2a6f97", "#e9ecef", "#ffffff"
PADDING, PROTECTED = "#c9ada7", "#f4a259"

PROMPT_TOKENS, DEPTH, CAPACITY, STEPS = 320, 0.45, 96, 48
SETTINGS = {
    "snapkv_decoding": "snapkv_decoding:capacity=96:window_size=16:interval=16",
    "scissorhands": "scissorhands:capacity=96:history=16:interval=16",
}
"""Of policies whose defaults are made for longer answers than those of the pictures."""


def setting(name: str) -> str:
    """How a policy is set for its picture."""
    return SETTINGS.get(name, f"{name}:capacity={CAPACITY}")


def _embedded() -> tuple[Any, Any, Any]:
    """The embedded model, a prompt of essays with a number in it, and the needle."""
    from kvcompress_eval.needle import make_needle

    from kvcompress.models import load

    model, tokenizer = load(device="cpu", dtype="float32")
    needle = make_needle(tokenizer, PROMPT_TOKENS, DEPTH)
    return model, torch.tensor([needle.input_ids]), needle


@torch.inference_mode()
def measure_policy(name: str) -> dict[str, Array]:
    """What a policy holds of the needle's prompt, and of the answer while it is generated.

    Returns:
        `NAME.layers`, layers x prompt, and `NAME.life`, steps x tokens: shares of heads, and of
        heads and layers, in units of 1 / 255.
    """
    model, ids, _ = _embedded()
    cache = CompressedCache(model, setting(name), prompt_length=ids.shape[1])
    life = np.zeros((STEPS + 1, ids.shape[1] + STEPS))
    layers = np.zeros((0, 0))
    for step in range(STEPS + 1):
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:]
        ids = ids.argmax(dim=-1)
        share = np.asarray(kept_share(cache, cache.get_seq_length()).numpy())
        if step == 0:
            layers = share
        life[step, : share.shape[1]] = share.mean(axis=0)
    return {f"{name}.layers": _bytes(layers), f"{name}.life": _bytes(life)}


def _bytes(share: Array) -> Array:
    return np.asarray(np.rint(share * 255), dtype=np.uint8)


LAYER, HEAD = 18, 2
"""Whose votes are shown: it attends to the number far more than to the essays around it."""


@torch.inference_mode()
def measure_votes() -> dict[str, Array]:
    """Votes of SnapKV's window in one head, pooled in two ways, and what is kept."""
    model, ids, needle = _embedded()
    found = {"votes.needle": np.asarray([needle.first, needle.last])}
    for pooling, kernel in (("avg", 5), ("max", 13)):
        seen: list[tuple[Any, Any]] = []

        class Watched(SnapKVPolicy):
            def scores(self, view: LayerView) -> Any:
                pooled = super().scores(view)
                if view.layer_idx == LAYER:
                    seen.append((view.attention_received()[0, HEAD], pooled[0, HEAD]))  # noqa: B023
                return pooled

        policy = Watched(capacity=CAPACITY, window_size=16, pooling=pooling, kernel_size=kernel)
        cache = CompressedCache(model, policy, prompt_length=ids.shape[1])
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layer: Any = cache.layers[LAYER]
        [(votes, pooled)] = seen
        found["votes.raw"] = np.asarray(votes.numpy(), dtype=np.float32)
        found[f"votes.{pooling}"] = np.asarray(pooled.numpy(), dtype=np.float32)
        found[f"votes.{pooling}.kept"] = np.asarray(layer.positions[0, HEAD].numpy())
    return found


COURSES = (
    "snapkv:capacity=32:window_size=8",
    "tova:capacity=32",
    "knorm:capacity=32:interval=8",
    "snapkv:capacity=32:window_size=8+h2o:capacity=12:scope=generated",
)
TURNS, ANSWER = (64, 24), 33


def measure_course() -> dict[str, Array]:
    """Rows that a layer holds after every forward of two turns, by policy."""
    model: Any = tiny_model()
    found = {}
    for number, text in enumerate(COURSES):
        cache = CompressedCache(model, text)
        ids = torch.zeros(1, 0, dtype=torch.long)
        for prompt in TURNS:
            ids = torch.cat([ids, random_prompt(prompt)["input_ids"]], dim=1)
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=ANSWER, do_sample=False)
        report = cache.report()
        history = np.asarray(report.history)
        history[:, 1] //= report.hosted_layers
        found[f"course.{number}"] = history
    return found


SEEN_BY = ("snapkv:capacity=20:window_size=6", "tova:capacity=20")
FED, NEW = 40, 20


def measure_attention() -> dict[str, Array]:
    """Which tokens each query attends to in one head, queries x tokens, by policy."""
    model: Any = tiny_model()
    found = {}
    for number, text in enumerate(SEEN_BY):
        with press(model, text) as session, record(session) as evictions:
            model.generate(**random_prompt(FED), max_new_tokens=NEW, do_sample=False)
        tokens = FED + NEW - 1
        visible = evictions.visible(1, 1, tokens, tokens)
        assert visible is not None
        sees = visible[0, 0] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        found[f"attention.{number}"] = np.asarray(sees.numpy(), dtype=np.uint8)
    return found


SINKS = 3


def measure_positions() -> dict[str, Array]:
    """The positions of held rows, read off their keys, with and without moving them.

    A key's first and second half are the two parts of rotated pairs, so the angle between a key of
    the first layer and the same key unrotated is its position times the pair's frequency.
    """
    model: Any = tiny_model()
    inputs = random_prompt(28)
    found = {}
    for form in ("original", "cache"):
        policy = policy_from(f"streaming_llm:capacity=12:n_sink={SINKS}:positions={form}")
        cache = CompressedCache(model, policy, prompt_length=28)
        with torch.inference_mode():
            model(**inputs, past_key_values=cache, use_cache=True)
            layer: Any = cache.layers[0]
            keys, tokens = layer.keys[0, 0], layer.positions[0, 0]
        block = model.model.layers[0]
        with torch.inference_mode():
            hidden = block.input_layernorm(model.model.embed_tokens(inputs["input_ids"]))
            bare = block.self_attn.k_proj(hidden)[0, :, : keys.shape[-1]]
        half = keys.shape[-1] // 2
        slowest = half - 1  # turns by less than a circle in such a short text
        turned = torch.complex(keys[:, slowest], keys[:, -1])
        unturned = torch.complex(bare[tokens, slowest], bare[tokens, -1])
        frequency = float(model.model.rotary_emb.inv_freq[slowest])
        place = torch.angle(turned / unturned) / frequency
        found[f"positions.{form}"] = np.asarray(place.numpy(), dtype=np.float32)
        found[f"positions.{form}.tokens"] = np.asarray(tokens.numpy())
    return found


LENGTHS = (36, 22, 9)


@torch.inference_mode()
def _held(model: Any, policy: str, inputs: dict[str, Any]) -> Any:
    """Positions that one head holds of every row of a batch."""
    cache = CompressedCache(model, policy, prompt_length=inputs["input_ids"].shape[1])
    model(**inputs, past_key_values=cache, use_cache=True)
    layer: Any = cache.layers[1]
    return layer.positions[:, 0]


def measure_padding() -> dict[str, Array]:
    """What is held of a padded batch in one head, and of each row alone: 1 held, 2 padding."""
    model: Any = tiny_model()
    policy = "snapkv:capacity=14:window_size=4"
    inputs = random_prompt(*LENGTHS)
    shown = np.zeros((2, len(LENGTHS), max(LENGTHS)), dtype=np.uint8)
    batch = _held(model, policy, inputs)
    for row, length in enumerate(LENGTHS):
        pads = max(LENGTHS) - length
        alone = {name: each[row : row + 1, pads:] for name, each in inputs.items()}
        [kept] = _held(model, policy, alone)
        shown[:, row, :pads] = 2
        shown[0, row, pads + batch[row][batch[row] >= 0].numpy()] = 1
        shown[1, row, pads + kept[kept >= 0].numpy()] = 1
    return {"padding": shown}


def draw_policy(numbers: Numbers, name: str, needle: Array) -> Any:
    """Above: layers x prompt when it ends. Below: steps x tokens while the answer is generated."""
    layers, life = numbers[f"{name}.layers"] / 255, numbers[f"{name}.life"] / 255
    prompt = layers.shape[1]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
    options: dict[str, Any] = {
        "aspect": "auto", "interpolation": "none", "vmin": 0, "vmax": 1, "cmap": "magma_r",
    }  # fmt: skip
    above.imshow(layers, extent=(0, prompt, len(layers) - 0.5, -0.5), **options)
    above.set_ylabel("layer")
    above.set_title(f"{setting(name)}: when the prompt has been read", fontsize=9, loc="left")
    fed = np.arange(life.shape[1]) < prompt + np.arange(len(life))[:, None]
    image = below.imshow(
        np.where(fed, life, np.nan), extent=(0, life.shape[1], len(life) - 0.5, -0.5), **options
    )
    below.set_ylabel("generated tokens fed")
    below.set_title("mean over layers, while the answer is generated", fontsize=9, loc="left")
    below.set_xlabel("token of the conversation; the number asked for is between the blue lines")
    for axis in (above, below):
        for edge in (needle[0], needle[1] + 1):
            axis.axvline(edge, color="tab:blue", lw=0.8)
        axis.axvline(prompt, color="grey", lw=0.6, ls=":")
    figure.colorbar(image, ax=[above, below], label="share of KV heads that hold it")
    return figure


def draw_votes(numbers: Numbers) -> Any:
    """Votes of one head, as they are and pooled, with what stays beneath."""
    first, last = numbers["votes.needle"]
    raw = numbers["votes.raw"]
    figure, axes = plt.subplots(3, 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    shown = (
        ("raw", "attention that the window's 16 queries give to each token, summed", None),
        ("avg", "pooled: kernel_size=5, pooling=avg (the default)", "votes.avg.kept"),
        ("max", "pooled: kernel_size=13, pooling=max", "votes.max.kept"),
    )
    for axis, (which, title, kept) in zip(axes, shown, strict=True):
        values = np.array(numbers[f"votes.{which}"])
        top = np.sort(raw[: len(raw) - 16])[-4] * 1.1  # the first token's vote is off the scale
        axis.axvspan(first, last + 1, color="tab:cyan", alpha=0.3, lw=0)
        for edge in (first, last + 1):
            axis.axvline(edge, color="tab:blue", lw=1, zorder=4)
        axis.axvspan(len(raw) - 16, len(raw), color=PROTECTED, alpha=0.35, lw=0)
        axis.fill_between(np.arange(len(values)) + 0.5, values, step="mid", color="#555555", lw=0)
        axis.set_ylim(-0.14 * top, top)
        axis.set_title(title, fontsize=9, loc="left")
        if kept is not None:
            held = np.zeros((1, len(raw)))
            held[0, numbers[kept]] = 1
            extent = (0, len(raw), -0.12 * top, -0.02 * top)
            colours = matplotlib.colors.ListedColormap([GONE, HELD])
            axis.imshow(held, extent=extent, aspect="auto", cmap=colours, zorder=3)
            axis.set_xlim(0, len(raw))
            axis.set_ylim(-0.14 * top, top)
        axis.set_yticks([])
    axes[0].set_ylabel("votes")
    axes[-1].set_xlabel(
        "token of the prompt. Between the lines: the number asked for. Orange: the window. "
        "Blue strip: kept, grey: evicted"
    )
    return figure


def draw_course(numbers: Numbers) -> Any:
    """Rows held against tokens seen."""
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    longest = int(numbers["course.0"][-1, 0])
    start, end = 0, 0
    for turn in TURNS:
        end = (
            start + turn + (1 if start else 0)
        )  # with the last answer's last token, not fed so far
        axis.axvspan(start, end, color="tab:orange", alpha=0.1, lw=0)
        start = end + ANSWER - 1
    axis.plot(
        [TURNS[0], longest], [TURNS[0], longest], "--", color="grey", lw=1, label="uncompressed"
    )
    for number, text in enumerate(COURSES):
        seen, held = numbers[f"course.{number}"].T
        axis.plot(seen, held, ".-", ms=3, lw=1, label=text)
    axis.set_xlim(40, longest + 1)
    axis.set_ylim(0, longest)
    axis.set_xlabel("tokens seen; orange: a prompt, white: its answer")
    axis.set_ylabel("rows that a layer holds\nafter each forward")
    axis.legend(fontsize=8, loc="upper left")
    return figure


def draw_attention(numbers: Numbers) -> Any:
    """Queries x tokens: dark is attended to, light is gone."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 5), sharey=True, layout="constrained")
    colours = matplotlib.colors.ListedColormap([BLANK, "#f2cc8f", HELD])
    for number, (axis, text) in enumerate(zip(axes, SEEN_BY, strict=True)):
        sees = numbers[f"attention.{number}"]
        past = np.tril(np.ones_like(sees))
        axis.imshow(
            past + sees * past, cmap=colours, vmin=0, vmax=2, interpolation="none", aspect="auto"
        )
        axis.axhline(FED - 0.5, color="black", lw=0.8)
        axis.set_title(text, fontsize=9, loc="left")
        axis.set_xlabel("token (key)")
    axes[0].set_ylabel("token (query); below the line: generated")
    marks = [Rectangle((0, 0), 1, 1, color=c) for c in (HELD, "#f2cc8f")]
    axes[1].legend(marks, ["attended to", "evicted before"], fontsize=8, loc="upper right")
    return figure


def draw_positions(numbers: Numbers) -> Any:
    """Held rows at the positions that their keys are rotated to."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 2.6), sharex=True, layout="constrained")
    for axis, form in zip(axes, ("original", "cache"), strict=True):
        places, tokens = numbers[f"positions.{form}"], numbers[f"positions.{form}.tokens"]
        for place, token in zip(places, tokens, strict=True):
            colour = PROTECTED if token < SINKS else HELD
            axis.add_patch(Rectangle((place - 0.45, 0), 0.9, 1, color=colour))
            axis.text(place, 0.5, str(token), ha="center", va="center", fontsize=8, color="white")
        axis.set_yticks([])
        axis.set_ylim(-0.1, 1.1)
        axis.set_title(f"positions={form}", fontsize=9, loc="left")
    axes[1].set_xlim(-1, 28)
    axes[1].set_xticks(range(0, 29, 4))
    axes[1].set_xlabel("position that the key is rotated to; in the box: the token's number")
    return figure


def draw_padding(numbers: Numbers) -> Any:
    """The rows of a batch, and each alone."""
    shown = numbers["padding"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 2.8), sharex=True, layout="constrained")
    colours = matplotlib.colors.ListedColormap([GONE, HELD, PADDING])
    for axis, part, title in zip(axes, shown, ("in one batch", "each alone"), strict=True):
        axis.pcolormesh(part[::-1], cmap=colours, vmin=0, vmax=2, edgecolors="white", lw=0.8)
        axis.set_yticks(np.arange(len(LENGTHS)) + 0.5, [f"{n} tokens" for n in LENGTHS[::-1]])
        axis.tick_params(length=0)
        axis.set_title(title, fontsize=9, loc="left")
    axes[1].set_xlabel("column. Blue: held, grey: evicted, brown: padding")
    return figure


MEASURES: dict[str, Callable[[], dict[str, Array]]] = {
    "votes": measure_votes,
    "course": measure_course,
    "attention": measure_attention,
    "positions": measure_positions,
    "padding": measure_padding,
}
DRAWINGS: dict[str, Callable[[Numbers], Any]] = {
    "votes": draw_votes,
    "course": draw_course,
    "attention": draw_attention,
    "positions": draw_positions,
    "padding": draw_padding,
}


def digest(numbers: Numbers, subject: str) -> str:
    """Of the numbers of one picture; it is written into the file."""
    total = hashlib.sha256()
    for name in sorted(numbers):
        if name.split(".")[0] == subject:
            total.update(name.encode() + np.ascontiguousarray(numbers[name]).tobytes())
    return total.hexdigest()


def save(figure: Any, path: Path, numbers: Numbers, subject: str) -> None:
    """Write a picture that says which numbers it shows."""
    note = {"Description": f"numbers {digest(numbers, subject)}", "Software": None}
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png", metadata=note)
    path.write_bytes(picture.getvalue())
    plt.close(figure)


def main(subjects: list[str]) -> None:
    """Measure and draw again: all, or the named pictures.

    Args:
        subjects: Names of policies, or of the pictures of how it works.
    """
    torch.set_num_threads(1)
    # The new name of the argument does not exist before transformers 5.24.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    FOLDER.mkdir(exist_ok=True)
    numbers: dict[str, Array] = dict(np.load(NUMBERS)) if NUMBERS.exists() else {}
    known = [*MEASURES, *built_in()]
    strange = sorted(set(subjects) - set(known))
    if strange:
        sys.exit(f"No picture of {', '.join(strange)}; there are: {', '.join(known)}.")
    numbers = {name: each for name, each in numbers.items() if name.split(".")[0] in known}
    for subject in subjects or known:
        print(subject)
        measure = MEASURES.get(subject)
        numbers |= measure() if measure is not None else measure_policy(subject)
    np.savez_compressed(NUMBERS, allow_pickle=False, **numbers)
    for subject in known:
        draw = DRAWINGS.get(subject)
        if draw is not None:
            figure = draw(numbers)
        else:
            figure = draw_policy(numbers, subject, numbers["votes.needle"])
        save(figure, FOLDER / f"{subject}.png", numbers, subject)


if __name__ == "__main__":
    main(sys.argv[1:])
