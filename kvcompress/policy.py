"""What a policy is and all that it may see: the base class and the view of one layer."""

import difflib
import functools
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from jaxtyping import Bool, Float, Float32, Int64
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from kvcompress.errors import PolicyConfigError
from kvcompress.tensors import GroupReduce, Weigh, attention_received, newest

Phase = Literal["prefill", "decode"]


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false.")
    return value


PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_no_flag)]
NonNegativeInt = Annotated[int, Field(ge=0), BeforeValidator(_no_flag)]


def _pairs(value: Any) -> list[tuple[int, int]]:
    """Ranges of tokens in order, read from text or pairs."""
    single = isinstance(value, str) or (
        len(value) == 2 and all(isinstance(bound, int) for bound in value)
    )
    return sorted(_bounds(each) for each in ([value] if single else value))


def _ranges(value: Any) -> tuple[str, ...]:
    """Ranges of tokens in their text form, in order and merged."""
    merged: list[tuple[int, int]] = []
    for start, end in _pairs(value):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return tuple(f"{start}-{end}" for start, end in merged)


def _spans(value: Any) -> tuple[str, ...]:
    """Ranges of tokens in their text form, in order; side by side or apart."""
    pairs = _pairs(value)
    for (first, end), (start, last) in itertools.pairwise(pairs):
        if start < end:
            raise ValueError(
                f"the spans {first}-{end} and {start}-{last} have tokens in common, and a token "
                "belongs to one span. The end is not included: 0-40/40-120 lie side by side."
            )
    return tuple(f"{start}-{end}" for start, end in pairs)


def _bounds(value: Any) -> tuple[int, int]:
    parts = value.split("-") if isinstance(value, str) else list(value)
    numbers = [int(part) for part in parts if str(part).isdecimal()]
    if len(parts) != 2 or len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise ValueError(
            f"{value!r} is no range of tokens; it is written first-end, the end not included: "
            "0-40 are the first forty."
        )
    return numbers[0], numbers[1]


Ranges = Annotated[tuple[str, ...], BeforeValidator(_ranges)]
Spans = Annotated[tuple[str, ...], BeforeValidator(_spans)]
PerLayer = PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
"""One value for all layers, or one value for each hosted layer."""

_RESERVED = set(":=+/, ")
_ALL = 2**40
"""More queries than any prompt has."""


