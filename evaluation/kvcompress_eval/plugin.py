"""The commands that this package adds to the command line; imports no torch."""

import typer

from kvcompress.hookspecs import hookimpl


@hookimpl
def kvcompress_commands(app: typer.Typer) -> None:
    """Demo, benchmarks and evaluations."""
    from kvcompress_eval.bench_command import bench, bench_report
    from kvcompress_eval.compare import compare
    from kvcompress_eval.demo import demo
    from kvcompress_eval.fidelity_command import fidelity
    from kvcompress_eval.leak_command import leak
    from kvcompress_eval.lm_eval_command import lm_eval
    from kvcompress_eval.long_prompts import long_prompts
    from kvcompress_eval.needle_grid import needle
    from kvcompress_eval.observe import observe
    from kvcompress_eval.plan_command import plan
    from kvcompress_eval.show import show
    from kvcompress_eval.stream import stream
    from kvcompress_eval.tune_command import tune

    theirs = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("lm-eval", context_settings=theirs, add_help_option=False)(lm_eval)
    app.command()(demo)
    app.command()(bench)
    app.command("bench-report")(bench_report)
    app.command()(needle)
    app.command()(show)
    app.command()(observe)
    app.command()(long_prompts)
    app.command()(stream)
    app.command()(compare)
    app.command()(plan)
    app.command()(fidelity)
    app.command()(tune)
    app.command()(leak)
