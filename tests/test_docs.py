"""Documents say what is: generated tables are fresh, code blocks run, commands can be read."""

import difflib
import functools
import importlib
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
POLICIES = ROOT / "docs" / "policies.md"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
IN_OWN_TESTS = {"README.md", "docs/index.md", "docs/long-prompts.md", "docs/policies.md"}
"""Documents whose Python blocks need what only tests of their own have."""


def name_of(document):
    return document.relative_to(ROOT).as_posix()


def blocks(language, document=README):
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


def policy_table():
    """The README's table of policies, from the registry."""
    from kvcompress.plugins import registry

    lines = ["| name | class | what it keeps | evicts at | source |", "|---|---|---|---|---|"]
    for name, entry in registry().policies.items():
        if entry.distribution != "kvcompress":
            continue
        doc = entry.policy.__doc__
        summary = doc.strip().splitlines()[0].removesuffix(".")
        source = re.search(r"Source: (.*?)[;\n]", doc).group(1).strip().removesuffix(".")
        source = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)
        phases = ", ".join(sorted(entry.policy.phases, reverse=True))
        cells = [f"`{name}`", f"`{entry.policy.__name__}`", summary, phases, source]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_policy_table_is_fresh():
    shown = re.search(r"<!-- policies -->\n(.*?)\n<!-- end -->", README.read_text(), re.S).group(1)
    assert shown == policy_table()


def test_links_and_pictures_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{name_of(document)}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"^make ([\w-]+)", document.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.model
def test_first_example_prints_what_the_readme_shows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = blocks("python")[0]
    (shown,) = re.findall(r"It prints\n\n```\n(.*?)^```", README.read_text(), re.M | re.S)
    exec(compile(code, "README", "exec"), {})

    def without_times(text):
        # The last column is time.
        return [re.sub(r"\s+[\d.]+$", "", line) for line in text.strip().splitlines()]

    assert without_times(capsys.readouterr().out) == without_times(shown)


def test_other_examples_run(make_model, prompt, capsys):
    """The later blocks, in one namespace, on a tiny model."""
    model = make_model()
    names = {"model": model, "inputs": prompt(70), "CAPACITY": 24}
    later = blocks("python")[1:]
    assert len(later) >= 2
    for code in later:
        exec(compile(code, "README", "exec"), names)
    assert "layers hosted" in capsys.readouterr().out


def test_the_examples_of_long_prompts_run(make_model, prompt):
    document = ROOT / "docs" / "long-prompts.md"
    code = blocks("python", document)
    assert len(code) == document.read_text().count("```python") == 3
    names = {"model": make_model(), "inputs": prompt(400)}
    for block in code:
        exec(compile(block, document.name, "exec"), names)
    assert names["cache"].report().layers[0].held_tokens == 64
    assert names["again"].get_seq_length() == 380
    assert names["first"].shape == names["second"].shape == (1, 5)


def test_compositions_in_the_readme_can_be_read():
    from kvcompress import policy_from

    specs = re.findall(r"snapkv:[\w:=]+\+[\w:=]+", README.read_text())
    assert len(specs) == 2
    for spec in specs:
        policy_from(spec).check_layers(32)


@pytest.fixture(scope="module")
def guide(saved_model):
    """What the blocks of docs/policies.md define, run in one namespace with a tokenizer."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    names = {"tokenizer": AutoTokenizer.from_pretrained(saved_model)}
    code = blocks("python", POLICIES)
    assert len(code) == POLICIES.read_text().count("```python")
    for block in code:
        exec(compile(block, POLICIES.name, "exec"), names)
    return names


def test_the_guide_to_policies_runs(guide):
    assert guide["session"].report().hosted_layers == 3
    (policy,) = re.findall(r"return \[(\w+)\]", blocks("python", POLICIES)[-1])
    assert policy in guide


@pytest.mark.parametrize("name", ["Loud", "Focus", "FocusDecoding", "Habit"])
def test_policies_of_the_guide_keep_the_quick_contracts(guide, name):
    from kvcompress.testing import contracts

    checks = list(contracts(guide[f"{name}Policy"], capacity=20).values())
    for check in checks[:8]:  # those without a generation
        check()


def test_the_guide_names_every_contract_and_every_field_of_the_view():
    from dataclasses import fields

    from kvcompress import LayerView
    from kvcompress.testing import contracts

    text = POLICIES.read_text()
    listed = re.search(r"^\| contract \|.*?\n\n", text, re.M | re.S).group(0)
    rows = re.findall(r"^\| (.*?) \|", listed, re.M)
    assert rows[1:] == list(contracts("snapkv:capacity=40"))
    table = re.search(r"^\| field \|.*?\n\n", text, re.M | re.S).group(0)
    named = set(re.findall(r"`(\w+)`", table))
    asked = {"locate", "find_newest"}  # by `positions` and `last`
    assert {field.name for field in fields(LayerView)} - asked <= named


def fences(document):
    """Language and text of every block."""
    return re.findall(r"^(?:```+)(\w*)\n(.*?)^```+$", document.read_text(), re.M | re.S)


def test_every_block_is_of_a_kind_that_is_checked():
    for document in DOCUMENTS:
        text = document.read_text()
        assert len(fences(document)) * 2 == len(re.findall(r"^```", text, re.M)), document
        for language, block in fences(document):
            assert language in {"", "python", "toml", "text"}, f"{name_of(document)}: {block}"
            if language == "toml":
                tomllib.loads(block)


@pytest.mark.parametrize(
    "document",
    [d for d in DOCUMENTS if name_of(d) not in IN_OWN_TESTS and "```python" in d.read_text()],
    ids=name_of,
)
def test_python_blocks_run(document, make_model, prompt, saved_model):
    """In one namespace for each document, on a tiny model."""
    from transformers import AutoTokenizer

    names = {"model": make_model(), "inputs": prompt(400)}
    names["tokenizer"] = AutoTokenizer.from_pretrained(saved_model)
    for code in blocks("python", document):
        exec(compile(code, name_of(document), "exec"), names)


@pytest.mark.model
def test_the_ten_minutes_print_what_they_show(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    document = ROOT / "docs" / "index.md"
    parts = fences(document)
    names = {}
    assert [language for language, _ in parts].count("python") >= 3
    for (language, code), (after, shown) in zip(parts, [*parts[1:], ("", "")], strict=True):
        if language != "python":
            continue
        exec(compile(code, name_of(document), "exec"), names)
        printed = capsys.readouterr().out
        if after == "text":
            # The last number of a line is a time.
            wanted, got = (re.sub(r" +[\d.]+$", "", text, flags=re.M) for text in (shown, printed))
            assert got.strip() == wanted.strip()


COMMANDS = ("accelerate", "kvcompress", "lm_eval", "make", "pip", "pytest", "python", "torchrun")


def command_lines(document):
    """The commands of a document's unlabelled blocks, each as a list of words."""
    for language, block in fences(document):
        lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        first = [line.split()[0] for line in lines]
        if language or not any(word in COMMANDS for word in first):
            if not language:  # a list of files, what was printed, a policy
                for word in first:
                    near = difflib.get_close_matches(word, COMMANDS, cutoff=0.8)
                    assert not near, f"{name_of(document)}: {word!r} is close to {near}"
            continue
        for line in lines:
            words = shlex.split(line, comments=True)
            for part in " ".join(map(shlex.quote, words)).split("'&&'"):
                yield shlex.split(part)


