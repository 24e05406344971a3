"""`lm_eval --model snapkv-hf`: lm_eval's Hugging Face model, answering from a compressed cache."""

import bisect
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple

import torch
import transformers
from accelerate.utils import find_executable_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

import kvcompress
from kvcompress import (
    CompressedCache,
    DecodePolicy,
    EvaluationError,
    Policy,
    UnsupportedModelError,
    press,
)
from kvcompress.hosting import hostable_model, hosted_layers
from kvcompress.models import source_of
from kvcompress.prefill import check_chunks
from kvcompress.session import cache_argument
from kvcompress_eval.comparison import UNCOMPRESSED
from kvcompress_eval.measure import cache_of
from kvcompress_eval.model_args import (
    check_settings,
    make_policy,
    split_fields,
    unknown_argument,
)
from kvcompress_eval.nltk_data import check_punkt
from kvcompress_eval.one_prefill import end_tokens
from kvcompress_eval.samples import Sample, dense_bytes, held_rows, summary

logger = logging.getLogger(__name__)

_FINGERPRINT = "kvcompress fingerprint"
_SAMPLES = "kvcompress samples "


class Prompt(NamedTuple):
    """A prompt as it is fed."""

    ids: list[int]
    context: int
    """With compress=context: tokens at its front that are compressed before the rest is seen."""
    truncated: bool
    requests: list[Instance]
    """Those that it answers; several if their prompts are equal."""


@dataclass(frozen=True)
class Scored:
    """A continuation to be scored by reading the compressed cache at each of its tokens."""

    number: int
    text: tuple[str, str] | None
    prompt: Prompt
    continuation: list[int]

    @property
    def prefix(self) -> tuple[int, ...]:
        """What is compressed; requests that share it share its cache."""
        return tuple(self.prompt.ids[: self.prompt.context])

    @property
    def question(self) -> int:
        """Tokens of the prompt that are read after that."""
        return len(self.prompt.ids) - self.prompt.context

    @property
    def fed(self) -> list[int]:
        """All tokens that are read after that."""
        return self.prompt.ids[self.prompt.context :] + self.continuation[:-1]


