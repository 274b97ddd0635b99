"""The command line, one file per command. Exit codes: 0 fine, 1 a negative answer, 2 bad input, 3 above a limit."""

import sys

from gramcert import __version__
from gramcert.cli.streams import safe_streams


def main() -> None:
    """Run the command line. Its version is told at once: the commands load torch, which takes seconds."""
    with safe_streams():
        if sys.argv[1:2] == ["--version"]:
            sys.stdout.write(f"gramcert {__version__}\n")
            return
        from gramcert.cli.app import app

        app(prog_name="gramcert")