@functools.cache
def our_commands():
    from typer.main import get_command

    from kvcompress.cli import app
    from kvcompress.plugins import registry

    registry().add_commands(app)
    return get_command(app)


def read_by_typer(words):
    """What a command of ours makes of its arguments; raises if it cannot be read."""
    import typer

    from kvcompress.plugins import policy_from

    group = our_commands()
    if words == ["--help"]:
        return
    command = group.commands[words[0]]
    parent = typer.Context(group, info_name="kvcompress")
    context = command.make_context(words[0], words[1:], parent=parent)
    if words[0] == "lm-eval":
        read_by_lm_eval(words[1:])
    policies = context.params.get("policy") or ()
    for policy in [policies] if isinstance(policies, str) else policies:
        policy_from(policy)


def read_by_lm_eval(words):
    """lm_eval's own parser; of our arguments, the policy."""
    from lm_eval._cli.harness import HarnessCLI

    from kvcompress import policy_from

    arguments = HarnessCLI()._parser.parse_args(["run", *words])
    assert arguments.model in ("snapkv-hf", "kvcompress-hf", "hf")
    given = dict(arguments.model_args or {})
    policy = given.get("policy", "snapkv")
    if policy != "none":
        known = set(type(policy_from(policy)).model_fields)
        fields = {name: value for name, value in given.items() if name in known}
        policy_from({"policy": policy, **fields})


def read_by_script(words, monkeypatch):
    """One of our scripts: its options are the parameters of `main`."""
    script = ROOT / words[0]
    assert script.is_file()
    monkeypatch.syspath_prepend(str(script.parent))
    main = importlib.import_module(script.stem).main
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(main).parameters}
    given = [word for word in words[1:] if word.startswith("--")]
    assert set(given) <= known


def test_commands_can_be_read(monkeypatch):
    """Commands and their options exist, and values are of the right kind."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(extras["optional-dependencies"])
    read = 0
    for document in DOCUMENTS:
        for command, *words in command_lines(document):
            try:
                if command == "kvcompress":
                    read_by_typer(words)
                elif command == "lm_eval":
                    read_by_lm_eval(words)
                elif command == "python" and words[0] != "-m":
                    read_by_script(words, monkeypatch)
                elif command == "pip":
                    named = re.findall(r"\[([\w,]+)\]", " ".join(words))
                    assert {each for names in named for each in names.split(",")} <= extras
                else:
                    assert command in COMMANDS
                    scripts = [word for word in words if word.endswith(".py")]
                    assert all((ROOT / script).is_file() for script in scripts)
            except BaseException as error:
                line = " ".join([command, *words])
                pytest.fail(f"{name_of(document)}: {line}: {type(error).__name__}: {error}")
            read += 1
    assert read >= 30


@pytest.mark.parametrize(
    "wrong",
    [
        ["generate", "prompt.txt", "--polcy", "snapkv"],
        ["generate", "prompt.txt", "--policy", "snapvk"],
        ["shows", "prompt.txt"],
        ["needle", "--capacity", "many"],
        ["plan", "MODEL"],
    ],
)
def test_a_wrong_command_would_be_found(wrong):
    with pytest.raises(Exception, match=r"polcy|snapvk|shows|valid integer|prompt_tokens"):
        read_by_typer(wrong)
