"""One run of lm_eval's own command: what it is given, how it is watched, what it leaves behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import Comparison
from kvcompress_eval.offline import row_id

MODEL = "snapkv-hf"
"""Our model's name in lm_eval."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""So that a run with local rows never waits for a network."""

_ROWS = re.compile(rb"Running \w+ requests:[^\r\n]*?\| *(\d+)/(\d+) ")
_BAR = re.compile(r"\d+%\|")

Record = dict[str, Any]


@dataclass(frozen=True)
class HarnessRun:
    """A model and a policy on some tasks, in a process of its own."""

    model: str
    policy: str
    tasks: dict[str, str]
    """What lm_eval calls each task, by its name in the comparison."""
    folder: Path
    """For the log, lm_eval's output and its cache of answers."""
    include: Path | None
    """Where local tasks are defined."""

    @property
    def log(self) -> Path:
        """What lm_eval printed."""
        return self.folder / "lm_eval.log"

    def command(self, settings: Comparison) -> list[str]:
        """The command line, for this machine's Python or behind the launcher."""
        harness = [sys.executable, "-m", "lm_eval"]
        launcher = shlex.split(settings.launch)
        if launcher[-1:] == ["-m"]:
            harness = ["lm_eval"]
        arguments = [f"pretrained={self.model}", f"policy={self.policy}", settings.model_args]
        command = [*launcher, *harness, "run", "--model", MODEL]
        command += ["--model_args", ",".join(filter(None, arguments))]
        command += ["--tasks", ",".join(self.tasks.values())]
        command += ["--batch_size", settings.batch_size]
        command += ["--log_samples", "--output_path", str(self.folder)]
        # Of every policy its own: lm_eval's cache asks only for the prompt.
        command += ["--use_cache", str(self.folder / "answers")]
        if self.include is not None:
            command += ["--include_path", str(self.include)]
        elif settings.limit is not None:
            command += ["--limit", str(settings.limit)]
        for option in ("device", "gen_kwargs"):
            if value := getattr(settings, option):
                command += [f"--{option}", value]
        return [*command, "--apply_chat_template"] if settings.chat else command

    def execute(
        self, settings: Comparison, show_rows: Callable[[int, int], None]
    ) -> dict[str, Record]:
        """Run it to its end.

        Args:
            settings: Of the comparison.
            show_rows: Called now and then with the rows that are done and all of them.

        Returns:
            A complete record for each task, by its name in the comparison.

        Raises:
            EvaluationError: It failed; the message is the end of what it printed.
        """
        command = self.command(settings)
        extra = OFFLINE if self.include is not None else {}
        self.folder.mkdir(parents=True, exist_ok=True)
        before = set(self.folder.glob("*/results_*.json"))
        started = time.perf_counter()
        with self.log.open("wb") as log, _ending_on_sigterm():
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | extra
            )
            try:
                _watch(process, self.log, show_rows)
            finally:
                # Also when we are ended: it would go on alone, and write where the next one does.
                process.terminate()
                process.wait()
        seconds = time.perf_counter() - started
        found = sorted(set(self.folder.glob("*/results_*.json")) - before)
        if process.returncode or not found:
            raise EvaluationError(
                f"lm_eval ended with code {process.returncode}: {last_lines(self.log)}"
            )
        settled = {"command": shlex.join(command), "environment": extra, "seconds": seconds}
        try:
            return {task: self._record(task, found[-1]) | settled for task in self.tasks}
        except (KeyError, OSError, ValueError) as error:
            raise EvaluationError(
                f"lm_eval's results {found[-1]} are not as expected: {error!r}"
            ) from None

    def _record(self, task: str, path: Path) -> Record:
        """What a results file and the samples beside it say about one task.

        Raises:
            EvaluationError: The run used another policy, or something is missing.
        """
        results, name = json.loads(path.read_text(encoding="utf-8")), self.tasks[task]
        config = results["config"]
        ours = config.get("kvcompress")
        if ours is None or ours["policy"] != self.policy:
            used = "none of ours" if ours is None else ours["policy"]
            raise EvaluationError(f"lm_eval was asked for {self.policy} and used {used}.")
        samples = path.with_name(path.name.replace("results_", f"samples_{name}_") + "l")
        rows, values = read_samples(samples)
        fixed = {"name", "alias", "sample_len"}
        metrics = {
            key: value for key, value in results["results"][name].items() if key not in fixed
        }
        return {
            "model": self.model,
            "policy": self.policy,
            "task": task,
            "harness_task": name,
            "metrics": metrics,
            "n": len(rows),
            "rows": rows,
            "values": values,
            "kvcompress": ours["tasks"][name],
            "policy_fields": ours["policy_fields"],
            "compress": ours["compress"],
            "truncate": ours["truncate"],
            "task_version": results["versions"].get(name),
            "versions": {"lm_eval": results.get("lm_eval_version"), **ours["versions"]},
            "device": ours["device"],
            "dtype": config.get("model_dtype"),
            "samples": str(samples.relative_to(self.folder)),
        }


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM, by which batch systems end jobs, pass through `finally`, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(
    process: "subprocess.Popen[bytes]", log: Path, show_rows: Callable[[int, int], None]
) -> None:
    while True:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            rows = rows_done(log)
            if rows is not None:
                show_rows(*rows)
        else:
            return


def rows_done(log: Path) -> tuple[int, int] | None:
    """Requests answered and all of them, from the last progress bar in a log; None if none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        found = _ROWS.findall(file.read())
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def last_lines(log: Path, count: int = 6) -> str:
    """The end of a log without progress bars."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line for line in text.split("\n") if line.strip() and not _BAR.search(line)]
    return "\n".join(lines[-count:]) or "it printed nothing."


def read_samples(path: Path) -> tuple[list[Record], dict[str, list[Any]]]:
    """Rows of one task and every metric's value for each, in the order of the rows.

    A row that several filters read has one line for each; processes that share the work write their
    rows one after the other.

    Returns:
        The rows' ids, and the values by `metric,filter`.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    rows = {line["doc_id"]: _identity(line) for line in lines}
    values: dict[str, list[Any]] = {}
    for line in lines:
        for metric in line["metrics"]:
            values.setdefault(f"{metric},{line['filter']}", []).append(line[metric])
    return list(rows.values()), values


def _identity(line: Record) -> Record:
    doc = line["doc"] if isinstance(line["doc"], dict) else {}
    return {
        "doc_id": line["doc_id"],
        "id": row_id(doc),
        "source_line": doc.get("source_line"),
        "hash": line["doc_hash"],
    }


class Records:
    """The records of a comparison, a JSON line each; of a repeated cell the last one counts."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._path = path
        self._all: dict[tuple[str, str, str], Record] = {}
        for line in lines:
            self._keep(json.loads(line))

    def _keep(self, record: Record) -> None:
        self._all[record["model"], record["policy"], record["task"]] = record

    def add(self, records: Sequence[Record]) -> None:
        """Write them, all or none, so that whoever is killed leaves whole lines."""
        for record in records:
            self._keep(record)
        text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in self._all.values())
        beside = self._path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._path)

    def complete(self, model: str, policy: str, task: str) -> Record | None:
        """The record of a cell that was run to its end, or None."""
        record = self._all.get((model, policy, task))
        return None if record is None or record.get("error") else record
