import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Side by side, one thread each, in what tests start too.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
else:
    torch.set_num_threads(2)

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads_as_before():
    """Commands set their number for the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread():
    """Tensors as small as these take longer on two, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def at_once():
    """Run functions that start together, each in a thread of its own; gives their results."""

    def run(*jobs):
        start = threading.Barrier(len(jobs))

        def wait_and_run(job):
            start.wait(timeout=60)
            return job()

        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(wait_and_run, job) for job in jobs]
            return [job.result() for job in running]

    return run


@pytest.fixture
def no_trace():
    """Fail if transformers' classes or a model's hooks are not as they were."""
    from transformers import GenerationMixin
    from transformers.modeling_utils import AttentionInterface

    import kvcompress.attention  # noqa: F401  (wraps generate once and for all)

    before = AttentionInterface.get_interface, GenerationMixin.generate
    yield
    assert (AttentionInterface.get_interface, GenerationMixin.generate) == before


@pytest.fixture(scope="session")
def make_model():
    """A tiny model; one per distinct set of arguments, shared by all tests."""
    from kvcompress.testing import tiny_model

    made = {}

    def make(family="llama", attn="sdpa", **config):
        key = (family, attn, *sorted(config.items()))
        if key not in made:
            made[key] = tiny_model(family, attn=attn, **config)
        return made[key]

    return make


@pytest.fixture
def prompt():
    """Token ids, and for several lengths a left-padded batch with its mask."""

    from kvcompress.testing.models import random_prompt

    return random_prompt


@pytest.fixture(scope="session")
def golden():
    """The cases of one file of golden vectors."""
    import json

    from safetensors.torch import load_file

    def load(name):
        meta = json.loads((GOLDEN / f"{name}.json").read_text())
        return meta["cases"], load_file(GOLDEN / f"{name}.safetensors")

    return load


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """A folder with a tiny model and a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvcompress.testing import tiny_model

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = ["<pad>", *alphabet, "<eos>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    fast.save_pretrained(folder)
    tiny_model(vocab_size=len(vocabulary)).save_pretrained(folder)
    return folder


@pytest.fixture
def call(capfd, monkeypatch):
    """Run the command line in this process; gives exit code, stdout and stderr."""

    def run(*arguments, stdin=None):
        import io
        import sys

        from kvcompress.cli import main

        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["kvcompress", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err

    return run
