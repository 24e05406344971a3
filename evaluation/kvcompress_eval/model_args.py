"""What of lm_eval's `model_args` is ours: a policy and its fields, flat beside the model's."""

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcompress import EvaluationError, PolicyConfigError
from kvcompress.plugins import policy_from
from kvcompress.policy import Policy
from kvcompress_eval.comparison import UNCOMPRESSED, policy_fields

CHOICES = {
    "truncate": ("left", "middle"),
    "compress": ("prompt", "context"),
    "rolling": ("refuse", "uncompressed"),
}
"""What some of the adapter's own arguments may be."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse values of the adapter's own arguments that they cannot have.

    Raises:
        EvaluationError: There is one.
    """
    for name, allowed in CHOICES.items():
        if settings[name] not in allowed:
            raise EvaluationError(
                f"model_args: {name}={settings[name]!r}; it can be {' or '.join(allowed)}."
            )
    for name, least in (("prefill_chunk_size", 1), ("lookahead", 0), ("spare", 0)):
        value = settings[name]
        if value is not None and (not isinstance(value, int) or value < least):
            raise EvaluationError(
                f"model_args: {name}={value!r}; it is a number of tokens, at least {least}."
            )
    for name in ("lookahead", "spare"):
        if settings[name] is not None and settings["prefill_chunk_size"] is None:
            raise EvaluationError(
                f"model_args: {name} is for prompts that are read in chunks; give "
                "prefill_chunk_size too."
            )


def split_fields(
    arguments: Mapping[str, Any], ours: Iterable[str], known: type
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell fields of a policy from arguments for lm_eval's model.

    Args:
        arguments: All that were given, without `policy`.
        ours: The adapter's own arguments.
        known: lm_eval's class; what neither it nor a policy knows is for transformers, unless it
            looks like a slip of the pen.

    Returns:
        The fields, and all others.

    Raises:
        EvaluationError: A name is nearly one of ours or lm_eval's.
    """
    fields = policy_fields()
    theirs = set(inspect.signature(known).parameters)
    candidates = sorted(fields | set(ours) | {"policy"})
    for name in arguments:
        if name in fields or name in theirs:
            continue
        starts = [field for field in candidates if len(name) > 3 and field.startswith(name)]
        near = starts or difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.7)
        # Stricter: transformers has names like lm_eval's (device_map).
        near = near or difflib.get_close_matches(name.lower(), theirs, n=1, cutoff=0.85)
        if near:
            raise EvaluationError(
                f"model_args: no argument {name!r}. Did you mean {near[0]!r}? Ours are "
                f"{', '.join(sorted({*ours, 'policy'}))} and the policy's fields; `kvcompress "
                "policies` lists those."
            )
    given = {name: value for name, value in arguments.items() if name in fields}
    return given, {name: value for name, value in arguments.items() if name not in given}


def unknown_argument(error: TypeError) -> str | None:
    """The name that a call did not know, if that is what went wrong."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found else None


def make_policy(policy: Any, fields: Mapping[str, Any]) -> Policy | None:
    """The policy of a run; None if the cache is to stay whole.

    Args:
        policy: A policy or one of its forms; the text none, or None, for the uncompressed cache.
        fields: Of a policy that is not composed, as lm_eval read them: text, numbers, lists.

    Raises:
        PolicyConfigError: The fields fit nothing, or are wrong.
        UnknownPolicyError: The policy is not installed.
    """
    if policy is None or policy == UNCOMPRESSED:
        if fields:
            raise PolicyConfigError(
                f"policy=none compresses nothing, and {', '.join(fields)} would set how. Leave "
                "them out, or name a policy."
            )
        return None
    if not fields:
        return policy_from(policy)
    if not isinstance(policy, str) or "+" in policy:
        raise PolicyConfigError(
            f"{', '.join(fields)}: fields beside policy={policy!s} could be those of either part. "
            "Write them into the policy, as in policy=snapkv:capacity=512+h2o:capacity=640."
        )
    name, *written = policy.split(":")
    twice = sorted({part.split("=")[0] for part in written} & set(fields))
    if twice:
        raise PolicyConfigError(
            f"{', '.join(twice)} is given in policy={policy} and beside it. Give it once."
        )
    flat = [f"{field}={_text(value)}" for field, value in fields.items()]
    return policy_from(":".join([name, *written, *flat]))


def _text(value: Any) -> str:
    """What was written, undoing lm_eval's guesses at types."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "/".join(map(_text, value)) + ("/" if len(value) == 1 else "")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
