"""Two processes that hold some heads of every layer each give what one process gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

PER_HEAD = [
    "snapkv:capacity=24:window_size=6",
    # No eviction at decode, where a token that is generated again has a key of equal norm in
    # layer 0, and rounding chooses between the two.
    "knorm:capacity=24:interval=20",
    "h2o:capacity=24",
    "streaming_llm:capacity=24",
    "streaming_llm:capacity=24:positions=cache",
    "snapkv:capacity=24:window_size=6+h2o:capacity=4:scope=generated",
]
ACROSS = ["tova:capacity=24", "snapkv:capacity=24:window_size=6+tova:capacity=24"]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}
MLA = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 3,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The answers of both processes, and the model and inputs that they had."""
    from kvcompress.testing import tiny_model

    folder = tmp_path_factory.mktemp("parallel")
    llama, latents = folder / "llama", folder / "latents"
    tiny_model().save_pretrained(llama)
    tiny_model("deepseek_v2", **MLA).save_pretrained(latents)
    # No token twice, for the same reason.
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(100, generator=generator)[:70] + 1 for _ in range(2)])
    mask = torch.ones_like(ids)
    ids[1, :29] = mask[1, :29] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    task = {
        "models": {str(llama): PER_HEAD + ACROSS, str(latents): PER_HEAD[:1]},
        "inputs": {name: rows.tolist() for name, rows in inputs.items()},
        "options": OPTIONS,
    }
    (folder / "task.json").write_text(json.dumps(task))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    worker = Path(__file__).with_name("parallel_worker.py")
    done = subprocess.run(
        [*launch, f"--master-port={port}", str(worker), str(folder / "task.json")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {
        "llama": [answer[str(llama)] for answer in answers],
        "latents": [answer[str(latents)] for answer in answers],
        "inputs": inputs,
    }


@pytest.mark.parametrize("policy", PER_HEAD)
def test_each_process_keeps_what_one_process_keeps_in_its_heads(make_model, ranks, policy):
    from kvcompress import press

    model = make_model()
    with press(model, policy):
        whole = model.generate(**ranks["inputs"], **OPTIONS, return_dict_in_generate=True)
    answers = [answer[policy] for answer in ranks["llama"]]
    assert [answer.get("heads") for answer in answers] == [1, 1], answers
    assert [answer["tokens"] for answer in answers] == [whole.sequences.tolist()] * 2
    for number, layer in enumerate(whole.past_key_values.layers):
        kept = [torch.tensor(answer["kept"][number]) for answer in answers]
        assert torch.equal(torch.cat(kept, dim=1), layer.positions)


@pytest.mark.parametrize("policy", ACROSS)
def test_policies_that_look_across_heads_are_refused(ranks, policy):
    for answer in ranks["llama"]:
        error = answer[policy]["error"]
        assert error.startswith("UnsupportedModelError: tova judges")
        assert "each of 2 processes" in error and "without tp_plan" in error


def test_latents_are_refused(ranks):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    policy = PER_HEAD[0]
    first, second = (answer[policy] for answer in ranks["latents"])
    if "error" in first:
        for answer in (first, second):
            start = "UnsupportedModelError: DeepseekV2ForCausalLM caches latents"
            assert answer["error"].startswith(start)
        return
    # Older transformers caches what the latents expand to, which has heads like any other model's.
    model = tiny_model("deepseek_v2", **MLA)
    with press(model, policy):
        whole = model.generate(**ranks["inputs"], **OPTIONS)
    assert first["tokens"] == second["tokens"] == whole.tolist()


def test_a_part_of_a_parallel_model_and_a_pipeline_are_refused():
    """Without processes: what transformers notes in the config of such models is enough."""
    from kvcompress import CompressedCache, UnsupportedModelError, press
    from kvcompress.testing import tiny_model

    model = tiny_model()
    model.config.distributed_config = type("Noted", (), {"tp_size": 2, "pp_size": 1})
    press(model.model, "snapkv")
    for use in (press, CompressedCache):
        with pytest.raises(UnsupportedModelError, match=r"tova .* tensor-parallel: each of 2"):
            use(model.model, "tova")
    model.config.distributed_config = type("Noted", (), {"tp_size": 1, "pp_size": 4})
    for use in (press, CompressedCache):
        with pytest.raises(UnsupportedModelError, match=r"pipeline-parallel: .* in 4 processes"):
            use(model, "snapkv")
