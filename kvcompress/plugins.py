"""Finding policies and commands in installed plugins, by pluggy; the built-in ones too."""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from kvcompress import hookspecs
from kvcompress.errors import (
    DuplicatePolicyError,
    PluginLoadError,
    PolicyConfigError,
    UnknownPolicyError,
)

if TYPE_CHECKING:
    from kvcompress.policy import Policy


_NAME = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True)
class PolicyEntry:
    """A policy class and where it comes from."""

    policy: "type[Policy]"
    distribution: str


class Registry:
    """The plugins of one set of entry points, each loaded by itself so that none stops the rest.

    Plugin modules are imported when the registry is made, policies when they are first asked for.
    """

    def __init__(self, found: Iterable[EntryPoint]) -> None:
        self.broken: dict[str, Exception] = {}
        """Errors of plugins that could not be loaded, by distribution."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._distributions: dict[str, str] = {}
        self._policies: dict[str, list[PolicyEntry]] | None = None
        for entry in found:
            self._load(entry)

    def _load(self, entry: EntryPoint) -> None:
        distribution = entry.dist.name if entry.dist is not None else entry.value
        name = f"{distribution}:{entry.name}"
        if name in self._distributions:
            return
        try:
            self._manager.register(entry.load(), name=name)
            self._manager.check_pending()
        except Exception as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self.broken[distribution] = error
        else:
            self._distributions[name] = distribution

    def _call(self, hook: str, **arguments: Any) -> Iterable[tuple[str, Any]]:
        """Every plugin's answer with its distribution; a plugin that raises becomes broken."""
        plugins = dict(self._manager.list_name_plugin())
        for name, distribution in list(self._distributions.items()):
            others = [plugin for other, plugin in plugins.items() if other != name]
            try:
                answers = self._manager.subset_hook_caller(hook, others)(**arguments)
                answers = [list(answer) if answer is not None else [] for answer in answers]
            except Exception as error:
                self.broken[distribution] = error
                continue
            for answer in answers:
                yield distribution, answer

    def add_commands(self, app: Any) -> None:
        """Let every plugin add its commands to a typer application."""
        for _ in self._call("kvcompress_commands", app=app):
            pass

    @property
    def distributions(self) -> list[str]:
        """Whose plugins were loaded."""
        return sorted(set(self._distributions.values()) - set(self.broken))

    @property
    def policies(self) -> Mapping[str, PolicyEntry]:
        """All policies by name.

        Raises:
            DuplicatePolicyError: Two distributions provide one name.
        """
        if self._policies is None:
            found: dict[str, list[PolicyEntry]] = {}
            for distribution, classes in self._call("kvcompress_policies"):
                strange = [thing for thing in classes if not _is_policy(thing)]
                if strange:
                    self.broken[distribution] = PluginLoadError(
                        f"kvcompress_policies() of {distribution} returned {strange[0]!r}; it must "
                        "return subclasses of kvcompress.Policy that have a name of letters, "
                        "digits and underscores, other than 'composed'."
                    )
                    continue
                for policy in classes:
                    entry = PolicyEntry(policy, distribution)
                    found.setdefault(policy.name, []).append(entry)
            self._policies = found
        for name, entries in self._policies.items():
            if len(entries) > 1:
                owners = " and ".join(sorted({entry.distribution for entry in entries}))
                raise DuplicatePolicyError(
                    f"Two policies are named {name!r}, from {owners}. Uninstall one of them; "
                    "policies are never renamed, so that results stay comparable."
                )
        return {name: entries[0] for name, entries in sorted(self._policies.items())}

    def get(self, name: str) -> "type[Policy]":
        """The policy class of that name.

        Raises:
            UnknownPolicyError: No installed plugin provides it.
            PluginLoadError: None does, but a broken plugin might.
        """
        policies = self.policies
        if name in policies:
            return policies[name].policy
        for distribution, error in self.broken.items():
            if _plain(distribution) == f"kvcompress-{_plain(name)}" or not policies:
                raise PluginLoadError(
                    f"Policy {name!r}: the plugin {distribution} is installed but broken: "
                    f"{type(error).__name__}: {error}"
                ) from error
        near = difflib.get_close_matches(name, policies, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        broken = f" Broken plugins: {', '.join(sorted(self.broken))}." if self.broken else ""
        raise UnknownPolicyError(
            f"No policy named {name!r}.{hint} Installed: {', '.join(policies)}.{broken} "
            "Others: pip install kvcompress-NAME."
        )


def _plain(name: str) -> str:
    """A name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_policy(thing: Any) -> bool:
    from kvcompress.composition import ComposedPolicy
    from kvcompress.policy import Policy

    if not isinstance(thing, type) or not issubclass(thing, Policy):
        return False
    name = getattr(thing, "name", None)
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and name != ComposedPolicy.name


@functools.cache
def registry() -> Registry:
    """The registry of what is installed, made on first need."""
    return Registry(tuple(entry_points(group=hookspecs.PROJECT)))


def policy_from(spec: "Policy | str | Mapping[str, Any]") -> "Policy":
    """A policy from an instance, a string `name:field=value:...` or a dict `{"policy": name, ...}`.

    In strings, values of a list are separated by `/` and null is `none`:
    `snapkv:capacity=512/256:pooling=max`. Two policies are composed by `+`, prefill first, and the
    composition's scope is given with the second: `snapkv+h2o:capacity=128:scope=generated`.

    Raises:
        UnknownPolicyError: The name is not installed.
        PolicyConfigError: The form cannot be read, or a field is wrong.
    """
    from kvcompress.composition import ComposedPolicy
    from kvcompress.policy import Policy

    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, Mapping):
        fields = dict(spec)
        name = fields.pop("policy", None)
        if not isinstance(name, str) or not all(isinstance(key, str) for key in fields):
            raise PolicyConfigError(
                f"A policy's dict form needs its name under 'policy', as in "
                f"{{'policy': 'snapkv', 'capacity': 512}}; got {dict(spec)!r}."
            )
        if name == ComposedPolicy.name:
            parts = {"prefill", "decode"} & set(fields)
            return ComposedPolicy(**fields | {part: policy_from(fields[part]) for part in parts})
        return registry().get(name)(**fields)
    if not isinstance(spec, str):
        raise PolicyConfigError(
            f"A policy is given as an instance, a string such as 'snapkv:capacity=512' or a dict; "
            f"got {spec!r}."
        )
    first, *others = spec.strip().split("+")
    if not others:
        return _from_string(first)
    if len(others) > 1:
        raise PolicyConfigError(
            f"{spec!r} composes {len(others) + 1} policies; a composition is one for the prompt "
            "and one for what is generated, as in snapkv:capacity=2048+h2o:capacity=2176."
        )
    decode, *fields_of_decode = others[0].split(":")
    scope = [part for part in fields_of_decode if part.startswith("scope=")]
    if len(scope) > 1:
        raise PolicyConfigError(f"'scope' is given twice in the policy {spec!r}.")
    kept = [part for part in fields_of_decode if part not in scope]
    composed: dict[str, Any] = dict(part.split("=", 1) for part in scope)
    composed["prefill"] = _from_string(first)
    composed["decode"] = _from_string(":".join([decode, *kept]))
    return ComposedPolicy(**composed)


def _from_string(spec: str) -> "Policy":
    """A policy that is not composed, from its string form."""
    name, *parts = spec.split(":")
    return registry().get(name).parse(parts, spec)
