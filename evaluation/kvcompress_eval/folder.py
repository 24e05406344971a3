"""A folder of results that a command goes on with: its settings, and records as they come."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvcompress.errors import EvaluationError

Record = TypeVar("Record")


class RecordFile(Generic[Record]):
    """Records in a file, a JSON line each, written as soon as there is one.

    Args:
        path: May exist from an earlier run; a line that was cut off is left out.
        kind: Of the records, a dataclass.
    """

    def __init__(self, path: Path, kind: type[Record]) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.all: list[Record] = [kind(**json.loads(line)) for line in lines if line.endswith("}")]
        path.write_text("".join(map(_line, self.all)), encoding="utf-8")

    def add(self, record: Record) -> None:
        """One more."""
        self.all.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Any) -> str:
    return json.dumps(asdict(record)) + "\n"


def versions(*packages: str) -> dict[str, str]:
    """What results depend on, as settings of a folder."""
    return {f"version of {name}": metadata.version(name) for name in packages}


def of_model(name: str, model: Any) -> dict[str, str]:
    """A model's name and what its numbers depend on beside it, as settings of a folder."""
    return {
        "model": name,
        "dtype": str(model.dtype),
        "device": model.device.type,
        "machine": platform.machine(),
        **versions("kvcompress", "torch", "transformers"),
    }


def enter_folder(folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Make a folder for results, or check that earlier ones in it had the same settings.

    Args:
        folder: Gets `kind.json` with the settings.
        kind: What is in it, as a word.
        settings: What two results must share to be comparable; ready for JSON.

    Raises:
        EvaluationError: It had others, or the folder holds something else.
    """
    path = folder / f"{kind}.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        names = sorted({*before, *settings})
        changed = [
            f"{name} was {before.get(name)!r} and is now {settings.get(name)!r}"
            for name in names
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise EvaluationError(
                f"{folder} holds a {kind} with other settings: {'; '.join(changed)}. Give another "
                "folder as --out, or the same settings."
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EvaluationError(
            f"{folder} exists and holds no {kind}. Give an empty or new folder as --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
