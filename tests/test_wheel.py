"""The wheel and the sdist: what is in them, and that the wheel works from anywhere."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    # The build backend is installed already; an isolated build would download it.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


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


def test_sdist_holds_what_is_needed_to_build_and_test(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("LICENSE", "README.md", "Makefile", "constraints.txt", "tests/conftest.py"):
        assert name in names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


def test_wheel_works_in_a_fresh_venv(built, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", str(built[0]))
    # The heavy dependencies are this interpreter's.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
    run(python, "-m", "pip", "uninstall", "-y", "-q", "kvcompress")
    assert not [path for path in site.rglob("*kvcompress*") if "outer" not in path.name]


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
    code = (
        "import torch; from kvcompress import press; from kvcompress.testing import tiny_model;"
        "model = tiny_model(); session = press(model, 'snapkv:capacity=24:window_size=6');"
        "session.__enter__(); model(torch.arange(60)[None]);"
        "print(session.report().layers[0].held_tokens)"
    )
    assert run(home / "bin" / "python", "-c", code, cwd="/").split()[-1] == "24"
