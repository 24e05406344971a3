"""The page of the command line, from the commands themselves."""

import textwrap

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command


def page() -> str:
    """All commands with their arguments, in Markdown."""
    from kvcompress.cli import app
    from kvcompress.plugins import registry

    registry().add_commands(app)  # again does no harm: commands have names
    group = get_command(app)
    parts = [
        textwrap.dedent(
            """\
            # Command line

            Everything that `kvcompress --help` says. Whatever a command refuses is one line that
            says what to do, and exit code 1, or 2 for arguments that cannot be read.
            """
        )
    ]
    context = typer.Context(group, info_name="kvcompress")
    commands = getattr(group, "commands", {})
    for name in sorted(commands):
        text = get_docs_for_click(
            obj=commands[name],
            ctx=typer.Context(commands[name], info_name=name, parent=context),
            indent=1,
            call_prefix="kvcompress",
        )
        parts.append(_plain(text))
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Without what only a terminal needs."""
    lines = [line for line in text.splitlines() if not line.startswith("* `--help`")]
    return "\n".join(lines).replace("```console\n$ ", "```\n") + "\n"
