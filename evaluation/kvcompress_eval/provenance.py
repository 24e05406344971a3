"""Where a record was made. Imports no torch, for scripts that load none."""

import os
import platform
import subprocess
from pathlib import Path

import kvcompress


def machine() -> str:
    """Processor architecture, cores and system."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def commit() -> str:
    """Of the checkout that kvcompress runs from, `+` if it has changes; unknown for a wheel."""
    root = Path(kvcompress.__file__).resolve().parents[1]
    top = _git(root, "rev-parse", "--show-toplevel")
    # An environment may lie inside another project's checkout.
    if top is None or Path(top).resolve() != root:
        return "unknown"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changes else ''}" if head else "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
