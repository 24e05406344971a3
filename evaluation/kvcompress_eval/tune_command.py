"""`kvcompress tune`: which policy and settings hold least and still keep what is asked for."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import EvaluationError, PolicyConfigError
from kvcompress_eval.comparison import UNCOMPRESSED, need
from kvcompress_eval.console import counted, show_table
from kvcompress_eval.folder import RecordFile, enter_folder, of_model, versions
from kvcompress_eval.needle import Kind, make_needle
from kvcompress_eval.options import Chat, Device, Dtype, Model, NewTokens, OutFolder
from kvcompress_eval.prompts import Prompt, read_prompt, tokenize
from kvcompress_eval.provenance import commit, machine
from kvcompress_eval.search_space import Setting, Space, families
from kvcompress_eval.tune import (
    BOUNDS,
    Outcome,
    Quality,
    Score,
    Scorer,
    candidates,
    check_level,
    front,
    outcome,
    recommended,
    search,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kvcompress.policy import Policy
    from kvcompress_eval.fidelity import Estimate

DEFAULTS = "authors' defaults"
AUTHORS = {DEFAULTS: "snapkv", "authors' LongBench settings": "snapkv:kernel_size=7:pooling=max"}
"""SnapKV's, with a window of 32."""
ROWS = {1: "as many rows", 2: "twice the rows"}
GOLDEN = 0.618


@dataclass(frozen=True)
class Tuned:
    """All that was found."""

    model: str
    quality: Quality
    level: float
    confidence: float
    searched: list[Outcome]
    """Every setting that was tried, on the searching prompts."""
    judged: list[Outcome]
    """Candidates on the prompts that were held back, by tokens held."""
    references: dict[str, Outcome]
    """The authors' settings on those prompts, by what they are."""
    gains: dict[str, "Estimate"]
    """What the recommended policy keeps more than each of these, on the same prompts."""
    recommended: Outcome | None
    smaller: tuple[Outcome, "Estimate"] | None
    """The smallest candidate that keeps no less than the authors' defaults with as many rows as the
    recommended policy, and what it keeps more."""
    whole: float
    """Tokens that the uncompressed cache holds, mean over the prompts that were held back."""


