"""What stands in .github is true: targets exist, versions agree, and the code of the forms runs."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]-*.yml"))


def jobs():
    for workflow in WORKFLOWS:
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
            yield f"{workflow.stem} {name}", job


def matrix():
    found = dict(jobs())["ci make"]["strategy"]["matrix"]
    return found["python"], found["target"] + [job["target"] for job in found["include"]]


def test_workflows_run_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    runs = [step["run"] for _, job in jobs() for step in job.get("steps", ()) if "run" in step]
    assert len(runs) == 3 and all(run.startswith("make ") for run in runs)
    named = {run.split()[1] for run in runs} - {'"$TARGET"'} | set(matrix()[1])
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_python_that_is_declared_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    declared = [name.split()[-1] for name in project["classifiers"] if name.startswith(prefix)]
    assert matrix()[0] == declared
    assert project["requires-python"] == f">={declared[0]}"


def test_only_the_upload_may_say_who_we_are():
    may = [name for name, job in jobs() if "id-token" in job.get("permissions", {})]
    assert may == ["release publish"]
    publish = dict(jobs())["release publish"]
    # It waits for the tests and for the files that were checked, and builds nothing itself.
    assert publish["needs"] == ["ci", "build"] and publish["environment"] == "pypi"
    assert not [step for step in publish["steps"] if "run" in step]
    for _, job in jobs():
        assert "timeout-minutes" in job or "uses" in job


def fields(form):
    return {field["id"]: field for field in form["body"] if "id" in field}


def test_reports_of_bugs_ask_for_the_environment():
    names = {}
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        env = fields(form).get("env")
        names[path.stem] = env and env["validations"]["required"] and env["attributes"]["label"]
    asked = "Output of `kvcompress env`"
    assert names == {"1-bug": asked, "2-wrong-result": asked, "3-policy": None}


@pytest.mark.model
def test_the_comparison_in_the_form_runs(capsys):
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/2-wrong-result.yml").read_text())
    names = {}
    exec(fields(form)["oracle"]["attributes"]["value"], names)
    same, *differences = capsys.readouterr().out.splitlines()
    assert same == "True" and len(differences) == 8
    for line in differences:
        difference, largest = map(float, line.split(" of "))
        assert difference < 1e-4 * largest
    # Something was evicted, so there was something to compare.
    assert names["evictions"].evicted(0) > 0


def make(*arguments):
    command = ("make", "--no-print-directory", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_a_tag_must_be_the_version_and_in_the_changelog(tmp_path):
    import kvcompress

    version = kvcompress.__version__
    wrong = make("tag", "TAG=v9.9.9")
    assert wrong.returncode and f"The tag v9.9.9 is not v{version}" in wrong.stderr
    told, untold = tmp_path / "told.md", tmp_path / "untold.md"
    told.write_text(f"## [Unreleased]\n\n## [{version}] - 2030-01-31\n")
    untold.write_text("## [Unreleased]\n")
    assert make("tag", f"TAG=v{version}", f"CHANGELOG={told}").returncode == 0
    missing = make("tag", f"TAG=v{version}", f"CHANGELOG={untold}")
    assert missing.returncode and f"no section [{version}]" in missing.stderr
    # The name of a tag is data.
    assert make("tag", 'TAG=$(shell touch /)"; exit 0; "').returncode
