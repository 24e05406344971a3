"""Documents say what is: generated tables are fresh, and code blocks run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)


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