class SnapKVLM(HFLM):  # type: ignore[misc]
    """HFLM whose every answer and every scored token comes from a compressed cache.

    Args:
        pretrained: As for HFLM; `smollm2` is the embedded model.
        policy: A policy in any of its forms; `none` leaves the cache whole. In `model_args` the
            fields of a policy that is not composed may stand beside it: `policy=h2o,capacity=512`.
        truncate: What goes where a prompt is too long for the model: its beginning, as in HFLM, or
            its middle, as in LongBench. Differs from LongBench's own code: it cuts tokens of the
            finished prompt, so that a chat template's ends stay.
        compress: `prompt` compresses when the whole prompt was read, so that its question votes, as
            the papers do. `context` compresses when a document's `context` was read, before its
            question is seen, as a cache of prefixes would; prompts are then answered one by one.
        rolling: Perplexities of whole texts have no prompt that could be compressed; they are
            refused, unless they are to be computed `uncompressed`.
        prefill_chunk_size: Read prompts in chunks of as many tokens, in memory that does not depend
            on their length; see `Session.prefill`. No effect with `policy=none`.
        lookahead: With `prefill_chunk_size`: the prompt's last tokens that vote after every chunk.
            None do with `compress=context`.
        spare: With `prefill_chunk_size`: rows beyond its budget that every layer keeps until all
            chunks were read.
        **arguments: Fields of the policy, and whatever HFLM takes.

    Raises:
        EvaluationError: An argument is unknown or has a value that it cannot have.
        PolicyConfigError: The policy is wrong in itself or for this model.
        UnsupportedModelError: The model cannot be hosted.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        policy: Any = "snapkv",
        truncate: Literal["left", "middle"] = "left",
        compress: Literal["prompt", "context"] = "prompt",
        rolling: Literal["refuse", "uncompressed"] = "refuse",
        prefill_chunk_size: int | None = None,
        lookahead: int | None = None,
        spare: int | None = None,
        **arguments: Any,
    ) -> None:
        self.settings: dict[str, Any] = {
            "truncate": truncate,
            "compress": compress,
            "rolling": rolling,
            "prefill_chunk_size": prefill_chunk_size,
            "lookahead": lookahead,
            "spare": spare,
        }
        check_settings(self.settings)
        fields, arguments = split_fields(arguments, self.settings, HFLM)
        self.policy = make_policy(policy, fields)
        if self.policy is None:
            # Not recorded either: such a run reads every prompt at once.
            self.settings |= {"prefill_chunk_size": None, "lookahead": None, "spare": None}
        if compress == "context" and arguments.get("truncation"):
            raise EvaluationError(
                "model_args: truncation=True cuts prompts where compress=context needs to find "
                "their documents. Leave it out; truncate=left or middle is for long prompts."
            )
        if pretrained is None:
            raise EvaluationError(
                "model_args: no model. Give pretrained=, a name on the hub or a folder, or smollm2 "
                "for the embedded model."
            )
        if isinstance(pretrained, str):
            pretrained = source_of(pretrained)
        try:
            super().__init__(pretrained, **arguments)
        except TypeError as error:
            name = unknown_argument(error)
            if name not in arguments:
                raise
            raise EvaluationError(
                f"model_args: neither kvcompress, lm_eval nor the model knows {name!r}."
            ) from error
        free = ("batch_size", "max_batch_size", "device")
        self._given = {name: str(arguments[name]) for name in sorted(set(arguments) - set(free))}
        if self.backend != "causal":
            raise UnsupportedModelError(
                f"{self.config.model_type} is no decoder model; evaluate it with --model hf."
            )
        model: Any = self.model
        adapter = getattr(model, "active_peft_config", None)
        if self.policy is not None and getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                "The adapter learns a prompt, whose virtual tokens come anew with every call of "
                "the model, and scoring takes several. Use --model hf, or policy=none."
            )
        if self.policy is not None:
            press(model, self.policy)  # refuses what does not fit, before any task is run
            model = hostable_model(model)
            self._layers = len(hosted_layers(model.config))
            if self.settings["prefill_chunk_size"]:
                ahead = 0 if self._splits_contexts else self.settings["lookahead"]
                check_chunks(self.policy, self._layers, ahead)
        self._cache_name = cache_argument(model)
        if hasattr(self, "accelerator"):
            # HFLM does so for GPUs only, and would let every CPU process answer every request.
            self._rank = self.accelerator.process_index
            self._world_size = self.accelerator.num_processes
        self._samples: dict[Any, Sample] = {}
        self._asked: dict[Any, list[Instance]] = {}
        self._prompts: list[Prompt] = []
        self._probed: tuple[int, int] | None = None  # requests, tokens of the longest
        self._sample_cache: Any = None

    @property
    def _policy_name(self) -> str:
        """As it was asked for, in its canonical form."""
        return UNCOMPRESSED if self.policy is None else self.policy.to_string()

    @property
    def _policy_fields(self) -> dict[str, Any] | None:
        """All fields of the policy as it is applied, those that were left to defaults too."""
        if self.policy is None:
            return None
        policy = self._policy_for_context if self._splits_contexts else self.policy
        fields: dict[str, Any] = policy.model_dump(mode="json", serialize_as_any=True)
        return fields

    @property
    def _splits_contexts(self) -> bool:
        """Whether a document is compressed before its question is read."""
        return self.policy is not None and self.settings["compress"] == "context"

    @property
    def _policy_for_context(self) -> Policy:
        """What compresses a context whose question comes later, and leaves the question whole."""
        assert self.policy is not None
        part = self.policy.part("prefill")
        if self.policy.part("decode") is None:
            return self.policy.model_copy(update={"later_turns": "keep"})
        if part is not None and self.policy.spares_prompt:
            return self.policy.model_copy(
                update={"prefill": part.model_copy(update={"later_turns": "keep"})}
            )
        return self.policy  # goes on evicting anyhow, as the question and the answer are read

    # Answers.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As HFLM's, from the compressed cache.

        Raises:
            EvaluationError: The answers could not be scored, or nothing would be compressed.
        """
        check_punkt([request.doc for request in requests])
        self._note(requests, lambda request: request.args[0])
        for request in requests:
            if self._splits_contexts:
                self._until_question(request.args[0])
            answers_each = request.args[1].get("num_return_sequences") or 1
            if answers_each > 1:
                raise EvaluationError(
                    f"gen_kwargs: num_return_sequences={answers_each}, and a prompt is answered "
                    "once. Leave it out; repeats of a task ask several times."
                )
        if self.batch_size == "auto":
            lengths = [len(self.tok_encode(request.args[0])) for request in requests]
            self._probed = len(requests), min(max(lengths), self.max_length)
        answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return answers

    def _note(self, requests: Sequence[Instance], key: Any) -> None:
        """Remember which request a prompt belongs to; lm_eval's batches no longer tell."""
        self._asked = {}
        once = {id(request): request for request in requests}  # asked repeatedly, it is one
        for request in once.values():
            self._asked.setdefault(key(request), []).append(request)

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """As HFLM's; prompts longer than `left_truncate_len` are cut as `truncate` says."""
        ids, mask = super().tok_batch_encode(
            list(strings), padding_side=padding_side, truncation=truncation
        )
        self._prompts = []
        for string, row, real in zip(strings, ids, mask.bool(), strict=True):
            tokens = row[real].tolist()
            context = len(tokens)
            if self._splits_contexts:
                before, _ = super().tok_batch_encode([self._until_question(string)])
                context = _common(before[0].tolist(), tokens)
            self._prompts.append(self._fit(string, tokens, context, left_truncate_len))
        cut = sum(prompt.truncated for prompt in self._prompts)
        if cut:
            logger.warning(
                "%d of %d prompts were cut to %s tokens (truncate=%s).",
                cut,
                len(strings),
                left_truncate_len,
                self.settings["truncate"],
            )
        return _padded([prompt.ids for prompt in self._prompts], self.tokenizer.pad_token_id)

    def _until_question(self, prompt: str) -> str:
        """The prompt's beginning that ends with its document."""
        request = self._asked[prompt][0]
        context = request.doc.get("context")
        count = prompt.count(context) if isinstance(context, str) and context else None
        if count != 1:
            found = "has no column named context"
            if count is not None:
                found = f"does not contain its column named context, once, but {count} times"
            raise EvaluationError(
                f"compress=context needs to tell a document from the question, and the prompt of "
                f"row {request.doc_id} of {request.task_name} {found}. Use compress=prompt."
            )
        return prompt[: prompt.index(context) + len(context)]

    def _fit(self, key: Any, tokens: list[int], context: int, limit: int | None) -> Prompt:
        """Cut a prompt to `limit` tokens; the last one is always read after the context."""
        cut = limit is not None and len(tokens) > limit
        if cut:
            assert limit is not None
            front = limit // 2 if self.settings["truncate"] == "middle" else 0
            back = len(tokens) - (limit - front)
            context -= max(0, min(context, back) - front)
            tokens = tokens[:front] + tokens[back:]
        context = max(1, min(context, len(tokens) - 1))
        return Prompt(tokens, context, cut, self._asked.get(key, []))

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        """Token ids as HFLM's: a row of `context` and its answer, in every row."""
        prompts, width = self._prompts, context.shape[1]
        mask = kwargs.pop("attention_mask")
        answers: list[list[int]] = [[] for _ in prompts]
        for rows in self._groups([len(prompt.ids) for prompt in prompts]):
            longest = max(len(prompts[row].ids) for row in rows)
            output = self._answer(
                context[rows, width - longest :],
                [prompts[row] for row in rows],
                max_length=max_length - width + longest,
                stop=stop,
                attention_mask=mask[rows, width - longest :],
                **kwargs,
            )
            for row, tokens in zip(rows, output[:, longest:].tolist(), strict=True):
                answers[row] = tokens
        most = max(map(len, answers))
        pad = self.tokenizer.pad_token_id
        filled = [tokens + [pad] * (most - len(tokens)) for tokens in answers]
        return torch.cat([context, torch.tensor(filled, device=context.device)], dim=1)

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows that may be compressed in one batch: those to which the policy gives one budget."""
        if self._splits_contexts:
            return [[row] for row in range(len(lengths))]
        groups: dict[Any, list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault(self._budgets(length), []).append(row)
        return list(groups.values())

    def _budgets(self, length: int) -> Any:
        """What a prompt's length decides."""
        if self.policy is None:
            return None
        parts = [part for part in (self.policy.part("prefill"), self.policy.part("decode")) if part]
        layers = range(self._layers)
        budgets = [[part.budget(length, each, len(layers)) for each in layers] for part in parts]
        # Rows shorter than what is kept would bring padding among the rows that always stay.
        alone = self.policy.spares_prompt and length <= max(budgets[0])
        # So would one that is shorter than what looks ahead: none of a batch then reads in chunks.
        chunk = self.settings["prefill_chunk_size"]
        alone |= chunk is not None and length <= chunk
        return str(budgets), length if alone else None

    def _answer(self, ids: Tensor, prompts: list[Prompt], **kwargs: Any) -> Tensor:
        kwargs["return_dict_in_generate"] = True
        if self.policy is None:
            output = super()._model_generate(ids, **kwargs)
        elif self._splits_contexts:
            cache = self._compressed(ids[:, : prompts[0].context])
            output = super()._model_generate(ids, **{self._cache_name: cache}, **kwargs)
        else:
            with press(self.model, self.policy) as session:
                if self.settings["prefill_chunk_size"]:
                    mask = kwargs["attention_mask"]
                    kwargs[self._cache_name] = session.prefill(ids, mask, **self._chunks(mask))
                output = super()._model_generate(ids, **kwargs)
        sequences: Tensor = output.sequences
        lengths = [
            len(prompt.ids) + self._until_end(tokens, kwargs["stop"]) - 1
            for prompt, tokens in zip(prompts, sequences[:, ids.shape[1] :].tolist(), strict=True)
        ]
        evicted = list(map(self._must_evict, prompts, lengths))
        held = held_rows(cache_of(output), lengths, self._evicts_later, evicted)
        self._add(prompts, lengths, held)
        return sequences

    def _until_end(self, answer: list[int], stop: list[str]) -> int:
        """Tokens of an answer up to its end, which other rows of the batch may outlast."""
        known = end_tokens(self.model)
        size = len(list(takewhile(lambda token: token not in known, answer))) + 1
        size = min(size, len(answer))

        def stopped(tokens: int) -> bool:
            text = self.tok_decode(answer[:tokens], skip_special_tokens=False)
            return any(end in text for end in stop)

        return bisect.bisect_left(range(size), True, key=stopped)

    def _compressed(self, ids: Tensor, mask: Tensor | None = None) -> CompressedCache:
        """A cache that has read `ids` and been cut."""
        policy = self._policy_for_context if self._splits_contexts else self.policy
        assert policy is not None
        if self.settings["prefill_chunk_size"]:
            mask = torch.ones_like(ids) if mask is None else mask
            session = press(self.model, policy)
            return session.prefill(ids, mask, hold_back=0, **self._chunks(mask))
        cache = CompressedCache(self.model, policy, prompt_length=ids.shape[1])
        self._feed(ids, cache, mask)
        return cache

    def _chunks(self, mask: Tensor) -> dict[str, Any]:
        """How a prompt is read in chunks; a short one has less to look ahead to."""
        lookahead = 0 if self._splits_contexts else self.settings["lookahead"]
        if lookahead is not None:
            lookahead = min(lookahead, int(mask.sum(dim=1).min()) - 1)
        chunk, spare = self.settings["prefill_chunk_size"], self.settings["spare"]
        return {"chunk_size": chunk, "lookahead": lookahead, "spare": spare}

    def _feed(self, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        """Logits of all `ids` but, for the first call on a cache, only those of the last token."""
        seen = cache.get_seq_length()
        given: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if mask is not None:
            given["attention_mask"] = mask
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            given["position_ids"] = positions[:, -ids.shape[1] :]
        if not seen:
            given["logits_to_keep"] = 1
        with torch.no_grad(), self._autocast():
            logits: Tensor = self.model(ids, **given).logits
        return logits

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        )

    # Scores.

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """As HFLM's; every scored token reads the compressed cache."""
        self._note(requests, lambda request: tuple(request.args))
        if self._splits_contexts:
            for request in requests:
                if request.args[0]:
                    self._asked.setdefault(request.args[0], [request])
                    self._until_question(request.args[0])
        self._probed = None
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scores

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """As HFLM's, without compression, if that was asked for.

        Raises:
            EvaluationError: It was not.
        """
        if self.policy is not None and self.settings["rolling"] == "refuse":
            raise EvaluationError(
                f"{requests[0].task_name} asks for the likelihood of whole texts. They have no "
                "prompt, so there is nothing that could be compressed, and the score would be the "
                "uncompressed model's. Leave the task out, or say so with rolling=uncompressed."
            )
        self._asked, self._probed = {}, None
        for request in requests:
            text = Prompt(self.tok_encode(request.args[0]), 0, False, [request])
            self._add([text], [len(text.ids)], [self._dense(text)])
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        return scores

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Summed log-likelihood of every continuation, and whether it is the greedy one.

        The context but for its last token is fed and compressed once for all its continuations, as
        they are fed then, the last token first: so even the first scored token reads what is left.
        """
        everything = [
            Scored(number, text, self._split(text, context, continuation), continuation)
            for number, (text, context, continuation) in enumerate(requests)
        ]
        found: dict[int, tuple[float, bool]] = {}
        # Whole texts, and contexts of one token: nothing of them could be compressed.
        plain = [
            scored
            for scored in everything
            if self.policy is None or scored.text is None or len(scored.prompt.ids) == 1
        ]
        if plain:
            answers = super()._loglikelihood_tokens(
                [requests[scored.number] for scored in plain], disable_tqdm, override_bs
            )
            for scored, answer in zip(plain, answers, strict=True):
                found[scored.number] = answer
                self._add([scored.prompt], [len(scored.prompt.ids)], [self._dense(scored.prompt)])
        everything = [scored for scored in everything if scored.number not in found]
        size = override_bs or self.batch_size
        if size == "auto" and everything:
            longest = max(len(scored.prompt.ids) for scored in everything)
            self._probed = len(everything), longest
            size = self._detect_batch_size()
        with tqdm(
            total=len(everything),
            disable=disable_tqdm or self.rank != 0 or not everything,
            desc="Running loglikelihood requests",
        ) as bar:
            for batch in self._batches(everything, size):
                for scored, answer in self._scores(batch, size):
                    found[scored.number] = answer
                    if scored.text is not None:
                        self.cache_hook.add_partial("loglikelihood", scored.text, answer)
                    bar.update(1)
        return [found[number] for number in range(len(requests))]

    def _split(
        self, text: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> Prompt:
        """The prompt of a continuation, with what is compressed before the rest is read."""
        first = len(context) - 1
        if text is not None and self._splits_contexts and len(context) > 1:
            first = _common(self.tok_encode(self._until_question(text[0])), context)
        return self._fit(text, context, first, self.max_length + 1 - len(continuation))

    def _batches(self, everything: list[Scored], size: int) -> Iterator[list[list[Scored]]]:
        """Up to `size` contexts at a time, each with its continuations; the longest first."""
        by_prefix: dict[tuple[int, ...], list[Scored]] = {}
        for scored in everything:
            by_prefix.setdefault(scored.prefix, []).append(scored)
        by_budget: dict[Any, list[list[Scored]]] = {}
        for prefix in sorted(by_prefix, key=len, reverse=True):
            by_budget.setdefault(self._budgets(len(prefix)), []).append(by_prefix[prefix])
        # A budget that is set anew when the question ends may then differ.
        size = 1 if self._splits_contexts and self._evicts_later else size
        for group in by_budget.values():
            rest = iter(group)
            while batch := list(islice(rest, size)):
                yield batch

    def _scores(
        self, batch: list[list[Scored]], size: int
    ) -> Iterator[tuple[Scored, tuple[float, bool]]]:
        """Compress the contexts of a batch, then score all their continuations."""
        ids, mask = _padded([list(group[0].prefix) for group in batch], 0)
        ids, mask = ids.to(self.device), mask.to(self.device)
        cache = self._compressed(ids, mask)
        held = held_rows(cache, mask.sum(dim=1).tolist())
        waiting: dict[int, list[tuple[int, Scored]]] = {}
        for row, group in enumerate(batch):
            for scored in group:
                self._add([scored.prompt], [len(group[0].prefix)], [held[row]])
                # A policy that evicts as tokens come is told where the question ends.
                question = scored.question if self._evicts_later else 0
                waiting.setdefault(question, []).append((row, scored))
        chunks = [
            members[start : start + size]
            for members in waiting.values()
            for start in range(0, len(members), size)
        ]
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            fork = cache if last else copy.deepcopy(cache)
            rows = torch.tensor([row for row, _ in chunk], device=self.device)
            fork.batch_select_indices(rows)
            logits = self._read([scored for _, scored in chunk], fork, mask[rows])
            for (_, scored), own in zip(chunk, logits, strict=True):
                yield scored, self._judge(own[: len(scored.fed)], scored.continuation)

    @property
    def _evicts_later(self) -> bool:
        return self.policy is not None and self.policy.part("decode") is not None

    def _read(self, chunk: list[Scored], cache: Any, mask: Tensor) -> Tensor:
        """Logits of what is read after the compressed cache, padded at the right."""
        fed = [scored.fed for scored in chunk]
        longest = max(map(len, fed))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in fed], device=self.device)
        mask = torch.cat([mask, mask.new_ones(len(fed), longest)], dim=1)
        if not self._evicts_later:
            return self._feed(ids, cache, mask)
        # As `generate` would: the question at once, then token by token.
        seen, start, logits = mask.shape[1] - longest, 0, []
        for end in range(chunk[0].question, longest + 1):
            logits.append(self._feed(ids[:, start:end], cache, mask[:, : seen + end]))
            start = end
        return torch.cat(logits, dim=1)

    def _judge(self, logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
        wanted = torch.tensor(continuation, device=logits.device)
        chances = logits[-len(continuation) :].log_softmax(dim=-1, dtype=self.softmax_dtype)
        greedy = bool((chances.argmax(dim=-1) == wanted).all())
        return float(chances.gather(1, wanted[:, None]).sum()), greedy

    # Guards and numbers.

    def _dense(self, prompt: Prompt) -> tuple[float, float, float]:
        """What an uncompressed cache holds of a prompt."""
        if self._sample_cache is None:
            first = torch.tensor([prompt.ids[:1]], device=self.device)
            with torch.no_grad():
                self._sample_cache = cache_of(self.model(first, use_cache=True))
        size = float(dense_bytes(self._sample_cache, len(prompt.ids)))
        return float(len(prompt.ids)), size, size

    def _must_evict(self, prompt: Prompt, seen: int) -> bool:
        if self.policy is None:
            return False
        layers = range(self._layers)
        part, slack = self.policy.part("prefill"), 0
        if part is None:
            part = self.policy.part("decode")
            assert isinstance(part, DecodePolicy)
            if seen - len(prompt.ids) < part.interval:
                return False
            slack = part.interval
        else:
            seen = prompt.context
        return any(part.budget(seen, layer, len(layers)) + slack < seen for layer in layers)

    def _add(
        self,
        prompts: Sequence[Prompt],
        lengths: Sequence[int],
        held: Sequence[tuple[float, float, float]],
    ) -> None:
        """Note what the caches held.

        Raises:
            EvaluationError: Nothing was evicted where the policy has to.
        """
        for prompt, length, (tokens, held_bytes, dense) in zip(prompts, lengths, held, strict=True):
            if prompt.context and tokens >= length and self._must_evict(prompt, length):
                raise EvaluationError(
                    f"{self.policy} evicted nothing of a prompt of {len(prompt.ids)} tokens, which "
                    "is more than its budget: the scores would be the uncompressed model's. This "
                    "is a fault of kvcompress or of the policy; please report it."
                )
            for request in prompt.requests:
                sample = Sample(
                    task=request.task_name or "",
                    doc_id=request.doc_id,
                    prompt_tokens=len(prompt.ids),
                    seen_tokens=length,
                    held_tokens=tokens,
                    held_bytes=held_bytes,
                    dense_bytes=dense,
                    truncated=prompt.truncated,
                )
                key = _SAMPLES + hash_args(sample.task, (request.request_type, request.args))
                key += f" {sample.doc_id} {request.idx}"
                self._samples[key] = sample
                if self.cache_hook.dbdict is not None:
                    self.cache_hook.dbdict[key] = asdict(sample)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The most prompts whose prefill and compression fit, tried on the longest."""
        if self._probed is None:
            size: int = super()._detect_batch_size(requests, pos)
            return size
        if self.device.type == "cpu":
            logger.info("batch_size=auto is 1 on the CPU, where nothing tells what fits.")
            return 1
        count, tokens = self._probed
        try:
            size = find_executable_batch_size(
                lambda size: self._probe(size, tokens),
                starting_batch_size=min(self.max_batch_size, count),
            )()
        except RuntimeError as error:
            if "No executable batch size" not in str(error):
                raise
            size = 1
        if self.world_size > 1:
            size = int(self.all_gather(torch.tensor([size], device=self.device)).min())
        return size

    def _probe(self, size: int, tokens: int) -> int:
        """Prefill a batch as big as that and feed one more token; gives its size."""
        ids = torch.ones(size, tokens, dtype=torch.long, device=self.device)
        cache: Any = transformers.DynamicCache(config=self.model.config)
        if self.policy is not None:
            cache = CompressedCache(self.model, self.policy, prompt_length=tokens)
        self._feed(ids, cache)
        self._feed(ids[:, :1], cache)
        return size

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Use lm_eval's request cache, whose keys know nothing of models and policies.

        Raises:
            EvaluationError: It holds answers of another model, policy or setting.
        """
        store = cache_hook.dbdict
        if store is not None:
            mine = self._fingerprint()
            known = store.get(_FINGERPRINT)
            if known is None and len(store) == 0:
                store[_FINGERPRINT] = known = mine
            if known is None:
                raise EvaluationError(
                    "--use_cache: this file was not written by kvcompress, and its answers would "
                    "be taken for this run's. Give each run a file of its own."
                )
            # A setting that an earlier release did not know is one that was not given.
            differs = [
                f"{name} was {known.get(name)!r}, is {mine.get(name)!r}"
                for name in dict.fromkeys([*mine, *known])
                if known.get(name) != mine.get(name)
            ]
            if differs:
                raise EvaluationError(
                    "--use_cache: this file has answers of another run, and they would be taken "
                    f"for this one's. {'; '.join(differs)}. Give each run a file of its own."
                )
            stored = {key: store[key] for key in store if key.startswith(_SAMPLES)}
            self._samples |= {key: Sample(**fields) for key, fields in stored.items()}
        super().set_cache_hook(cache_hook)

    def _fingerprint(self) -> dict[str, Any]:
        """Everything on which answers depend."""
        model = self.pretrained
        return {
            "policy": self._policy_name,
            **self.settings,
            "model": model if isinstance(model, str) else self.config.name_or_path,
            **self._given,
            "dtype": str(self.model.dtype),
            "attention": self.model.config._attn_implementation,
            "max_length": self.max_length,
            **_versions(),
        }

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """As HFLM's. What the caches of other processes held comes along with what lm_eval wants.

        That is the one call in which all processes surely take part.
        """
        mine = {} if self.rank == dst else self._samples
        gathered: list[Any] | None = super().gather_object((obj, mine), dst=dst)
        if gathered is None:
            self._samples = {}
            return None
        for _, theirs in gathered:
            self._samples |= theirs
        return [wanted for wanted, _ in gathered]

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's, and under `kvcompress` the policy, the settings and what the caches held."""
        info: dict[str, Any] = super().get_model_info()
        return info | {
            "kvcompress": {
                "policy": self._policy_name,
                "policy_fields": self._policy_fields,
                **self.settings,
                "versions": _versions(),
                "device": str(self.device),
                "tasks": summary(self._samples.values()),
            }
        }


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens at the front are the same."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return len(list(same))


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens as a batch padded at the left, and its mask."""
    longest = max(map(len, rows))
    gaps = [longest - len(row) for row in rows]
    ids = [[pad] * gap + list(row) for gap, row in zip(gaps, rows, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
    return torch.tensor(ids), torch.tensor(mask)


def _versions() -> dict[str, str]:
    return {
        "kvcompress": kvcompress.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
