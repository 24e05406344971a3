"""The paper's observations, against attention maps of the model itself."""

import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def eager(make_model):
    return make_model(attn="eager")


@pytest.fixture(scope="module")
def maps(eager):
    """A prompt of 90 tokens, 12 generated ones, and the attention of all of them by eager."""
    ids = torch.randint(1, 101, (1, 90), generator=torch.Generator().manual_seed(3))
    whole = eager.generate(ids, max_new_tokens=13, min_new_tokens=13, do_sample=False)[:, :-1]
    with torch.no_grad():
        attention = torch.stack(eager(whole, output_attentions=True).attentions)[:, 0]
    layers, heads, tokens, _ = attention.shape
    grouped = attention.view(layers, 2, heads // 2, tokens, tokens).mean(dim=2)
    return ids, whole, grouped  # layers x kv_heads x queries x rows


def test_attention_is_that_of_the_model(eager, maps):
    from kvcompress_eval.observations import watch

    ids, whole, grouped = maps
    found = watch(eager, ids, window=8, windows=3, new_tokens=12)
    assert found.answer == whole[0, 90:].tolist() and found.tokens == 90
    for number, end in enumerate((74, 82, 90)):
        expected = grouped[:, :, end - 8 : end, :90].sum(dim=2)
        torch.testing.assert_close(found.prompt[:, number], expected, atol=1e-5, rtol=1e-4)
    for number, queries in enumerate((slice(90, 98), slice(98, 102))):
        expected = grouped[:, :, queries, :90].sum(dim=2)
        torch.testing.assert_close(found.generated[:, number], expected, atol=1e-5, rtol=1e-4)


def test_windows_must_fit(eager, maps):
    from kvcompress_eval.observations import watch

    from kvcompress import EvaluationError

    with pytest.raises(EvaluationError, match="3 windows of 30 do not fit into a prompt of 90"):
        watch(eager, maps[0], window=30, windows=3, new_tokens=4)


def test_hit_rates_by_hand():
    from kvcompress_eval.observations import hit_rate, important

    attention = torch.tensor([[0.5, 0.1, 0.3, 0.0, 9.0], [0.0, 0.2, 0.1, 0.4, 9.0]])
    first, second = important(attention, 0.5, 4)  # the last token is not among the four
    assert first.tolist() == [True, False, True, False]
    assert second.tolist() == [False, True, False, True]
    assert hit_rate(first, second) == 0 and hit_rate(first, first) == 1
    assert important(attention, 0.01, 4).sum(dim=-1).tolist() == [1, 1]
    three = torch.tensor([True, True, False, False])
    assert hit_rate(three, first) == 0.5


def attention_of(prompt, generated, window=2):
    from kvcompress_eval.observations import Attention

    return Attention(prompt, generated, [1], window)


def test_rates_are_one_where_both_agree_and_chance_where_they_do_not():
    from kvcompress_eval.observations import (
        between_questions,
        by_answer_window,
        by_place,
        by_prompt_window,
    )

    generator = torch.Generator().manual_seed(0)
    one = torch.rand(2, 1, 3, 400, generator=generator)
    other = torch.rand(2, 1, 3, 400, generator=generator)
    same = attention_of(one.expand(-1, 2, -1, -1), one)
    assert (by_prompt_window(same, 0.25) == 1).all()
    assert by_prompt_window(same, 0.25).shape == (2, 2)
    assert (by_answer_window(same, 0.25) == 1).all()
    document = slice(10, 390)
    assert (by_place(same, document, 0.25) == 1).all()
    unlike = attention_of(other, one)
    assert by_place(unlike, document, 0.25).mean().item() == pytest.approx(0.25, abs=0.06)
    table = between_questions([same, unlike], document, 0.25)
    assert table.shape == (2, 2, 2)
    assert (table.diagonal(dim1=1, dim2=2) == 1).all()
    assert table[:, 0, 1].mean().item() == pytest.approx(0.25, abs=0.06)


def test_the_command(call, saved_model, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("The office is closed on Mondays. " * 30)
    out = tmp_path / "observe.png"
    code, shown, err = call(
        "observe", document, "--model", saved_model, "--tokens", 300, "--window", 16, "--windows",
        4, "--new-tokens", 10, "--answer-window", 6, "--question", "When is it closed?",
        "--question", "Where is it?", "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert code == 0, err
    assert out.read_bytes()[:4] == b"\x89PNG" and "question first: mean" in shown
    rates = json.loads(out.with_suffix(".json").read_text())["rates"]
    assert torch.tensor(rates["prompt windows"]).shape == (3, 4)
    assert torch.tensor(rates["answer windows"]).shape == (3, 2)
    assert torch.tensor(rates["questions"]).shape == (3, 2, 2)
    assert torch.tensor(rates["question last"]).shape == (3,)
    code, out, err = call("observe", "nowhere.txt")
    assert code == 2 and "'nowhere.txt' is not a file" in err
