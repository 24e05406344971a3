"""Every way to generate, under every kind of policy: right, or refused before any token."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = {
    "prefill": "snapkv:capacity=24:window_size=4",
    "layer budgets": "pyramidkv:capacity=24:window_size=4:beta=4",
    "decode": "tova:capacity=24",
    "interval": "knorm:capacity=24:interval=3",
    "state": "h2o:capacity=24",
    "window": "snapkv_decoding:capacity=24:window_size=3:interval=3",
    "moved keys": "streaming_llm:capacity=24:positions=cache",
    "composed": "snapkv:capacity=24:window_size=4+h2o:capacity=24",
    "generated": "snapkv:capacity=24:window_size=4+h2o:capacity=4:scope=generated",
    "append": "snapkv:capacity=24:window_size=4:later_turns=append",
}
LEGEND = {name: f"`{spec}`" for name, spec in POLICIES.items()}
PROMPT = 70
NEW = 7
"""Tokens of a generation: enough for each policy to evict twice while decoding."""

SHORT = (PROMPT, 41, 10)
"""Left-padded, and a row within the budget."""

MODES = {}


def mode(name, padded=False, lengths=(PROMPT,)):
    """Make a function a row of the table, and with `padded` one for a left-padded batch too."""

    def add(function):
        MODES[name] = function, lengths
        if padded:
            MODES[f"{name}, padded batch"] = function, (PROMPT, 58, 45)
        return function

    return add


class Trial:
    """One policy on one model and prompt, with the ways to check what it generates."""

    def __init__(self, cell, model, policy, inputs, references, saved):
        from kvcompress import policy_from
        from kvcompress.session import cache_argument

        self.cell, self.model, self.inputs, self.saved = cell, model, inputs, saved
        self.policy = policy_from(policy)
        self.moves = self.policy.reindexed_tokens(0, model.config.num_hidden_layers) > 0
        self.argument = cache_argument(model)
        self._references = references

    def press(self):
        from kvcompress import press

        return press(self.model, self.policy)

    def generate(self, cache=None, inputs=None, **options):
        given = {} if cache is None else {self.argument: cache}
        options = {"max_new_tokens": NEW, **given, **options}
        return self.cell.generate(self.model, inputs or self.inputs, **options)

    def call(self, ids, cache=None, **options):
        given = {} if cache is None else {self.argument: cache}
        with torch.no_grad():
            return self.model(ids, **given, **options)

    def mask(self, ids):
        """The attention mask of `ids`, which go on from the prompt, maybe in several versions."""
        mask = self.inputs["attention_mask"]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        return mask.repeat_interleave(ids.shape[0] // mask.shape[0], dim=0)

    def loop(self, ids, ends, cache=None, with_positions=True, start=0):
        """Logits after every piece of `ids`, fed by calls of the model; and the cache."""
        logits, mask = [], self.mask(ids)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        for end in ends:
            options = {"attention_mask": mask[:, :end]}
            if with_positions:
                options["position_ids"] = positions[:, start:end]
            output = self.call(ids[:, start:end], cache, **options)
            logits.append(output.logits[:, -1])
            cache, start = output[self.argument], end
        return logits, cache

    def ends(self, new=NEW, start=PROMPT):
        """Where the pieces end that `generate` feeds, for a prompt up to `start`."""
        return list(range(start, start + new))

    def check(self, logits, ids, ends, evictions, cache=None):
        """As the oracle; for moved keys, which it cannot move, as the same pieces fed by hand."""
        from kvcompress.testing import oracle

        assert evictions.evicted(0) > 0
        with self.press() if self.moves else oracle(self.model, evictions):
            theirs, _ = self.loop(ids, ends)
        same(logits, theirs)
        if self.moves and cache is not None:
            self.check_moved(cache, ids)

    def check_moved(self, cache, ids):
        """Keys of the first layer are those of the kept tokens side by side, up to the newest."""
        layer = cache.layers[0]
        columns, seen = layer.columns[:, 0], layer.get_seq_length()
        pads = (self.mask(ids) == 0).sum(dim=1, keepdim=True)
        place = torch.arange(seen - columns.shape[1], seen) - pads
        plain = self.call(ids.gather(1, columns), position_ids=place.clamp(min=0))
        real = (layer.positions >= 0)[..., None]
        expected = plain[self.argument].layers[0].keys
        torch.testing.assert_close(layer.keys * real, expected * real, atol=1e-4, rtol=1e-4)

    def reference(self, inputs=None):
        """What greedy search gives under the policy; the row "greedy" checks that it is right."""
        inputs = inputs or self.inputs
        key = str(self.policy), str(inputs)
        if key not in self._references:
            with self.press():
                self._references[key] = self.generate(inputs=inputs)
        return self._references[key]

    def check_reference(self, output, inputs=None, kept=True):
        """The tokens, logits and kept rows of greedy search."""
        expected = self.reference(inputs)
        assert torch.equal(output.sequences[:, -NEW:], expected.sequences[:, -NEW:])
        same(output.logits, expected.logits)
        if kept:
            self.check_kept(output[self.argument], expected[self.argument])

    def check_kept(self, cache, expected):
        for ours, theirs in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(ours.positions, theirs.positions)


def same(ours, theirs):
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4, worst


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.fixture(scope="module")
def saved(saved_model):
    """A model with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(saved_model)
    return model.eval(), AutoTokenizer.from_pretrained(saved_model, padding_side="left")


