"""What every script shares: one line for a mistake, and an exit code that says so."""

import pathlib
import sys
from collections.abc import Callable

import rich.console
from absl import app, logging


def run(main: Callable[[], None]) -> None:
    """Parses flags and runs `main`.

    What a user can get wrong raises ValueError, OSError or MemoryError with a message meant for
    them: it is printed as one line and the exit code is 2. With `-v 1` the traceback is shown too.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        try:
            main()
        except (ValueError, OSError, MemoryError) as error:
            if logging.vlog_is_on(1):
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    app.run(guarded)


def table_console() -> rich.console.Console:
    """Prints as wide as the terminal, and wide enough for a table where the output is a file."""
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=160)


def exit_on(failures: list[str]) -> None:
    """Prints what a check found wrong, a line each, and ends with exit code 1 if there is any."""
    for text in failures:
        print(f"failed: {text}", file=sys.stderr)
    if failures:
        sys.exit(1)


def read_text(path: str | pathlib.Path) -> str:
    """A UTF-8 file; one in another encoding is a ValueError that names it."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
