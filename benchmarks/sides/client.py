"""The coordinator's end of a worker."""

import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 10.0
"""Seconds for a worker to end by itself."""


class WorkerError(Exception):
    """A worker could not do what it was asked, or is gone."""


class Worker:
    """A process that is asked one thing at a time, and idle in between.

    Args:
        name: Of the side.
        command: Starts it.
        environment: Added to this process's.
        log: Where what it prints is appended.
        timeout: Seconds for one answer.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        timeout: float,
    ) -> None:
        self.name, self._log, self._timeout = name, log, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as printed:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env={**os.environ, **environment},
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a request.

        Raises:
            WorkerError: It failed, ended, or took too long.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise WorkerError(f"{self.name} has ended before {do!r}.")
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._timeout)
        except OSError:
            line = None
        except queue.Empty:
            self.close()
            raise WorkerError(
                f"{self.name} took more than {self._timeout:.0f} s over {do!r}."
            ) from None
        if line is None:
            code = self._process.wait()
            raise WorkerError(f"{self.name} ended with {code} at {do!r}; see {self._log}.")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"{self.name} answered {line!r} to {do!r}.") from None
        if "error" in answer:
            with self._log.open("a", encoding="utf-8") as printed:
                printed.write(answer.get("trace", ""))
            raise WorkerError(f"{self.name} could not {do} {arguments}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # it has ended with a request unread
                self._process.stdin.close()
        try:
            self._process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
