"""Who may import whom: evaluation -> core <- policies, and layers inside core point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvcompress": ROOT / "kvcompress",
    "kvcompress_policies": ROOT / "policies" / "kvcompress_policies",
    "kvcompress_eval": ROOT / "evaluation" / "kvcompress_eval",
}
FORBIDDEN = {
    "kvcompress": {"kvcompress_policies", "kvcompress_eval", "lm_eval", "matplotlib"},
    "kvcompress_policies": {"kvcompress_eval", "transformers", "lm_eval", "matplotlib"},
    "kvcompress_eval": {"kvcompress_policies"},
}
# What a built-in policy may use is what a third party may.
PUBLIC_FOR_POLICIES = {"kvcompress", "kvcompress.hookspecs", "kvcompress.policy"} | {
    "kvcompress.tensors",
    "kvcompress.errors",
}
# From the bottom up: a module imports only modules of lower ranks.
RANKS = [
    {"errors", "report", "hookspecs"},
    {"tensors", "timing", "models", "spans"},
    {"policy"},
    {"composition"},
    {"selection", "plugins"},
    {"fair"},
    {"attention"},
    {"state"},
    {"rotation", "rows"},
    {"quantized"},
    {"cache"},
    {"hosting"},
    {"prefill", "saving"},
    {"session"},
    {"testing"},
    {"installation"},
    {"cli"},
]


def imports(path):
    """Imported modules of a file, except those that only type checkers see."""
    tree = ast.parse(path.read_text())
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "kvcompress":
                yield from (f"kvcompress.{alias.name}" for alias in node.names)
            else:
                yield node.module


def files(package):
    found = sorted(PACKAGES[package].rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_keep_their_direction(package):
    for path in files(package):
        for name in imports(path):
            assert name.split(".")[0] not in FORBIDDEN[package], f"{path.name} imports {name}"


def test_policies_use_public_modules_only():
    for path in files("kvcompress_policies"):
        for name in imports(path):
            if name.split(".")[0] == "kvcompress":
                assert name in PUBLIC_FOR_POLICIES, f"{path.name} imports {name}"


def test_core_modules_keep_their_ranks():
    rank = {name: number for number, names in enumerate(RANKS) for name in names}
    for path in files("kvcompress"):
        own = path.relative_to(PACKAGES["kvcompress"]).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "kvcompress" or len(parts) == 1 or parts[1] == own:
                continue
            if parts[1] in rank:
                below = rank[parts[1]] < rank[own] or {parts[1], own} <= {"hookspecs", "errors"}
                assert below, f"{own} imports {name}"


def test_the_rule_can_fail(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text("if x:\n    from kvcompress_policies.snapkv import SnapKVPolicy\n")
    assert list(imports(file)) == ["kvcompress_policies.snapkv"]
    file.write_text("from kvcompress import press\n")
    assert list(imports(file)) == ["kvcompress.press"]


@pytest.mark.parametrize(
    "code",
    [
        "import kvcompress",
        "import kvcompress, kvcompress.plugins; kvcompress.plugins.registry()",
        "import sys; sys.argv = ['kvcompress', '--help']\n"
        "from kvcompress.cli import main\n"
        "try: main()\nexcept SystemExit: pass",
    ],
    ids=["import", "registry", "help"],
)
def test_no_torch_before_it_is_needed(code):
    check = f"{code}\nimport sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_policy_files_stay_small():
    for path in files("kvcompress_policies"):
        assert len(path.read_text().splitlines()) < 150, path.name


def test_nothing_of_this_workplace_is_named():
    """The project speaks of itself alone."""
    words = ["/wo" + "rk/", "sha" + "red/", "is" + "sue #"]
    for folder in (*PACKAGES.values(), ROOT / "tests", ROOT / "docs", ROOT / "examples"):
        for path in folder.rglob("*"):
            if path.suffix in {".py", ".md", ".toml"}:
                text = path.read_text()
                assert not [word for word in words if word in text], path
