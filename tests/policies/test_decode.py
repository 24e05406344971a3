"""While decoding, the rows that stay are those that the model's true attention maps choose.

The reference keeps its own list of columns for every layer and head, reads the attention weights
that eager attention returns, and applies each rule in plain torch.
"""

import pytest
import torch

CAPACITY, STEPS, PROMPT, GROUPS = 16, 30, 40, 4


class Reference:
    """Kept columns, layers x heads x held, and whatever the rule needs per column."""

    def __init__(self, rule, interval):
        self.rule, self.interval, self.since = rule, interval, 0
        self.layers = None

    def step(self, attentions, seen):
        """One forward; its attention maps are over the held columns and the new ones."""
        prompt = self.layers is None
        if prompt:
            self.layers = [
                {"columns": None, "sums": None, "window": []} for _ in range(len(attentions))
            ]
        new = seen if prompt else 1
        self.since = 0 if prompt else self.since + new
        for layer, weights in zip(self.layers, attentions, strict=True):
            _, heads, q_len, held = weights.shape
            # Mean over the query heads of each KV head.
            maps = weights[0].unflatten(0, (heads // GROUPS, GROUPS)).mean(dim=1)
            kv_heads = maps.shape[0]
            fresh = torch.arange(seen - new, seen).expand(kv_heads, new)
            old = layer["columns"]
            layer["columns"] = fresh if old is None else torch.cat([old, fresh], dim=1)
            assert layer["columns"].shape[1] == held
            sums = maps.sum(dim=1)
            if layer["sums"] is not None:
                sums[:, : held - new] += layer["sums"]
            layer["sums"] = sums
            # Every query's map, as attention to columns.
            for query in range(q_len):
                row = torch.zeros(kv_heads, seen).scatter_(1, layer["columns"], maps[:, query])
                layer["window"] = [*layer["window"], row][-8:]
            if prompt or self.since >= self.interval:
                self.evict(layer, weights)
        if self.since >= self.interval:
            self.since = 0

    def evict(self, layer, weights):
        columns = layer["columns"]
        if columns.shape[1] <= CAPACITY:
            return
        scores, protected = getattr(self, self.rule)(layer, weights)
        scores[:, scores.shape[1] - protected :] = float("inf")
        index = scores.topk(CAPACITY, dim=1).indices.sort(dim=1).values
        layer["columns"], layer["sums"] = columns.gather(1, index), layer["sums"].gather(1, index)

    def tova(self, layer, weights):
        kv_heads = layer["columns"].shape[0]
        return weights[0, :, -1].mean(dim=0).expand(kv_heads, -1).clone(), 1

    def h2o(self, layer, weights):
        return layer["sums"].clone(), CAPACITY // 2

    def h2o_observers(self, layer, weights):
        columns = layer["columns"]
        return layer["sums"] / (columns[:, -1:] + 1 - columns), CAPACITY // 2

    def snapkv_decoding(self, layer, weights):
        window = [torch.nn.functional.pad(row, (0, 99)) for row in layer["window"][-4:]]
        window = torch.stack([row[:, :99] for row in window]).sum(dim=0)
        votes = window.gather(1, layer["columns"])[:, :-4]
        votes = torch.nn.functional.avg_pool1d(votes, 5, stride=1, padding=2)
        return torch.nn.functional.pad(votes, (0, 4)), 4


RULES = {
    "tova": f"tova:capacity={CAPACITY}",
    "h2o": f"h2o:capacity={CAPACITY}",
    "h2o_observers": f"h2o:capacity={CAPACITY}:normalize=observers",
    "snapkv_decoding": f"snapkv_decoding:capacity={CAPACITY}:window_size=4",
}


def kept(model, spec, inputs, tokens, watch=None):
    """Columns of every layer after the prompt and after each forced token."""
    from kvcompress import press

    found = []
    options = {"output_attentions": True} if watch else {}
    with press(model, spec), torch.no_grad():
        output = model(inputs, **options)
        cache = output.past_key_values
        for seen in range(inputs.shape[1], inputs.shape[1] + STEPS + 1):
            if watch:
                watch.step(output.attentions, seen)
            # Reading `layer.columns` would bring the rows into order first.
            columns = [layer.columns if watch else layer.rows.columns() for layer in cache.layers]
            found.append([each[0].long().sort(dim=-1).values for each in columns])
            token = tokens[:, seen - inputs.shape[1]][:, None]
            output = model(token, past_key_values=cache, **options)
    return found


# SnapKV-Decoding's window may reach back beyond the last eviction at interval 1; its votes are then
# counted anew over what is held now: see the next test.
@pytest.mark.parametrize(
    ("rule", "interval"),
    [(rule, interval) for rule in ("tova", "h2o", "h2o_observers") for interval in (1, 5, 24)]
    + [("snapkv_decoding", 5)],
)
def test_selection_is_that_of_the_true_attention_maps(make_model, prompt, rule, interval):
    inputs, tokens = prompt(PROMPT)["input_ids"], prompt(STEPS + 1, seed=9)["input_ids"]
    reference, expected = Reference(rule, interval), []
    original = reference.step

    def step(attentions, seen):
        original(attentions, seen)
        expected.append([layer["columns"] for layer in reference.layers])

    reference.step = step
    spec = f"{RULES[rule]}:interval={interval}"
    ours = kept(make_model("llama", "eager"), spec, inputs, tokens, reference)
    assert len(ours) == len(expected) == STEPS + 1
    for seen, (mine, theirs) in enumerate(zip(ours, expected, strict=True), PROMPT):
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"layer {layer} after {seen} tokens"
    # And sdpa, which returns no weights, keeps the same.
    other = kept(make_model("llama", "sdpa"), spec, inputs, tokens)
    for mine, theirs in zip(ours, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("lengths", [(40,), (40, 31)], ids=["single", "padded"])
@pytest.mark.parametrize(
    "spec",
    [
        f"h2o:capacity={CAPACITY}:interval=6",
        "snapkv:capacity=16:window_size=4+h2o:capacity=20:interval=6",
        f"h2o:capacity={CAPACITY}+tova:capacity=20:interval=6",
    ],
)
def test_queries_observed_together_count_as_one_by_one(
    make_model, prompt, monkeypatch, spec, lengths
):
    """Over two turns, the first of which ends between two evictions, and with beams."""
    from kvcompress import cache, press

    model, inputs = make_model(), prompt(*lengths)
    results = []
    for together in (1, 4, 16):
        monkeypatch.setattr(cache, "OBSERVED_TOGETHER", together)
        for beams in (1, 3):
            options = {"max_new_tokens": 15, "do_sample": False, "num_beams": beams}
            with press(model, spec):
                first = model.generate(**inputs, **options, return_dict_in_generate=True)
                kept = [layer.positions for layer in first.past_key_values.layers]
                if beams == 1:
                    ids = torch.cat([first.sequences, prompt(*[9] * len(lengths))["input_ids"]], 1)
                    mask = torch.ones_like(ids)
                    mask[:, : lengths[0]] = inputs["attention_mask"]
                    model.generate(
                        ids,
                        attention_mask=mask,
                        past_key_values=first.past_key_values,
                        max_new_tokens=9,
                        do_sample=False,
                    )
                    kept += [layer.positions for layer in first.past_key_values.layers]
            results.append((beams, [first.sequences, *kept]))
    for beams, other in results:
        expected = next(found for number, found in results if number == beams)
        assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


@pytest.mark.parametrize("spec", [RULES["snapkv_decoding"], RULES["tova"], RULES["h2o"]])
def test_the_vote_at_decode_is_over_what_is_held(make_model, prompt, spec, monkeypatch):
    """Softmax of the model's queries over the held keys, causal by column."""
    from kvcompress import policy_from
    from kvcompress.policy import LayerView

    checked = []
    original = LayerView.attention_received

    def received(view, **options):
        result = original(view, **options)
        query, key = view.query[0].double(), view.key[0].double()
        logits = query @ key.repeat_interleave(GROUPS, 0).transpose(1, 2) * view.scaling
        own = view.positions[0, :, -view.query.shape[2] :].repeat_interleave(GROUPS, 0)
        columns = view.positions[0].repeat_interleave(GROUPS, 0)
        logits.masked_fill_(columns[:, None] > own[..., None], float("-inf"))
        votes = logits.softmax(dim=-1).sum(dim=1)
        groups = 1 if options.get("whole_layer") else view.kv_heads
        votes = votes.unflatten(0, (groups, -1)).mean(dim=1)
        torch.testing.assert_close(result[0].double(), votes, atol=1e-5, rtol=1e-5)
        checked.append(view.phase)
        return result

    monkeypatch.setattr(LayerView, "attention_received", received)
    inputs, tokens = prompt(PROMPT)["input_ids"], prompt(STEPS + 1, seed=9)["input_ids"]
    kept(make_model(), policy_from(f"{spec}:interval=1"), inputs, tokens)
    assert checked.count("decode") == 3 * (STEPS + 1)


def test_ties_go_to_the_earliest_while_decoding():
    from kvcompress.tensors import top_positions

    scores = torch.tensor([[[3.0, 1.0, 2.0, 1.0, 1.0]]])
    assert top_positions(scores, 4).tolist() == [[[0, 1, 2, 3]]]
    assert top_positions(scores, 3).tolist() == [[[0, 1, 2]]]


def test_scissorhands_counts_low_attention():
    """Marks of the last queries, from plain softmax."""
    from kvcompress.testing import kept_positions, scores

    torch.manual_seed(2)
    query, key, value = (torch.randn(2, heads, 30, 8) for heads in (4, 2, 2))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    spec = "scissorhands:capacity=12:history=5:recent=3:interval=5"
    given = scores(spec, query, key, value, attention_mask=mask)
    for row in range(2):
        for head in range(2):
            marks = torch.zeros(30)
            for of_group in (2 * head, 2 * head + 1):
                for number in range(25, 30):
                    seen = [c for c in range(number + 1) if mask[row, c]]
                    logits = (key[row, head, seen] @ query[row, of_group, number]) / 8**0.5
                    low = logits.softmax(dim=0) < 1 / len(seen)
                    marks[seen] += low.float() / 2
            judged = given[row, head, :27]
            real = mask[row, :27].bool()
            torch.testing.assert_close(judged[real], -marks[:27][real])
            assert given[row, head, 27:].isposinf().all()
    kept = kept_positions(spec, query, key, value, attention_mask=mask)
    assert kept.shape == (2, 2, 12) and (kept[1] >= 7).all()


def test_scissorhands_reads_no_query_whose_row_may_be_gone(make_model):
    from kvcompress import PolicyConfigError, press

    with pytest.raises(PolicyConfigError, match="reads 400 queries while decoding"):
        press(make_model(), "scissorhands:capacity=512:interval=100")
