"""What `kvcompress tune` may choose from: settings of some policies, each a policy itself."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from kvcompress.errors import EvaluationError, PolicyConfigError

if TYPE_CHECKING:
    from kvcompress.policy import Policy

USUAL = {
    "window_size": ("8", "16", "32"),
    "kernel_size": ("5", "7", "13", "21"),
    "pooling": ("avg", "max"),
    "beta": ("5", "20"),
}
"""Values of fields that are tried of every policy that has the field and does not name it."""

LARGEST = 20_000
"""Settings of a space: all are made and checked before anything is run."""

_BUDGETS = ("capacity", "keep_ratio")
_SHARES = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
_DECODE = "decode."


@dataclass(frozen=True)
class Dimension:
    """One field and the values that it may have."""

    name: str
    """The field; of the second part of a composition with `decode.` before it."""
    values: tuple[str, ...]
    """As in a policy's string; ascending if they are numbers."""
    asked: bool
    """Whether a user named them: then a value that cannot be used is an error."""

    @property
    def ordered(self) -> bool:
        """Whether all values are numbers."""
        return all(map(_is_number, self.values))


@dataclass(frozen=True)
class Family:
    """A policy as it was given, and what is still free of it."""

    spec: str
    dimensions: tuple[Dimension, ...]

    def string(self, choice: Mapping[str, str]) -> str:
        """The policy's string with a value for every dimension."""
        first, *second = self.spec.split("+")
        for name, value in choice.items():
            if name.startswith(_DECODE):
                second = [f"{second[0]}:{name.removeprefix(_DECODE)}={value}"]
            else:
                first += f":{name}={value}"
        return "+".join([first, *second])

    def choices(self) -> Iterator[dict[str, str]]:
        """Every combination of values."""
        names = [each.name for each in self.dimensions]
        for values in product(*(each.values for each in self.dimensions)):
            yield dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class Setting:
    """One point of the space."""

    policy: "Policy"
    family: int
    choice: Mapping[str, str]

    @property
    def budget(self) -> float:
        """Its capacity, or its ratio, if that is searched; else 0."""
        return next((float(self.choice[name]) for name in _BUDGETS if name in self.choice), 0.0)

    @property
    def shape(self) -> tuple[object, ...]:
        """What it has in common with those that differ in the budget alone."""
        rest = ((name, value) for name, value in self.choice.items() if name not in _BUDGETS)
        return self.family, *rest


class Space:
    """All settings of some families that are policies.

    Args:
        families: At least one.
        layers: Hosted layers of the model.
        prompt_tokens: Length of the shortest prompt, of which every setting must evict something.
        new_tokens: Length of a continuation, in which the second part of a composition must.

    Raises:
        PolicyConfigError: A value that was asked for fits nothing.
        EvaluationError: There are too many settings, or one would not evict anything.
    """

    def __init__(
        self, families: Sequence[Family], layers: int, prompt_tokens: int, new_tokens: int
    ) -> None:
        self.families = list(families)
        size = sum(prod(len(each.values) for each in family.dimensions) for family in families)
        if size > LARGEST:
            raise EvaluationError(
                f"The search space has {size:,} settings, and at most {LARGEST:,} can be searched. "
                "Give fewer values to --search and --capacity, or fix fields in --policy."
            )
        self.settings: dict[str, Setting] = {}
        """By the policy's string, in the order of the dimensions."""
        self._by_choice: dict[tuple[object, ...], Setting] = {}
        for number, family in enumerate(self.families):
            self._add(number, family, layers, prompt_tokens, new_tokens)

    def _add(
        self, number: int, family: Family, layers: int, prompt_tokens: int, new_tokens: int
    ) -> None:
        from kvcompress import policy_from

        used = set[tuple[str, str]]()
        refused: dict[tuple[str, str], PolicyConfigError] = {}
        for choice in family.choices():
            try:
                policy = policy_from(family.string(choice))
                policy.check_layers(layers)
            except PolicyConfigError as error:
                refused |= {pair: error for pair in choice.items() if pair not in refused}
                continue
            used |= set(choice.items())
            _evicts(policy, layers, prompt_tokens, new_tokens)
            setting = Setting(policy, number, choice)
            setting = self.settings.setdefault(policy.to_string(), setting)
            self._by_choice[number, *choice.values()] = setting
        for dimension in family.dimensions:
            for value in dimension.values:
                pair = dimension.name, value
                if pair not in used and (dimension.asked or not used):
                    raise refused[pair]

    def find(self, family: int, choice: Mapping[str, str]) -> Setting | None:
        """The setting of a choice; None if it is no policy."""
        return self._by_choice.get((family, *choice.values()))

    def larger(self, setting: Setting) -> list[Setting]:
        """Those that differ from a setting in a larger budget alone, ascending."""
        alike = [each for each in self.settings.values() if each.shape == setting.shape]
        return sorted(
            (each for each in alike if each.budget > setting.budget), key=lambda each: each.budget
        )

    def by_default(self, family: int) -> list[Setting]:
        """A family's settings that have its own defaults in all but the budget, ascending."""
        from kvcompress import policy_from

        own = _without_budget(policy_from(self.families[family].spec).to_dict())
        found = [
            each
            for each in self.settings.values()
            if each.family == family and _without_budget(each.policy.to_dict()) == own
        ]
        return sorted(found, key=lambda each: each.budget)

    def describe(self) -> dict[str, dict[str, list[str]]]:
        """Policies with their dimensions and values, ready for JSON."""
        return {
            family.spec: {each.name: list(each.values) for each in family.dimensions}
            for family in self.families
        }


