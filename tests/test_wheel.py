"""The wheel and the sdist: what is in them, and that both work from anywhere.

KVCOMPRESS_DIST names a folder with the two that are about to be released; else they are built here.
"""

import email
import email.policy
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RELEASE = os.environ.get("KVCOMPRESS_DIST")


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(out, *options, source=ROOT):
    # The build backend is installed already; an isolated build would download it.
    build = ("-m", "build", "--no-isolation", "--outdir")
    run(sys.executable, *build, str(out), *options, str(source))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = Path(RELEASE) if RELEASE else tmp_path_factory.mktemp("dist")
    if not RELEASE:
        build(out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def members(archive):
    """The files of an sdist, below its one folder."""
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


STARTUP = {"_kvcompress_lm_eval.py", "kvcompress_lm_eval.pth", "kvcompress_lm_eval.start"}


def test_wheel_holds_the_three_packages_and_the_start_up_hook_only(built):
    names = zipfile.ZipFile(built[0]).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"kvcompress", "kvcompress_policies", "kvcompress_eval"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages | STARTUP
    for package in packages:
        assert f"{package}/py.typed" in names
    sources = {
        path.relative_to(folder.parent).as_posix()
        for folder in (
            ROOT / "kvcompress",
            ROOT / "policies" / "kvcompress_policies",
            ROOT / "evaluation" / "kvcompress_eval",
        )
        for path in folder.rglob("*.py")
    }
    assert sources == {name for name in names if name.endswith(".py")} - STARTUP


def test_wheel_holds_the_license_and_no_data_but_what_commands_read(built):
    archive = zipfile.ZipFile(built[0])
    others = [name for name in archive.namelist() if not name.endswith((".py", "/py.typed"))]
    (info,) = {name.split("/")[0] for name in others if ".dist-info/" in name}
    parts = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    described = {f"{info}/{part}" for part in parts}
    data = {f"kvcompress_eval/{name}" for name in ("show.html", "leak_rows.jsonl")}
    assert set(others) - STARTUP == described | data
    license = archive.read(f"{info}/licenses/LICENSE")
    assert license == (ROOT / "LICENSE").read_bytes()


def test_sdist_holds_what_is_needed_to_build_and_test(built):
    names = members(built[1])
    for name in ("LICENSE", "README.md", "Makefile", "constraints.txt", "tests/conftest.py"):
        assert name in names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


@pytest.mark.skipif(not RELEASE, reason="a working tree may hold what is not committed yet")
def test_sdist_holds_committed_files_only(built):
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    assert members(built[1]) - tracked == {"", "PKG-INFO"}


def contents(wheel):
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist()}


def test_tree_and_sdist_give_the_same_wheel(built, tmp_path):
    # `built` is from the sdist: that is how `python -m build` makes a wheel.
    build(tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == built[0].name and contents(wheel) == contents(built[0])


def without_code(text):
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.M | re.S)


@pytest.fixture(scope="module")
def metadata(built):
    (name,) = (name for name in zipfile.ZipFile(built[0]).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(built[0]).read(name)
    return email.message_from_bytes(text, policy=email.policy.compat32)


def test_the_version_is_written_once(metadata):
    import kvcompress

    assert metadata["Version"] == kvcompress.__version__
    for file in ("pyproject.toml", "CITATION.cff"):
        assert kvcompress.__version__ not in (ROOT / file).read_text()


def test_the_index_page_has_no_link_into_the_repository(metadata):
    readme = (ROOT / "README.md").read_text()
    page = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]*)\)", without_code(page))
    assert links and not [link for link in links if not link.startswith("https://")]
    assert "](docs/" in without_code(readme), "nothing to take out: this test proves nothing"
    # Nothing else went, and no code was touched.
    code = r"^```.*?^```"
    assert re.findall(code, page, re.M | re.S) == re.findall(code, readme, re.M | re.S)
    words = re.compile(r"\w+")
    text = re.sub(r"\]\((?!http).*?\)", "]", without_code(readme))
    assert set(words.findall(text)) <= set(words.findall(page))


def test_an_index_takes_both(built):
    check = run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    assert check.count("PASSED") == 2


@pytest.fixture
def fresh(tmp_path):
    """An empty environment and its pip; the heavy dependencies are this interpreter's."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))
    outer = [folder for folder in sys.path if folder.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(outer))
    pip = (sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"))
    return home, site, pip


def test_wheel_works_in_a_fresh_venv(built, fresh):
    home, site, pip = fresh
    python = home / "bin" / "python"
    run(*pip, "install", "--no-deps", "--no-index", "-q", str(built[0]))
    code = (
        "import kvcompress; from kvcompress import SnapKVPolicy, policy_from;"
        "print(kvcompress.__file__); print(policy_from('snapkv:capacity=64') == "
        "SnapKVPolicy(capacity=64))"
    )
    where, equal = run(python, "-c", code, cwd="/").split()
    assert where.startswith(str(site)) and equal == "True"
    listing = run(home / "bin" / "kvcompress", "policies", cwd="/")
    assert "snapkv" in listing and "window_size" in listing and "broken" not in listing
    for name in ("policies", "evaluation", "tests"):
        done = subprocess.run([python, "-c", f"import {name}"], cwd="/", capture_output=True)
        assert done.returncode, f"the wheel made {name!r} importable"
    ask = "import _kvcompress_lm_eval, sys; print(_kvcompress_lm_eval.Finder in sys.meta_path)"
    assert run(python, "-c", ask, cwd="/").strip() == "True"
    run(*pip, "uninstall", "-y", "-q", "kvcompress")
    assert not [path for path in site.rglob("*kvcompress*") if "outer" not in path.name]


def test_sdist_installs_in_a_fresh_venv(built, fresh):
    home, site, pip = fresh
    options = ("--no-deps", "--no-index", "--no-build-isolation", "-q")
    run(*pip, "install", *options, str(built[1]))
    where = "import kvcompress_eval.plugin; print(kvcompress_eval.__file__)"
    assert run(home / "bin" / "python", "-c", where, cwd="/").startswith(str(site))
    assert "demo" in run(home / "bin" / "kvcompress", "--help", cwd="/")


@pytest.mark.slow
def test_full_install(built, tmp_path):
    """What a stranger does: the wheel with all that it needs, in an empty environment."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    run(*pip, "torch")
    run(*pip, built[0])
    out = run(home / "bin" / "kvcompress", "policies", cwd="/")
    assert "snapkv" in out and "broken" not in out
    facts = run(home / "bin" / "kvcompress", "env", cwd="/")
    version = built[0].name.split("-")[1]
    assert f"kvcompress: {version}, in {home}" in facts and "cannot be told" not in facts
    code = (
        "import torch; from kvcompress import press; from kvcompress.testing import tiny_model;"
        "model = tiny_model(); session = press(model, 'snapkv:capacity=24:window_size=6');"
        "session.__enter__(); model(torch.arange(60)[None]);"
        "print(session.report().layers[0].held_tokens)"
    )
    assert run(home / "bin" / "python", "-c", code, cwd="/").split()[-1] == "24"
