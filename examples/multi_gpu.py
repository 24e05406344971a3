"""Compressed caches in several processes: copies of a model, or one model spread over them.

    python examples/multi_gpu.py data                                        # one process
    accelerate launch --num_processes 4 examples/multi_gpu.py data           # a copy on each card
    torchrun --nproc-per-node 4 examples/multi_gpu.py tensor --model MODEL   # heads on each card

See multi_gpu.md. On CPUs put `torchrun --nproc-per-node 2` before either.
"""

import inspect
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from accelerate import PartialState
from accelerate.utils import gather_object
from kvcompress_eval.console import show_table
from kvcompress_eval.measure import cache_of
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from kvcompress import press
from kvcompress.models import load, source_of


class Mode(StrEnum):
    """What is split."""

    data = "data"
    """The prompts: every process has a whole model."""
    tensor = "tensor"
    """The model: every process has some heads of every layer, and sees every prompt."""


def load_spread(name: str) -> tuple[Any, Any]:
    """A model of which this process holds its share."""
    source = source_of(name)
    plan: dict[str, Any]
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        plan = {"distributed_config": DistributedConfig(tp_plan="auto")}
    else:  # before transformers 5.24
        plan = {"tp_plan": "auto"}
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **plan)
    return model.eval(), AutoTokenizer.from_pretrained(source)


def answer(model: Any, tokenizer: Any, policy: str, prompt: str, max_new_tokens: int) -> Any:
    """One prompt, answered in this process."""
    message = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(message, **options).to(model.device)
    given = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    with press(model, policy) as session:
        output = model.generate(**inputs, **given)
    length = inputs["input_ids"].shape[1]
    report, layer = session.report(), cache_of(output).layers[0]
    return {
        "answer": tokenizer.decode(output.sequences[0, length:], skip_special_tokens=True).strip(),
        "process": PartialState().process_index,
        "heads": layer.keys.shape[1],
        "held": layer.keys.shape[2],
        "seen": report.layers[0].seen_tokens,
        "mib": report.held_bytes / 2**20,
    }


def main(
    mode: Mode,
    model: str = "smollm2",
    policy: str = "snapkv:capacity=64",
    documents: Path = Path(__file__).parent / "documents",
    limit: int = 4,
    max_new_tokens: int = 24,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Answer a prompt for every document, and gather the answers of all processes."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(documents.glob("*.txt"))]
    if not texts:
        raise typer.BadParameter(f"{documents} has no .txt files. Give a folder that has.")
    prompts = [f"{text.strip()}\n\nWhat is this text about?" for text in texts[:limit]]
    state = PartialState(cpu=not torch.cuda.is_available())
    if mode is Mode.data:
        loaded, tokenizer = load(model, device=state.device)
        with state.split_between_processes(prompts) as mine:
            own = [answer(loaded, tokenizer, policy, each, max_new_tokens) for each in mine]
    else:
        if state.num_processes == 1:
            raise typer.BadParameter("One process has all heads. Launch several with torchrun.")
        loaded, tokenizer = load_spread(model)
        own = [answer(loaded, tokenizer, policy, each, max_new_tokens) for each in prompts]
    results: list[dict[str, Any]] = gather_object(
        own
    )  # in order of the processes, and so of the prompts
    if state.is_main_process:
        rows = [("process", "heads", "held", "seen", "MiB", "answer")]
        for one in results:
            numbers = [str(one[key]) for key in ("process", "heads", "held", "seen")]
            rows.append((*numbers, f"{one['mib']:.2f}", one["answer"]))
        show_table(Console(), f"{mode} parallel, {state.num_processes} processes, {policy}", rows)
        if out is not None:
            out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    typer.run(main)
