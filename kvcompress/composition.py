"""Two policies on one cache: one for the prompt, one for what is generated after it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, InstanceOf, model_validator

from kvcompress.errors import PolicyConfigError
from kvcompress.policy import Phase, Policy

_UNBOUNDED = 2**40
"""A prompt so long that every budget is reached."""


class ComposedPolicy(Policy):
    """One policy cuts the prompt, another one evicts while tokens are generated.

    In string form `snapkv:capacity=2048+h2o:capacity=2176`, or with a scope
    `snapkv:capacity=2048+h2o:capacity=128:scope=generated`. Each part has its own budget. In a
    later turn the prefill policy cuts everything held, by its own `later_turns`.

    Raises:
        PolicyConfigError: The two cannot be combined; the message names them and says why.
    """

    name: ClassVar[str] = "composed"
    phases: ClassVar[frozenset[Phase]] = frozenset({"prefill", "decode"})
    per_layer: ClassVar[frozenset[str]] = frozenset()

    prefill: InstanceOf[Policy] = Field(description="Cuts the prompt when it ends.")
    decode: InstanceOf[Policy] = Field(description="Evicts while tokens are generated.")
    scope: Literal["all", "generated"] = Field(
        default="all",
        description="all: the decode budget bounds everything held, rows of the prompt may go. "
        "generated: what was kept of the prompt stays, the decode budget is for generated rows.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_budget(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            unset: dict[str, Any] = {"capacity": None, "keep_ratio": None, "later_turns": "revote"}
            unset |= {"protect": (), "fair": ()}
            own = [name for name, value in unset.items() if data.get(name, value) != value]
            if own:
                raise ValueError(
                    f"{', '.join(own)} cannot be set on a composition; set it on one of its parts."
                )
        return data

    @model_validator(mode="after")
    def _can_be_combined(self) -> "ComposedPolicy":
        pair = f"{self.prefill.name}+{self.decode.name}"
        for role, part in (("prefill", self.prefill), ("decode", self.decode)):
            if isinstance(part, ComposedPolicy):
                raise ValueError(f"{pair}: a composition cannot be part of another one.")
            if role not in part.phases:
                raise ValueError(
                    f"{pair}: {part.name} evicts at {', '.join(sorted(part.phases))} only, so it "
                    f"cannot be the {role} policy."
                )
        if "observe" in self.prefill.needs and "observe" in self.decode.needs:
            raise ValueError(
                f"{pair}: both keep a record of every forward, and a cache carries one. Use one of "
                "them alone, or with a policy that keeps none."
            )
        if "scope" in type(self.decode).model_fields:
            raise ValueError(
                f"{pair}: {self.decode.name} has a field named scope, which in the string form "
                "belongs to the composition."
            )
        if self.decode.fair:
            raise ValueError(
                f"{pair}: fair={'/'.join(self.decode.fair)} divides the budget of a prompt, which "
                f"{self.decode.name} does not cut here. Give it to {self.prefill.name}."
            )
        self._check_unmoved(1)
        if self.scope == "all":
            if self.prefill.protect != self.decode.protect:
                raise ValueError(
                    f"{pair}: the parts protect different tokens, so that one would evict what the "
                    "other has to keep. Give both the same protect."
                )
            if self.prefill.later_turns != "revote":
                raise ValueError(
                    f"{pair}: later_turns={self.prefill.later_turns!r} keeps earlier turns beyond "
                    "the decode policy's budget. Use scope='generated' or later_turns='revote'."
                )
            ratios = (self.prefill.keep_ratio is None, self.decode.keep_ratio is None)
            if ratios[0] != ratios[1]:
                raise ValueError(
                    f"{pair}: with scope='all' the decode budget must not be below the prefill "
                    "budget, but one is a capacity and the other a ratio. Give both as one kind."
                )
        return self

    def _check_unmoved(self, num_layers: int) -> None:
        for part in (self.prefill, self.decode):
            if any(part.reindexed_tokens(layer, num_layers) for layer in range(num_layers)):
                raise PolicyConfigError(
                    f"{self.prefill.name}+{self.decode.name}: {part} moves keys to other "
                    "positions, and the other policy's evictions would leave gaps. Use original "
                    f"positions, or {part.name} alone."
                )

    def part(self, phase: Phase) -> Policy:
        """The policy of a phase."""
        return self.prefill if phase == "prefill" else self.decode

    def observer(self, phase: Phase) -> Policy | None:
        """Whichever keeps a record; one that judges generated rows only need not see the prompt."""
        if "observe" in self.prefill.needs:
            return self.prefill
        late = self.spares_prompt and phase == "prefill"
        return self.decode if "observe" in self.decode.needs and not late else None

    @property
    def spares_prompt(self) -> bool:
        """With scope "generated"."""
        return self.scope == "generated"

    def budget(self, prompt_tokens: int, layer_idx: int, num_layers: int) -> int:
        """Rows of the prompt that this layer keeps."""
        return self.prefill.budget(prompt_tokens, layer_idx, num_layers)

    def check_layers(self, num_layers: int) -> None:
        """As both parts do; with scope "all", refuse a decode budget below the prefill budget.

        Raises:
            PolicyConfigError: A part does not fit the model, or the budgets do not fit each other.
        """
        self.prefill.check_layers(num_layers)
        self.decode.check_layers(num_layers)
        self._check_unmoved(num_layers)
        for layer in range(0 if self.spares_prompt else num_layers):
            first, then = (
                part.budget(_UNBOUNDED, layer, num_layers) for part in (self.prefill, self.decode)
            )
            if then < first:
                raise PolicyConfigError(
                    f"{self}: in layer {layer} the decode policy's budget is below the prefill "
                    "policy's, so the first generated token would cut the prompt again. Give "
                    "decode at least as much, or use scope=generated, where its budget is for "
                    "generated tokens alone."
                )

    def to_dict(self) -> dict[str, Any]:
        """The dict form, with those of the parts inside."""
        form: dict[str, Any] = {"policy": self.name}
        form |= {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()}
        return form | ({"scope": self.scope} if self.scope != "all" else {})

    def to_string(self) -> str:
        """The string form, `prefill+decode` and the scope if it is not "all"."""
        scope = f":scope={self.scope}" if self.scope != "all" else ""
        return f"{self.prefill.to_string()}+{self.decode.to_string()}{scope}"
