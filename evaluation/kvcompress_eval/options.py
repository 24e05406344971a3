"""Options that several commands have: what they are called, and what help says of them."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Hub id or path; smollm2 is embedded.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="CUDA if there is one, else cpu.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Chat = Annotated[
    bool, typer.Option(help="Use the tokenizer's chat template for files, if it has one.")
]
NewTokens = Annotated[
    int, typer.Option(min=2, help="Length of the continuation; the first does not count.")
]
OutFolder = Annotated[Path, typer.Option(help="Folder; it is gone on with.")]
