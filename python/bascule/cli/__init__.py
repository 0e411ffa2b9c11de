"""The ``bascule`` command: one module a command; docs/cli.md shows each.

To add one, write its function in a module of its own here and name it in the list below.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import bascule
from bascule.cli import demo, doctor, plan, serve, status, verify
from bascule.cli._common import fail

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Turns errors of bascule, and of files, into one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (bascule.Error, OSError) as error:
            # Whoever reads a closed pipe has gone: nothing to tell.
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            fail(error, ctx.invoked_subcommand)


app = typer.Typer(
    name="bascule",
    cls=_Commands,
    help="Move policy weights from trainers to rollout engines.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

app.command()(serve.serve)
app.command()(status.status)
app.command()(plan.plan)
app.command()(verify.verify)
app.command()(doctor.doctor)


app.command(context_settings=demo.CONTEXT)(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bascule {bascule.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    del version, debug


def main() -> None:
    """Run the command line."""
    app(prog_name="bascule")
