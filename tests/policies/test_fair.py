"""Fair eviction: spans of a prompt share its budget, and each is judged as if it were alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, CAPACITY, CUT = 90, 30, 30
FAIR = f"fair=0-{CUT}/{CUT}-{PROMPT}"
BASES = [
    f"streaming_llm:capacity={CAPACITY}",
    f"snapkv:capacity={CAPACITY}:window_size=6",
    f"tova:capacity={CAPACITY}",
    f"h2o:capacity={CAPACITY}",
    f"knorm:capacity={CAPACITY}",
    f"pyramidkv:capacity={CAPACITY}:window_size=6:beta=2",
    f"snapkv_decoding:capacity={CAPACITY}:window_size=6",
    f"scissorhands:capacity={CAPACITY}:history=8:recent=4:interval=8",
]


def kept(model, policy, inputs):
    """Positions that every layer holds when the prompt has ended."""
    from kvcompress import CompressedCache

    cache = CompressedCache(model, policy, prompt_length=inputs["input_ids"].shape[1])
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    return [layer.positions for layer in cache.layers]


def test_every_policy_is_tried():
    from kvcompress.plugins import registry

    assert set(registry().policies) <= {spec.split(":")[0] for spec in BASES}


@settings(deadline=None)
@given(st.data())
def test_shares(data):
    from kvcompress.fair import shares

    lengths = tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)))
    least = tuple(data.draw(st.integers(0, length)) for length in lengths)
    total = data.draw(st.integers(sum(least), sum(lengths)))
    found = shares(total, lengths, least)
    assert sum(found) == total
    assert all(a <= b <= c for a, b, c in zip(least, found, lengths, strict=True))
    if total > sum(least):
        fewer = shares(total - 1, lengths, least)
        assert all(a <= b for a, b in zip(fewer, found, strict=True))
    free = shares(total, lengths, (0,) * len(lengths))
    exact = [total * length / sum(lengths) for length in lengths]
    assert all(abs(a - b) < 1 for a, b in zip(free, exact, strict=True)) or len(lengths) > 2
    if len(lengths) == 2:
        assert all(abs(a - b) <= 0.5 for a, b in zip(free, exact, strict=True))


@pytest.mark.parametrize("policy", BASES)
def test_every_span_has_its_share_in_every_head(make_model, prompt, policy):
    model = make_model()
    fair, plain = (kept(model, p, prompt(PROMPT)) for p in (f"{policy}:{FAIR}", policy))
    total = uneven = 0
    for ours, theirs in zip(fair, plain, strict=True):
        budget = ours.shape[-1]
        assert budget == theirs.shape[-1]  # of a pyramid's layers they differ
        first = (ours < CUT).sum(dim=-1)
        assert (first == round(budget * CUT / PROMPT)).all()
        assert (ours[..., 1:] > ours[..., :-1]).all()
        total += budget
        uneven += int(((theirs < CUT).sum(dim=-1) != first).sum())
    assert total == CAPACITY * len(fair)
    assert uneven  # without fair it is otherwise


@pytest.mark.parametrize("policy", BASES)
def test_a_later_span_has_no_say_in_an_earlier_one(make_model, prompt, policy):
    model = make_model()
    one, other = prompt(PROMPT), prompt(PROMPT)
    other["input_ids"] = other["input_ids"].clone()
    other["input_ids"][:, CUT:] = prompt(PROMPT, seed=5)["input_ids"][:, CUT:]
    spec = f"{policy}:{FAIR}"
    for ours, theirs in zip(kept(model, spec, one), kept(model, spec, other), strict=True):
        first = int((ours[0, 0] < CUT).sum())
        assert torch.equal(ours[..., :first], theirs[..., :first])
    if policy.split(":")[0] not in ("streaming_llm", "knorm"):
        plain = zip(kept(model, policy, one), kept(model, policy, other), strict=True)
        assert any(set(a[a < CUT].tolist()) != set(b[b < CUT].tolist()) for a, b in plain)


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("snapkv:window_size=9", ("snapkv:window_size=2", "snapkv:window_size=4") * 2),
        ("tova", ("tova",) * 4),
        ("h2o", ("h2o",) * 4),
        ("h2o:normalize=observers:recent_ratio=0.2",) * 2,
        ("knorm:protect_recent=9", ("knorm:protect_recent=2", "knorm:protect_recent=4") * 2),
    ],
)
def test_a_span_is_judged_as_a_prompt_of_its_own(policy, parts):
    """By the policy itself, of which only numbers of rows are divided, and on other tensors."""
    from kvcompress.testing import kept_positions

    if isinstance(parts, str):
        parts = (parts,) * 4
    ends = [0, 20, 50, 60, 90]  # the named ones are the second and the last
    windows = [2, 3, 1, 3]
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 90, 16, generator=generator) for heads in (8, 2, 2))
    found = kept_positions(f"{policy}:capacity=45:fair=20-50/60-90", query, key, value)
    assert found.shape[-1] == 45
    wanted = []
    for part, window, start, end in zip(parts, windows, ends, ends[1:], strict=False):
        own = slice(start, end)
        name, *fields = part.split(":")
        fields = [f"{f.split('=')[0]}={window}" if f[-2:] in ("=2", "=4") else f for f in fields]
        spec = ":".join([name, f"capacity={(end - start) // 2}", *fields])
        wanted.append(
            kept_positions(spec, query[:, :, own], key[:, :, own], value[:, :, own]) + start
        )
    assert torch.equal(found, torch.cat(wanted, dim=-1))


def test_sinks_are_those_of_the_prompt(make_model, prompt):
    for held in kept(make_model(), f"streaming_llm:capacity=30:{FAIR}", prompt(PROMPT)):
        wanted = [*range(4), *range(24, 30), *range(70, 90)]
        assert (held == torch.tensor(wanted)).all()


ESSENTIAL = [
    "padding changes nothing",
    "a prompt within the budget changes no bit",
    "equals the evicted rows masked out, eager",
]
REST = [
    "string and dict forms read back",
    "a policy is a frozen value",
    "scores are pure float32",
    "rows of a batch do not meet",
    "the prompt is attended to as a whole",
    "held rows keep to the bound",
    "sdpa and eager keep the same",
    "a padded row equals the row alone",
    "a prompt in chunks keeps the same",
]
SETTINGS = [
    ("snapkv:capacity=20:window_size=4:fair=0-8/8-26:protect=3-5", [*ESSENTIAL, *REST]),
    ("tova:capacity=20:fair=4-12", [*ESSENTIAL, "rows in any order are judged alike"]),
    ("h2o:capacity=20:fair=0-8/8-26", ESSENTIAL),
    ("streaming_llm:capacity=20:fair=0-8/8-26", ESSENTIAL),
    ("knorm:capacity=20:fair=0-8/10-26", ESSENTIAL),
]


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        # One policy goes through the whole suite every time, the others when there are minutes.
        pytest.param(policy, name, marks=() if "snapkv" in policy else pytest.mark.slow)
        for policy, names in SETTINGS
        for name in names
    ],
)
def test_contracts(policy, name):
    from kvcompress.testing import contracts

    contracts(policy)[name]()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("policy", ["h2o:capacity=24", "snapkv:capacity=24:window_size=6"])
def test_latents_sinks_and_caps(make_model, prompt, family, policy):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    model, inputs = make_model(family, "eager"), prompt(70, 52)
    options = {"max_new_tokens": 6, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with press(model, f"{policy}:fair=0-20") as session, record(session) as evictions:
        ours = model.generate(**inputs, **options)
    assert evictions.evicted(1) > 0
    with oracle(model, evictions):
        theirs = model.generate(**inputs, **options)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize(
    "policy", [f"snapkv:capacity={CAPACITY}:window_size=6", "tova:capacity=30"]
)
def test_rows_of_a_padded_batch_have_shares_of_their_own(make_model, prompt, policy):
    lengths, spec = (90, 60, 25, 90), f"{policy}:fair=0-20"
    model, batch = make_model(), prompt(*lengths)
    together = kept(model, spec, batch)
    for row, length in enumerate(lengths):
        ids = batch["input_ids"][row : row + 1, -length:]
        for all_rows, alone in zip(together, kept(model, spec, {"input_ids": ids}), strict=True):
            own = all_rows[row, :, -alone.shape[-1] :]
            assert torch.equal(own, alone[0])
            expected = 20 if length == 25 else round(CAPACITY * 20 / length)
            assert ((own >= 0) & (own < 20)).sum(dim=-1).tolist() == [expected] * 2


@pytest.mark.parametrize("policy", BASES)
def test_protected_tokens_stay_and_the_sum_too(make_model, prompt, policy):
    spec = f"{policy.replace('=30', '=45')}:{FAIR}:protect=2-20"
    for held in kept(make_model(), spec, prompt(PROMPT)):
        assert (held[..., None] == torch.arange(2, 20)).any(dim=-2).all()
        first = (held < CUT).sum(dim=-1)
        # Eighteen are more than a third of 45: the other span makes room.
        assert (first >= 18).all() and len(set(first.flatten().tolist())) == 1


def test_what_is_said_later_leaves_the_shares(make_model, prompt):
    from kvcompress import press

    model, ids = make_model(), prompt(PROMPT)["input_ids"]
    policy = f"snapkv:capacity={CAPACITY}:window_size=6:later_turns=keep:{FAIR}"
    with press(model, policy) as session:
        cache = session.prefill(ids, chunk_size=PROMPT, hold_back=0)
        for _ in range(2):
            session.ask(cache, prompt(12, seed=4)["input_ids"], fork=False, max_new_tokens=5)
    for layer in cache.layers:
        assert ((layer.positions < CUT).sum(dim=-1) == 10).all()
        assert ((layer.positions < PROMPT).sum(dim=-1) == CAPACITY).all()
        assert layer.positions.shape[-1] == CAPACITY + 2 * 12 + 2 * 5 - 1


def test_a_token_that_is_held_back_counts_in_its_span(make_model, prompt):
    from kvcompress import press

    model, ids = make_model(), prompt(PROMPT)["input_ids"]
    for policy in BASES:
        with press(model, f"{policy}:{FAIR}") as session:
            held = [layer.positions for layer in session.prefill(ids, chunk_size=200).layers]
        for each in held:
            budget = each.shape[-1] + 1
            if policy.startswith("h2o"):  # it leaves the token out of its votes and its budget
                budget -= 1
            assert (((each < CUT).sum(dim=-1) - budget * CUT / PROMPT).abs() <= 1).all(), policy


def test_no_queries_are_left_over(make_model, prompt):
    """They are all at hand when the prompt ends, and none of them later."""
    from kvcompress import press

    model = make_model()
    for policy in BASES:
        allocated = []
        for spec in (policy, f"{policy}:{FAIR}"):
            with press(model, spec) as session:
                model.generate(**prompt(PROMPT), max_new_tokens=3)
            allocated.append(session.report().allocated_bytes)
        assert allocated[0] == allocated[1], policy


def test_one_prefill_serves_it(make_model, prompt):
    from kvcompress_eval.one_prefill import OnePrefill

    from kvcompress import policy_from

    model, inputs = make_model(), prompt(PROMPT)
    policies = [policy_from(f"{each}:{FAIR}") for each in BASES]
    shared = [each for each in policies if OnePrefill.serves(each)]
    prefill = OnePrefill(model, inputs["input_ids"], shared)
    assert len(shared) == len(BASES) - 1
    for policy in shared:
        cache = prefill.cache(policy)
        cache.end_prefill()
        for layer, held in zip(cache.layers, kept(model, policy, inputs), strict=True):
            assert torch.equal(layer.positions, held)


def test_forms():
    from kvcompress import PolicyConfigError, SnapKVPolicy, policy_from

    policy = SnapKVPolicy(capacity=64, window_size=8, fair=[(40, 120), (0, 40)])
    assert policy.fair == ("0-40", "40-120") and policy.spans == ((0, 40), (40, 120))
    text = "snapkv:capacity=64:fair=0-40/40-120:window_size=8"
    assert str(policy) == text and policy_from(text) == policy
    assert policy_from(policy.to_dict()) == policy
    with pytest.raises(PolicyConfigError, match=r"0-40 and 39-120 have tokens in common"):
        policy_from("tova:fair=39-120/0-40")
    with pytest.raises(PolicyConfigError, match=r"no range of tokens"):
        policy_from("tova:fair=40-0")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (f"streaming_llm:capacity=24:positions=cache:{FAIR}", r"fair=.* are moved"),
        (f"snapkv:capacity=24:window_size=6+tova:capacity=24:{FAIR}", r"Give it to snapkv"),
        (
            {"policy": "composed", "prefill": "tova", "decode": "tova", "fair": "0-4"},
            r"fair cannot",
        ),
    ],
)
def test_what_cannot_be_is_refused(make_model, policy, said):
    from kvcompress import PolicyConfigError, press

    with pytest.raises(PolicyConfigError, match=said):
        press(make_model(), policy)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("tova:capacity=24:fair=0-40/90-91", r"90-91 begins behind .* 90 tokens"),
        ("tova:capacity=3:fair=0-40/50-60", r"3 rows .* 4 spans .* are 4"),
    ],
)
def test_spans_that_do_not_fit_the_prompt(make_model, prompt, policy, said):
    from kvcompress import PolicyConfigError, press

    with press(make_model(), policy), pytest.raises(PolicyConfigError, match=said):
        make_model().generate(**prompt(PROMPT), max_new_tokens=2)


def test_a_prompt_in_chunks_with_evictions_is_refused(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    session = press(make_model(), f"{BASES[1]}:{FAIR}")
    with pytest.raises(
        UnsupportedModeError, match=r"90 tokens come in chunks of 40.*chunk_size=90"
    ):
        session.prefill(prompt(PROMPT)["input_ids"], chunk_size=40)


@pytest.mark.parametrize("policy", BASES[:2])
def test_a_later_turn_that_would_cut_all_is_refused(make_model, prompt, policy):
    from kvcompress import CompressedCache, UnsupportedModeError

    model, ids = make_model(), prompt(PROMPT)["input_ids"]
    cache = CompressedCache(model, f"{policy}:{FAIR}")
    output = model.generate(ids, past_key_values=cache, max_new_tokens=2)
    longer = torch.cat([output, ids[:, :9]], dim=1)
    with pytest.raises(UnsupportedModeError, match=r"later turn would cut .*later_turns='keep'"):
        model.generate(longer, past_key_values=cache, max_new_tokens=2)


def test_rows_that_are_gone_are_missed(make_model, prompt):
    """A view without the whole prompt, as a caller of the public selection may give."""
    from kvcompress import UnsupportedModeError
    from kvcompress.testing import kept_positions

    query, key = torch.randn(1, 8, 20, 16), torch.randn(1, 2, PROMPT, 16)
    with pytest.raises(UnsupportedModeError, match=r"of 90 tokens 90 rows and 20 queries are left"):
        kept_positions(f"tova:capacity=30:{FAIR}", query, key, key)