@pytest.fixture
def trial(cell, make_model, prompt, references, saved):
    def make(policy, lengths):
        model = make_model(num_hidden_layers=2)
        return Trial(cell, model, policy, prompt(*lengths), references, saved)

    return make


def generated(trial, **options):
    """A generation under the policy, checked by the oracle."""
    from kvcompress.testing import record

    with trial.press() as session, record(session) as evictions:
        output = trial.generate(**options)
    cache = output[trial.argument]
    trial.check(output.logits, output.sequences, trial.ends(), evictions, cache)
    return output, session


@mode("greedy, batch with a row within the budget", lengths=SHORT)
@mode("greedy", padded=True)
def greedy(trial):
    output, session = generated(trial)
    assert torch.equal(torch.stack(output.logits, 1).argmax(-1), output.sequences[:, -NEW:])
    trial.check_reference(output)
    report = session.report()
    assert report.seen_tokens == 2 * (PROMPT + NEW - 1)
    assert report.held_tokens <= 2 * (24 + NEW - 1)


@mode("sampling", padded=True)
def sampling(trial):
    torch.manual_seed(5)
    generated(trial, do_sample=True)


@mode("several return sequences", padded=True)
def return_sequences(trial):
    torch.manual_seed(5)
    generated(trial, do_sample=True, num_return_sequences=3)


@mode("beam search", padded=True)
def beams(trial, **options):
    with trial.press():
        output = trial.generate(
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
            length_penalty=0.0,
            **options,
        )
    ids = output.sequences
    with trial.press():
        logits, _ = trial.loop(ids, trial.ends())
    # A beam's score is that of its tokens, fed by hand to a cache of their own.
    chosen = torch.stack(logits, 1).log_softmax(-1).gather(2, ids[:, -NEW:, None])
    assert (chosen.sum(dim=(1, 2)) - output.sequences_scores).abs().max() < 1e-3


@mode("beam search with sampling", padded=True)
def beam_sampling(trial):
    torch.manual_seed(5)
    beams(trial, do_sample=True, top_k=0)


def speculative(trial, inputs=None, **options):
    expected = trial.reference(inputs)
    tokens = expected.sequences[0, -NEW:].tolist()
    # Prompt lookup in older transformers needs an end token.
    end = next(token for token in range(1, 101) if token not in tokens)
    verified = []

    def note(module, args, kwargs):
        ids = kwargs["input_ids"]
        verified.append(ids.shape[1] if verified else 1)

    handle = trial.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with trial.press():
            output = trial.generate(inputs=inputs, eos_token_id=end, **options)
    finally:
        handle.remove()
    assert max(verified) > 1
    trial.check_reference(output, inputs)


@mode("prompt lookup")
def prompt_lookup(trial):
    half = trial.inputs["input_ids"][:, :35]
    inputs = {**trial.inputs, "input_ids": torch.cat([half, half], dim=1)}
    speculative(trial, inputs, prompt_lookup_num_tokens=3)


@mode("assistant model")
def assistant(trial):
    from kvcompress.testing import tiny_model

    speculative(trial, assistant_model=tiny_model(seed=7, num_hidden_layers=1))


@mode("assistant by early exit")
def early_exit(trial):
    speculative(trial, assistant_early_exit=1)


