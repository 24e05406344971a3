"""The search for the smallest cache: its space, its scores, its statistics, and the command."""

import json
import math
import random
import shutil

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")


def space_of(specs, capacities=(), searches=(), prompt_tokens=200, layers=3, new_tokens=32):
    from kvcompress_eval.search_space import Space, families

    found = families(specs, capacities, searches, prompt_tokens)
    return Space(found, layers, prompt_tokens, new_tokens)


def test_a_space_has_what_is_free():
    usual = space_of(["snapkv"])
    assert usual.describe() == {
        "snapkv": {
            "capacity": ["24", "32", "48", "64", "96", "136"],
            "kernel_size": ["5", "7", "13", "21"],
            "pooling": ["avg", "max"],
            "window_size": ["8", "16", "32"],
        }
    }
    # A window of 32 fits neither of the two smallest capacities.
    assert len(usual.settings) == (6 * 3 - 2) * 4 * 2
    assert "snapkv:capacity=96" in usual.settings
    fixed = space_of(
        ["snapkv:window_size=8:pooling=max"],
        [64, 40],
        ["kernel_size=13,9", "group_reduce=max,mean"],
    )
    assert fixed.describe()["snapkv:window_size=8:pooling=max"] == {
        "capacity": ["40", "64"],
        "group_reduce": ["max", "mean"],
        "kernel_size": ["9", "13"],
    }
    assert len(fixed.settings) == 8
    assert all(each.policy.window_size == 8 for each in fixed.settings.values())
    ratio = space_of(["snapkv", "streaming_llm:capacity=40"], [], ["keep_ratio=0.5,0.25"])
    snap, stream = ratio.describe().values()
    assert snap["keep_ratio"] == ["0.25", "0.5"] and "capacity" not in snap
    assert stream == {}


def test_a_space_of_pyramids_and_compositions():
    pyramids = space_of(["pyramidkv:kernel_size=5"], [48, 96], ["beta=2,20"])
    assert {each.policy.beta for each in pyramids.settings.values()} == {2, 20}
    pair = "snapkv:window_size=8:kernel_size=5:pooling=avg+streaming_llm:scope=generated"
    both = space_of([pair], [40, 64], ["decode.capacity=16,8"])
    assert [str(each.policy) for each in both.settings.values()] == [
        f"snapkv:capacity={first}:window_size=8+streaming_llm:capacity={second}:scope=generated"
        for first in (40, 64)
        for second in (8, 16)
    ]
    either = space_of(
        ["snapkv:capacity=40:window_size=8:kernel_size=5:pooling=avg+streaming_llm:capacity=44"],
        [],
        ["decode.scope=all,generated"],
        new_tokens=64,
    )
    assert {each.policy.scope for each in either.settings.values()} == {"all", "generated"}


def test_larger_ones_differ_in_the_budget_alone():
    space = space_of(["snapkv"], [40, 64, 100])
    small = space.settings["snapkv:capacity=40:kernel_size=13:pooling=max"]
    assert [str(each.policy) for each in space.larger(small)] == [
        "snapkv:capacity=64:kernel_size=13:pooling=max",
        "snapkv:capacity=100:kernel_size=13:pooling=max",
    ]
    assert [str(each.policy) for each in space.by_default(0)] == [
        "snapkv:capacity=40",
        "snapkv:capacity=64",
        "snapkv:capacity=100",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"searches": ["kernel_sizes=5,7"]}, r"Did you mean 'kernel_size'\?"),
        ({"searches": ["kernel_size"]}, r"--search 'kernel_size' cannot be read"),
        ({"searches": ["kernel_size=5,5"]}, r"each value once"),
        ({"searches": ["kernel_size=5", "kernel_size=7"]}, r"names a field twice"),
        ({"searches": ["kernel_size=5,6"]}, r"kernel_size must be odd"),
        ({"searches": ["pooling=max,mx"]}, r"'avg', 'max' or 'none'"),
        ({"searches": ["capacity=40"], "capacities": [50]}, r"both give it"),
        ({"searches": ["window_size=8,64"], "capacities": [50]}, r"window_size=64 must be smaller"),
        ({"capacities": [100, 200]}, r"capacity=200\S* evicts nothing of the shortest prompt"),
        (
            {"specs": ["snapkv:capacity=40"], "capacities": [50]},
            r"no free field|No policy has a free",
        ),
        ({"specs": ["snapkv:windo=4"]}, r"windo"),
        ({"searches": [f"window_size={','.join(map(str, range(1, 900)))}"]}, r"at most 20,000"),
        (
            {"specs": ["snapkv+streaming_llm:capacity=40:scope=generated"]},
            r"streaming_llm:capacity=40 evicts nothing in 32 new tokens",
        ),
        (
            {"specs": ["snapkv+streaming_llm:scope=generated"], "searches": ["decode.capacity=0"]},
            r"capacity",
        ),
    ],
)
def test_spaces_that_are_none(arguments, message):
    from kvcompress import KVCompressError

    with pytest.raises(KVCompressError, match=message):
        space_of(**{"specs": ["snapkv"], **arguments})


