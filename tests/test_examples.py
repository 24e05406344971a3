"""The scripts in examples/ do what their tables say: on a tiny model, and on the embedded one."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def example():
    """A script as a module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def two_documents(tmp_path):
    (tmp_path / "cat.txt").write_text("Cats\n\nThe cat of the mill is called Ambrose. It sleeps.")
    (tmp_path / "dog.txt").write_text("Dogs\n\nThe dog of the farm is called Juniper. It barks.")
    return tmp_path


def test_retrieval_puts_the_passage_with_the_answer_last(example):
    rag = example("rag")
    texts = [file.read_text() for file in sorted((EXAMPLES / "documents").glob("*.txt"))]
    assert 10 <= len(texts) <= 20
    for question, word in rag.QUESTIONS.items():
        found = rag.retrieve(texts, question, 9)
        assert len(set(found)) == 9
        assert word in found[-1]
        # Else a citation of any passage would pass the script's own check.
        assert sum(rag.says(text, word) for text in found) == 1


def test_every_sentence_of_a_passage_carries_its_number(example):
    prompt = example("rag").write_prompt(["A\n\nOne is red. Two is blue.", "Three is red."], "Why?")
    passages = "A\n\nOne is red. [1] Two is blue. [1]\n\nThree is red. [2]\n\n"
    assert prompt == passages + "Answer in one sentence, from the passages above. Why?"


@pytest.mark.parametrize(
    ("answer", "cited"),
    [
        ("The cat is called Ambrose [2].", (2, "the model")),
        ("The cat is called Ambrose.", (1, "its words")),
        ("It barks.", (2, "its words")),
        ("The cat [7].", (None, "the model")),
        ("Nothing.", (None, "its words")),
    ],
)
def test_an_answer_is_traced_to_a_passage(example, answer, cited):
    passages = ["The cat is called Ambrose. It sleeps.", "The dog is called Juniper. It barks."]
    assert example("rag").cite(answer, "What is the cat called?", passages) == cited


def test_words_are_whole(example):
    says = example("rag").says
    assert says("It costs 38 Crowns.", "38 crowns")
    assert not says("It costs 138 crowns.", "38 crowns") and not says("38 cents", "38 crowns")


def test_the_verdict_tells_wrong_answers_and_wrong_citations(example):
    rag = example("rag")

    def verdict(right, supported, cited=2):
        return rag.Answer("", cited, "its words", right, supported, 1, 1.0, 1.0, 1.0).verdict()

    assert verdict(True, True) == "is right and cites [2], which contains it"
    assert verdict(False, True) == "is WRONG and cites [2], which contains the right one"
    assert verdict(True, False) == "is right and cites [2], which does NOT contain it"
    assert verdict(False, False, None) == "is WRONG and cites nothing"


def test_rag_on_a_tiny_model(example, saved_model, two_documents, capsys):
    answers = example("rag").main(
        model=str(saved_model),
        policy="snapkv:capacity=64",
        documents=two_documents,
        question="What is the cat called?",
        expect="Ambrose",
    )
    ((full, small),) = answers.values()
    assert full.held_tokens > 200
    assert 64 <= small.held_tokens < 64 + 40
    assert small.mib == pytest.approx(full.mib * small.held_tokens / full.held_tokens)
    out = capsys.readouterr().out
    assert "The full answer is WRONG" in out and "The compressed answer is WRONG" in out


@pytest.mark.parametrize("name", ["rag", "multi_gpu", "summarise"])
def test_a_folder_without_documents_is_refused(example, tmp_path, name):
    given = {
        "rag": {"documents": tmp_path},
        "multi_gpu": {"mode": "data", "documents": tmp_path},
        "summarise": {"document": tmp_path},
    }
    with pytest.raises(typer.BadParameter, match=r"\.txt files"):
        example(name).main(**given[name])


def test_a_question_needs_words_of_its_answer(example):
    with pytest.raises(typer.BadParameter, match=r"together with --expect"):
        example("rag").main(question="Who?")


def test_a_chat_is_bounded_after_every_message(example, saved_model, capsys):
    options = {"model": str(saved_model), "max_new_tokens": 8}
    turns = example("chat").main(**options, capacity=80, interval=8)
    full, bounded, protected = turns.values()
    assert len(full) == len(bounded) == len(protected) == 5
    assert all(turn.held_tokens == turn.seen_tokens for turn in full)
    assert all(80 <= turn.held_tokens <= 80 + 7 for turn in bounded[1:] + protected[1:])
    assert full[-1].mib > 2 * bounded[-1].mib
    assert (
        f"{bounded[-1].held_tokens} of {bounded[-1].seen_tokens} tokens" in capsys.readouterr().out
    )


def test_a_chat_that_fits_gets_the_full_caches_answers(example, saved_model):
    chat = example("chat")
    turns = chat.main(model=str(saved_model), max_new_tokens=8, capacity=4000)
    full, bounded, protected = turns.values()
    for other in (bounded, protected):
        assert [turn.answer for turn in full] == [turn.answer for turn in other]
    assert full[-1].seen_tokens == bounded[-1].seen_tokens == bounded[-1].held_tokens


def test_a_chat_feeds_what_the_template_writes(example, saved_model):
    from transformers import DynamicCache

    from kvcompress.models import load

    model, tokenizer = load(str(saved_model))
    talk = example("chat").Chat(model, tokenizer, DynamicCache(config=model.config))
    for text in ("One?", "Two?", "Three?"):
        before = talk.ids.shape[1]
        talk.say(text, max_new_tokens=8)
        fed = tokenizer.decode(talk.ids[0, before:], skip_special_tokens=True)
        assert fed.startswith(f"[user]{text}[assistant]")


