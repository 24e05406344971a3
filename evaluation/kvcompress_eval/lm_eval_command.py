"""`kvcompress lm-eval`: lm_eval's own command line, with our models in it, hook or no hook."""

import sys

import typer

from kvcompress.errors import EvaluationError

INSTALL = "pip install 'kvcompress[eval]'"


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval; all arguments are its own. Adds the models snapkv-hf and kvcompress-hf."""
    try:
        import lm_eval.models  # noqa: F401
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise EvaluationError(
            f"Evaluating needs lm_eval, and {error.name} is not installed. Run: {INSTALL}."
        ) from None
    import _kvcompress_lm_eval

    _kvcompress_lm_eval.register()
    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
