"""Documents say what is: generated tables are fresh, and code blocks run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
POLICIES = ROOT / "docs" / "policies.md"


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
    for document in [README, *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document in (README, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"^make (\w+)", document.read_text(), re.M):
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