@mode("prefill_chunk_size", padded=True)
def chunks(trial):
    for size in (16, 23):  # the last leaves one token
        with trial.press():
            output = trial.generate(prefill_chunk_size=size)
        trial.check_reference(output)


@mode("session.prefill in chunks", padded=True)
def prefill_in_chunks(trial):
    """After every chunk some rows go; the oracle hides each from then on."""
    from kvcompress.testing.oracle import Evictions, oracle

    evictions, ids, ends = Evictions(), trial.reference().sequences, trial.ends()[1:]
    with trial.press() as session:

        def look(*_):
            evictions.look(session.cache)

        options = {"chunk_size": 32, "hold_back": 0, "spare": 0 if trial.moves else None}
        cache = session.prefill(**trial.inputs, **options, progress=look)
        handle = trial.model.register_forward_hook(look)
        try:
            logits, _ = trial.loop(ids, ends, cache, start=PROMPT)
        finally:
            handle.remove()
    assert evictions.evicted(0) > 0
    # Keys that were moved it cannot hide: the same pieces are fed by hand.
    pieces = [PROMPT - 64, PROMPT - 32, PROMPT, *ends] if trial.moves else ends
    with trial.press() if trial.moves else oracle(trial.model, evictions):
        theirs, _ = trial.loop(ids, pieces)
    same(logits, theirs[-len(logits) :])


@mode("session.ask, a fork")
def asked(trial):
    """As generate with the whole conversation on a cache of its own."""
    question = trial.inputs["input_ids"][:, :9].flip(1)
    said = torch.cat([trial.inputs["input_ids"], question], dim=1)
    options = {"max_new_tokens": NEW, "do_sample": False}
    with trial.press() as session:
        cache, own = (
            session.prefill(trial.inputs["input_ids"], chunk_size=32, hold_back=0) for _ in range(2)
        )
        before = copy.deepcopy(cache)
        answers = [session.ask(cache, question, **options) for _ in range(2)]
        expected = trial.generate(own, {"input_ids": said, "attention_mask": trial.mask(said)})
    trial.check_kept(cache, before)
    for answer in answers:
        assert torch.equal(answer, expected.sequences[:, -NEW:])


@mode("saved and loaded")
def saved_and_loaded(trial):
    import tempfile
    from pathlib import Path

    with trial.press() as session, tempfile.TemporaryDirectory() as folder:
        cache = session.prefill(**trial.inputs, chunk_size=32)
        session.save(cache, Path(folder) / "cache.safetensors")
        loaded = session.load(Path(folder) / "cache.safetensors")
        expected, output = trial.generate(cache), trial.generate(loaded)
    assert torch.equal(output.sequences, expected.sequences)
    same(output.logits, expected.logits)
    trial.check_kept(output[trial.argument], expected[trial.argument])


@mode("inputs_embeds", padded=True)
def embeds(trial):
    with torch.no_grad():
        vectors = trial.model.get_input_embeddings()(trial.inputs["input_ids"])
    inputs = {"inputs_embeds": vectors, "attention_mask": trial.inputs["attention_mask"]}
    with trial.press():
        output = trial.generate(inputs=inputs)
    trial.check_reference(output)


def conversation(trial, lengths, only_new=False, new=4):
    """Turns that bring `lengths` tokens each, with one cache, checked by the oracle."""
    from kvcompress.testing import record

    with trial.press() as session, record(session) as evictions:
        output = trial.generate(max_new_tokens=new)
        ids, logits, ends = output.sequences, list(output.logits), trial.ends(new)
        for number, length in enumerate(lengths):
            seen = ids.shape[1] - 1
            generator = torch.Generator().manual_seed(number)
            more = torch.randint(1, 101, (ids.shape[0], length), generator=generator)
            ids = torch.cat([ids, more], dim=1)
            fed = ids[:, seen:] if only_new else ids
            inputs = {"input_ids": fed, "attention_mask": trial.mask(ids)}
            output = trial.generate(output[trial.argument], inputs, max_new_tokens=new)
            ends += trial.ends(new, ids.shape[1])
            logits += output.logits
            ids = torch.cat([ids, output.sequences[:, -new:]], dim=1)
    trial.check(logits, ids, ends, evictions, output[trial.argument])


