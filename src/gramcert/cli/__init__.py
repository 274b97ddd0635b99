"""The command line, one file per command. Exit codes: 0 fine, 1 a negative answer, 2 bad input."""

from gramcert.cli.app import app, main

__all__ = ["app", "main"]
