"""Where a record was made. Imports no torch, for scripts that load none."""

import os
import platform
import subprocess
from pathlib import Path


def machine() -> str:
    """Processor architecture, cores and system."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def commit() -> str:
    """Of the checkout that this file is in; `+` if it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
