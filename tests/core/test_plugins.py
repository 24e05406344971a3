"""Plugins come in by their entry points; one that is broken breaks nothing but itself."""

import importlib
import importlib.metadata
import sys

import pytest

GOOD = """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    from kvcompress import Policy
    return [type({classname!r}, (Policy,), {{"name": {name!r}, "__module__": __name__}})]

@hookimpl
def kvcompress_commands(app):
    app.append({name!r})
"""

BROKEN = {
    "import": ("import no_such_module_anywhere", ModuleNotFoundError, "no_such_module_anywhere"),
    "raises on import": ("raise RuntimeError('at import')", RuntimeError, "at import"),
    "syntax": ("def", SyntaxError, "invalid syntax|expected"),
    "misspelt hook": (
        """
from kvcompress import hookimpl

@hookimpl
def kvcompress_polices():
    return []
""",
        Exception,
        "unknown hook 'kvcompress_polices'",
    ),
    "misspelt argument": (
        """
from kvcompress import hookimpl

@hookimpl
def kvcompress_commands(application):
    pass
""",
        Exception,
        "application",
    ),
    "raising hook": (
        """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    raise LookupError("in the hook")
""",
        LookupError,
        "in the hook",
    ),
    "import in the hook": (
        """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    import no_such_module_anywhere
""",
        ModuleNotFoundError,
        "no_such_module_anywhere",
    ),
    "answer is no list": (
        """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    return 5
""",
        TypeError,
        "not iterable",
    ),
}


class Site:
    """A folder of installed distributions, each with one plugin module."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = set()

    def install(self, distribution, source, *, modules=None):
        modules = modules or [distribution.replace("-", "_")]
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        points = "".join(f"{module} = {module}\n" for module in modules)
        (info / "entry_points.txt").write_text(f"[kvcompress]\n{points}")
        for module in modules:
            (self.folder / f"{module}.py").write_text(source)
            self.modules.add(module)
        importlib.invalidate_caches()

    def policy(self, name, distribution=None):
        classname = name.title().replace("_", "") + "Policy"
        source = GOOD.format(name=name, classname=classname)
        self.install(distribution or f"kvcompress-{name.replace('_', '-')}", source)

    def registry(self):
        from kvcompress.plugins import Registry

        found = importlib.metadata.distributions(path=[str(self.folder)])
        entries = [entry for distribution in found for entry in distribution.entry_points]
        return Registry(sorted(entries, key=lambda entry: entry.name))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


def test_plugins_bring_policies(site):
    site.policy("zebra")
    site.policy("ant", "a-thing-of-another-name")
    registry = site.registry()
    assert not registry.broken
    assert list(registry.policies) == ["ant", "zebra"]
    assert registry.policies["ant"].distribution == "a-thing-of-another-name"
    assert registry.policies["zebra"].distribution == "kvcompress-zebra"
    policy = registry.get("zebra")
    assert policy.__name__ == "ZebraPolicy" and policy(capacity=64).to_string() == (
        "zebra:capacity=64"
    )
    assert registry.get("zebra") is policy


@pytest.mark.parametrize("broken", ["kvcompress-aaa", "kvcompress-zzz"])
@pytest.mark.parametrize(("source", "kind", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_breaks_only_itself(site, source, kind, message, broken):
    from kvcompress import KVCompressError, PluginLoadError

    # Before or after the sound ones.
    site.install(broken, source)
    site.policy("mouse")
    site.policy("cat")
    registry = site.registry()
    assert list(registry.policies) == ["cat", "mouse"]
    assert registry.get("mouse").name == "mouse"
    assert list(registry.broken) == [broken]
    error = registry.broken[broken]
    assert isinstance(error, kind)

    missing = broken.removeprefix("kvcompress-")
    with pytest.raises(PluginLoadError, match=f"'{missing}': .*{broken} .*broken") as caught:
        registry.get(missing)
    assert isinstance(caught.value, KVCompressError)
    assert caught.value.__cause__ is error
    assert type(error).__name__ in str(caught.value) and str(error) in str(caught.value)
    with pytest.raises(PluginLoadError, match=message):
        registry.get(missing)
    commands = []
    registry.add_commands(commands)
    assert sorted(commands) == ["cat", "mouse"]


def test_the_error_surfaces_for_policy_names_with_underscores(site):
    from kvcompress import PluginLoadError

    site.install("kvcompress-two-words", "raise RuntimeError('at import')")
    site.policy("mouse")
    with pytest.raises(PluginLoadError, match="kvcompress-two-words is installed but broken"):
        site.registry().get("two_words")


def test_an_unrelated_name_is_unknown_and_broken_plugins_are_named(site):
    from kvcompress import UnknownPolicyError

    site.install("kvcompress-aaa", "raise RuntimeError('at import')")
    site.policy("mouse")
    with pytest.raises(UnknownPolicyError, match="'house'") as caught:
        site.registry().get("house")
    assert "Did you mean 'mouse'? Installed: mouse. Broken plugins: kvcompress-aaa." in str(
        caught.value
    )


def test_all_plugins_broken(site):
    from kvcompress import PluginLoadError

    site.install("kvcompress-aaa", "raise RuntimeError('at import')")
    with pytest.raises(
        PluginLoadError, match="kvcompress-aaa is installed but broken: RuntimeError"
    ):
        site.registry().get("house")


def test_unknown(site):
    from kvcompress import UnknownPolicyError

    site.policy("mouse")
    registry = site.registry()
    for name in ("mousse", "moose"):
        with pytest.raises(UnknownPolicyError, match=f"'{name}'. Did you mean 'mouse'") as caught:
            registry.get(name)
        assert "pip install kvcompress-NAME" in str(caught.value)
    with pytest.raises(UnknownPolicyError, match="'xyz'") as caught:
        registry.get("xyz")
    assert "Did you mean" not in str(caught.value)


def test_without_plugins_there_are_no_policies():
    from kvcompress import UnknownPolicyError
    from kvcompress.plugins import Registry

    registry = Registry(())
    assert registry.policies == {} and registry.broken == {}
    with pytest.raises(UnknownPolicyError, match="'snapkv'"):
        registry.get("snapkv")


@pytest.mark.parametrize("name", ["mouse", "cat"])
def test_two_plugins_may_not_share_a_name(site, name):
    from kvcompress import DuplicatePolicyError, KVCompressError

    site.policy("mouse", "kvcompress-one")
    site.policy("mouse", "kvcompress-two")
    site.policy("cat")
    registry = site.registry()
    with pytest.raises(
        DuplicatePolicyError, match="'mouse', from kvcompress-one and kvcompress-two"
    ):
        registry.get(name)
    # Not only the first time.
    with pytest.raises(DuplicatePolicyError) as caught:
        assert registry.policies
    assert isinstance(caught.value, KVCompressError)


def test_a_plugin_that_is_found_twice_counts_once(site):
    from kvcompress.plugins import Registry

    site.policy("mouse")
    (found,) = importlib.metadata.distributions(path=[str(site.folder)])
    registry = Registry([*found.entry_points, *found.entry_points])
    assert list(registry.policies) == ["mouse"] and not registry.broken


def test_one_distribution_may_have_several_plugins(site):
    source = """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    from kvcompress import Policy
    return [type("AnyPolicy", (Policy,), {"name": __name__})]
