"""Every way to generate, under every kind of policy: right by the oracle, or refused."""

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
]

POLICIES = {
    "prefill": "snapkv:capacity=24:window_size=6",
    "layer budgets": "pyramidkv:capacity=24:window_size=6:beta=4",
    "decode": "tova:capacity=24",
    "decode, interval": "knorm:capacity=24:interval=4",
    "with state": "h2o:capacity=24",
    "window at decode": "snapkv_decoding:capacity=24:window_size=6:interval=6",
    "moved keys": "streaming_llm:capacity=24:positions=cache",
    "composed": "snapkv:capacity=24:window_size=6+h2o:capacity=24",
    "composed, generated": "snapkv:capacity=24:window_size=6+h2o:capacity=6:scope=generated",
    "append": "snapkv:capacity=24:window_size=6:later_turns=append",
}


@pytest.mark.support("modes", legend={name: f"`{spec}`" for name, spec in POLICIES.items()})
@pytest.mark.parametrize("column", POLICIES)
@pytest.mark.parametrize("row", ["greedy", "greedy, padded batch"])
def test_greedy(cell, make_model, prompt, row, column):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    model = make_model()
    inputs = prompt(70, 41, 30) if "padded" in row else prompt(70)
    with cell:
        with press(model, POLICIES[column]) as session, record(session) as evictions:
            ours = cell.generate(model, inputs)
        if column != "moved keys":
            with oracle(model, evictions):
                theirs = cell.generate(model, inputs)
            assert torch.equal(ours.sequences, theirs.sequences)
