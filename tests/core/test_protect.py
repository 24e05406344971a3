"""Tokens that are always kept: the field `protect` of every policy, and what finds its ranges."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

RANGES = ((0, 5), (23, 29))
FIELD = "protect=0-5/23-29"
POLICIES = [
    f"snapkv:capacity=24:window_size=6:{FIELD}",
    f"snapkv:keep_ratio=0.4:window_size=6:{FIELD}",
    f"pyramidkv:capacity=28:window_size=4:beta=2:{FIELD}",
    f"snapkv_decoding:capacity=24:window_size=3:interval=3:{FIELD}",
    f"h2o:capacity=24:{FIELD}",
    f"h2o:capacity=24:interval=3:{FIELD}",
    f"tova:capacity=24:{FIELD}",
    f"knorm:capacity=24:{FIELD}",
    f"streaming_llm:capacity=24:{FIELD}",
    f"scissorhands:capacity=24:history=4:recent=4:interval=4:{FIELD}",
    f"snapkv:capacity=24:window_size=6:{FIELD}+tova:capacity=26:{FIELD}",
    f"snapkv:capacity=24:window_size=6:{FIELD}+h2o:capacity=4:scope=generated",
]


def test_every_policy_is_tried():
    from kvcompress.plugins import registry

    assert set(registry().policies) <= {spec.split(":")[0] for spec in POLICIES}


def check_held(cache, rows=1):
    """Every head of every layer holds all of the ranges, of every row of the batch."""
    wanted = torch.cat([torch.arange(*each) for each in RANGES])
    evicted = 0
    for layer in cache.layers:
        held = (layer.positions[..., None] == wanted).any(dim=-2)
        assert held.shape[0] == rows and held.all()
        evicted += layer.get_seq_length() - layer.positions.shape[-1]
    assert evicted > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks", "second turn"])
def test_protected_tokens_are_held_at_every_step(make_model, prompt, policy, mode):
    from kvcompress import press

    model, inputs = make_model(), prompt(70, 58)
    options = {"max_new_tokens": 12, "do_sample": False}
    options |= {"beams": {"num_beams": 3}, "chunks": {"prefill_chunk_size": 16}}.get(mode, {})
    looks = []

    def look(*_):
        if session.cache is not None and session.cache.get_seq_length() >= 70:
            looks.append(session.cache)
            check_held(session.cache, 6 if mode == "beams" else 2)

    if "keep_ratio" in policy or "scope=generated" in policy:
        # Of rows of different lengths other numbers would be kept.
        inputs = {name: tensor.expand(2, -1) for name, tensor in prompt(70).items()}
    with press(model, policy) as session:
        handle = model.register_forward_hook(look)
        try:
            output = model.generate(**inputs, **options, return_dict_in_generate=True)
            if mode == "second turn":
                name = "cache" if "cache" in output else "past_key_values"
                more = inputs["input_ids"][:, :9]
                ids = torch.cat([output.sequences, more], dim=1)
                mask = torch.ones_like(ids)
                mask[:, :70] = inputs["attention_mask"]
                model.generate(ids, attention_mask=mask, **{name: output[name]}, **options)
        finally:
            handle.remove()
    assert len(looks) >= 12


@pytest.mark.parametrize("policy", POLICIES)
def test_protected_tokens_are_held_by_a_prefill_in_chunks(make_model, prompt, policy):
    from kvcompress import press

    if "keep_ratio" in policy:
        pytest.skip("a share of the prompt bounds nothing")
    model, ids = make_model(), prompt(130)["input_ids"]

    def look(read, _):
        if read > 29:
            check_held(session.cache)

    with press(model, policy) as session:
        lookahead = 4 if policy.startswith("snapkv:") and "+h2o:capacity=2" not in policy else 0
        for spare in (0, 8):
            options = {"chunk_size": 32, "lookahead": lookahead, "spare": spare}
            check_held(session.prefill(ids, **options, progress=look))


def test_the_rest_of_the_budget_goes_by_score(make_model, prompt):
    """What is protected takes places of the lowest of those that would be kept without."""
    from kvcompress import CompressedCache

    model, ids = make_model(), prompt(70)["input_ids"]
    found = []
    for policy in ("knorm:capacity=24", f"knorm:capacity=24:{FIELD}"):
        cache = CompressedCache(model, policy, prompt_length=70)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        found.append([set(head.tolist()) for head in cache.layers[0].positions[0]])
    protected = {token for each in RANGES for token in range(*each)}
    for plain, ours in zip(*found, strict=True):
        assert len(plain) == len(ours) == 24
        assert protected <= ours and ours - protected < plain


def test_forms():
    from kvcompress import PolicyConfigError, SnapKVPolicy, policy_from

    policy = SnapKVPolicy(capacity=64, window_size=8, protect=[(23, 29), (0, 5), (4, 9)])
    assert policy.protect == ("0-9", "23-29") and policy.ranges == ((0, 9), (23, 29))
    text = "snapkv:capacity=64:protect=0-9/23-29:window_size=8"
    assert str(policy) == text and policy_from(text) == policy
    assert policy_from(policy.to_dict()) == policy
    for single in ((0, 5), "0-5", ["0-5"], [(0, 5)]):
        one = SnapKVPolicy(capacity=64, window_size=8, protect=single)
        assert one.protect == ("0-5",) and policy_from(str(one)) == one
    assert SnapKVPolicy(capacity=64, window_size=8).ranges == ()
    for wrong in ("5", "5-", "9-5", "a-b", [(1, 2, 3)], "-1-4", [(-1, 4)]):
        with pytest.raises(PolicyConfigError, match="no range of tokens"):
            SnapKVPolicy(capacity=64, window_size=8, protect=wrong)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("snapkv:capacity=40:window_size=32:protect=0-8", r"no room beside the 40 tokens"),
        ("streaming_llm:capacity=24:positions=cache:protect=0-8", r"keys .* are moved"),
        ("snapkv:capacity=64:window_size=8:protect=0-8+h2o:capacity=64", r"protect different"),
    ],
)
def test_what_cannot_be_is_refused(make_model, policy, said):
    from kvcompress import PolicyConfigError, press

    with pytest.raises(PolicyConfigError, match=said):
        press(make_model(), policy)


def test_chunks_need_room_beside_what_is_protected(make_model, prompt):
    from kvcompress import PolicyConfigError, press

    session = press(make_model(), "snapkv:capacity=24:window_size=6:protect=0-16")
    with pytest.raises(PolicyConfigError, match=r"more than 12 beside 16 tokens of protect"):
        session.prefill(prompt(130)["input_ids"], chunk_size=32, lookahead=12)


@pytest.fixture(scope="module")
def tokenizer(saved_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(saved_model)


def test_ranges_of_text(tokenizer):
    from kvcompress import ShapeError, text_ranges

    text = "Be brief. Answer in French. What is it?"
    ids = tokenizer(text)["input_ids"]
    [first, second] = text_ranges(tokenizer, text, "Answer in French.", "Be brief.")
    assert tokenizer.decode(ids[slice(*first)]) == "Answer in French."
    assert tokenizer.decode(ids[slice(*second)]) == "Be brief." and second[0] == 0
    for part, count in (("brief. ", 1), ("i", 4), ("nowhere", 0), ("", 0)):
        if count != 1:
            with pytest.raises(ShapeError, match=rf"is {count} times"):
                text_ranges(tokenizer, text, part)


def test_ranges_of_roles(tokenizer):
    from kvcompress import ShapeError, role_ranges

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "A cache."},
        {"role": "user", "content": "Whose?"},
    ]
    options = {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    said = [
        tokenizer.decode(ids[slice(*each)])
        for each in role_ranges(tokenizer, messages, "user", "system", **options)
    ]
    assert said == ["[system]Be brief.", "[user]What is it?", "[user]Whose?"]
    assert role_ranges(tokenizer, messages, **options) == [(0, len(said[0]))]
    with pytest.raises(ShapeError, match=r"of the role tool; there are assistant, system, user"):
        role_ranges(tokenizer, messages, "tool")


def test_a_template_that_changes_its_mind(tokenizer):
    import copy

    from kvcompress import ShapeError, role_ranges

    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages | length }}" + other.chat_template
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ShapeError, match=r"message 0 \(system\) otherwise"):
        role_ranges(other, messages)