@dataclass(frozen=True)
class LayerView:
    """One layer's cache at the moment when a policy is asked, after the new rows were attended.

    Rows are in position order unless the policy can do without (`Policy.any_order`). Rows that may
    not be judged (draft tokens of speculative decoding) are not in the view.
    """

    query: Float[Tensor, "batch heads q_len head_dim"]
    """After RoPE: the last queries, oldest first; as many as the policy's `query_tokens` asks for
    and the turn has. In `observe`, all queries since the last call."""
    key: Float[Tensor, "batch key_heads held head_dim"]
    """After RoPE, as the attention function gets it."""
    value: Float[Tensor, "batch key_heads held value_dim"]
    kv_heads: int
    """Heads of the cache: one set of kept rows each."""
    locate: Callable[[], Int64[Tensor, "batch kv_heads held"]]
    """Gives `positions`, when they are asked for."""
    scaling: float
    """The model's factor on attention logits."""
    layer_idx: int
    """Counts hosted layers only, from 0."""
    num_layers: int
    """Hosted layers of the model."""
    seen: int
    """Tokens that this layer has seen, evicted ones and padding included."""
    phase: Phase
    padded: bool = True
    """False if it is known that no row is padding."""
    find_newest: Callable[[int], Bool[Tensor, "batch kv_heads held"]] | None = None
    """Does what `last` does if rows are in no order; None if they are in position order."""
    budget: int = 0
    """Rows of the view that will stay, not counting any that core keeps in any case; 0 in
    `observe`, where nothing is chosen."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """The policy's own tensors, batch x kv_heads x held; see `Policy.observe`."""
    softcap: float | None = None
    """Cap on attention logits where the model has one."""
    sinks: Float[Tensor, " heads"] | None = None
    """Learned logits in the softmax's denominator where the model has them."""

    @functools.cached_property
    def positions(self) -> Int64[Tensor, "batch kv_heads held"]:
        """Original position of every row; -1 for padding, which is always at the left."""
        return self.locate()

    @functools.cached_property
    def valid(self) -> Bool[Tensor, "batch kv_heads held"]:
        """False for padding."""
        return self.positions >= 0

    @property
    def held(self) -> int:
        """Rows in the view."""
        return self.key.shape[2]

    def last(self, count: int) -> Bool[Tensor, "#batch #kv_heads held"]:
        """True for the newest `count` rows."""
        if self.find_newest is None or count <= 1:
            return newest(self.held, count, self.key.device)
        return self.find_newest(count)

    def attention_received(
        self,
        *,
        group_reduce: GroupReduce = "mean",
        weigh: Weigh | None = None,
        whole_layer: bool = False,
    ) -> Float32[Tensor, "batch groups held"]:
        """Attention that every row gets from the view's queries, summed over them.

        As the model's own attention, caps and sinks included; see `tensors.attention_received`.

        Args:
            group_reduce: How the query heads of one KV head are combined.
            weigh: What to sum instead of the attention itself.
            whole_layer: Combine all query heads of the layer, to one group, instead.

        Raises:
            PolicyConfigError: The view has no queries.
        """
        if self.query.shape[2] == 0:
            raise PolicyConfigError(
                "attention_received() needs queries, and this view has none: query_tokens() of "
                "the policy must say how many it reads."
            )
        valid = self.valid if self.padded else None
        return attention_received(
            self.query,
            self.key,
            valid[:, :1] if valid is not None and whole_layer else valid,
            scaling=self.scaling,
            kv_heads=1 if whole_layer else self.kv_heads,
            group_reduce=group_reduce,
            softcap=self.softcap,
            sinks=self.sinks,
            weigh=weigh,
        )