@mode("second turn, batch with a row within the budget", lengths=SHORT)
@mode("second turn, whole conversation", padded=True)
def second_turn(trial):
    conversation(trial, [19])


@mode("second turn, new tokens and a full mask", padded=True)
def second_turn_only_new(trial):
    conversation(trial, [19], only_new=True)


@mode("third turn", padded=True)
def third_turn(trial):
    conversation(trial, [19, 30])


@mode("later turn shorter than the window", padded=True)
def short_turn(trial):
    conversation(trial, [1])


@mode("streaming from another thread")
def streaming(trial):
    from transformers import TextIteratorStreamer

    tokens = trial.reference().sequences[0, -NEW:]
    _, tokenizer = trial.saved
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with trial.press(), ThreadPoolExecutor() as pool:
        running = pool.submit(trial.generate, streamer=streamer)
        text = "".join(streamer)
        running.result()
    assert text == tokenizer.decode(tokens)


def piped(trial, texts):
    from transformers import pipeline

    model, tokenizer = trial.saved
    trial.model = model
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with trial.press() as session:
        options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
        outputs = answer(texts, batch_size=len(texts), **options)
    assert session.report().held_tokens < session.report().seen_tokens
    expected = trial.reference(dict(tokenizer(texts, return_tensors="pt", padding=True)))
    said = [output[0]["generated_text"] for output in outputs]
    assert said == tokenizer.batch_decode(expected.sequences[:, -NEW:], skip_special_tokens=True)


TEXT = "Keep what the end of the prompt asks for, and let go of everything else."


@mode("pipeline")
def one_piped(trial):
    piped(trial, [TEXT])


@mode("pipeline, padded batch")
def batch_piped(trial):
    piped(trial, [TEXT, TEXT[:50]])


def looped(trial, cache=None, with_positions=False):
    expected = trial.reference()
    with trial.press():
        logits, cache = trial.loop(expected.sequences, trial.ends(), cache, with_positions)
    same(logits, expected.logits)
    trial.check_kept(cache, expected[trial.argument])


@mode("loop of calls", padded=True)
def loop(trial):
    looped(trial)


@mode("loop of calls with position_ids", padded=True)
def loop_with_positions(trial):
    looped(trial, with_positions=True)


@mode("loop of calls with a DynamicCache", padded=True)
def loop_with_cache(trial):
    from transformers import DynamicCache

    looped(trial, DynamicCache(config=trial.model.config))


@mode("loop of calls with a DynamicCache without config", padded=True)
def loop_with_bare_cache(trial):
    from transformers import DynamicCache

    looped(trial, DynamicCache(), with_positions=True)


@mode("loop of calls with a CompressedCache, prompt in pieces", padded=True)
def loop_in_pieces(trial):
    from kvcompress import CompressedCache

    expected = trial.reference()
    cache = CompressedCache(trial.model, trial.policy)
    logits, _ = trial.loop(expected.sequences, [30, 66, *trial.ends()], cache)
    same(logits[2:], expected.logits)
    trial.check_kept(cache, expected[trial.argument])


@mode("CompressedCache in generate", padded=True)
def compressed_cache(trial):
    from kvcompress import CompressedCache

    cache = CompressedCache(trial.model, trial.policy)
    trial.check_reference(trial.generate(cache))


@mode("DynamicCache that has part of the prompt", padded=True)
def prefilled(trial):
    from transformers import DynamicCache

    _, cache = trial.loop(trial.inputs["input_ids"], [40], DynamicCache())
    output, _ = generated(trial, cache=cache)
    if trial.policy.later_turns == "revote":  # else those 40 are an earlier turn, and stay
        trial.check_reference(output)


@mode("copy.deepcopy of a cache, both go on", padded=True)
def copies(trial):
    expected = trial.reference()
    ids = expected.sequences
    others = torch.cat([ids[:, :PROMPT], ids[:, PROMPT:].flip(1)], dim=1)
    with trial.press():
        _, cache = trial.loop(ids, [PROMPT])
        twin, logits, flipped = copy.deepcopy(cache), [], []
        for end in trial.ends()[1:]:
            logits += trial.loop(ids, [end], cache, start=end - 1)[0]
            flipped += trial.loop(others, [end], twin, start=end - 1)[0]
        alone, fresh = trial.loop(others, trial.ends())
    same(logits, expected.logits[1:])
    same(flipped, alone[1:])
    trial.check_kept(cache, expected[trial.argument])
    trial.check_kept(twin, fresh)


