"""One of the processes of tensor-parallel models: what it generates and keeps, or its error.

Run by `torch.distributed.run` with a JSON file of models, policies and inputs; every process writes
its answers beside it.
"""

import inspect
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from kvcompress import KVCompressError, press


def load(folder):
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        plan = {"distributed_config": DistributedConfig(tp_plan="auto")}
    else:  # older transformers
        plan = {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(folder, **plan).eval()


def answer(model, policy, inputs, options):
    try:
        with press(model, policy):
            output = model.generate(**inputs, **options, return_dict_in_generate=True)
    except KVCompressError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    layers = output.past_key_values.layers
    return {
        "tokens": output.sequences.tolist(),
        "kept": [layer.positions.tolist() for layer in layers],
        "heads": layers[0].keys.shape[1],
    }


def main():
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    task = json.loads(file.read_text())
    inputs = {name: torch.tensor(rows) for name, rows in task["inputs"].items()}
    answers = {}
    for folder, policies in task["models"].items():
        model = load(folder)
        answers[folder] = {
            policy: answer(model, policy, inputs, task["options"]) for policy in policies
        }
    rank = os.environ["RANK"]
    file.with_name(f"rank{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