class Policy(BaseModel):
    """Which rows of the KV cache to keep: a frozen value whose methods are pure functions.

    A subclass names itself, says in which phases it evicts, and scores rows. Core does the rest:
    top-k, padding, sorting, gathering, and everything about caches, models and generation.
    `capacity` or `keep_ratio` sets the budget; a subclass with another rule overrides `budget`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    """The name in strings, plugins, CLI and results."""
    phases: ClassVar[frozenset[Phase]] = frozenset({"prefill"})
    """When the policy evicts: once when a prompt ends, after decode steps, or both."""
    needs: ClassVar[frozenset[Literal["observe"]]] = frozenset()
    """`observe`: the policy keeps state and must see every query."""
    any_order: ClassVar[bool] = False
    """Whether the policy reads rows in any order, the newest last. If so, a decode step that evicts
    one row moves only the newest row, into its place."""
    across_heads: ClassVar[bool] = False
    """Whether what is kept in a head depends on other heads of the layer, or on its number. If so,
    tensor-parallel models, of which every process has some of the heads, are refused."""
    per_layer: ClassVar[frozenset[str]] = frozenset({"capacity"})
    """Fields that accept one value for each hosted layer."""
    shared_by_spans: ClassVar[frozenset[str]] = frozenset()
    """Fields that count rows at a prompt's end, of which every span has its share under `fair`."""
    default_capacity: ClassVar[int] = 2048

    capacity: PerLayer | None = Field(
        default=None,
        description="Tokens kept per KV head and layer, protected ones included. "
        "Default 2048 unless keep_ratio is given.",
    )
    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of the prompt kept, instead of capacity.",
    )
    later_turns: Literal["revote", "append", "keep"] = Field(
        default="revote",
        description="At the end of a later turn's prompt: revote brings the whole cache back to "
        "its budget, append keeps the earlier rows and cuts only the new turn, keep evicts nothing "
        "more.",
    )

    protect: Ranges = Field(
        default=(),
        description="Tokens that are always kept, by their numbers in the conversation: 0-40 are "
        "the first forty; several ranges as 0-40/812-830. Part of the budget.",
    )
    fair: Spans = Field(
        default=(),
        description="Spans of the first prompt that share its budget by their lengths, each judged "
        "as if it were a prompt of its own: 0-40/40-120. What they leave out are spans too.",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        decides = cls.part is Policy.part and "decode" in cls.phases
        if decides and all(base.__name__ != "DecodePolicy" for base in cls.__mro__):
            raise PolicyConfigError(
                f"{cls.__name__} evicts while decoding: derive it from kvcompress.DecodePolicy, "
                "which has the interval that this needs."
            )

    def __init__(self, **fields: Any) -> None:
        """Validate the fields.

        Raises:
            PolicyConfigError: A field is unknown, out of range, or contradicts another.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PolicyConfigError(_explain(type(self), error)) from None
        lists = {
            name: len(value)
            for name in sorted(self.per_layer)
            if isinstance(value := getattr(self, name), tuple)
        }
        if len(set(lists.values())) > 1:
            given = ", ".join(f"{name} {length}" for name, length in lists.items())
            raise PolicyConfigError(
                f"{type(self).__name__}: lists must have one value for each layer, but of values "
                f"there are: {given}."
            )
        self._check_room(max(lists.values(), default=1))

    @model_validator(mode="before")
    @classmethod
    def _one_budget(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            capacity, ratio = data.get("capacity"), data.get("keep_ratio")
            if capacity is not None and ratio is not None:
                raise ValueError(
                    f"capacity={capacity} and keep_ratio={ratio} both set the budget: give one."
                )
            if capacity is None and ratio is None:
                return {**data, "capacity": cls.default_capacity}
        return data

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "Policy":
        """A copy with some fields replaced; validated, unlike pydantic's own."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        fields = {**own, **(update or {})}
        if "keep_ratio" in (update or {}) and "capacity" not in (update or {}):
            fields["capacity"] = None
        if "capacity" in (update or {}) and "keep_ratio" not in (update or {}):
            fields["keep_ratio"] = None
        return type(self)(**fields)

    def scores(self, view: LayerView) -> Float[Tensor, "batch kv_heads held"]:
        """Float32 score of every row; the highest are kept. Padding and protection are core's."""
        raise NotImplementedError

    def protected(self, view: LayerView) -> Bool[Tensor, "#batch #kv_heads held"] | None:
        """Rows that must be kept whatever their score; at most `protected_tokens` of them.

        Those of the field `protect` are core's.
        """
        return None

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """How many rows `protected` may name; the budget is always larger."""
        return 0

    @functools.cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """`protect` as numbers, the ends not included."""
        return tuple(map(_bounds, self.protect))

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`fair` as numbers, the ends not included."""
        return tuple(map(_bounds, self.fair))

    @property
    def named_tokens(self) -> int:
        """How many tokens `protect` names."""
        return sum(end - start for start, end in self.ranges)

    def fixed_tokens(self, layer_idx: int, num_layers: int) -> int:
        """How many rows are kept in any case: the budget is always larger."""
        return self.named_tokens + self.protected_tokens(layer_idx, num_layers)

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """How many of the last queries `scores` reads; 0 if it reads none.

        A policy that evicts while decoding and reads more than one must protect their rows, or
        read no more than `interval`: else rows of its own queries may be gone.
        """
        return 0

    def prompt_query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """How many of a prompt's last queries must be at hand when it ends.

        As many as are read, or all of them if its spans are judged one by one.
        """
        wanted = self.query_tokens(layer_idx, num_layers)
        return _ALL if self.fair and (wanted or "observe" in self.needs) else wanted

    def reindexed_tokens(self, layer_idx: int, num_layers: int) -> int:
        """How many rows at the cache's front move up when rows behind them are evicted.

        Their keys are rotated to the position that follows from their place in the cache, counted
        back from the newest row. Only rows right behind them may be evicted, so that all others
        are in place already. 0 leaves every key at its original position.
        """
        return 0

    def observe(self, view: LayerView) -> Mapping[str, Tensor]:
        """New state after one or more forwards, for policies that declare `needs = {"observe"}`.

        Every query is shown once, before any row is evicted that it attended to. Between two
        evictions at decode, queries may be shown together.

        `view.state` holds the previous state, with zeros for the new rows. Every tensor is
        batch x kv_heads x held; core takes it along when rows are evicted, reordered or dropped.
        """
        return view.state

    def budget(self, prompt_tokens: int, layer_idx: int, num_layers: int) -> int:
        """Rows that this layer keeps, fixed when a prompt ends.

        Args:
            prompt_tokens: Real tokens seen, padding not counted.
            layer_idx: Among the hosted layers.
            num_layers: Hosted layers.
        """
        if self.keep_ratio is None:
            capacity: int = self.at("capacity", layer_idx)
            return capacity
        share = math.floor(self.keep_ratio * prompt_tokens + 1e-9)
        return max(share, self.fixed_tokens(layer_idx, num_layers) + 1)

    def part(self, phase: Phase) -> "Policy | None":
        """The policy that evicts in a phase, or None: itself, unless it is composed of others."""
        return self if phase in self.phases else None

    def observer(self, phase: Phase) -> "Policy | None":
        """The policy whose `observe` is called for the forwards of a phase, or None."""
        return self if "observe" in self.needs else None

    @property
    def spares_prompt(self) -> bool:
        """Whether what was kept of the prompt stays at decode, beside the budget."""
        return False

    def at(self, name: str, layer_idx: int) -> Any:
        """The value of a per-layer field at one layer."""
        value = getattr(self, name)
        return value[layer_idx] if isinstance(value, tuple) else value

    def check_layers(self, num_layers: int) -> None:
        """Refuse fields that do not fit a model.

        Raises:
            PolicyConfigError: A list's length is not `num_layers`, or a layer's capacity leaves no
                room beside the rows that are always kept.
        """
        for name in sorted(self.per_layer):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_layers:
                raise PolicyConfigError(
                    f"{self.name}: {name} lists {len(value)} values, but the model has "
                    f"{num_layers} full-attention layers. Give one value, or {num_layers}."
                )
        moves = any(self.reindexed_tokens(layer, num_layers) for layer in range(num_layers))
        for name in ("protect", "fair"):
            if moves and getattr(self, name):
                raise PolicyConfigError(
                    f"{self.name}: {name}={'/'.join(getattr(self, name))} keeps rows among those "
                    "that go, and keys at the cache's front are moved up to the rows behind them. "
                    f"Use original positions, or leave {name} out."
                )
        self._check_room(num_layers)

    def _check_room(self, num_layers: int) -> None:
        if self.capacity is None:
            return
        for layer in range(num_layers):
            fixed = self.fixed_tokens(layer, num_layers)
            if self.at("capacity", layer) <= fixed:
                raise PolicyConfigError(
                    f"{self.name}: capacity={self.at('capacity', layer)} in layer {layer} leaves "
                    f"no room beside the {fixed} tokens that are always kept. Use a capacity "
                    f"above {fixed}."
                )

    def changed_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        changed = {}
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            default = info.get_default(call_default_factory=True)
            if name == "capacity" and self.keep_ratio is None:
                default = self.default_capacity
            if value != default:
                changed[name] = value
        return changed

    def to_dict(self) -> dict[str, Any]:
        """The dict form, `{"policy": name, ...}`, defaults omitted; `policy_from` reads it."""
        fields = self.changed_fields()
        return {"policy": self.name} | {
            key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
        }

    def to_string(self) -> str:
        """The string form, `name:field=value:...`, defaults omitted; `policy_from` reads it."""
        parts = [f"{key}={_format(value)}" for key, value in self.changed_fields().items()]
        return ":".join([self.name, *parts])

    def __str__(self) -> str:
        try:
            return self.to_string()
        except PolicyConfigError:  # a value has no string form
            return str(self.to_dict())

    @classmethod
    def parse(cls, parts: Sequence[str], spec: str) -> "Policy":
        """A policy from the parts of its string form after the name, each `field=value`.

        Args:
            parts: Empty for a policy with its defaults.
            spec: The whole string, for errors.

        Raises:
            PolicyConfigError: It cannot be read, or a field is wrong.
        """
        values: dict[str, Any] = {}
        for part in parts:
            field_name, equals, value = part.partition("=")
            if not equals or not field_name:
                raise PolicyConfigError(
                    f"Cannot read {part!r} in the policy {spec!r}. The form is "
                    "name:field=value:field=value, for example snapkv:capacity=512:pooling=max."
                )
            if field_name in values:
                raise PolicyConfigError(f"{field_name!r} is given twice in the policy {spec!r}.")
            values[field_name] = cls.parse_field(field_name, value)
        return cls(**values)

    @classmethod
    def parse_field(cls, name: str, text: str) -> Any:
        """The value that a field's text stands for in the string form."""
        info = cls.model_fields.get(name)
        allowed = _leaves(info.annotation) if info is not None else set()
        if text == "none" and type(None) in allowed and "none" not in allowed:
            return None
        if "/" in text:
            # A slash at the end marks a list of one.
            return tuple(text.removesuffix("/").split("/"))
        return text


class DecodePolicy(Policy):
    """A policy that goes on evicting while tokens are generated.

    When a prompt ends it cuts the cache to its budget b; then it cuts it back to b whenever
    `interval` tokens were added, so that no layer ever holds more than b + interval - 1 rows after
    a step.
    """

    phases: ClassVar[frozenset[Phase]] = frozenset({"prefill", "decode"})

    interval: PositiveInt = Field(
        default=1,
        description="Generated tokens between evictions; the cache grows by at most interval - 1 "
        "beyond its budget.",
    )

    @model_validator(mode="after")
    def _bounded(self) -> "DecodePolicy":
        if self.later_turns != "revote":
            raise ValueError(
                f"later_turns={self.later_turns!r} keeps earlier turns beyond the budget, to which "
                "this policy cuts the cache while decoding. Use later_turns='revote'."
            )
        return self

    def check_layers(self, num_layers: int) -> None:
        """As for every policy; also refuse queries whose rows may be gone.

        Raises:
            PolicyConfigError: See `Policy.check_layers` and `Policy.query_tokens`.
        """
        super().check_layers(num_layers)
        for layer in range(num_layers):
            wanted = self.query_tokens(layer, num_layers)
            surely_held = max(self.protected_tokens(layer, num_layers), self.interval, 1)
            if wanted > surely_held:
                raise PolicyConfigError(
                    f"{self.name}: reads {wanted} queries while decoding, but only the last "
                    f"{surely_held} rows are sure to be held. Protect as many rows as queries are "
                    "read, or use a longer interval."
                )


def _leaves(annotation: Any) -> set[Any]:
    """The types and literal values of a (nested) union."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return set(args)
    if origin is None or origin in (tuple, list):
        return {annotation if origin is None else origin}
    return set().union(*(_leaves(arg) for arg in args))


def _format(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(map(_format, value)) + ("/" if len(value) == 1 else "")
    text = str(value)
    if _RESERVED & set(text):
        raise PolicyConfigError(
            f"The value {text!r} has no string form: it contains one of {''.join(_RESERVED)!r}. "
            "Use the dict form."
        )
    return text


def _explain(policy: type[Policy], error: ValidationError) -> str:
    """All faults of a configuration in one message."""
    lines = []
    faults = error.errors()
    # Of "one value or a list" only the alternative that was meant is worth explaining.
    meant = [fault for fault in faults if fault["type"] not in ("int_type", "tuple_type")]
    explained = {fault["loc"][:1] for fault in meant}
    for fault in faults:
        if fault not in meant and fault["loc"][:1] in explained:
            continue
        where = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "extra_forbidden":
            known = sorted(policy.model_fields)
            near = difflib.get_close_matches(where.lower(), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            line = f"no field {where!r}.{hint} Fields: {', '.join(known)}."
        else:
            message = fault["msg"].removeprefix("Value error, ")
            given = "" if not where else f"{where}={fault['input']!r}: "
            line = f"{given}{message[0].lower() + message[1:].removesuffix('.')}."
        if line not in lines:
            lines.append(line)
    return f"{policy.__name__}: " + " ".join(lines)
