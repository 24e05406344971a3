"""`kvcompress env`: what a bug report needs, also of an installation that does not work."""

import sys
from importlib import metadata

import pytest


@pytest.fixture
def env(call):
    def run():
        code, out, _ = call("env")
        assert code == 0
        return dict(line.split(": ", 1) for line in out.splitlines())

    return run


@pytest.fixture
def plugins(monkeypatch, tmp_path):
    """Install plugins for the command line only: the body of each one's hook, by distribution."""

    def install(**bodies):
        import kvcompress.plugins

        for name, body in bodies.items():
            info = tmp_path / f"{name}-2.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
            (info / "entry_points.txt").write_text(f"[kvcompress]\n{name} = {name}\n")
            head = "from kvcompress import KNormPolicy, hookimpl\n\n@hookimpl\n"
            (tmp_path / f"{name}.py").write_text(f"{head}def kvcompress_policies():\n    {body}\n")
        monkeypatch.syspath_prepend(tmp_path)
        found = [
            entry
            for distribution in metadata.distributions(path=[str(tmp_path)])
            for entry in distribution.entry_points
        ]
        registry = kvcompress.plugins.Registry(found)
        monkeypatch.setattr(kvcompress.plugins, "registry", lambda: registry)

    return install


def test_env_names_versions_devices_and_backends(env):
    import kvcompress

    found = env()
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        assert found[name] == metadata.version(name)
    assert found["kvcompress"].startswith(f"{kvcompress.__version__}, in /")
    assert "flash-attn" in found["not installed"].split(", ") and found["python"]
    assert found["cpu"].endswith("threads, computes in float32, bfloat16, float16")
    usable, _, others = found["attention"].partition("; not ")
    assert {"eager", "sdpa"} <= set(usable.split(", "))
    assert "flash_attention_2" in others.split(", ")  # flash-attn is not installed
    assert "quanto" in found["quantized caches"].split(", ")
    assert set(found) >= {"memory", "cuda", "embedded model", "lm_eval hook"}


def test_env_names_what_each_plugin_brings(env):
    from kvcompress.plugins import registry

    assert env()[f"plugin kvcompress {metadata.version('kvcompress')}"].split(", ") == [
        name for name, entry in registry().policies.items() if entry.distribution == "kvcompress"
    ]


def test_env_shows_settings_but_no_secrets(env, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KVCOMPRESS_NO_LM_EVAL_HOOK", "yes")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = env()
    assert "OMP_NUM_THREADS=1" in found["variables"]
    assert "KVCOMPRESS_NO_LM_EVAL_HOOK=yes" in found["variables"]
    assert "hf_secret" not in str(found)


def test_env_works_where_torch_does_not(env, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # what a failing import looks like
    found = env()
    assert found["devices"].startswith("cannot be told: ModuleNotFoundError: ")
    assert found["torch"] == metadata.version("torch") and found["lm_eval hook"]


def test_env_shows_plugins_that_quarrel_or_are_broken(env, plugins):
    same = "return [KNormPolicy]"
    plugins(one_p=same, two_p=same, three_p="raise RuntimeError('no such card')")
    found = env()
    assert found["policies"].startswith("DuplicatePolicyError: Two policies are named 'knorm'")
    assert found["broken plugin three_p 2.5"] == "RuntimeError: no such card"
    assert {"plugin one_p 2.5", "plugin two_p 2.5"} <= set(found)
    assert "plugin three_p 2.5" not in found


def test_env_says_where_the_embedded_model_is(env, monkeypatch, tmp_path):
    import kvcompress.models as models

    file, folder = tmp_path / "model.gguf", tmp_path / "unpacked"

    def said():
        return env()["embedded model"]

    monkeypatch.setattr(models, "embedded_model", lambda: (None, folder))
    assert said() == "not installed"
    monkeypatch.setattr(models, "embedded_model", lambda: (file, folder))
    assert said() == f"in {file} (the file is missing), unpacked at its first use"
    file.touch()
    assert said() == f"in {file}, unpacked at its first use"
    folder.mkdir()
    (folder / "config.json").touch()
    assert said() == f"unpacked in {folder}"


def test_env_shows_an_installation_that_is_stale(env, monkeypatch):
    import kvcompress

    monkeypatch.setattr(kvcompress, "__version__", "99.1")
    installed = metadata.version("kvcompress")
    assert env()["kvcompress"].startswith(f"99.1 (installed as {installed}: install again), in ")


def test_asking_imports_nothing_heavy():
    import subprocess

    heavy = "print({'torch', 'transformers'} & set(sys.modules))"
    code = f"import sys, kvcompress.installation; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