@mode("cache.reset() and another prompt", padded=True)
def reset(trial):
    with trial.press():
        cache = trial.generate(inputs={"input_ids": torch.full((2, 50), 7)})[trial.argument]
        cache.reset()
        output = trial.generate(cache)
    trial.check_reference(output)


@mode("cache.crop() of two tokens", padded=True)
def crop(trial):
    expected = trial.reference()
    ids = expected.sequences
    with trial.press():
        _, cache = trial.loop(ids, [PROMPT])
        wrong = torch.cat([ids[:, :PROMPT], ids[:, PROMPT:].flip(1)], dim=1)
        trial.loop(wrong, [PROMPT + 1, PROMPT + 2], cache, start=PROMPT)
        cache.crop(-2)
        logits, _ = trial.loop(ids, trial.ends()[1:], cache, start=PROMPT)
    same(logits, expected.logits[1:])
    trial.check_kept(cache, expected[trial.argument])


@mode("classifier-free guidance")
def guidance(trial):
    negative = trial.inputs["input_ids"].flip(1)[:, :60]
    with trial.press() as session:
        output = trial.generate(
            guidance_scale=1.5, negative_prompt_ids=negative, output_scores=True
        )
    given, unwanted = session.reports
    assert given.held_tokens <= 2 * (24 + NEW - 1)
    assert unwanted.held_tokens <= 2 * (24 + NEW - 1)
    ids = output.sequences
    other = torch.cat([negative, ids[:, PROMPT:]], dim=1)
    with trial.press():
        positive, _ = trial.loop(ids, trial.ends())
        trial.inputs = {"attention_mask": torch.ones_like(negative)}
        negative, _ = trial.loop(other, trial.ends(start=60))
    same(output.logits, positive)
    for score, wanted, unwanted in zip(output.scores, positive, negative, strict=True):
        wanted, unwanted = wanted.log_softmax(-1), unwanted.log_softmax(-1)
        assert (unwanted + 1.5 * (wanted - unwanted) - score).abs().max() < 1e-3


@mode("padding at the right")
def right_padding(trial):
    trial.inputs["attention_mask"][:, -5:] = 0
    with trial.press():
        trial.generate()
    pytest.fail("not refused")


@mode("feeding a cache the same prompt again")
def fed_twice(trial):
    with trial.press():
        output = trial.generate()
        trial.generate(output[trial.argument])
    pytest.fail("not refused")


@mode("use_cache=False")
def no_cache(trial):
    with trial.press():
        trial.generate(use_cache=False)
    pytest.fail("not refused")


@mode("generate_batch (continuous batching)")
def continuous_batching(trial):
    with trial.press():
        trial.model.generate_batch(trial.inputs["input_ids"].tolist(), max_new_tokens=NEW)
    pytest.fail("not refused")


def implementation(trial, name):
    # Older transformers keep a static cache with the model, also one that was not filled.
    vars(trial.model).pop("_cache", None)
    with trial.press() as session:
        output = trial.generate(cache_implementation=name)
    trial.check_reference(output, kept=False)
    assert session.report().held_tokens < session.report().seen_tokens


@mode("EncoderDecoderCache")
def encoder_decoder_cache(trial):
    from transformers import DynamicCache, EncoderDecoderCache

    with trial.press():
        trial.generate(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    pytest.fail("not refused")


@mode("StaticCache")
def static_cache(trial):
    implementation(trial, "static")


@mode("StaticCache, offloaded")
def offloaded_static_cache(trial):
    implementation(trial, "offloaded_static")


@mode("QuantizedCache")
def quantized_cache(trial):
    from transformers import cache_utils

    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("the quantized caches of this transformers need a package that is not there")
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with trial.press():
        output = trial.generate(**settings)
    expected = trial.reference()
    same(output.logits[:1], expected.logits[:1])
    trial.check_kept(output[trial.argument], expected[trial.argument])


@pytest.mark.support("modes", legend=LEGEND)
@pytest.mark.parametrize("column", POLICIES)
@pytest.mark.parametrize("row", MODES)
def test_mode(cell, trial, row, column):
    run, lengths = MODES[row]
    with cell:
        run(trial(POLICIES[column], lengths))
