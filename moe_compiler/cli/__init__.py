"""The `moeflex` command.

One file per command; `COMMANDS` names them. Exit codes, the same for all commands:

```
0  done
1  done, and what was asked for does not hold (`inspect --strict`: a block was not matched)
2  the command line or an option cannot be used
3  the input cannot be used (a model that cannot be built or traced, a missing package)
130  interrupted
```

Nothing here imports torch: `--help`, `--version` and shell completion answer at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moe_compiler.errors import MoeflexError, OptionError

COMMANDS = ("inspect", "compile", "verify", "diff", "bench", "doctor", "cache", "replay")

EXIT_DONE = 0
EXIT_NOT_FULFILLED = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: those after the program's name; those of the process by default.
    """
    try:
        # typer shows usage errors itself, and always ends with SystemExit
        _command()(args=arguments, prog_name="moeflex")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_DONE
    except OptionError as error:
        return _fail(error, EXIT_USAGE)
    except MoeflexError as error:
        return _fail(error, EXIT_INPUT)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _fail(error: MoeflexError, code: int) -> int:
    print(f"moeflex: error: {error}", file=sys.stderr)
    return code


def _command() -> Callable[..., Any]:
    import typer

    app = typer.Typer(
        name="moeflex",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def moeflex(
        version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        """A compiler for Mixture-of-Experts models: `torch.compile(model, backend="moeflex")`."""

    for name in COMMANDS:
        module = importlib.import_module(f"moe_compiler.cli.{name}")
        app.command(name)(module.command)
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        from moe_compiler import __version__

        print(f"moeflex {__version__}")
        raise typer.Exit