def test_a_chat_from_the_terminal(example, saved_model, monkeypatch, capsys):
    lines = iter(["Hello", "And?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    options = {"model": str(saved_model), "capacity": 40, "max_new_tokens": 8}
    turns = example("chat").main(**options, interactive=True)
    assert [turn.question for turn in turns["bounded"]] == ["Hello", "And?"] and len(turns) == 1
    assert capsys.readouterr().out.count(" MiB") == 2


def test_a_summary_in_chunks_has_a_bounded_peak(example, saved_model, capsys):
    options = {"model": str(saved_model), "capacity": 64, "chunk_size": 100, "max_new_tokens": 12}
    peaks = []
    for tokens in (500, 900):
        plain, cut, chunks = example("summarise").main(**options, tokens=tokens)
        assert tokens < cut.peak_tokens <= plain.peak_tokens
        assert chunks.mib <= cut.mib < plain.mib / 2
        assert plain.rouge["rouge-l"] == pytest.approx(1)
        peaks.append(chunks.peak_tokens)
    assert peaks == [2 * 64 + 100] * 2
    assert "chunks of 100" in capsys.readouterr().out


def test_protected_tool_definitions_are_held(example, saved_model, capsys):
    agent = example("agent_tools")
    agent.REQUESTS = agent.REQUESTS[:3]
    policy = "snapkv_decoding:capacity=640:window_size=16:interval=16"
    full, bounded, protected = agent.main(model=str(saved_model), policy=policy).values()
    assert full.definitions_held == protected.definitions_held == 1
    assert bounded.definitions_held < 0.95
    assert bounded.held_tokens < 656 and protected.held_tokens < 656 < full.held_tokens
    assert "100 % of" in capsys.readouterr().out


def test_tools_go_through_a_template_that_takes_them(example, saved_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    agent = example("agent_tools")
    messages, options = agent.set_up(tokenizer)
    assert "reserve_car: " in messages[0]["content"] and len(messages) == 11 and not options
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    messages, options = agent.set_up(tokenizer)
    assert len(messages) == 1 and "reserve_car" not in messages[0]["content"]
    assert "reserve_car" in tokenizer.apply_chat_template(messages, tokenize=False, **options)


def launched(out, *arguments, processes=2):
    """What processes gather."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launch, f"--master-port={port}", EXAMPLES / "multi_gpu.py", *arguments, "--out", out],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_two_processes_answer_what_one_does(example, saved_model, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from accelerate import PartialState

    module = example("multi_gpu")
    options = ["--model", saved_model, "--limit", "3", "--max-new-tokens", "8"]
    try:
        alone = module.main(module.Mode.data, str(saved_model), limit=3, max_new_tokens=8)
        with pytest.raises(typer.BadParameter, match=r"torchrun"):
            module.main(module.Mode.tensor, str(saved_model))
    finally:
        PartialState._reset_state()
    copies = launched(tmp_path / "data.json", "data", *options)
    assert [one["process"] for one in copies] == [0, 0, 1]
    assert [one["answer"] for one in copies] == [one["answer"] for one in alone]


@pytest.mark.model
def test_rag_finds_and_cites_the_engineer(example, capsys):
    question = "Who is the engineer for the electric boat?"
    answers = example("rag").main(question=question, expect="Nakamura", passages=4)
    full, small = answers[question]
    for one in (full, small):
        assert one.right and one.supported and one.cited == 4
    assert small.held_tokens < 560 < 700 < full.held_tokens
    assert small.mib < 0.7 * full.mib
    out = capsys.readouterr().out
    assert out.count("is right and cites [4], which contains it") == 2
    assert out.count("[4] Crew and duties") == 2


@pytest.mark.model
def test_an_agent_calls_the_right_tools_from_a_cache_that_protects_them(example):
    full, bounded, protected = example("agent_tools").main().values()
    assert full.right >= 6 and protected.right >= 6
    assert protected.right >= bounded.right
    assert protected.definitions_held == 1 and bounded.definitions_held < 0.5
    assert protected.mib < full.mib / 2


@pytest.mark.slow
@pytest.mark.model
def test_a_protected_name_is_remembered(example):
    turns = example("chat").main()
    assert "Ines" in turns["full"][-1].answer
    assert "Ines" in turns["first message protected"][-1].answer
    assert turns["first message protected"][-1].held_tokens <= 128 + 15
    assert turns["full"][-1].held_tokens > 2 * (128 + 15)


@pytest.mark.slow
@pytest.mark.model
def test_rag_as_it_is_shown(example):
    answers = example("rag").main()
    for full, small in answers.values():
        assert full.right and full.supported and small.supported
        assert small.mib < full.mib / 4
    assert next(iter(answers.values()))[1].right


@pytest.mark.slow
@pytest.mark.model
def test_summaries_as_they_are_shown(example):
    plain, cut, chunks = example("summarise").main()
    assert plain.peak_tokens > 2000 and chunks.peak_tokens == 2 * 512 + 256
    assert chunks.mib < plain.mib / 3 and cut.mib < plain.mib / 3
    for one in (cut, chunks):
        assert "cooperative" in one.text.lower() and 0 < one.rouge["rouge-1"] < 1


@pytest.mark.slow
@pytest.mark.model
def test_three_processes_share_the_embedded_models_heads(tmp_path):
    alone = launched(tmp_path / "data.json", "data", "--limit", "1", processes=1)
    spread = launched(tmp_path / "tensor.json", "tensor", "--limit", "1", processes=3)
    assert [one["heads"] for one in spread] == [1, 1, 1] and alone[0]["heads"] == 3
    assert {one["answer"] for one in spread} == {alone[0]["answer"]}
    assert sum(one["mib"] for one in spread) == pytest.approx(alone[0]["mib"])
