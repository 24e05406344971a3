"""`press(model, policy)`: compress every cache that a model is called with."""

import inspect
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from kvcompress import attention
from kvcompress.errors import PressStateError, UnsupportedCacheError, UnsupportedModeError
from kvcompress.hosting import check_fit, host_cache, hostable_model, state_of
from kvcompress.plugins import policy_from
from kvcompress.policy import Policy
from kvcompress.report import Report
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


def cache_argument(module: PreTrainedModel) -> str:
    """What the cache is called among a model's arguments and outputs."""
    # Renamed from past_key_values to cache in transformers 5.24.
    parameters = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


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
