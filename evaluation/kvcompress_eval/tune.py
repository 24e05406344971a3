"""The smallest cache that keeps a stated quality: what is tried, and how sure the choice is.

No paper of the policies chooses their settings by itself; this search is ours. Settings are chosen
on some prompts and judged on others that were held back. Candidates are judged from the largest
cache down, until the first whose lower confidence bound is below the quality asked for (a fixed
sequence of tests). So the chance that the one which is recommended keeps less than that is at most
1 - confidence, however many were judged, as far as the bound holds (exactly for needles, about for
means over prompts) and the prompts stand for those to come.

Source: for tests in a fixed sequence, Angelopoulos et al. 2021, arXiv:2110.01052.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from kvcompress.errors import EvaluationError, UnsupportedModeError
from kvcompress_eval.comparison import UNCOMPRESSED
from kvcompress_eval.needle import Needle
from kvcompress_eval.prompts import Prompt
from kvcompress_eval.search_space import Setting, Space

if TYPE_CHECKING:
    from torch import Tensor

    from kvcompress.policy import Policy
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.one_prefill import OnePrefill

AT_RANDOM = 10
"""Settings that are drawn before the sampler learns from what was found."""
CANDIDATES = 5
"""At most so many are judged on the prompts that were held back."""


class Quality(StrEnum):
    """What is to be kept, from 0 to 1, of each prompt."""

    found = "found"
    """1 if the answer names the needle, else 0."""
    agreement = "agreement"
    """Share of the uncompressed model's tokens that are the likeliest."""
    likeness = "likeness"
    """exp(-KL(uncompressed || compressed)), the KL in nats, mean of the tokens."""


@dataclass(frozen=True)
class Score:
    """One policy on one prompt, along the uncompressed model's own answer."""

    digest: str
    policy: str
    held_tokens: float
    """Rows in the end, mean over layers that policies act on, per KV head."""
    tokens: int
    """Of the answer, from the second on; the first is predicted by the prefill. 0 if it has one."""
    agreeing: int
    """How many of them are the likeliest for this cache."""
    divergence: float
    """KL(uncompressed || this), nats, mean over the tokens."""
    found: bool | None
    """Whether the needle is named; None without one."""

    def value(self, quality: Quality) -> float:
        """From 0 to 1."""
        if quality is Quality.found:
            return float(bool(self.found))
        if quality is Quality.agreement:
            return self.agreeing / self.tokens
        return math.exp(-self.divergence)

    def usable(self, quality: Quality) -> bool:
        """Of the uncompressed cache: whether others can be compared with it on this prompt."""
        return bool(self.found) if quality is Quality.found else self.tokens > 0


@dataclass(frozen=True)
class _Read:
    """A prompt that was read, and the uncompressed model's answer."""

    prefill: "OnePrefill"
    said: list[int]
    named: int | None
    """How many of its tokens name the needle; None if it is not named, or there is none."""
    stepwise: "Tensor"
    """Logits of all tokens but the first, when they are fed one at a time."""
    at_once: "Tensor"
    """The same when they are fed together."""
    nbytes: int


