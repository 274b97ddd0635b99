"""The command line, one file per command. Exit codes: 0 fine, 1 a negative answer, 2 bad input, 3 above a limit."""

from gramcert.cli.app import app, main

__all__ = ["app", "main"]