"""
    site.install("kvcompress-many", source, modules=["many_one", "many_two"])
    registry = site.registry()
    assert {name: entry.distribution for name, entry in registry.policies.items()} == {
        "many_one": "kvcompress-many",
        "many_two": "kvcompress-many",
    }


def test_policies_are_loaded_only_when_asked_for(site):
    site.policy("mouse")
    source = "from kvcompress import hookimpl\n@hookimpl\ndef kvcompress_policies():\n    1 / 0\n"
    site.install("kvcompress-late", source)
    registry = site.registry()
    assert registry.broken == {}
    registry.add_commands([])
    assert registry.broken == {}
    assert list(registry.policies) == ["mouse"]
    assert isinstance(registry.broken["kvcompress-late"], ZeroDivisionError)


def test_commands_of_every_plugin_are_added(site):
    site.policy("mouse")
    site.policy("cat")
    source = """
from kvcompress import hookimpl

@hookimpl
def kvcompress_commands(app):
    raise LookupError("no commands")
"""
    site.install("kvcompress-dog", source)
    registry = site.registry()
    commands = []
    registry.add_commands(commands)
    assert sorted(commands) == ["cat", "mouse"]
    assert isinstance(registry.broken["kvcompress-dog"], LookupError)


def test_an_entry_point_without_distribution_goes_by_its_module(site):
    from kvcompress import PluginLoadError
    from kvcompress.plugins import Registry

    site.policy("mouse")
    entry = importlib.metadata.EntryPoint("mouse", "kvcompress_mouse", "kvcompress")
    assert Registry([entry]).policies["mouse"].distribution == "kvcompress_mouse"
    missing = importlib.metadata.EntryPoint("gone", "no_such_module_anywhere", "kvcompress")
    with pytest.raises(PluginLoadError, match="no_such_module_anywhere"):
        Registry([missing]).get("gone")


def test_a_plugin_that_answers_with_something_else_breaks_only_itself(site):
    source = """
from kvcompress import hookimpl

@hookimpl
def kvcompress_policies():
    return ["a name, not a class"]
"""
    site.install("kvcompress-aaa", source)
    site.policy("mouse")
    registry = site.registry()
    assert list(registry.policies) == ["mouse"]
    assert list(registry.broken) == ["kvcompress-aaa"]


def test_built_in_policies_come_in_by_the_entry_point_group():
    from kvcompress import SnapKVPolicy
    from kvcompress.hookspecs import PROJECT
    from kvcompress.plugins import Registry, registry

    assert PROJECT == "kvcompress"
    entries = importlib.metadata.entry_points(group="kvcompress")
    (entry,) = [entry for entry in entries if entry.name == "kvcompress_policies"]
    assert entry.value == "kvcompress_policies.plugin" and entry.dist.name == "kvcompress"
    assert Registry([entry]).get("snapkv") is SnapKVPolicy
    others = Registry([other for other in entries if other != entry])
    assert "snapkv" not in others.policies

    installed = registry()
    assert registry() is installed
    assert installed.broken == {}
    assert installed.policies["snapkv"].policy is SnapKVPolicy
    assert installed.policies["snapkv"].distribution == "kvcompress"
    assert SnapKVPolicy.__module__ == "kvcompress_policies.snapkv"


def test_a_plugins_policy_is_read_by_policy_from(site, monkeypatch):
    from kvcompress import plugins, policy_from

    site.policy("mouse")
    found = site.registry()
    monkeypatch.setattr(plugins, "registry", lambda: found)
    assert policy_from("mouse:capacity=64") == found.get("mouse")(capacity=64)
    assert policy_from({"policy": "mouse", "keep_ratio": 0.5}).to_string() == "mouse:keep_ratio=0.5"
