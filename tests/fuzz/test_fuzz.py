"""200 random situations; `situations.py` says what must be true of each."""

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, CHUNK = 200, 10


@pytest.fixture(scope="module")
def situations():
    path = Path(__file__).with_name("situations.py")
    spec = importlib.util.spec_from_file_location("situations", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_situations(situations, first):
    verdicts = [situations.examine(seed) for seed in range(first, first + CHUNK)]
    failures = [verdict for verdict in verdicts if verdict.outcome == "failure"]
    ties = [verdict for verdict in verdicts if verdict.outcome == "near tie"]
    if len(ties) > 1:  # they are too rare for that
        failures += ties
    if failures:
        pytest.fail("\n\n".join(map(str, failures)), pytrace=False)


def test_a_seed_is_one_situation(situations):
    drawn = [situations.draw(seed) for seed in range(COUNT)]
    assert drawn == [situations.draw(seed) for seed in range(COUNT)]
    assert {situation.mode for situation in drawn} == set(situations.MODES)


def forget_state(monkeypatch):
    """Beams change places, and what the policy noted about their rows is lost."""
    from kvcompress.cache import KVLayer

    def reorder_cache(self, beam_idx):
        self._map_batch(lambda rows: rows.index_select(0, beam_idx))
        self.rows.state = {name: torch.zeros_like(it) for name, it in self.rows.state.items()}

    monkeypatch.setattr(KVLayer, "reorder_cache", reorder_cache)


def leave_columns_behind(monkeypatch):
    """Beams change places, which tokens their rows are does not."""
    from kvcompress.cache import KVLayer

    def reorder_cache(self, beam_idx):
        columns = self.rows.columns()
        self._map_batch(lambda rows: rows.index_select(0, beam_idx))
        self.rows._columns = columns

    monkeypatch.setattr(KVLayer, "reorder_cache", reorder_cache)


def judge_padding(monkeypatch):
    from kvcompress import cache

    judge = cache.judge
    monkeypatch.setattr(cache, "judge", lambda *view: replace(judge(*view), padding=None))


def leave_keys_where_they_were(monkeypatch):
    from kvcompress.rotation import Rotation

    monkeypatch.setattr(Rotation, "move", lambda self, key, *places: key)


def forget_the_interval(monkeypatch):
    from kvcompress.state import CacheState

    monkeypatch.setattr(CacheState, "evicts_now", property(lambda self: self.decode is not None))


@pytest.mark.parametrize(
    ("fault", "meant"),
    [
        (forget_state, lambda it: "beam" in it.mode and "h2o" in it.policy),
        (leave_columns_behind, lambda it: "beam" in it.mode),
        (judge_padding, lambda it: it.padded),
        (leave_keys_where_they_were, lambda it: "positions=cache" in it.policy),
        (forget_the_interval, lambda it: "interval" in it.policy),
    ],
)
def test_faults_are_found(situations, monkeypatch, fault, meant):
    """In fewer situations than are run, of those that may show the fault."""
    fault(monkeypatch)
    seeds = (seed for seed in itertools.count() if meant(situations.draw(seed)))
    tried = itertools.islice(seeds, COUNT // 4)
    assert any(situations.examine(seed).outcome == "failure" for seed in tried)
