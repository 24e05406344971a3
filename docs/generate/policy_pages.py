"""The page of every policy: advice written by hand, the rest from its class."""

import inspect
import re
from typing import Any

from kvcompress import Policy
from kvcompress.plugins import registry

HEADINGS = ("When to use it", "When not to", "What it costs")
"""What is written by hand, in docs/policies/NAME.md, in this order."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def built_in() -> dict[str, type[Policy]]:
    """The policies that need a page, by name."""
    found = registry().policies.items()
    return {name: entry.policy for name, entry in found if entry.distribution == "kvcompress"}


def check(name: str, text: str) -> None:
    """Refuse a page that lacks what has to be written by hand.

    Raises:
        ValueError: A heading, its text or the picture is missing.
    """
    if not text.startswith(f"# {name}\n"):
        raise ValueError(f"the page must begin with the title '# {name}'.")
    if f"](../pictures/{name}.png)" not in text:
        raise ValueError(
            f"the picture is missing: ![...](../pictures/{name}.png), drawn by "
            f"`python docs/generate/pictures.py {name}`."
        )
    parts = re.split(r"^## (.*)\n", text, flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    if tuple(sections) != HEADINGS:
        raise ValueError(f"its headings must be {', '.join(HEADINGS)}; they are {[*sections]}.")
    for heading, body in sections.items():
        words = re.sub(r"!\[.*?\]\(.*?\)", "", body, flags=re.S).split()
        if len(words) < 12:
            raise ValueError(f"'{heading}' says next to nothing: {' '.join(words)!r}.")


def page(name: str, text: str) -> str:
    """A policy's page with its rule, source, differences and fields.

    Args:
        name: Of the policy.
        text: The page as it was written.

    Raises:
        ValueError: There is no such policy, or the page lacks something.
    """
    policies = built_in()
    if name not in policies:
        raise ValueError(f"there is no built-in policy {name!r}; there are {', '.join(policies)}.")
    check(name, text)
    title, advice = text.split("\n", 1)
    policy = policies[name]
    phases = " and ".join(sorted(policy.phases, reverse=True))
    facts = f"`kvcompress.{policy.__name__}`, in strings `{name}`. Evicts at {phases}."
    return "\n\n".join([title, facts, _rule(policy), advice.strip(), _fields(policy)]) + "\n"


def _rule(policy: type[Policy]) -> str:
    """The docstring, with its source and differences set off."""
    lines = []
    for line in inspect.cleandoc(policy.__doc__ or "").splitlines():
        found = re.match(r"(Source|Differs): (.*)", line)
        lines += ["", f"**{found[1]}.** {found[2]}"] if found else [line]
    text = "\n".join(lines)
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _fields(policy: type[Policy]) -> str:
    """A table of the fields; the policy's own first."""
    inherited = Policy.model_fields
    fields = sorted(policy.model_fields.items(), key=lambda item: item[0] in inherited)
    rows = ["## Fields", "", "| field | default | allowed | meaning |", "|---|---|---|---|"]
    for name, info in fields:
        default = policy.default_capacity if name == "capacity" else info.get_default()
        shown = "" if default == () else f"`{str(default).lower()}`"
        cells = [f"`{name}`", shown, _allowed(policy, name), info.description or ""]
        rows.append("| " + " | ".join(cells) + " |")
    rows += ["", "`capacity` is the default budget only where `keep_ratio` is not given."]
    return "\n".join(rows)


def _allowed(policy: type[Policy], name: str) -> str:
    """What values a field takes, from its schema."""
    if policy.model_fields[name].annotation == Policy.model_fields["protect"].annotation:
        return "ranges of tokens"
    schema = policy.model_json_schema()["properties"][name]
    kinds = [_kind(each) for each in schema.get("anyOf", [schema])]
    wanted = [kind for kind in dict.fromkeys(kinds) if kind]
    return " or ".join(wanted)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return "a list, one a layer"
    if schema.get("type") not in ("integer", "number"):
        return ""
    bounds = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema]
    return ", ".join(bounds) or "a number"


def table(text: str) -> str:
    """The overview with links to the pages in its table of policies.

    Args:
        text: The page; its table has the policies' names in the first column.

    Raises:
        ValueError: The table does not name the built-in policies.
    """
    named = re.findall(r"^\| \[`(\w+)`\]\(", text, re.M)
    if sorted(named) != sorted(built_in()):
        raise ValueError(
            f"its table must name every built-in policy, {', '.join(built_in())}; it has {named}."
        )
    return text
