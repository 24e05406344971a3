"""The page of the Python interface: every public name, by subject."""

import importlib
import inspect
from typing import Any

from policy_pages import built_in

ELSEWHERE = {
    "hookimpl": "kvcompress.hookspecs.hookimpl",
    "FAMILIES": "kvcompress.testing.models.FAMILIES",
}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Compressing": ("press", "Session", "CompressedCache", "policy_from"),
    "Reports": ("Report", "LayerReport"),
    "Tokens that are always kept": ("role_ranges", "text_ranges"),
    "Writing policies": ("Policy", "DecodePolicy", "LayerView", "ComposedPolicy", "hookimpl"),
}
"""Errors and built-in policies are found by themselves."""

MORE = """\
## Models

::: kvcompress.models.load

## Tensors, for policies

::: kvcompress.tensors
    options:
      show_root_heading: false
      show_root_toc_entry: false

## Testing policies

See [how to test a policy](policies.md#test-it).

"""


def page() -> str:
    """Directives for mkdocstrings.

    Raises:
        ValueError: A public name belongs to no subject.
    """
    import kvcompress
    import kvcompress.testing

    errors, policies = _found()
    sorted_in = {name for names in SUBJECTS.values() for name in names} | set(errors)
    left = set(kvcompress.__all__) - sorted_in - set(policies)
    if left:
        raise ValueError(
            f"{', '.join(sorted(left))}: public, but in no subject of docs/generate/api_page.py."
        )
    parts = [
        "# Python\n\nWhat `import kvcompress` offers; names are imported on their first use.\n"
    ]
    for subject, names in SUBJECTS.items():
        parts.append(f"## {subject}\n")
        parts += [f"::: {_path(name)}\n" for name in names]
    parts.append("## Built-in policies\n")
    for name, policy in sorted(policies.items()):
        parts.append(
            f"::: {_path(name)}\n    options:\n      members: false\n\n"
            f"Fields, pictures and advice: [{policy}](policies/{policy}.md).\n"
        )
    parts.append("## Errors\n")
    parts += [f"::: {_path(name)}\n" for name in errors]
    parts.append(MORE)
    parts += [f"::: {_path(name, kvcompress.testing)}\n" for name in kvcompress.testing.__all__]
    return "\n".join(parts)


def _path(name: str, package: Any = None) -> str:
    """Where a public name is defined; what is no class or function is looked up in its module."""
    package = package or importlib.import_module("kvcompress")
    thing = getattr(package, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{name}"
    return ELSEWHERE[name]


def _found() -> tuple[list[str], dict[str, str]]:
    """Public errors, the base first, and classes of built-in policies with the policies' names."""
    import kvcompress

    public = {name: getattr(kvcompress, name) for name in kvcompress.__all__}
    errors = [
        name
        for name, thing in public.items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    ]
    errors.sort(key=lambda name: (name != "KVCompressError", name))
    return errors, {policy.__name__: name for name, policy in built_in().items()}
