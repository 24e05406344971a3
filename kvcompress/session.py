"""`press(model, policy)`: compress every cache that a model is called with."""

import copy
import inspect
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from kvcompress import attention
from kvcompress.errors import (
    PressStateError,
    ShapeError,
    UnsupportedCacheError,
    UnsupportedModeError,
)
from kvcompress.hosting import (
    CompressedCache,
    check_fit,
    host_cache,
    hostable_model,
    state_of,
)
from kvcompress.plugins import policy_from
from kvcompress.policy import Policy
from kvcompress.prefill import ChunkedPrefill, Progress
from kvcompress.report import Report
from kvcompress.saving import load_cache, save_cache
from kvcompress.state import CacheState

_pressed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_pressed_lock = threading.Lock()


def press(model: nn.Module, policy: Policy | str | dict[str, Any]) -> "Session":
    """A context in which every call of `model` compresses its KV cache.

        with press(model, SnapKVPolicy(capacity=2048)) as session:
            output = model.generate(**inputs, max_new_tokens=100)
        print(session.report())

    `generate`, pipelines and plain calls of the model are covered, in all threads. For two policies
    on one model at a time, or a compressed and a plain cache, use `CompressedCache`.

    Args:
        model: A transformers decoder model; PEFT and compile wrappers are looked through.
        policy: A policy, or its string or dict form.

    Raises:
        UnsupportedModelError: The model cannot be hosted.
        PolicyConfigError: The policy is wrong in itself or for this model.
        PressStateError: The model is in a `press` context already (on entering).
    """
    return Session(model, policy_from(policy))


