"""Compressed caches on disk: what comes back, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 12, "do_sample": False}
POLICIES = {
    "window": "snapkv:capacity=24:window_size=6",
    "state": "h2o:capacity=24:interval=5",
    "decoding window": "snapkv_decoding:capacity=24:window_size=4:interval=4",
    "moved keys": "streaming_llm:capacity=24:positions=cache",
    "generated": "snapkv:capacity=24:window_size=6+h2o:capacity=4:scope=generated",
}


def answer(model, cache, ids):
    from kvcompress.session import cache_argument

    return model.generate(ids, **{cache_argument(model): cache}, **GREEDY)


@pytest.fixture
def saved(make_model, prompt, tmp_path):
    from kvcompress import press

    def save(policy=POLICIES["window"], family="llama", attn="sdpa", **options):
        model, ids = make_model(family, attn), prompt(130)["input_ids"]
        session = press(model, policy)
        cache = session.prefill(ids, chunk_size=40, **options)
        path = tmp_path / "context.safetensors"
        session.save(cache, path)
        return model, session, cache, path, ids

    return save


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_loaded_cache_answers_as_the_saved_one(saved, policy):
    model, session, cache, path, ids = saved(policy)
    loaded = session.load(path)
    assert answer(model, loaded, ids).tolist() == answer(model, cache, ids).tolist()
    for one, other in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v3", "gemma3n_text"])
def test_layers_that_are_left_alone_come_along(saved, make_model, family):
    from kvcompress.hosting import hosted_layers

    try:
        hosted_layers(make_model(family, "sdpa").config)
    except Exception as error:
        if "newer transformers" not in str(error):
            raise
        pytest.skip("this transformers is too old for the cache of this family")
    model, session, cache, path, ids = saved(family=family)
    loaded = session.load(path)
    assert answer(model, loaded, ids).tolist() == answer(model, cache, ids).tolist()


def test_padding_and_questions_come_along(make_model, prompt, tmp_path):
    from kvcompress import press

    model, session = make_model(), press(make_model(), POLICIES["window"])
    cache = session.prefill(**prompt(130, 90), chunk_size=40, hold_back=0)
    session.save(cache, tmp_path / "two")
    loaded = session.load(tmp_path / "two")
    question = prompt(9, seed=4)["input_ids"].expand(2, -1)
    with press(model, POLICIES["window"]) as session:
        assert torch.equal(
            session.ask(loaded, question, **GREEDY), session.ask(cache, question, **GREEDY)
        )


def test_another_process_goes_on(saved, saved_model, prompt, tmp_path):
    from transformers import AutoModelForCausalLM

    from kvcompress import press

    model = AutoModelForCausalLM.from_pretrained(saved_model)
    session, ids = press(model, POLICIES["window"]), prompt(130)["input_ids"]
    cache = session.prefill(ids, chunk_size=40)
    session.save(cache, tmp_path / "context")
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM;"
        "from kvcompress import press; torch.set_num_threads(1);"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "cache = press(model, sys.argv[3]).load(sys.argv[2]);"
        "ids = torch.tensor([eval(sys.argv[4])]);"
        "name = 'past_key_values';"
        "print(model.generate(ids, **{name: cache}, max_new_tokens=12, do_sample=False).tolist())"
    )
    arguments = [str(saved_model), str(tmp_path / "context"), POLICIES["window"]]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments, str(ids[0].tolist())],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == answer(model, cache, ids).tolist()


def test_another_model_is_refused_by_what_differs(saved, make_model):
    from kvcompress import CacheFileError, press
    from kvcompress.testing import tiny_model

    _, _, _, path, _ = saved()
    for model, said in (
        (make_model(intermediate_size=96), r"intermediate_size was 64 and is 96"),
        (tiny_model(seed=5), r"weights was '\w+' and is '\w+'"),
        (tiny_model().bfloat16(), r"dtype was 'torch.float32' and is 'torch.bfloat16'"),
        (make_model("qwen2"), r"model_type was 'llama' and is 'qwen2'"),
    ):
        with pytest.raises(CacheFileError, match=said):
            press(model, POLICIES["window"]).load(path)


def test_another_policy_is_refused(saved):
    from kvcompress import PressStateError, press

    model, _, _, path, _ = saved()
    with pytest.raises(PressStateError, match=r"compressed by snapkv:capacity=24"):
        press(model, "tova").load(path)


def test_another_tokenizer_is_refused(make_model, prompt, saved_model, tmp_path):
    from transformers import AutoTokenizer

    from kvcompress import CacheFileError, press

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    session = press(make_model(), POLICIES["window"])
    cache = session.prefill(**prompt(60), chunk_size=40)
    session.save(cache, tmp_path / "context", tokenizer)
    session.load(tmp_path / "context", tokenizer)
    session.load(tmp_path / "context")
    tokenizer.add_tokens(["another"])
    with pytest.raises(CacheFileError, match="vocabulary was"):
        session.load(tmp_path / "context", tokenizer)


def test_damaged_files_are_refused(saved, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from kvcompress import CacheFileError

    _, session, _, path, _ = saved()
    whole = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    changed = dict(tensors)
    name = next(name for name in tensors if name.endswith("columns"))
    changed[name] = tensors[name] + 1
    other = json.dumps(json.loads(metadata["kvcompress"]) | {"policy": {"policy": "tova"}})
    damaged = {
        "cannot be read": whole[: len(whole) // 2],
        r"columns is not what was written": (changed, metadata),
        "header is not what was written": (tensors, metadata | {"kvcompress": other}),
        "holds no cache": (tensors, {"format": "pt"}),
        r"is not what was written": ({**tensors, "more": tensors[name].clone()}, metadata),
    }
    for said, content in damaged.items():
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file(content[0], path, content[1])
        with pytest.raises(CacheFileError, match=said):
            session.load(path)
    with pytest.raises(CacheFileError, match="no file"):
        session.load(tmp_path / "elsewhere")


def test_a_file_is_written_whole_or_not_at_all(saved, monkeypatch):
    from kvcompress import saving

    _, session, cache, path, _ = saved()
    before = path.read_bytes()

    def break_off(tensors, target, metadata):
        os.truncate(target, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "save_file", break_off)
    with pytest.raises(KeyboardInterrupt):
        session.save(cache, path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_what_cannot_be_saved(make_model, prompt, tmp_path):
    from transformers import DynamicCache

    from kvcompress import CacheFileError, CompressedCache, UnsupportedCacheError, press

    session = press(make_model(), POLICIES["window"])
    cache = CompressedCache(make_model(), POLICIES["window"])
    with pytest.raises(UnsupportedCacheError, match="prompt has ended"):
        session.save(cache, tmp_path / "empty")
    make_model()(prompt(60)["input_ids"], past_key_values=cache)
    with pytest.raises(UnsupportedCacheError, match="prompt has ended"):
        session.save(cache, tmp_path / "open")
    with pytest.raises(UnsupportedCacheError, match="CompressedCache"):
        session.save(DynamicCache(), tmp_path / "plain")
    cache.end_prefill()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nowhere" / "cache", tmp_path / "folder"):
        with pytest.raises(CacheFileError, match="cannot be written"):
            session.save(cache, path)
    (tmp_path / "folder").rmdir()
    session.save(cache, tmp_path / "ended")
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]
