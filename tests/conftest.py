from pathlib import Path

import pytest
import torch

torch.set_num_threads(2)

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def no_trace():
    """Fail if transformers' classes or a model's hooks are not as they were."""
    from transformers import GenerationMixin
    from transformers.modeling_utils import AttentionInterface

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

    def make(*lengths, seed=1):
        generator = torch.Generator().manual_seed(seed)
        longest = max(lengths)
        ids = torch.zeros(len(lengths), longest, dtype=torch.long)
        mask = torch.zeros(len(lengths), longest, dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, longest - length :] = torch.randint(1, 101, (length,), generator=generator)
            mask[row, longest - length :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def golden():
    """The cases of one file of golden vectors."""
    import json

    from safetensors.torch import load_file

    def load(name):
        meta = json.loads((GOLDEN / f"{name}.json").read_text())
        return meta["cases"], load_file(GOLDEN / f"{name}.safetensors")

    return load
