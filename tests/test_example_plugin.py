"""A policy from another distribution: built, installed beside kvcompress's wheel, and used."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "kvcompress-random"


def run(*command):
    # Wide, so that the command line's output is not wrapped.
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Installed:
    """A virtual environment that holds nothing but the two wheels."""

    def __init__(self, home, wheels):
        self.bin = home / "bin"
        self.site = Path(
            sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)})
        )
        self.wheels = wheels

    def python(self, *arguments):
        return run(self.bin / "python", *arguments).stdout

    def json(self, code):
        """What the code prints, read as JSON."""
        return json.loads(self.python("-c", code))

    def command(self, *arguments):
        return run(self.bin / "kvcompress", *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    for project in (ROOT, PLUGIN):
        # The build backend is installed already; an isolated build would download it.
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
        run(*build, folder / "dist", project)
    wheels = sorted((folder / "dist").glob("*.whl"))
    # This interpreter's pip installs into it; a pip of its own takes longer than all the rest.
    venv.create(folder / "venv", with_pip=False)
    found = Installed(folder / "venv", wheels)
    pip = [sys.executable, "-m", "pip", "--python", found.bin / "python", "install", "-q"]
    run(*pip, "--no-deps", "--no-index", *wheels)
    # The heavy dependencies are this interpreter's. Its own kvcompress, if any, comes later on the
    # path, and the hooks of an editable install do not run: path files are read at a venv's own
    # folder only.
    (found.site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def test_wheel_holds_the_package_only(installed):
    (wheel,) = [path for path in installed.wheels if path.name.startswith("kvcompress_random-")]
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"kvcompress_random", "kvcompress_random-0.1.0.dist-info"}


def test_the_wheels_are_what_is_imported_and_each_plugin_is_found_once(installed):
    files, entries = installed.json(
        "import json, kvcompress, kvcompress_policies, kvcompress_random\n"
        "from importlib.metadata import entry_points\n"
        "files = [m.__file__ for m in (kvcompress, kvcompress_policies, kvcompress_random)]\n"
        "entries = [(e.dist.name, e.name) for e in entry_points(group='kvcompress')]\n"
        "print(json.dumps([files, entries]))"
    )
    for file in files:
        assert Path(file).is_relative_to(installed.site)
    assert ["kvcompress-random", "random"] in entries
    assert len(entries) == len({tuple(entry) for entry in entries})


def test_press_by_string_and_by_class(installed):
    by_string, by_class, other_seed = installed.json(
        "import json, torch\n"
        "from kvcompress import RandomPolicy, press\n"
        "from kvcompress.testing import tiny_model\n"
        "model, prompt, kept = tiny_model(), torch.arange(1, 51)[None], []\n"
        "chosen = RandomPolicy(capacity=20)\n"
        "for policy in ('random:capacity=20', chosen, chosen.model_copy(update={'seed': 1})):\n"
        "    with press(model, policy) as session, torch.no_grad():\n"
        "        cache = model(prompt).past_key_values\n"
        "    assert [layer.held_tokens for layer in session.report().layers] == [20] * 3\n"
        "    kept.append([layer.positions.tolist() for layer in cache.layers])\n"
        "print(json.dumps(kept))"
    )
    heads = [head for (row,) in by_class for head in row]
    assert [len(set(head)) for head in heads] == [20] * 6
    assert set().union(*heads) <= set(range(50))
    assert len({tuple(head) for head in heads}) == 6, "two heads or layers drew the same rows"
    assert by_string == by_class != other_seed


def test_forms(installed):
    string, dictionary, *equal = installed.json(
        "import json\n"
        "from kvcompress import RandomPolicy, policy_from\n"
        "policy = RandomPolicy(capacity=20, seed=7)\n"
        "string, dictionary = policy.to_string(), policy.to_dict()\n"
        "read = policy_from(string), policy_from(dictionary)\n"
        "print(json.dumps([string, dictionary, *(policy == each for each in read)]))"
    )
    assert string == "random:capacity=20:seed=7"
    assert dictionary == {"policy": "random", "capacity": 20, "seed": 7}
    assert equal == [True, True]


def test_listing(installed):
    listing = installed.command("policies").stdout
    names = re.findall(r"^([a-z]\w*)  ", listing, re.M)
    assert {"random", "snapkv"} <= set(names)
    assert len(names) == len(set(names))
    assert listing.count("from kvcompress-random") == 1
    assert "Another seed, other rows." in listing and "broken" not in listing


def test_generate(installed, saved_model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("a long prompt, " * 20)
    options = ["--model", saved_model, "--max-new-tokens", "4"]
    done = installed.command("generate", file, *options, "--policy", "random:capacity=40")
    # The last generated token is never fed.
    assert "43 of" in done.stderr


def test_help_loads_the_plugin_but_neither_torch_nor_transformers(installed):
    loaded = installed.python(
        "-c",
        "import sys; sys.argv = ['kvcompress', '--help']\n"
        "from kvcompress.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules)",
    ).split()
    assert "kvcompress_random.plugin" in loaded
    assert not {"torch", "transformers", "kvcompress_random.policy"} & set(loaded)


def test_its_own_tests_pass(installed):
    """Among them `check_policy`, with all contracts of a policy."""
    out = installed.python("-m", "pytest", "-q", "-p", "no:cacheprovider", PLUGIN)
    assert re.search(r"^3 passed", out, re.M), out