class Scorer:
    """Scores policies on prompts, and keeps prompts that were read while there is room.

    Args:
        model: Any supported model.
        tokenizer: Its own.
        policies: All that may be asked for.
        new_tokens: Length of the answer, at least 2; it ends earlier at an end token, or where it
            has named the needle.
        room: Bytes for prompts that were read; those for which there is none are read every time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policies: Sequence["Policy"],
        new_tokens: int,
        room: float,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._policies, self._new_tokens, self._room = policies, new_tokens, room
        self._kept: dict[str, _Read] = {}

    def scores(self, prompt: Prompt, policies: Sequence["Policy | None"]) -> Iterator[Score]:
        """Each policy's, in the order given; None is the uncompressed cache."""
        read = self._kept.get(prompt.digest) or self._read(prompt)
        for policy in policies:
            yield self._score(prompt, read, policy)

    def forget(self) -> None:
        """Free what was read."""
        self._room += sum(each.nbytes for each in self._kept.values())
        self._kept.clear()

    def _read(self, prompt: Prompt) -> _Read:
        import torch

        from kvcompress_eval.fidelity import continued
        from kvcompress_eval.one_prefill import OnePrefill

        ids = torch.tensor([prompt.input_ids], device=self._model.device)
        shared = [each for each in self._policies if OnePrefill.serves(each)]
        prefill = OnePrefill(self._model, ids, [None, *shared])
        said, stepwise = continued(self._model, prefill, self._new_tokens)
        named = None if prompt.needle is None else self._named(prompt.needle, said)
        if named is not None:
            # With the token after it, which might be one more digit.
            said = said[: named + 1]
            stepwise = stepwise[: len(said) - 1]
        whole = prefill.cache(None)
        at_once = self._logits(whole, said[:-1])
        logits = stepwise if at_once is None else at_once
        nbytes = whole.report().allocated_bytes + stepwise.nbytes + logits.nbytes
        read = _Read(prefill, said, named, stepwise, logits, nbytes)
        if nbytes <= self._room:
            self._room -= nbytes
            self._kept[prompt.digest] = read
        return read

    def _named(self, needle: Needle, said: Sequence[int]) -> int | None:
        for count in range(1, len(said) + 1):
            if self._names(needle, said[:count]) and self._names(needle, said[: count + 1]):
                return count
        return None

    def _names(self, needle: Needle, tokens: Sequence[int]) -> bool:
        return needle.is_answered_by(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _score(self, prompt: Prompt, read: _Read, policy: "Policy | None") -> Score:
        import torch

        from kvcompress.hosting import CompressedCache
        from kvcompress_eval.fidelity import compare, read_on
        from kvcompress_eval.one_prefill import OnePrefill, feed

        if OnePrefill.serves(policy):
            cache = read.prefill.cache(policy)
        else:
            assert policy is not None
            cache = CompressedCache(self._model, policy, prompt_length=len(prompt.input_ids))
            feed(self._model, torch.tensor([prompt.input_ids], device=self._model.device), cache)
        together = policy is None or policy.part("decode") is None
        ours = self._logits(cache, read.said[:-1]) if together else None
        if ours is None:
            ours, full = read_on(self._model, cache, read.said[:-1]), read.stepwise
        else:
            full = read.at_once
        found = compare(read.said, full.to(ours.device), ours, cache)
        return Score(
            prompt.digest,
            UNCOMPRESSED if policy is None else policy.to_string(),
            found.held_tokens,
            len(found.agrees),
            sum(found.agrees),
            fmean(found.divergence) if found.divergence else 0.0,
            None if prompt.needle is None else self._finds(prompt.needle, read, ours),
        )

    def _finds(self, needle: Needle, read: _Read, logits: "Tensor") -> bool:
        """Whether a greedy answer is the uncompressed one up to where it has named the needle."""
        if read.named is None:
            return False
        likeliest = [read.said[0], *logits.argmax(dim=-1).tolist()]
        same = likeliest[: read.named] == read.said[: read.named]
        return same and self._names(needle, likeliest[: read.named + 1])

    def _logits(self, cache: Any, tokens: Sequence[int]) -> "Tensor | None":
        """Of tokens that are read together, in the time of one where nothing is evicted meanwhile.

        None if the model cannot evict before it reads them.
        """
        import torch

        from kvcompress.session import cache_argument

        try:
            cache.end_prefill()
        except UnsupportedModeError:
            return None
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._model.device)
        with torch.inference_mode():
            given = {cache_argument(self._model): cache, "use_cache": True}
            logits: Tensor = self._model(ids, **given).logits[0]
        return logits


