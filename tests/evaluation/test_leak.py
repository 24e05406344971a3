"""Leakage and following of compressed system prompts."""

import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = {
    "key": 7,
    "prompt": "What is tea?",
    "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
    "kwargs": [{}, {"end_phrase": "Bye."}],
}


@pytest.fixture(scope="module")
def loaded(saved_model):
    from kvcompress.models import load

    return load(str(saved_model), device="cpu")


@pytest.fixture(params=["defence first", "directive first"])
def guarded(request, loaded):
    from kvcompress_eval.leak import guard

    return guard(loaded[1], "Use no commas.", "What is tea?", request.param)


def cells(*wanted):
    from kvcompress_eval.leak import Cell

    from kvcompress import policy_from

    return [Cell(policy_from(base), mode, evicted) for base, mode, evicted in wanted]


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_told_and_checked(tmp_path):
    from kvcompress_eval.directives import follows, read_rows

    [row] = read_rows(write_rows(tmp_path / "rows.jsonl", ROW), 5)
    assert "commas" in row["directive"] and "Bye." in row["directive"]
    assert follows(row, "It is a drink. Bye.") == [True, True]
    assert follows(row, "It is, well, a drink. Bye.") == [False, True]
    assert follows(row, "It is a drink.") == [True, False]
    assert follows(row, " ") == [False, False]
    own = ROW | {"directive": "Avoid commas and say goodbye."}
    [row] = read_rows(write_rows(tmp_path / "own.jsonl", own), 5)
    assert row["directive"] == own["directive"] and follows(row, "Tea. Bye.") == [True, True]


def test_the_built_in_rows_can_be_followed():
    """Within few tokens, and an answer that ignores them fails."""
    from kvcompress_eval.directives import follows, read_rows

    answers = [
        "spring is mild and bright",
        "* Boil water.\n* Add tea.\n* Wait.\nEnjoy your day.",
        '"The moon is a lantern that moves the tide."',
        "<<Dogs>> A friend to walk with.",
        "It *lends* texts and is *quiet*.",
        '{"rivers": ["Nile", "Po", "Rhine"]}',
        "GO TO BED EARLY AND KEEP THE ROOM DARK EVERY NIGHT. P.S. NO COFFEE",
        "Walk to the forum and walk on. Safe travels!",
    ]
    rows = read_rows(None, 100)
    for row, answer in zip(rows, answers, strict=True):
        assert all(follows(row, answer)), row["key"]
        assert not all(follows(row, "Books, I think, and Tea. " * 12)), row["key"]
    assert len(read_rows(None, 3)) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instruction_id_list": ["startend:nothing"] * 2}, r"no instruction startend:nothing"),
        ({"kwargs": [{}]}, r"2 instructions and 1 kwargs"),
        (
            {
                "instruction_id_list": ["keywords:existence", "length_constraints:number_words"],
                "kwargs": [{"keywords": ["a"]}, {}],
            },
            r"number_words with kwargs \{\} leaves open",
        ),
        ({"prompt": None, "kwargs": None}, None),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, change, said):
    from kvcompress_eval.directives import read_rows

    from kvcompress import EvaluationError

    row = {name: value for name, value in (ROW | change).items() if value is not None}
    with pytest.raises(EvaluationError, match=said or r"rows.jsonl:1 has no column kwargs, prompt"):
        read_rows(write_rows(tmp_path / "rows.jsonl", row), 5)


def test_recall_is_of_the_text():
    from kvcompress_eval.directives import recall

    text = "Never use any commas here"
    assert recall(text, text) == 1
    assert recall(text, "I was told: never using a comma. " * 3) == pytest.approx(3 / 5)
    assert recall(text, "commas use never") == pytest.approx(1 / 5)  # in its order
    assert recall(text, "") == 0


def test_spans_are_the_texts(loaded, guarded):
    from kvcompress_eval.leak import ATTACK, DEFENCE, INTRODUCTION, KEY

    def text(ids):
        return loaded[1].decode(ids)

    system = guarded.system
    assert text(system).startswith("[system]")
    assert text(system[slice(*guarded.defence_span)]) == DEFENCE
    assert text(system[slice(*guarded.directive_span)]) == f"{INTRODUCTION} Use no commas."
    assert text(system[slice(*guarded.key_span)]) == KEY
    assert text(guarded.attack) == f"[user]{ATTACK}[assistant]"
    assert text(guarded.request) == "[user]What is tea?[assistant]"
    (start, cut), (same, end) = guarded.halves
    assert (start, end) == (0, len(system)) and cut == same
    assert cut in (guarded.defence_span[1], guarded.directive_span[1]) and cut < end


def test_what_every_mode_keeps(loaded, guarded):
    from kvcompress_eval.leak import MODES, compressed, kept_share

    wanted = cells(
        *((base, mode, 0.5) for base in ("streaming_llm", "snapkv", "h2o") for mode in MODES)
    )
    found = dict(compressed(loaded[0], guarded, wanted))
    assert set(found) == set(wanted)
    tokens = len(guarded.system)
    for cell, cache in found.items():
        held = int(0.5 * tokens + 1e-9)
        assert {layer.held_tokens for layer in cache.report().layers} == {held}
        defence, rules, key = (
            kept_share(cache, span)
            for span in (guarded.defence_span, guarded.directive_span, guarded.key_span)
        )
        if cell.mode == "whitelist":
            assert key == 1
        if cell.mode == "fair":
            assert defence == pytest.approx(0.5, abs=0.06) and rules == pytest.approx(0.5, abs=0.1)
        if cell.mode == "plain" and cell.base.name == "streaming_llm":
            first, second = sorted((guarded.defence_span, guarded.directive_span))
            assert kept_share(cache, second) > 0.5 > kept_share(cache, first)