@pytest.fixture(scope="module")
def tokenizer(saved_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(saved_model)


POLICIES = [
    "snapkv:capacity=24:window_size=6",
    "snapkv:capacity=40:window_size=8:kernel_size=3:pooling=max",
    "pyramidkv:capacity=24:window_size=6",
    "h2o:capacity=24",
    "snapkv:capacity=24:window_size=6+streaming_llm:capacity=6:scope=generated",
]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text"])
@pytest.mark.parametrize("room", [0, 2**30])
def test_scores_are_those_of_fidelity(make_model, prompt, tokenizer, family, room, monkeypatch):
    """Which reads the answer token by token; prompts that are kept and not kept give the same."""
    from kvcompress_eval import one_prefill
    from kvcompress_eval.fidelity import fidelity
    from kvcompress_eval.prompts import Prompt
    from kvcompress_eval.tune import Scorer

    from kvcompress import policy_from

    model, ids = make_model(family), prompt(70)["input_ids"]
    wanted = POLICIES if family != "deepseek_v3" else POLICIES[:3]
    policies = [policy_from(each) for each in wanted]
    expected = [found for _, found in fidelity(model, ids, policies, 12)]
    reads = []
    feed = one_prefill.feed
    monkeypatch.setattr(
        one_prefill, "feed", lambda *given: reads.append(given[1].shape[1]) or feed(*given)
    )
    scorer, one = Scorer(model, tokenizer, policies, 12, room), Prompt("one", ids[0].tolist())
    for _ in range(2):
        for found, theirs in zip(scorer.scores(one, policies), expected, strict=True):
            assert found.tokens == 11 and found.agreeing == sum(theirs.agrees)
            assert found.divergence == pytest.approx(sum(theirs.divergence) / 11, abs=1e-5)
            assert found.held_tokens == theirs.held_tokens and found.found is None
        (whole,) = scorer.scores(one, [None])
        assert whole.agreeing == 11 and whole.divergence == 0 and whole.held_tokens == 81
    shared = 4 if room == 0 else 1
    alone = 2 * ("h2o:capacity=24" in wanted)
    assert reads.count(70) == shared + alone
    scorer.forget()
    list(scorer.scores(one, []))
    assert reads.count(70) == shared + alone + 1


class Reciter(torch.nn.Module):
    """Stands for a tokenizer: a letter for every token."""

    @staticmethod
    def decode(tokens, skip_special_tokens):
        return "".join("0123456789 .abc"[token % 15] for token in tokens)


def test_a_needle_is_found_where_a_free_answer_names_it(make_model, prompt):
    """The greedy answer from each cache, up to the needle, is the uncompressed one's or is not."""
    from kvcompress_eval.needle import Needle
    from kvcompress_eval.one_prefill import OnePrefill
    from kvcompress_eval.prompts import Prompt
    from kvcompress_eval.tune import Scorer

    from kvcompress import policy_from

    model, outcomes = make_model(), set()
    policies = [policy_from(f"snapkv:capacity={size}:window_size=6") for size in (24, 50, 66)]
    for seed in range(6):
        ids = prompt(70, seed=seed)["input_ids"]
        prefill = OnePrefill(model, ids, [None, *policies])
        said = prefill.answer(None, 12)[0]
        words = Reciter.decode(said, True).replace(".", " ").split()
        if not words or len(words[0]) > 9:
            continue
        needle = Needle([], (words[0],), 0, 0)
        scorer = Scorer(model, Reciter(), policies, 12, 0)
        (whole,) = scorer.scores(Prompt("", ids[0].tolist(), needle), [None])
        assert whole.found and whole.tokens < 12
        found = list(scorer.scores(Prompt("", ids[0].tolist(), needle), policies))
        for policy, score in zip(policies, found, strict=True):
            text = Reciter.decode(prefill.answer(policy, 12)[0], True)
            first = text.replace(".", " ").split()[:1] == words[:1]
            assert score.found == (first and needle.is_answered_by(text)), (seed, policy)
            outcomes.add(score.found)
        absent = Needle([], ("nowhere",), 0, 0)
        (never,) = scorer.scores(Prompt("", ids[0].tolist(), absent), policies[:1])
        assert never.found is False
    assert outcomes == {True, False}


def score(policy="p", tokens=10, agreeing=10, divergence=0.0, found=None):
    from kvcompress_eval.tune import Score

    return Score("digest", policy, 50.0, tokens, agreeing, divergence, found)


def test_bounds_are_the_exact_ones():
    from kvcompress_eval.tune import Quality, clopper_pearson, lower_bound

    # The chance of so many or more, if the share were the bound, is 1 - confidence.
    for right, of in ((1, 3), (7, 9), (16, 16)):
        share = clopper_pearson(right, of, 0.9)
        tail = sum(
            math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(right, of + 1)
        )
        assert tail == pytest.approx(0.1)
    assert clopper_pearson(0, 5, 0.9) == 0
    found = [score(found=each) for each in (True, True, False, True)]
    assert lower_bound(found, Quality.found, 0.9) == clopper_pearson(3, 4, 0.9)
    spread = [score(agreeing=each) for each in (6, 8, 10)]
    # Mean 0.8, deviation 0.2, Student's t of two degrees of freedom.
    assert lower_bound(spread, Quality.agreement, 0.95) == pytest.approx(
        0.8 - 2.919986 * 0.2 / 3**0.5
    )
    same = [score(), score(), score()]
    assert lower_bound(same, Quality.agreement, 0.95) == clopper_pearson(30, 30, 0.95) < 1
    far = [score(divergence=each) for each in (0.1, 0.3)]
    values = [math.exp(-0.1), math.exp(-0.3)]
    error = abs(values[0] - values[1]) / 2
    assert lower_bound(far, Quality.likeness, 0.75) == pytest.approx(sum(values) / 2 - error)
    assert lower_bound(far[:1], Quality.likeness, 0.75) == 0


def outcome_of(policy, held, quality, bound=0.0, divergence=0.0):
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.tune import Outcome

    return Outcome(policy, 8, held, Estimate(quality, 0.1), divergence, bound)


def test_the_front_is_what_nothing_beats():
    from kvcompress_eval.tune import front

    found = [
        outcome_of("a", 40, 0.2),
        outcome_of("b", 50, 0.6, divergence=0.5),
        outcome_of("c", 50, 0.6, divergence=0.4),
        outcome_of("d", 60, 0.6),
        outcome_of("e", 70, 0.9),
        outcome_of("f", 30, 0.1),
    ]
    assert [each.policy for each in front(found)] == ["f", "a", "c", "e"]


def test_the_last_that_passes_is_recommended():
    from kvcompress_eval.tune import recommended

    passes = [outcome_of(str(held), held, 1, bound) for held, bound in ((40, 0.85), (90, 0.8))]
    fails, smallest = outcome_of("30", 30, 1, 0.7), outcome_of("20", 20, 1, 0.9)
    assert recommended([smallest, passes[0], fails, passes[1]], 0.8) is passes[0]
    like_it = outcome_of("like it", 40, 1, 0.9)
    assert recommended([*passes, like_it], 0.8) is passes[0]
    assert recommended([like_it, *passes], 0.8) is like_it
    assert recommended([*passes, outcome_of("100", 100, 1, 0.79)], 0.8) is None


def test_recommendations_are_wrong_as_rarely_as_stated():
    """Six candidates near the level, none of which keeps it: few runs may recommend one."""
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.tune import Outcome, clopper_pearson, recommended

    chance, wrong, runs, prompts = random.Random(0), 0, 2000, 16
    bounds = [clopper_pearson(right, prompts, 0.9) for right in range(prompts + 1)]
    for _ in range(runs):
        judged = [
            Outcome(
                str(held),
                prompts,
                held,
                Estimate(0, 0),
                0,
                bounds[sum(chance.random() < 0.74 for _ in range(prompts))],
            )
            for held in range(6)
        ]
        wrong += recommended(judged, 0.75) is not None
    assert 0.02 < wrong / runs < 0.1


def test_candidates():
    from kvcompress_eval.tune import candidates

    space = space_of(["snapkv"], [40, 64, 80, 100, 120, 140])
    wide = ":kernel_size=13:pooling=max"
    tried = [
        outcome_of("snapkv:capacity=40", 50, 0.1),
        outcome_of(f"snapkv:capacity=40{wide}", 50, 0.6),
        outcome_of(f"snapkv:capacity=64{wide}", 74, 0.8),
        outcome_of(f"snapkv:capacity=80{wide}", 90, 0.5),
        outcome_of("snapkv:capacity=120:pooling=max", 130, 0.9),
        outcome_of("snapkv:capacity=140", 150, 0.9),
    ]
    assert [str(each.policy) for each in candidates(space, tried, 0.8)] == [
        f"snapkv:capacity=40{wide}",
        f"snapkv:capacity=64{wide}",
        "snapkv:capacity=120:pooling=max",
        f"snapkv:capacity=100{wide}",
        f"snapkv:capacity=120{wide}",
    ]
    # Nothing reached the level: what came nearest, and more of it.
    assert [str(each.policy) for each in candidates(space, tried[:3], 0.9)] == [
        f"snapkv:capacity=40{wide}",
        f"snapkv:capacity=64{wide}",
        f"snapkv:capacity=80{wide}",
        f"snapkv:capacity=100{wide}",
        f"snapkv:capacity=120{wide}",
    ]


def keeps(setting):
    """A quality that wide max pooling of large caches has."""
    policy = setting.policy
    wide = min(policy.kernel_size, 13) / 13 * (1.0 if policy.pooling == "max" else 0.7)
    return float(policy.capacity), min(1.0, wide * policy.capacity / 100)


def searched(space, count, path, seed=0, batch=4, stop_after=None, known=None):
    from kvcompress_eval.tune import search

    known = {} if known is None else known

    def values(drawn):
        for each in drawn:
            if str(each.policy) not in known:
                if stop_after is not None and len(known) == stop_after:
                    raise KeyboardInterrupt
                known[str(each.policy)] = keeps(each)
        return [known[str(each.policy)] for each in drawn]

    return [str(each.policy) for each in search(space, values, count, batch, seed, path)]


def test_the_search_finds_more_than_chance_and_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    space = space_of(["snapkv"], [40, 56, 72, 88, 100, 112, 128, 144])
    whole = searched(space, 24, tmp_path / "journal")
    assert len(whole) == len(set(whole)) and 24 <= len(whole) < 28
    assert whole != searched(space, 24, tmp_path / "journal", seed=1)
    known = {}
    for stop in (3, 15):
        with pytest.raises(KeyboardInterrupt):
            searched(space, 24, tmp_path / "journal", stop_after=stop, known=known)
    assert searched(space, 24, tmp_path / "journal", known=known) == whole
    # More settings: the same ones first.
    assert searched(space, 32, tmp_path / "journal")[: len(whole)] == whole
    # After the first ones it looks where little is held and much is kept.
    late = [keeps(space.settings[each])[1] for each in whole[12:]]
    every = [keeps(each)[1] for each in space.settings.values()]
    assert sum(late) / len(late) > sum(every) / len(every) + 0.1


def test_a_small_space_is_tried_whole(tmp_path):
    space = space_of(
        ["snapkv:window_size=8", "pyramidkv:beta=20:window_size=8"], [40, 64], ["kernel_size=5,13"]
    )
    assert sorted(searched(space, 16, tmp_path / "journal")) == sorted(space.settings)
    assert 10 <= len(searched(space, 10, tmp_path / "journal")) <= 13


def command(saved_model, out, *more):
    return [
        "tune", "--model", saved_model, "--device", "cpu", "--search", "kernel_size=3,7",
        "--search", "window_size=4,8", "--settings", 6, "--batch", 2, "--out", out, *more,
    ]  # fmt: skip


def test_what_is_said_of_settings_that_keep_less_than_the_authors():
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.tune import Outcome, Quality
    from kvcompress_eval.tune_command import DEFAULTS, ROWS, Tuned, sentences

    nan = float("nan")
    best = Outcome("snapkv:capacity=60", 1, 67.0, Estimate(0.667, nan), 0.1, 0.5)
    same = Outcome("snapkv:capacity=59", 1, 67.0, Estimate(1.0, 0.25), 0.0, 0.5)
    of = {"searched": [best], "judged": [best], "recommended": best, "smaller": None, "gains": {}}
    of |= {"references": {f"{DEFAULTS}, {ROWS[1]}": same}, "whole": 300.0, "level": 0.5}
    said = sentences(Tuned("m", Quality.agreement, confidence=0.5, **of))
    assert "It keeps 0.667 on 1 held-back" in said[1]  # and no error of one prompt
    assert "No candidate keeps as much as the authors' defaults (snapkv:capacity=59" in said[2]
    assert "1.000 ± 0.250" in said[2]


@pytest.fixture
def texts(tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_text(f"{number} cups of tea, {7 * number} spoons; ships sail on. " * 3)
    return paths


def test_the_command(call, saved_model, tmp_path, texts):
    out = tmp_path / "tune"
    arguments = command(saved_model, out, "--at-least", 0.05, "--new-tokens", 9, *texts)
    code, shown, err = call(*arguments)
    assert code == 0, err
    result = json.loads((out / "result.json").read_text())
    best = result["recommended"]
    assert best["bound"] >= 0.05 and best["prompts"] == 4
    assert f"Recommended: {best['policy']}" in shown and "Student's t over prompts" in shown
    assert len(result["searched"]) in (6, 7) and result["searched"][0]["prompts"] == 2
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len({record["digest"] for record in records}) == 6
    by_prompt = {digest: [] for digest in {record["digest"] for record in records}}
    for record in records:
        by_prompt[record["digest"]].append(record["policy"])
        assert record["tokens"] == 8 and record["found"] is None
    assert all(len(each) == len(set(each)) and "none" in each for each in by_prompt.values())
    # Those that were searched on are not those that were held back.
    judged = {each["policy"] for each in result["judged"]}
    assert sum(judged <= set(each) for each in by_prompt.values()) >= 4
    # It was judged after it was searched on.
    values = [each["agreeing"] / 8 for each in records if each["policy"] == best["policy"]]
    assert best["quality"]["value"] == pytest.approx(sum(values[-4:]) / 4)
    smaller = [each for each in result["judged"] if each["held_tokens"] < best["held_tokens"]]
    assert not smaller or smaller[-1]["bound"] < 0.05
    assert set(result["references"]) >= {"authors' defaults, twice the rows"}
    assert set(result["gains"]) == set(result["references"])
    assert (out / "plot.png").read_bytes()[:4] == b"\x89PNG"
    table = (out / "table.md").read_text()
    assert f"{best['policy']} | recommended" in table and "95% bound" in table
    # Stopped in the middle of a line, it goes on to the same end.
    lines = (out / "records.jsonl").read_text().splitlines()
    (out / "records.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:20])
    (out / "optuna.journal").write_text("{")
    code, _, err = call(*arguments)
    assert code == 0, err
    assert (out / "table.md").read_text() == table
    assert sorted((out / "records.jsonl").read_text().splitlines()) == sorted(lines)
    # Another level is another answer from the same records, and none is an error of its own.
    code, shown, err = call(*arguments, "--at-least", 1)
    assert code == 1 and "Nothing is recommended" in err and "--at-least" in err
    assert "Nothing is recommended" not in shown  # once is enough
    assert "Nothing is recommended" in (out / "table.md").read_text()
    code, _, err = call(*arguments, texts[0])
    assert code == 1 and "more than once" in err and texts[0].name in err.replace("\n", "")
    assert json.loads((out / "result.json").read_text())["recommended"] is None
    for change, message in (
        (("--seed", 1), "seed was 0 and is now 1"),
        (("--search", "pooling=max"), "space was"),
        ((texts[0].with_name("more.txt"),), "prompts was '6, "),
        (("--quality", "likeness"), "quality was 'agreement'"),
    ):
        shutil.copy(texts[0], texts[0].with_name("more.txt"))
        texts[0].with_name("more.txt").write_text("More tea for all of us. " * 8)
        code, _, err = call(*arguments, *change)
        assert code == 1 and message in " ".join(err.split()), err


def test_compositions_and_likeness(call, saved_model, tmp_path, texts):
    pair = "snapkv:window_size=8:kernel_size=5:pooling=max+streaming_llm:scope=generated"
    out = tmp_path / "tune"
    code, _, err = call(
        "tune", *texts, "--model", saved_model, "--device", "cpu", "--policy", pair, "--capacity",
        40, "--capacity", 80, "--search", "decode.capacity=5,6", "--quality", "likeness",
        "--at-least", 0.01, "--new-tokens", 12, "--out", out,
    )  # fmt: skip
    assert code == 0, err
    result = json.loads((out / "result.json").read_text())
    held = {each["policy"]: each["held_tokens"] for each in result["searched"]}
    assert sorted(held.values()) == [45, 46, 85, 86]
    for each in result["searched"]:
        assert 0 < each["quality"]["value"] <= 1


def test_what_is_refused(call, saved_model, tmp_path, texts, monkeypatch):
    out = tmp_path / "out"

    def refused(*arguments):
        code, _, err = call("tune", "--model", saved_model, "--out", out, *arguments)
        assert code == 1
        return " ".join(err.split())

    assert "--quality found is for needles" in refused(texts[0], "--quality", "found")
    assert "second part of a composition" in refused("--policy", "snapkv+streaming_llm:capacity=9")
    assert "at least 2 are needed" in refused(*texts[:2])
    few = refused("--needles", 9)
    assert "If all of 6 needles" in few and "0.61" in few and "Hold back 14" in few
    assert "Did you mean 'snapkv'" in refused("--policy", "snapvk")
    shutil.copy(texts[0], texts[1])
    assert "0.txt and 1.txt are the same" in refused(*texts)
    texts[1].write_text(" ")
    assert "1.txt is empty" in refused(*texts)
    monkeypatch.setattr("kvcompress_eval.comparison.find_spec", lambda name: None)
    assert "pip install 'kvcompress[tune]'" in refused()
    assert not out.exists()


def test_a_model_that_finds_no_needle_is_told(call, saved_model, tmp_path):
    arguments = command(saved_model, tmp_path / "tune", "--needles", 16, "--searching", 2)
    code, _, err = call(*arguments, "--tokens", 60)
    assert code == 1 and "the uncompressed model finds no needle" in " ".join(err.split())


@pytest.mark.model
@pytest.mark.slow
def test_wide_pooling_is_recommended_for_real_needles(call, tmp_path):
    """And what counts as found is what the free answer of `kvcompress needle` has."""
    from kvcompress_eval.needle import make_needle
    from kvcompress_eval.needle_grid import Setting, answer_all
    from kvcompress_eval.prompts import Prompt
    from kvcompress_eval.tune import Scorer

    from kvcompress import policy_from
    from kvcompress.models import load

    out = tmp_path / "tune"
    code, _, err = call(
        "tune", "--needles", 4, "--searching", 2, "--tokens", 150, "--at-least", 0.2, "--capacity",
        120, "--policy", "snapkv:window_size=8", "--search", "kernel_size=5,21", "--settings", 4,
        "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert code == 0, err
    result = json.loads((out / "result.json").read_text())
    assert result["recommended"]["policy"].startswith("snapkv:capacity=120:window_size=8:kernel")
    assert result["recommended"]["quality"]["value"] == 1
    assert result["gains"]["authors' defaults, as many rows"]["value"] > 0
    model, tokenizer = load(device="cpu")
    needle = make_needle(tokenizer, 150, 0.4, 7)
    policies = [
        policy_from(f"snapkv:capacity=72:window_size=8{rest}")
        for rest in ("", ":kernel_size=21:pooling=max")
    ]
    scorer = Scorer(model, tokenizer, policies, 24, 0)
    prompt = Prompt("", needle.input_ids, needle)
    found = [score.found for score in scorer.scores(prompt, policies)]
    settings = [Setting(policy) for policy in policies]
    texts = [text for _, text, _ in answer_all(model, tokenizer, needle, settings)]
    assert found == [needle.is_answered_by(text) for text in texts]