def _evicts(policy: "Policy", layers: int, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a setting whose quality would say nothing about it."""
    kept = [policy.budget(prompt_tokens, layer, layers) for layer in range(layers)]
    if min(kept) >= prompt_tokens:
        raise EvaluationError(
            f"{policy} evicts nothing of the shortest prompt, which has {prompt_tokens} tokens. "
            "Give smaller budgets, or longer prompts."
        )
    decode = policy.part("decode")
    if decode is None or decode is policy:
        return
    in_all = [decode.budget(prompt_tokens, layer, layers) for layer in range(layers)]
    before = [0] * layers if policy.spares_prompt else kept
    # The last token is never fed.
    if all(most - rows >= new_tokens - 1 for most, rows in zip(in_all, before, strict=True)):
        raise EvaluationError(
            f"{policy}: {decode} evicts nothing in {new_tokens} new tokens. Give it a smaller "
            "capacity in --policy or by --search decode.capacity=..., or more --new-tokens."
        )


def _without_budget(form: Any) -> Any:
    if not isinstance(form, dict):
        return form
    return {name: _without_budget(value) for name, value in form.items() if name not in _BUDGETS}


def families(
    specs: Sequence[str],
    capacities: Sequence[int],
    searches: Sequence[str],
    prompt_tokens: int,
) -> list[Family]:
    """What is free of every policy.

    A field that a policy's string names is fixed. `capacities` and `searches` say which values
    others may have; the rest of `USUAL`, and capacities from an eighth to two thirds of the
    shortest prompt, are added. Any other field keeps its default.

    Args:
        specs: Policies, as strings.
        capacities: May be empty.
        searches: `field=value,value,...`, of a composition's second part `decode.field=...`.
        prompt_tokens: Length of the shortest prompt.

    Raises:
        UnknownPolicyError: A policy is not installed.
        PolicyConfigError: A policy's form or fields are wrong.
        EvaluationError: A search cannot be read, or is for no policy.
    """
    from kvcompress import policy_from

    for spec in specs:
        policy_from(spec)
    asked = dict(map(_read, searches))
    if len(asked) < len(searches):
        raise EvaluationError("--search names a field twice. Give all its values in one.")
    if capacities:
        if "capacity" in asked:
            raise EvaluationError("--capacity and --search capacity=... both give it. Give one.")
        asked["capacity"] = _in_order(list(map(str, capacities)))
    usual = USUAL | {"capacity": _ladder(prompt_tokens)}
    found, free = [], set[str]()
    for spec in dict.fromkeys(specs):
        fields, fixed = _fields(spec)
        open_fields = fields - fixed - (set(_BUDGETS) if fixed & set(_BUDGETS) else set())
        free |= open_fields
        mine = {name: values for name, values in asked.items() if name in open_fields}
        rest = open_fields - set(mine)
        if "keep_ratio" in mine:
            rest.discard("capacity")
        names = [name for name in usual if name in rest]
        dimensions = [Dimension(name, usual[name], asked=False) for name in names]
        dimensions += [Dimension(*each, asked=True) for each in mine.items()]
        dimensions.sort(key=lambda each: (each.name not in _BUDGETS, each.name))
        found.append(Family(spec, tuple(dimensions)))
    for name in asked:
        if name not in free:
            near = difflib.get_close_matches(name, free, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise EvaluationError(
                f"No policy has a free field {name!r}.{hint} Free: {', '.join(sorted(free))}. A "
                "field that --policy names is fixed; those of a composition's second part are "
                "written decode.field."
            )
    return found


def _read(search: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = search.partition("=")
    parts = [part.strip() for part in values.split(",")]
    if not equals or not name.strip() or not all(parts) or len(set(parts)) < len(parts):
        raise EvaluationError(
            f"--search {search!r} cannot be read. The form is field=value,value, each value once: "
            "kernel_size=5,13,21."
        )
    return name.strip(), _in_order(parts)


def _fields(spec: str) -> tuple[set[str], set[str]]:
    """Names of a policy's fields, and of those that its string names."""
    from kvcompress.plugins import registry

    fields, fixed = set[str](), set[str]()
    for prefix, part in zip(("", _DECODE), spec.strip().split("+"), strict=False):
        name, *given = part.split(":")
        fields |= {f"{prefix}{field}" for field in registry().get(name).model_fields}
        fixed |= {f"{prefix}{each.split('=')[0]}" for each in given}
    if "+" in spec:
        fields.add(f"{_DECODE}scope")
    return fields, fixed


def _ladder(prompt_tokens: int) -> tuple[str, ...]:
    """Capacities that are shares of a prompt, in multiples of 8."""
    steps = [max(8, round(share * prompt_tokens / 8) * 8) for share in _SHARES]
    return tuple(str(step) for step in dict.fromkeys(steps))


def _in_order(values: Sequence[str]) -> tuple[str, ...]:
    if all(map(_is_number, values)):
        return tuple(sorted(dict.fromkeys(values), key=float))
    return tuple(dict.fromkeys(values))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
