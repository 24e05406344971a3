"""What `kvcompress compare` compares: its settings, from options and a YAML file, all checked."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvcompress.errors import EvaluationError
from kvcompress_eval.folder import enter_folder, versions

if TYPE_CHECKING:
    from kvcompress.policy import Policy

UNCOMPRESSED = "none"
"""Stands for the cache that keeps everything; the row that all others are compared to."""

Value = TypeVar("Value")


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


Many = Annotated[tuple[Value, ...], BeforeValidator(_listed)]
"""A list; in YAML, one value may stand for a list of one."""
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class Comparison(BaseModel):
    """The settings; the names are those of the options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Many[str] = Field(
        default=("smollm2",),
        min_length=1,
        description="Hub id or path; smollm2 is embedded. May be repeated.",
    )
    policy: Many[str] = Field(
        default=(),
        description="Policy, as name:field=value:...; may be repeated. The uncompressed cache is "
        "always run, and first.",
    )
    capacity: Many[Count] = Field(
        default=(),
        description="May be repeated: every policy that is not composed and names neither capacity "
        "nor keep_ratio is taken at each.",
    )
    task: Many[str] = Field(default=(), description="Task, group or tag of lm_eval; repeatable.")
    limit: Count | None = Field(default=None, description="At most so many rows of each task.")
    max_prompt_tokens: Count | None = Field(
        default=None,
        description="With --offline-data: only rows whose text has at most so many tokens.",
    )
    offline_data: Path | None = Field(
        default=None,
        description="Folder with LongBench's and IFEval's JSONL files, read instead of the hub's: "
        "longbench/NAME.jsonl, ifeval/*.jsonl.",
    )
    skip_rows_needing_nltk: bool = Field(
        default=False,
        description="With --offline-data: leave out IFEval rows that need NLTK's punkt_tab data.",
    )
    model_args: str = Field(
        default="",
        description="More of lm_eval's --model_args: dtype=float32,max_length=8192,truncate=middle",
    )
    gen_kwargs: str = Field(default="", description="lm_eval's --gen_kwargs: max_gen_toks=64,...")
    chat: bool = Field(default=False, description="Use the tokenizer's chat template.")
    batch_size: Text = Field(default="1", description="lm_eval's --batch_size.")
    device: str | None = Field(default=None, description="CUDA if there is one, else cpu.")
    launch: str = Field(
        default="",
        description="Put before lm_eval, for several GPUs: 'accelerate launch --num_processes 4 "
        "-m'.",
    )
    metric: Many[str] = Field(
        default=(),
        description="Which metric is a task's score, may be repeated: the first that the task has. "
        "Without: score, else the task's first.",
    )
    out: Path = Field(default=Path("comparison"), description="Folder; it is gone on with.")

    @classmethod
    def read(cls, config: Path | None, options: Mapping[str, Any]) -> "Comparison":
        """The settings of a YAML file, with the options that were given in place of its own.

        Raises:
            EvaluationError: The file cannot be read, or a setting is unknown, wrong or missing.
        """
        settings = {} if config is None else _yaml(config)
        settings |= {name: value for name, value in options.items() if value not in (None, [])}
        try:
            comparison = cls(**settings)
        except ValidationError as error:
            raise EvaluationError(_explain(error)) from None
        for name in ("policy", "task"):
            if not getattr(comparison, name):
                raise EvaluationError(f"No {name} is given. Give at least one --{name}.")
        if comparison.offline_data is None:
            for name in ("max_prompt_tokens", "skip_rows_needing_nltk"):
                if getattr(comparison, name):
                    option = f"--{name.replace('_', '-')}"
                    raise EvaluationError(f"{option} chooses rows of --offline-data: give both.")
        return comparison

    def policies(self) -> list["Policy"]:
        """See `at_capacities`; the uncompressed cache is always run anyhow."""
        specs = [spec for spec in self.policy if spec != UNCOMPRESSED]
        return at_capacities(specs, self.capacity)

    def deciding(self) -> dict[str, Any]:
        """What two results must share to be comparable; more models, policies and tasks may come.

        Versions are among it: numerics and prompts change between releases.
        """
        free = {"model", "policy", "capacity", "task", "launch", "metric", "out"}
        settings = self.model_dump(mode="json", exclude=free)
        if self.offline_data is not None:
            settings["offline_data"] = str(self.offline_data.resolve())
        return settings | versions("kvcompress", "lm_eval", "torch", "transformers")

    def enter(self) -> None:
        """Make the folder, or check that an earlier comparison there had the same settings.

        Raises:
            EvaluationError: It had others, or the folder holds something else.
        """
        enter_folder(self.out, "comparison", self.deciding())