def search(
    space: Space,
    values: Callable[[Sequence[Setting]], Sequence[tuple[float, float]]],
    count: int,
    batch: int,
    seed: int,
    journal: Path,
) -> list[Setting]:
    """Settings that are worth trying, chosen by optuna (TPE) to hold little and keep much.

    A sampler is made for every trial, with a seed of its own, so that what it draws depends on the
    trials before alone. A run that was stopped is played again, with `values` that are known by
    then, and goes on as it would have.

    Args:
        space: If it has no more than `count` settings, all are tried.
        values: Tokens held and quality of some settings, in their order.
        count: How many different settings to try. Fewer are if most draws repeat earlier ones.
        batch: Settings that are drawn before any of them is tried.
        seed: Of all draws.
        journal: Written anew: optuna's own record of all trials, for its tools.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for path in (journal, Path(f"{journal}.lock")):
        path.unlink(missing_ok=True)
    backend = JournalFileBackend(str(journal))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="tune",
        directions=["minimize", "maximize"],
    )
    first = _starts(space, count)
    for start in first:
        study.enqueue_trial(_parameters(space, start))
    tried = dict[str, Setting]()
    asked, most = 0, len(first) if len(first) == len(space.settings) else 4 * count
    while asked < most and len(tried) < count:
        drawn = list[tuple[Any, Setting]]()
        for _ in range(min(batch, most - asked)):
            # No two trials of two seeds share one.
            own = seed * 1_000_003 + asked
            study.sampler = optuna.samplers.TPESampler(seed=own, n_startup_trials=AT_RANDOM)
            trial = study.ask()
            asked += 1
            setting = _suggested(space, trial)
            if setting is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            trial.set_user_attr("policy", setting.policy.to_string())
            drawn.append((trial, setting))
        found = values([setting for _, setting in drawn])
        for (trial, each), value in zip(drawn, found, strict=True):
            study.tell(trial, value)
            tried.setdefault(each.policy.to_string(), each)
    return list(tried.values())


def _starts(space: Space, count: int) -> list[Setting]:
    """All settings if they are few, else some of every policy's defaults: what others must beat."""
    if len(space.settings) <= count:
        return list(space.settings.values())
    found = [
        each for number in range(len(space.families)) for each in space.by_default(number)[::2]
    ]
    return found[: count // 2]


def _parameters(space: Space, setting: Setting) -> dict[str, Any]:
    """What optuna calls a setting's values."""
    family = space.families[setting.family]
    found: dict[str, Any] = {"policy": family.spec} if len(space.families) > 1 else {}
    for each in family.dimensions:
        if len(each.values) > 1:
            value = setting.choice[each.name]
            name = _parameter(space, setting.family, each.name)
            found[name] = each.values.index(value) if each.ordered else value
    return found


def _suggested(space: Space, trial: Any) -> Setting | None:
    """The setting that a trial asks for; None if it is no policy."""
    number = 0
    if len(space.families) > 1:
        specs = [family.spec for family in space.families]
        number = specs.index(trial.suggest_categorical("policy", specs))
    choice = dict[str, str]()
    for each in space.families[number].dimensions:
        name = _parameter(space, number, each.name)
        if len(each.values) == 1:
            choice[each.name] = each.values[0]
        elif each.ordered:
            # Places in the list, which the sampler knows to be near or far from each other.
            choice[each.name] = each.values[trial.suggest_int(name, 0, len(each.values) - 1)]
        else:
            choice[each.name] = trial.suggest_categorical(name, each.values)
    return space.find(number, choice)


def _parameter(space: Space, family: int, name: str) -> str:
    return name if len(space.families) == 1 else f"{space.families[family].spec} {name}"


@dataclass(frozen=True)
class Outcome:
    """One policy over some prompts."""

    policy: str
    prompts: int
    held_tokens: float
    quality: "Estimate"
    divergence: float
    """Mean over prompts, nats."""
    bound: float
    """Lower confidence bound of the quality."""


def outcome(scores: Sequence[Score], quality: Quality, confidence: float) -> Outcome:
    """Of one policy's scores, one for each prompt."""
    from kvcompress_eval.fidelity import bootstrap

    return Outcome(
        scores[0].policy,
        len(scores),
        fmean(each.held_tokens for each in scores),
        bootstrap([each.value(quality) for each in scores]),
        fmean(each.divergence for each in scores),
        lower_bound(scores, quality, confidence),
    )


def lower_bound(scores: Sequence[Score], quality: Quality, confidence: float) -> float:
    """One-sided bound that the mean over all such prompts is above, with this confidence.

    For needles found, Clopper and Pearson's exact one. Else Student's t over prompts; for
    agreement at most Clopper and Pearson's over all tokens, since prompts of which none differs
    anywhere would seem to leave no doubt.
    """
    from scipy import stats

    if quality is Quality.found:
        named = sum(bool(each.found) for each in scores)
        return clopper_pearson(named, len(scores), confidence)
    values = [each.value(quality) for each in scores]
    if len(values) < 2:
        return 0.0
    error = stdev(values) / math.sqrt(len(values))
    bounds = [fmean(values) - float(stats.t.ppf(confidence, len(values) - 1)) * error]
    if quality is Quality.agreement:
        right, of = sum(each.agreeing for each in scores), sum(each.tokens for each in scores)
        bounds.append(clopper_pearson(right, of, confidence))
    return max(0.0, min(bounds))


def clopper_pearson(right: int, of: int, confidence: float) -> float:
    """One-sided lower bound of a share, of which `right` of `of` were seen."""
    from scipy import stats

    return float(stats.beta.ppf(1 - confidence, right, of - right + 1)) if right else 0.0


BOUNDS = {
    Quality.found: "Clopper-Pearson",
    Quality.agreement: "Student's t over prompts, at most Clopper-Pearson over tokens",
    Quality.likeness: "Student's t over prompts",
}


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other beats in both tokens held and quality, by tokens held.

    Of equal ones the one with the smaller divergence stays.
    """
    found = list[Outcome]()
    ranked = sorted(
        outcomes, key=lambda each: (each.held_tokens, -each.quality.value, each.divergence)
    )
    for each in ranked:
        if not found or each.quality.value > found[-1].quality.value:
            found.append(each)
    return found


def candidates(space: Space, tried: Sequence[Outcome], level: float) -> list[Setting]:
    """Which settings to judge on prompts that were held back.

    The smallest one that reached the level; what differs from it in a larger budget alone, unless
    it was tried and did not reach it; larger ones of the front; and the next smaller one of it. If
    none reached the level, the best one takes the first's place.
    """
    ahead = front(tried)
    good = [each for each in ahead if each.quality.value >= level] or ahead[-1:]
    below = ahead[: ahead.index(good[0])][-1:]
    failed = {each.policy for each in tried if each.quality.value < level}
    chosen = space.settings[good[0].policy]
    larger = [each for each in space.larger(chosen) if each.policy.to_string() not in failed]
    # As many steps up as there is room for, the rest of the front first.
    others = [space.settings[each.policy] for each in good[1:]]
    first = [space.settings[each.policy] for each in below] + [chosen]
    found = {
        each.policy.to_string(): each for each in [*first, *others[: CANDIDATES // 3], *larger]
    }
    return list(found.values())[:CANDIDATES]


def recommended(judged: Sequence[Outcome], level: float) -> Outcome | None:
    """The last to pass when they are tested from the most tokens held to the first that fails.

    Args:
        judged: On prompts that were held back; of some that hold as much, the preferred one first.
        level: What the lower bound must reach.
    """
    passed = None
    for each in sorted(reversed(judged), key=lambda each: -each.held_tokens):
        if each.bound < level:
            break
        passed = each
    return passed


def check_level(prompts: int, quality: Quality, level: float, confidence: float) -> None:
    """Refuse a level that not even finding everything could show.

    Raises:
        EvaluationError: There are too few prompts that are held back.
    """
    if prompts < 2:
        raise EvaluationError(
            f"{prompts} prompts are held back, and at least 2 are needed to be sure of anything. "
            "Give more prompts, or fewer to --searching."
        )
    if quality is Quality.found and clopper_pearson(prompts, prompts, confidence) < level:
        needed = math.ceil(math.log(1 - confidence) / math.log(level))
        raise EvaluationError(
            f"If all of {prompts} needles that are held back are found, the {confidence:.0%} lower "
            f"bound is {clopper_pearson(prompts, prompts, confidence):.2f}, below --at-least "
            f"{level}. Hold back {needed} (--needles, --searching), or ask for less."
        )