def test_a_span_s_share_is_counted(make_model, prompt):
    from kvcompress_eval.leak import kept_share

    from kvcompress import CompressedCache

    model = make_model()
    cache = CompressedCache(model, "streaming_llm:capacity=20", prompt_length=60)
    with torch.no_grad():
        model(prompt(60)["input_ids"], past_key_values=cache)
    assert kept_share(cache, (0, 8)) == 0.5  # the sinks
    assert kept_share(cache, (40, 50)) == pytest.approx(0.6) and kept_share(cache, (8, 40)) == 0


def test_answers_are_those_of_a_session(loaded, guarded):
    """One that compresses the system prompt by itself and is asked in later turns."""
    from kvcompress_eval.leak import ask

    from kvcompress import press

    model, tokenizer = loaded
    wanted = cells(*(("snapkv", mode, 0.5) for mode in ("plain", "whitelist", "fair")))
    found = dict(ask(model, tokenizer, guarded, wanted, 12, 9))
    for cell, told in found.items():
        policy = cell.policy(guarded).model_copy(update={"later_turns": "keep"})
        with press(model, policy) as session:
            system = torch.tensor([guarded.system])
            cache = session.prefill(system, chunk_size=len(guarded.system), hold_back=0)
            for question, answer, tokens in (
                (guarded.attack, told.disclosed, 12),
                (guarded.request, told.answer, 9),
            ):
                said = session.ask(
                    cache, torch.tensor([question]), max_new_tokens=tokens, do_sample=False
                )
                assert tokenizer.decode(said[0], skip_special_tokens=True) == answer
    assert len({told.disclosed for told in found.values()}) > 1


def test_no_room_is_no_number(loaded, guarded):
    from kvcompress_eval.leak import compressed

    wanted = cells(("tova", "whitelist", 0.9), ("snapkv", "plain", 0.95), ("tova", "plain", 0.95))
    found = dict(compressed(loaded[0], guarded, wanted))
    assert "no room beside" in found[wanted[0]] and "window_size=32" in found[wanted[1]]
    assert found[wanted[2]].get_seq_length() == len(guarded.system)


def test_layers_with_windows_are_shared(make_model, prompt):
    from kvcompress_eval.one_prefill import OnePrefill, feed, settled

    from kvcompress import policy_from

    model, ids = make_model("gemma3_text"), prompt(60)["input_ids"]
    policies = [policy_from(f"{each}:capacity=24") for each in ("tova", "knorm", "streaming_llm")]
    prefill = OnePrefill(model, ids, policies)
    caches = [prefill.cache(policy) for policy in policies]
    for cache in caches:
        cache.end_prefill()
    joined = settled(model, caches)
    more = prompt(7, seed=3)["input_ids"]
    together = feed(model, more.expand(3, -1), joined)
    for row, cache in enumerate(caches):
        alone = feed(model, more, settled(model, [cache]))
        assert (alone[0] - together[row]).abs().max() < 1e-4
    held = {layer.held_tokens for layer in joined.report().layers if layer.hosted}
    assert held == {24 + 7}  # nothing goes any more
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def test_the_command(call, saved_model, tmp_path):
    out = tmp_path / "leak"
    rows = write_rows(tmp_path / "rows.jsonl", ROW, ROW | {"key": 8, "prompt": "Why?"})
    arguments = [
        "leak", "--rows", rows, "--model", saved_model, "--policy", "tova",
        "--evicted", 0.5, "--evicted", 0.9, "--attack-tokens", 6, "--new-tokens", 5,
        "--device", "cpu", "--out", out,
    ]  # fmt: skip
    code, shown, err = call(*arguments)
    assert code == 0, err
    assert "2 directives" in shown and "bootstrap over rows" in shown
    assert "No room for what must stay" in shown and "whitelist tova 0.9" in shown
    lines = (out / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 2 * (1 + 2 * 3)
    for record in records:
        if record["refused"]:
            assert (record["mode"], record["evicted"]) == ("whitelist", 0.9)
            continue
        share = record["held_tokens"] / record["system_tokens"]
        assert share == pytest.approx(1 - record["evicted"], abs=0.01)
        assert len(record["follows"]) == 2 and 0 <= record["leakage"] <= 1
        assert record["disclosed"] and record["answer"]
        if record["policy"] == "none":
            assert record["kept_defence"] == record["kept_directive"] == 1
    assert (out / "plot.png").read_bytes()[:4] == b"\x89PNG"
    table = (out / "table.md").read_text()
    assert table.count("\n| ") == 1 + 2 * (1 + 2 + 3)
    # It goes on where it stopped, and repeats nothing.
    (out / "records.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:30])
    code, _, err = call(*arguments)
    assert code == 0, err
    again = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len(again) == len(records) and (out / "table.md").read_text() == table
    code, _, err = call(*arguments, "--new-tokens", 4)
    assert code == 1 and "new_tokens was 5 and is now 4" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "tova:capacity=8"], "sets capacity"),
        (["--policy", "snapkv:protect=0-4"], "sets protect"),
        (["--policy", "snapkv+tova"], "is no policy for a prompt alone"),
        (["--policy", "tovva"], "Did you mean 'tova'"),
        (["--rows", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_what_it_cannot_be_asked_for(call, tmp_path, arguments, said):
    code, _, err = call("leak", *arguments, "--out", tmp_path / "out")
    assert code == 1 and said in err
    assert not (tmp_path / "out").exists()


def test_a_model_without_system_prompts(loaded):
    import copy

    from kvcompress_eval.leak import guard

    from kvcompress import EvaluationError

    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = None
    with pytest.raises(EvaluationError, match="no chat template"):
        guard(tokenizer, "Use no commas.", "Why?", "defence first")
