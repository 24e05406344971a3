"""`kvcompress needle`: what is found of a needle, over depth and length, under any policies."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import UNCOMPRESSED, at_capacities, need
from kvcompress_eval.console import counted, show_table
from kvcompress_eval.folder import RecordFile, enter_folder, of_model
from kvcompress_eval.needle import Kind, Needle, make_needle
from kvcompress_eval.options import Device, Dtype, Model, OutFolder

if TYPE_CHECKING:
    from kvcompress.policy import Policy
    from kvcompress_eval.one_prefill import OnePrefill

DEFAULT = ["snapkv", "snapkv:kernel_size=13:pooling=max", "streaming_llm"]
NEW_TOKENS = 24


@dataclass(frozen=True)
class Setting:
    """A policy, and how the prompt is read under it."""

    policy: "Policy | None"
    chunk_size: int | None = None
    lookahead: int | None = None
    spare: int | None = None

    @property
    def label(self) -> str:
        """Its name in records and tables."""
        name = UNCOMPRESSED if self.policy is None else self.policy.to_string()
        if self.chunk_size is None:
            return name
        ahead = "default" if self.lookahead is None else self.lookahead
        spare = "default" if self.spare is None else self.spare
        return f"{name}, chunks of {self.chunk_size}, look-ahead {ahead}, spare {spare}"


@dataclass(frozen=True)
class Prompt:
    """One prompt of the grid."""

    kind: Kind
    tokens: int
    depth: float
    seed: int


@dataclass(frozen=True)
class Found:
    """What one setting made of one prompt."""

    kind: str
    tokens: int
    depth: float
    seed: int
    setting: str
    prompt_tokens: int
    held_tokens: int
    """Rows of the layer that holds most, when the answer was complete."""
    answer: str
    found: bool

    @property
    def prompt(self) -> tuple[str, int, float, int]:
        """Which prompt it was."""
        return self.kind, self.tokens, self.depth, self.seed


@dataclass(frozen=True)
class Share:
    """Of the prompts of one length, how many were answered, and by how much less than plain."""

    setting: str
    tokens: int
    prompts: int
    value: float
    error: float
    difference: float
    """To the uncompressed cache on the same prompts."""
    difference_error: float


def settings_for(
    policies: Sequence["Policy"],
    chunk_size: int | None,
    lookaheads: Sequence[int],
    spares: Sequence[int],
) -> list[Setting]:
    """Every policy with an ordinary prefill, and if asked for in chunks in each of these ways."""
    found = [Setting(None), *(Setting(policy) for policy in policies)]
    if chunk_size is not None:
        ways = list(itertools.product(policies, lookaheads or (None,), spares or (None,)))
        found += [Setting(each, chunk_size, ahead, spare) for each, ahead, spare in ways]
    return found


def answer_all(
    model: Any, tokenizer: Any, needle: Needle, settings: Sequence[Setting]
) -> Iterator[tuple[Setting, str, int]]:
    """Every setting's answer to one prompt, and the rows of its fullest layer after it.

    Settings that can share a prefill do.
    """
    import torch

    from kvcompress_eval.one_prefill import OnePrefill

    ids = torch.tensor([needle.input_ids], device=model.device)
    shared = [
        each for each in settings if each.chunk_size is None and OnePrefill.serves(each.policy)
    ]
    if shared:
        prefill = OnePrefill(model, ids, [each.policy for each in shared])
        for each in shared:
            tokens, held = _from(prefill, each)
            yield each, tokenizer.decode(tokens, skip_special_tokens=True), held
        del prefill
    for each in settings:
        if each not in shared:
            tokens, held = _alone(model, ids, each)
            yield each, tokenizer.decode(tokens, skip_special_tokens=True), held


def _from(prefill: "OnePrefill", setting: Setting) -> tuple[list[int], int]:
    tokens, cache = prefill.answer(setting.policy, NEW_TOKENS)
    return tokens, max(layer.held_tokens for layer in cache.report().layers)


def _alone(model: Any, ids: Any, setting: Setting) -> tuple[list[int], int]:
    from kvcompress import press
    from kvcompress.session import cache_argument

    assert setting.policy is not None
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with press(model, setting.policy) as session:
        if setting.chunk_size is not None:
            given[cache_argument(model)] = session.prefill(
                ids,
                chunk_size=setting.chunk_size,
                lookahead=setting.lookahead,
                spare=setting.spare,
            )
        output = model.generate(ids, **given)
    held = max(layer.held_tokens for layer in session.report().layers)
    return output[0, ids.shape[1] :].tolist(), held


def shares(records: Sequence[Found]) -> list[Share]:
    """By setting and length, in the order of the records; prompts are independent of each other."""
    plain = {each.prompt: each.found for each in records if each.setting == UNCOMPRESSED}
    groups: dict[tuple[str, int], list[Found]] = {}
    for each in records:
        groups.setdefault((each.setting, each.tokens), []).append(each)
    return [
        Share(
            setting,
            tokens,
            len(group),
            *_mean([float(each.found) for each in group]),
            *_mean(
                [float(each.found) - plain[each.prompt] for each in group if each.prompt in plain]
            ),
        )
        for (setting, tokens), group in groups.items()
    ]


def _mean(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0] if values else float("nan")), float("nan")
    return fmean(values), stdev(values) / len(values) ** 0.5


def needle(
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, may be repeated; SnapKV and StreamingLLM if none is given."),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Every policy that names no budget is taken at each. [256, 512]"),
    ] = None,
    kind: Annotated[
        list[Kind] | None, typer.Option(help="What is hidden; may be repeated. [number]")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=50, help="Length of the haystack. [1000, 2000]")
    ] = None,
    depths: Annotated[int, typer.Option(min=1, help="How many, evenly from 0 to 1.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="How many of each.")] = 1,
    prefill_chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Every policy also in chunks of as many tokens.")
    ] = None,
    lookahead: Annotated[
        list[int] | None,
        typer.Option(min=0, help="With that: how many of the last tokens vote; may be repeated."),
    ] = None,
    spare: Annotated[
        list[int] | None,
        typer.Option(min=0, help="With that: rows kept until all was read; may be repeated."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    out: OutFolder = Path("needle"),
) -> None:
    """Hide something at many depths of prompts of many lengths, and see who finds it."""
    import transformers
    from rich.console import Console

    from kvcompress.models import load

    for name, given in (("lookahead", lookahead), ("spare", spare)):
        if given and prefill_chunk_size is None:
            raise EvaluationError(f"--{name} is for --prefill-chunk-size; give that too.")
    need("matplotlib", "The picture", "plots")
    specs = policy or DEFAULT
    amounts = capacity or ([256, 512] if policy is None else [])
    chosen = at_capacities(specs, amounts)
    settings = settings_for(chosen, prefill_chunk_size, lookahead or [], spare or [])
    prompts = [
        Prompt(each, length, number / max(depths - 1, 1), seed)
        for each in kind or [Kind.number]
        for length in tokens or [1000, 2000]
        for seed in range(seeds)
        for number in range(depths)
    ]
    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    enter_folder(out, "needle", of_model(model, loaded))
    records = RecordFile(out / "records.jsonl", Found)
    console = Console()
    with counted(console) as progress:
        bar = progress.add_task("answers", total=len(prompts) * len(settings))
        for prompt in prompts:
            key = (prompt.kind.value, prompt.tokens, prompt.depth, prompt.seed)
            done = {each.setting for each in records.all if each.prompt == key}
            missing = [each for each in settings if each.label not in done]
            progress.advance(bar, len(settings) - len(missing))
            if not missing:
                continue
            made = make_needle(tokenizer, prompt.tokens, prompt.depth, prompt.seed, prompt.kind)
            for setting, text, held in answer_all(loaded, tokenizer, made, missing):
                found = Found(
                    *key, setting.label, len(made.input_ids), held, text, made.is_answered_by(text)
                )
                records.add(found)
                progress.advance(bar)
    labels = [each.label for each in settings]
    wanted = {(each.kind.value, each.tokens, each.depth, each.seed) for each in prompts}
    shown = [each for each in records.all if each.setting in labels and each.prompt in wanted]
    shown.sort(key=lambda each: (labels.index(each.setting), each.tokens))
    report(model, shown, out, console)


def report(model: str, records: Sequence[Found], out: Path, console: Any) -> None:
    """Table on the console and in table.md, and a heat map for every setting."""
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.plots import plot_needles
    from kvcompress_eval.scores import markdown

    rows = [["kind", "tokens", "cache", "found", "minus none", "held", "prompts"]]
    for kind in dict.fromkeys(each.kind for each in records):
        of_kind = [each for each in records if each.kind == kind]
        for share in sorted(shares(of_kind), key=lambda each: each.tokens):
            held = [
                each.held_tokens
                for each in of_kind
                if (each.setting, each.tokens) == (share.setting, share.tokens)
            ]
            plain = share.setting == UNCOMPRESSED
            less = Estimate(share.difference, share.difference_error)
            rows.append(
                [
                    kind,
                    str(share.tokens),
                    share.setting,
                    Estimate(share.value, share.error).text(2),
                    "" if plain else less.text(2, "+"),
                    str(max(held)),
                    str(share.prompts),
                ]
            )
    show_table(console, f"Needles found, {model}", rows)
    (out / "table.md").write_text(f"{markdown(rows)}\n", encoding="utf-8")
    plot_needles(records, out / "plot.png", f"Needles found, {model}")
    console.print(
        "±: standard error over prompts. minus none: on the same prompts.", highlight=False
    )
    names = ("table.md", "plot.png", "records.jsonl")
    console.print("   ".join(str(out / name) for name in names), highlight=False)