def at_capacities(specs: Sequence[str], capacities: Sequence[int]) -> list["Policy"]:
    """Every policy at every capacity it is to be taken at, in the order given, each once.

    Raises:
        PolicyConfigError: A policy's form or fields are wrong.
        UnknownPolicyError: A policy is not installed.
        EvaluationError: Capacities are given and no policy takes them.
    """
    from kvcompress import policy_from

    if capacities and specs and all(map(_sets_budget, specs)):
        raise EvaluationError(
            f"--capacity is given, but every policy has its own budget: {', '.join(specs)}. "
            "Leave capacity and keep_ratio out of a policy, or leave --capacity out."
        )
    wanted = [
        f"{spec}:capacity={capacity}" if capacity else spec
        for spec in specs
        for capacity in ((None,) if _sets_budget(spec) else capacities or (None,))
    ]
    found = [policy_from(each) for each in wanted]
    return list({policy.to_string(): policy for policy in found}.values())


def need(package: str, purpose: str, extra: str) -> None:
    """Find out before anything long is begun whether its end will fail.

    Raises:
        EvaluationError: The package is not installed; `purpose` needs it, and `extra` brings it.
    """
    if find_spec(package) is None:
        raise EvaluationError(f"{purpose} needs {package}. Run: pip install 'kvcompress[{extra}]'.")


def _sets_budget(spec: str) -> bool:
    """Whether a policy's string says how much it keeps; a composition's parts always do."""
    fields = {part.split("=")[0] for part in spec.split(":")[1:]}
    return "+" in spec or not fields.isdisjoint({"capacity", "keep_ratio"})


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvaluationError(f"The configuration {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise EvaluationError(f"The configuration {path} must be a mapping of settings.")
    return content


def _explain(error: ValidationError) -> str:
    known = list(Comparison.model_fields)
    lines = []
    for fault in error.errors():
        name = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            lines.append(f"No setting {name!r}.{hint} Settings: {', '.join(known)}.")
        else:
            lines.append(f"{name}: {fault['msg']}; got {fault['input']!r}.")
    return " ".join(lines)


def policy_fields() -> set[str]:
    """Names of the fields of all installed policies."""
    from kvcompress.plugins import registry

    return {name for entry in registry().policies.values() for name in entry.policy.model_fields}


def leaf_tasks(names: Iterable[str]) -> list[str]:
    """Tasks of lm_eval by name, groups and tags replaced by their tasks, each once.

    Reads the definitions of all tasks, which takes seconds, and imports no task.

    Raises:
        EvaluationError: A name is unknown, or a group changes its tasks' definitions.
    """
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    return list(dict.fromkeys(leaf for name in names for leaf in _leaves(name, index)))


def _leaves(name: str, index: Mapping[str, Any]) -> Sequence[str]:
    if name not in index:
        near = ", ".join(difflib.get_close_matches(name, index, n=3))
        hint = f" Near: {near}." if near else ""
        raise EvaluationError(
            f"lm_eval has no task {name!r}.{hint} `lm_eval ls tasks` lists all of them."
        )
    entry = index[name]
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name != "GROUP":
        return [name]
    children = entry.cfg["task"]
    if not all(isinstance(child, str) for child in children):
        raise EvaluationError(
            f"The group {name!r} changes the definitions of its tasks. Name single tasks instead."
        )
    return [leaf for child in children for leaf in _leaves(child, index)]