class Session:
    """An open or closed `press` context and the numbers of the caches that it has seen."""

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self._model = hostable_model(model)
        check_fit(self._model, policy)  # refused now rather than in the first forward
        self._states: dict[CacheState, None] = {}  # in order of adoption
        self._cache: weakref.ref[Cache] | None = None
        self._undo: list[Any] = []
        self._lease: attention.Lease | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Session":
        modules = _entry_points(self._model)
        with _pressed_lock:
            if any(module in _pressed for module in modules):
                raise PressStateError(
                    f"This {type(self._model).__name__} is in a press context already; contexts do "
                    "not nest. Leave the other one first, or use CompressedCache(model, policy), "
                    "of which any number can be used side by side."
                )
            _pressed.update(modules)
        self._lease = attention.Lease()
        for module in modules:
            before, after = _BeforeForward(self), _AfterForward(self)
            self._undo += [
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]
            attention.require_hosting(module, True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._undo:
            handle.remove()
        self._undo.clear()
        modules = _entry_points(self._model)
        for module in modules:
            attention.require_hosting(module, False)
        with _pressed_lock:
            _pressed.difference_update(modules)
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        attention.withdraw()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that is called."""
        return self._model

    @property
    def is_open(self) -> bool:
        """Whether the context has been entered and not left."""
        return self._lease is not None

    @property
    def cache(self) -> Cache | None:
        """The cache that was adopted last, if it is still alive; the session keeps none alive."""
        return self._cache() if self._cache is not None else None

    @property
    def reports(self) -> list[Report]:
        """One report for every cache of the context, oldest first."""
        return [state.report() for state in self._states]

    def report(self) -> Report:
        """The report of the cache that was adopted last.

        Raises:
            PressStateError: The model was not called in this context.
        """
        if not self._states:
            raise PressStateError(
                "There is nothing to report: the model was not called with a cache in this "
                "context. Call model.generate(...) or model(...) inside it first."
            )
        return next(reversed(self._states)).report()

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk_size: int,
        lookahead: int | None = None,
        hold_back: int = 1,
        spare: int | None = None,
        progress: Progress | None = None,
    ) -> CompressedCache:
        """Read a prompt of any length in memory that does not depend on it.

        The prompt goes through in chunks, and after each of them the cache is cut to a working
        capacity, the policy's budget and `spare`; at the end to the budget. It never holds more
        than the working capacity, a chunk and the look-ahead. With one chunk it holds what an
        ordinary prefill keeps. Memory is O(capacity + chunk), time O(prompt x (capacity + chunk)).

            cache = session.prefill(input_ids, chunk_size=512)
            model.generate(input_ids, past_key_values=cache, max_new_tokens=100)

        Differs from ordinary prefill with more than one chunk: rows that go early cannot be asked
        for later, and later tokens are computed from what is left.

        Args:
            input_ids: batch x prompt.
            attention_mask: The same, 0 for padding, which must be at the left.
            chunk_size: Tokens between two evictions.
            lookahead: How many of the prompt's last tokens (the question) vote after every chunk,
                at their true positions; as many queries as the policy reads unless given. With 0
                every chunk is judged by its own end, as for a context whose question comes later.
            hold_back: Tokens at the end that are left out of the cache, but not of the votes, so
                that `generate` with the whole prompt has something to feed. 0 for a context that
                will be asked about later.
            spare: Rows beyond its budget that every layer keeps until the prompt's end, so that
                fewer go for good before all was read; as many as its budget unless given. 0 takes
                least memory.
            progress: Called with the tokens that were read, and all of them.

        Returns:
            A cache that has seen all but `hold_back` tokens; it may outlive the context.

        Raises:
            PolicyConfigError: The policy's budget is not fixed, or too small for that.
            ShapeError: The sizes do not fit together, or are none.
            UnsupportedModeError: The policy cannot act like this.
        """
        cache = CompressedCache(self._model, self.policy)
        run = ChunkedPrefill(
            self._model,
            cache,
            cache_argument(self._model),
            input_ids,
            attention_mask,
            chunk_size=chunk_size,
            lookahead=lookahead,
            hold_back=hold_back,
            spare=spare,
        )
        run.run(progress)
        cache.hold_back(input_ids[:, input_ids.shape[1] - hold_back :].clone())
        return cache

    def ask(
        self,
        cache: Cache,
        question: Tensor,
        *,
        fork: bool = True,
        **options: Any,
    ) -> Any:
        """Generate an answer to a question about what a cache has read.

            context = session.prefill(document, chunk_size=512, hold_back=0)
            first = session.ask(context, question, max_new_tokens=50)
            second = session.ask(context, another, max_new_tokens=50)

        A question is a later turn: at its end the cache is cut as the policy's `later_turns` says.

        Args:
            cache: From `prefill`, or one that was asked before.
            question: Tokens of one or more questions of equal length, without the context;
                several about one context share a batch.
            fork: Answer from a copy, so that the next question finds the cache as it was. Without,
                the conversation goes on in it.
            **options: For `generate`; beams and several answers included.

        Returns:
            The new tokens, batch x answer; what `generate` gives with `return_dict_in_generate`.

        Raises:
            PressStateError: The question is empty, or the batch does not fit the cache's.
            ShapeError: The question is no tensor.
        """
        if (
            not isinstance(cache, CompressedCache)
            or cache.held_back is None
            or cache.get_seq_length() != cache.held_back_at
        ):
            raise PressStateError(
                "Which tokens of its text the cache has still to read is not known: it was not "
                "made by session.prefill(...), or was used since by others than session.ask. Ask "
                "a fresh one, or call model.generate with the whole conversation."
            )
        if not isinstance(question, Tensor):
            raise ShapeError(
                f"The question is a {type(question).__name__}; it must be a tensor of token ids, "
                "(batch, tokens), as a tokenizer gives with return_tensors='pt'."
            )
        if question.ndim != 2 or question.shape[1] == 0:
            raise PressStateError(
                f"A question has {tuple(question.shape)} tokens; pass (batch, at least one)."
            )
        wider = _versions(options)
        if wider > 1 and not fork:
            raise PressStateError(
                f"fork=False, and {wider} beams or answers of a question: it would not be known "
                "which of them the conversation goes on from. Fork, or ask for one."
            )
        held_back = cache.held_back
        contexts, asked = held_back.shape[0], question.shape[0]
        if asked != contexts and contexts > 1:
            raise PressStateError(
                f"{asked} questions, and a cache of {contexts} contexts: pass one for each of them."
            )
        if asked > 1 and not fork:
            raise PressStateError(
                f"{asked} questions at once, and fork=False: answers end at different places, so a "
                "conversation goes on in a cache of one row. Fork, or ask one."
            )
        own = copy.deepcopy(cache) if fork else cache
        if asked != contexts:
            own.batch_repeat_interleave(asked)
        if wider > 1:
            own.batch_repeat_interleave(wider)
        ids = torch.cat([held_back.expand(asked, -1), question.to(held_back.device)], dim=1)
        columns = torch.arange(own.get_seq_length() + ids.shape[1], device=ids.device)
        state = state_of(own)
        pads = columns[:1] if state is None or state.pads is None else state.pads[::wider, None]
        generate: Any = self._model.generate
        output = generate(
            ids,
            attention_mask=(columns >= pads).expand(asked, -1).long(),
            **{cache_argument(self._model): own},
            **options,
        )
        sequences = output if isinstance(output, Tensor) else output.sequences
        if not fork:
            own.hold_back(sequences[:, -1:])  # the last token of an answer is not fed
        return output[:, ids.shape[1] :] if isinstance(output, Tensor) else output

    def save(
        self,
        cache: Cache,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write a cache to one file; see `kvcompress.saving.save_cache`."""
        save_cache(cache, path, self._model, tokenizer)

    def load(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> CompressedCache:
        """A cache from a file; see `kvcompress.saving.load_cache`.

        Raises:
            CacheFileError: The file cannot be used with this model.
            PressStateError: It was compressed by another policy.
        """
        cache = load_cache(path, self._model, tokenizer)
        if cache.policy != self.policy:
            raise PressStateError(
                f"{path} was compressed by {cache.policy}, and this context asks for "
                f"{self.policy}. Load it under its own policy."
            )
        return cache

    def adopt(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Host the cache that `module` is called with; supply one if it would make its own."""
        attention.withdraw()
        cache = _find_cache(args, kwargs)
        if cache is None:
            if not _will_cache(module, kwargs):
                return
            cache = DynamicCache(config=self._model.config)
            for name in ("cache", "past_key_values"):  # given as None
                kwargs.pop(name, None)
            kwargs[cache_argument(module)] = cache
        state = state_of(cache)
        if state is None or state not in self._states:
            state = host_cache(cache, self._model, self.policy, forward_is_turn=True)
            with self._lock:
                self._states[state] = None
            self._cache = weakref.ref(cache)


def _entry_points(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the modules inside it that may be called by themselves."""
    modules: list[PreTrainedModel] = []
    for module in (model, model.base_model, model.get_decoder()):
        if isinstance(module, PreTrainedModel) and module not in modules:
            modules.append(module)
    return modules


def _find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    for name in ("cache", "past_key_values"):
        given = kwargs.get(name)
        if given is not None and not isinstance(given, Cache):
            raise UnsupportedCacheError(
                f"A {type(given).__name__} cannot be compressed. Pass a DynamicCache, or none."
            )
    for value in (*kwargs.values(), *args):
        if isinstance(value, EncoderDecoderCache):
            raise UnsupportedCacheError(
                "An EncoderDecoderCache cannot be compressed. Pass a DynamicCache, or none."
            )
        if isinstance(value, Cache):
            return value
    return None


def cache_argument(module: nn.Module) -> str:
    """What the cache is called among a model's arguments and outputs."""
    # Renamed from past_key_values to cache in transformers 5.24.
    parameters = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _versions(options: dict[str, Any]) -> int:
    """How many rows of a cache `generate` needs for each of its prompts: beams, or answers."""
    config = options.get("generation_config")
    names = ("num_beams", "num_return_sequences")
    return max(options.get(name) or getattr(config, name, None) or 1 for name in names)


def _will_cache(module: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether a forward that was given no cache would make one."""
    wanted = kwargs.get("use_cache")
    if attention.current_generation() is not None and wanted is False:
        raise UnsupportedModeError(
            "generate(use_cache=False) keeps no cache that could be compressed. Leave use_cache "
            "out, or leave the press context."
        )
    if wanted is None:
        wanted = getattr(module.config.get_text_config(decoder=True), "use_cache", True)
    if module.training and wanted:
        # Checkpointing keeps no cache; the model's own property for it has changed its name.
        parts = module.modules()
        return not any(getattr(part, "gradient_checkpointing", False) for part in parts)
    return bool(wanted)


class _Hook:
    """A hook that can be copied and pickled with the model, and then does nothing."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = None if session is None else weakref.ref(session)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()

    @property
    def session(self) -> Session | None:
        """The open session, in the model that it was made for."""
        return None if self._session is None else self._session()


class _BeforeForward(_Hook):
    @torch.compiler.disable
    def __call__(
        self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.session is not None:
            self.session.adopt(module, args, kwargs)
        return args, kwargs


class _AfterForward(_Hook):
    @torch.compiler.disable
    def __call__(
        self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        attention.withdraw()
        if self.session is None or output is None:  # None: the forward raised
            return
        cache = _find_cache(args, kwargs)
        state = None if cache is None else state_of(cache)
        if state is not None and state.attended < state.num_layers:
            raise state.bypassed(state.counts[state.attended].layer_idx)
