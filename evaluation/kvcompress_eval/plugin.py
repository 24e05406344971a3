"""The commands that this package adds to the command line; imports no torch."""

import typer

from kvcompress.hookspecs import hookimpl


@hookimpl
def kvcompress_commands(app: typer.Typer) -> None:
    """Demo and benchmarks."""
    from kvcompress_eval.bench import bench
    from kvcompress_eval.demo import demo
    from kvcompress_eval.stream import stream

    app.command()(demo)
    app.command()(bench)
    app.command()(stream)
