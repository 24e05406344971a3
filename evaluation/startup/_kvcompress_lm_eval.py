"""Makes `lm_eval --model snapkv-hf` known to releases of lm_eval that read no entry points.

Python runs `install` at every start, so it imports nothing and only waits: when `lm_eval.models` is
imported, the names are added to its registry as text, behind which nothing is loaded until a model
of that name is asked for. Set KVCOMPRESS_NO_LM_EVAL_HOOK to anything to leave it out; uninstalling
kvcompress removes it.
"""

import sys

NAMES = ("snapkv-hf", "kvcompress-hf")
TARGET = "kvcompress_eval.harness:SnapKVLM"
WAITS_FOR = "lm_eval.models"


def register():
    """Add the names to lm_eval's models, unless they are there."""
    from lm_eval.api.registry import model_registry

    for name in NAMES:
        if name not in model_registry:
            model_registry.register(name, target=TARGET)


class Finder:
    """Finds one module by asking the finders behind it, and registers after it has run."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """A spec of `lm_eval.models` that registers; None for every other module."""
        if name != WAITS_FOR:
            return None
        for finder in sys.meta_path:
            find = None if finder is cls else getattr(finder, "find_spec", None)
            spec = find and find(name, path, target)
            if spec:
                return registering(spec)
        return None


def registering(spec):
    """The spec, whose module will be followed by our names."""
    run = getattr(spec.loader, "exec_module", None)
    if run is not None:

        def run_and_register(module):
            run(module)
            try:
                register()
            except Exception as error:  # lm_eval itself must go on working
                import warnings

                names = ", ".join(NAMES)
                warnings.warn(f"lm_eval will not know {names}: {error!r}", stacklevel=2)

        spec.loader.exec_module = run_and_register
    return spec


def install():
    """Wait for lm_eval, in this process."""
    import os

    unwanted = "KVCOMPRESS_NO_LM_EVAL_HOOK" in os.environ
    if not unwanted and WAITS_FOR not in sys.modules and Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
