"""Every installed policy keeps every contract, alone and composed."""

import pytest

SETTINGS = [
    "snapkv:capacity=20:window_size=6",
    "pyramidkv:capacity=20:window_size=6",
    "snapkv_decoding:capacity=20:window_size=6:interval=7",
    "h2o:capacity=20",
    "tova:capacity=20",
    "streaming_llm:capacity=20",
    "knorm:capacity=20",
    "scissorhands:capacity=20:history=4:recent=2:interval=6",
    "snapkv:capacity=20:window_size=6+h2o:capacity=6:scope=generated",
]
VARIANTS = [
    "snapkv:capacity=24/16/20:window_size=4:kernel_size=3:pooling=max",
    "snapkv:keep_ratio=0.4:window_size=6",
    "snapkv:capacity=20:window_size=6:later_turns=append",
    "snapkv:capacity=20:window_size=6:later_turns=keep",
    "pyramidkv:capacity=20:window_size=6:rounding=reference",
    "snapkv_decoding:capacity=20:window_size=6:interval=2",
    "h2o:capacity=21:recent_ratio=0.2:normalize=observers:interval=5",
    "h2o:keep_ratio=0.3:recent_ratio=0",
    "tova:capacity=20/12/16:interval=4",
    "streaming_llm:capacity=20:n_sink=0:interval=3",
    "streaming_llm:capacity=20:positions=cache",
    "knorm:capacity=20:protect_recent=3:interval=6",
    "snapkv:capacity=20:window_size=6+streaming_llm:capacity=8:scope=generated:interval=3",
    "h2o:capacity=20+tova:capacity=6:scope=generated",
    "snapkv:capacity=20:window_size=6+h2o:capacity=26:interval=2",
    "snapkv:capacity=20:window_size=6+streaming_llm:capacity=20",
    "pyramidkv:capacity=16:window_size=4+snapkv_decoding:capacity=32:window_size=8:interval=4",
]
"""Without the longest generation, which takes most of the time, and eager attention."""


def cases():
    from kvcompress.testing import contracts

    for setting in SETTINGS + VARIANTS:
        for name in contracts(setting):
            if setting in VARIANTS and ("200 tokens" in name or name.endswith("out, eager")):
                continue
            yield pytest.param(setting, name, id=f"{setting}-{name}")


def pytest_generate_tests(metafunc):
    if {"setting", "contract"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("setting", "contract"), list(cases()))


def test_contract(setting, contract):
    from kvcompress.testing import contracts

    contracts(setting)[contract]()


def test_every_installed_policy_is_tried():
    from kvcompress.plugins import registry

    tried = {part.split(":")[0] for setting in SETTINGS for part in setting.split("+")}
    built_in = {
        name
        for name, entry in registry().policies.items()
        if entry.policy.__module__.startswith("kvcompress_policies")
    }
    assert tried == built_in