def tune(
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(help="Files, a prompt each; needles in essays if none is given."),
    ] = None,
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, may be repeated; fields that it names are fixed. [snapkv]"),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="A capacity to try, may be repeated. [1/8 to 2/3 of the shortest prompt]"
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,...",
            help="Values to try of a field, as kernel_size=5,13; of a composition's second part as "
            "decode.capacity=16,32. May be repeated. Without: window_size, kernel_size, pooling "
            "and beta have several, others their default.",
        ),
    ] = None,
    quality: Annotated[
        Quality | None,
        typer.Option(help="What to keep. [found for needles, agreement for files]"),
    ] = None,
    at_least: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="How much of it. [0.8 for found, 0.9 for the others]"),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Of the lower bound, one-sided.")
    ] = 0.95,
    settings: Annotated[int, typer.Option(min=2, help="How many settings to try.")] = 24,
    searching: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts to choose on; others are held back. [a third]"),
    ] = None,
    needles: Annotated[int, typer.Option(min=3, help="How many needles without a file.")] = 21,
    tokens: Annotated[int, typer.Option(min=50, help="Length of their haystacks.")] = 300,
    kind: Annotated[
        list[Kind] | None, typer.Option(help="What is hidden; may be repeated. [number]")
    ] = None,
    new_tokens: NewTokens = 32,
    chat: Chat = True,
    batch: Annotated[
        int, typer.Option(min=1, help="Settings to draw before the prompts are gone through.")
    ] = 5,
    room: Annotated[
        float, typer.Option(min=0, help="GiB for caches of prompts, which are then read once.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the search and of who is held back.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    out: OutFolder = Path("tune"),
) -> None:
    """Find the smallest cache that keeps a stated quality, and say how sure that is."""
    specs = policy or ["snapkv"]
    aim = quality or (Quality.agreement if prompts else Quality.found)
    level = at_least if at_least is not None else 0.8 if aim is Quality.found else 0.9
    if twice := [str(path) for path, times in Counter(prompts or ()).items() if times > 1]:
        raise EvaluationError(f"Given more than once: {', '.join(twice)}. Give every prompt once.")
    texts = {path: read_prompt(path) for path in prompts or ()}
    _check(specs, texts, aim)
    count = len(texts) or needles
    choosing = searching or max(1, count // 3)
    check_level(count - choosing, aim, level, confidence)
    families(specs, capacity or [], search or [], 100)  # what is wrong with them shows now
    need("optuna", "The search", "tune")
    need("scipy", "The confidence bound", "tune")
    need("matplotlib", "The picture", "tune")
    import transformers
    from rich.console import Console

    from kvcompress.hosting import hosted_layers
    from kvcompress.models import load

    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    given = [Prompt(path.name, tokenize(tokenizer, text, chat)) for path, text in texts.items()]
    given = given or _needles(tokenizer, needles, tokens, kind or [Kind.number])
    _check_different(given)
    shortest = min(len(each.input_ids) for each in given)
    space = Space(
        families(specs, capacity or [], search or [], shortest),
        len(hosted_layers(loaded.config)),
        shortest,
        new_tokens,
    )
    random.Random(seed).shuffle(given)
    digests = "".join(each.digest for each in given)
    enter_folder(
        out,
        "tune",
        of_model(model, loaded)
        | versions("optuna", "scipy")
        | {
            "prompts": f"{len(given)}, {hashlib.sha256(digests.encode()).hexdigest()[:16]}",
            "searching": choosing,
            "space": space.describe(),
            "quality": aim.value,
            "new_tokens": new_tokens,
            "batch": batch,
            "seed": seed,
        },
    )
    console = Console()
    policies = [each.policy for each in space.settings.values()]
    run = _Run(
        Scorer(
            loaded,
            tokenizer,
            [*policies, _reference(AUTHORS[DEFAULTS], 2**20)],
            new_tokens,
            room * 2**30,
        ),
        RecordFile(out / "records.jsonl", Score),
        aim,
        confidence,
    )
    with counted(console) as progress:
        searched = run.search(space, given[:choosing], settings, batch, seed, out, progress)
        run.scorer.forget()
        tuned = run.judge(model, space, searched, given[choosing:], level, progress)
    report(tuned, run.left_out, out, console)


def _check(specs: Sequence[str], texts: Any, quality: Quality) -> None:
    if texts and quality is Quality.found:
        raise EvaluationError(
            "--quality found is for needles. For prompts in files, use agreement or likeness."
        )
    if not texts and any("+" in spec for spec in specs):
        raise EvaluationError(
            "Needles have answers of a few tokens, in which the second part of a composition has "
            "nothing to do. Give prompts as files to tune it, with --new-tokens as long as your "
            "answers."
        )


def _check_different(prompts: Sequence[Prompt]) -> None:
    seen = dict[str, str]()
    for each in prompts:
        if each.digest in seen:
            raise EvaluationError(
                f"The prompts {seen[each.digest]} and {each.name} are the same. One of them might "
                "be searched on and the other held back: leave one out."
            )
        seen[each.digest] = each.name


def _needles(tokenizer: Any, count: int, tokens: int, kinds: Sequence[Kind]) -> list[Prompt]:
    """Needles at depths that are spread evenly, whichever of them are taken."""
    found = []
    for number in range(count):
        depth = (0.5 + number * GOLDEN) % 1
        needle = make_needle(tokenizer, tokens, depth, number, kinds[number % len(kinds)])
        name = f"{kinds[number % len(kinds)]} {number} at {depth:.2f}"
        found.append(Prompt(name, needle.input_ids, needle))
    return found


def _reference(spec: str, capacity: int) -> "Policy":
    from kvcompress import policy_from

    return policy_from(f"{spec}:capacity={capacity}")


class _Run:
    """Scores that are known, and those that are made when they are asked for."""

    def __init__(
        self, scorer: Scorer, records: RecordFile[Score], quality: Quality, confidence: float
    ) -> None:
        self.scorer, self._records = scorer, records
        self._quality, self._confidence = quality, confidence
        self._known = {(each.digest, each.policy): each for each in records.all}
        self.left_out = list[Prompt]()
        """Prompts whose uncompressed answer is none to compare with."""

    def _score(
        self, prompts: Sequence[Prompt], policies: Sequence["Policy | None"], bar: Any
    ) -> None:
        """Make what is missing, a prompt at a time."""
        names = {
            UNCOMPRESSED if policy is None else policy.to_string(): policy for policy in policies
        }
        for prompt in prompts:
            missing = [name for name in names if (prompt.digest, name) not in self._known]
            if missing:
                for score in self.scorer.scores(prompt, [names[name] for name in missing]):
                    self._records.add(score)
                    self._known[score.digest, score.policy] = score
            bar(1)

    def _outcome(self, name: str, prompts: Sequence[Prompt]) -> Outcome:
        scores = [self._known[prompt.digest, name] for prompt in prompts]
        return outcome(scores, self._quality, self._confidence)

    def _usable(self, prompts: Sequence[Prompt], what: str, progress: "Progress") -> list[Prompt]:
        """Those whose uncompressed answer can be compared with."""
        task = progress.add_task(f"{what}, read", total=len(prompts))
        self._score(prompts, [None], lambda done: progress.advance(task, done))
        found = [
            each for each in prompts if self._known[each.digest, UNCOMPRESSED].usable(self._quality)
        ]
        self.left_out += [each for each in prompts if each not in found]
        if not found:
            raise EvaluationError(
                f"Of the {what} the uncompressed model "
                + (
                    "finds no needle. Give shorter --tokens, another --kind, or another model."
                    if self._quality is Quality.found
                    else "ends every answer after its first token, which the whole prompt predicts "
                    "under any policy. Give other prompts."
                )
            )
        return found

    def search(
        self,
        space: Space,
        prompts: Sequence[Prompt],
        count: int,
        batch: int,
        seed: int,
        out: Path,
        progress: "Progress",
    ) -> list[Outcome]:
        """What was found of each setting that was tried."""
        usable = self._usable(prompts, "searching prompts", progress)
        task = progress.add_task("settings", total=min(count, len(space.settings)))
        done = set[str]()

        def values(drawn: Sequence[Setting]) -> list[tuple[float, float]]:
            self._score(usable, [each.policy for each in drawn], lambda _: None)
            done.update(each.policy.to_string() for each in drawn)
            progress.update(task, completed=len(done))
            found = [self._outcome(each.policy.to_string(), usable) for each in drawn]
            return [(each.held_tokens, each.quality.value) for each in found]

        tried = search(space, values, count, batch, seed, out / "optuna.journal")
        return [self._outcome(each.policy.to_string(), usable) for each in tried]

    def judge(
        self,
        model: str,
        space: Space,
        searched: list[Outcome],
        prompts: Sequence[Prompt],
        level: float,
        progress: "Progress",
    ) -> Tuned:
        """Candidates, and the authors' settings, on prompts that were held back."""
        usable = self._usable(prompts, "held-back prompts", progress)
        check_level(len(usable), self._quality, level, self._confidence)
        chosen = [each.policy for each in candidates(space, searched, level)]
        task = progress.add_task("candidates", total=len(usable))
        self._score(usable, chosen, lambda done: progress.advance(task, done))
        judged = [self._outcome(each.to_string(), usable) for each in chosen]
        judged.sort(key=lambda each: each.held_tokens)
        best = recommended(judged, level)
        scores = [self._known[each.digest, (best or judged[-1]).policy] for each in usable]
        # What it held beside the answer's tokens, all but the last of which were fed.
        rows = round(sum(each.held_tokens - each.tokens for each in scores) / len(scores))
        others = dict[str, "Policy"]()
        for author, spec in AUTHORS.items():
            for times, words in ROWS.items():
                try:
                    others[f"{author}, {words}"] = _reference(spec, times * rows)
                except PolicyConfigError:
                    continue  # no room beside the window of 32
        task = progress.add_task("authors' settings", total=len(usable))
        self._score(usable, list(others.values()), lambda done: progress.advance(task, done))
        references = {
            name: self._outcome(each.to_string(), usable) for name, each in others.items()
        }
        gains = {name: self._gain(best, each, usable) for name, each in references.items() if best}
        smaller = None
        same = references.get(f"{DEFAULTS}, {ROWS[1]}")
        if same is not None:
            able = [each for each in judged if each.quality.value >= same.quality.value]
            if able:
                smaller = able[0], self._gain(able[0], same, usable)
        whole = self._outcome(UNCOMPRESSED, usable).held_tokens
        return Tuned(
            model,
            self._quality,
            level,
            self._confidence,
            searched,
            judged,
            references,
            gains,
            best,
            smaller,
            whole,
        )

    def _gain(self, best: Outcome, other: Outcome, prompts: Sequence[Prompt]) -> "Estimate":
        from kvcompress_eval.fidelity import bootstrap

        pairs = [
            [self._known[each.digest, name] for name in (best.policy, other.policy)]
            for each in prompts
        ]
        return bootstrap(
            [first.value(self._quality) - second.value(self._quality) for first, second in pairs]
        )


def report(tuned: Tuned, left_out: Sequence[Prompt], out: Path, console: "Console") -> None:
    """Tables and what they say on the console and in table.md, numbers, and a picture.

    Raises:
        EvaluationError: No candidate kept what was asked for; the files are written all the same.
    """
    from kvcompress_eval.plots import plot_tuning
    from kvcompress_eval.scores import markdown

    held_back = tuned.judged[0].prompts
    title = (
        f"{tuned.model}, {tuned.quality}: {len(tuned.searched)} settings on "
        f"{tuned.searched[0].prompts} prompts, judged on {held_back} held-back ones"
    )
    first = [["Pareto front, searching prompts", "held", str(tuned.quality), "KL, nats"]]
    first += [
        [
            each.policy,
            f"{each.held_tokens:.1f}",
            each.quality.text(3),
            f"{each.divergence:.3f}",
        ]
        for each in front(tuned.searched)
    ]
    bound = f"{tuned.confidence:.0%} bound"
    second = [["held-back prompts", "", "held", str(tuned.quality), bound, "KL, nats", "gain"]]
    for name, each in _judged(tuned):
        gain = tuned.gains.get(name)
        second.append(
            [
                each.policy,
                name,
                f"{each.held_tokens:.1f}",
                each.quality.text(3),
                f"{each.bound:.3f}",
                f"{each.divergence:.3f}",
                "" if gain is None else gain.text(3, "+"),
            ]
        )
    said = sentences(tuned)
    if left_out:
        said.append(f"Left out, since the uncompressed model's answer is none: {len(left_out)}.")
    show_table(console, title, first)
    show_table(console, "", second)
    # That nothing is recommended is the error that ends the command.
    for line in [*(said if tuned.recommended else said[1:]), LEGEND]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    parts = [title, markdown(first), markdown(second), *said, LEGEND]
    (out / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    numbers = {"commit": commit(), "machine": machine(), "bound": BOUNDS[tuned.quality]}
    numbers |= asdict(tuned)
    (out / "result.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    plot_tuning(tuned, out / "plot.png", title)
    names = ("table.md", "plot.png", "result.json", "records.jsonl", "optuna.journal")
    console.print("   ".join(str(out / name) for name in names), highlight=False, soft_wrap=True)
    if tuned.recommended is None:
        raise EvaluationError(said[0])


def _judged(tuned: Tuned) -> list[tuple[str, Outcome]]:
    found = [
        ("recommended" if each is tuned.recommended else "candidate", each) for each in tuned.judged
    ]
    return found + list(tuned.references.items())


def sentences(tuned: Tuned) -> list[str]:
    """What the tables say."""
    bound = f"lower {tuned.confidence:.0%} bound ({BOUNDS[tuned.quality]}, one-sided)"
    best = tuned.recommended
    if best is None:
        most = max(tuned.judged, key=lambda each: each.bound)
        return [
            f"Nothing is recommended: on the held-back prompts no setting's {bound} of "
            f"{tuned.quality} is at least {tuned.level:g} from the largest candidate on. The "
            f"highest is {most.bound:.3f}, of {most.policy}. Try larger --capacity, more prompts, "
            "longer answers (--new-tokens), more --settings, or ask for less with --at-least."
        ]
    said = [
        f"Recommended: {best.policy}",
        f"It keeps {best.quality.text(3)} on {best.prompts} held-back "
        f"prompts with {best.held_tokens:.1f} of {tuned.whole:.1f} tokens held; {bound} "
        f"{best.bound:.3f}, asked for {tuned.level:g}.",
    ]
    same = tuned.references.get(f"{DEFAULTS}, {ROWS[1]}")
    if tuned.smaller is not None and same is not None:
        less, gain = tuned.smaller
        said.append(
            f"The smallest candidate that keeps no less than the authors' defaults "
            f"({same.policy}, {same.held_tokens:.1f} held) is {less.policy}, with "
            f"{less.held_tokens:.1f} held: {gain.text(3, '+')}."
        )
    elif same is not None:
        said.append(
            f"No candidate keeps as much as the authors' defaults ({same.policy}, "
            f"{same.held_tokens:.1f} held): {same.quality.text(3)}. Search more --settings."
        )
    return said


LEGEND = (
    "±: standard error by bootstrap over prompts. held: rows in the end, mean over layers, the "
    "answer's included. KL: of the uncompressed from the compressed distribution, mean of tokens. "
    "gain: what the recommended policy keeps more on the same prompts. Candidates are tested "
    "from the most rows down to the first whose bound is too low."
)
