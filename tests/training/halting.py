"""Run the command line up to a moment, say so, and stand still to be killed: ``halting.py FOLDER MOMENT train ...``.

A moment is a number of files of the folder that were about to be opened, renamed or removed, which is the same on every
machine: it may lie before, in and after the writing of any file. At moment 0 nothing has been imported yet.
"""

import os
import signal
import sys

HALTED = "halted"


def halt():
    os.write(1, f"{HALTED}\n".encode())
    signal.pause()


def halt_at(folder, moment):
    """Python tells its audit hooks of each of these calls before they are made."""
    left = moment

    def watch(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(folder):
            left -= 1
            if left == 0:
                halt()

    if not moment:
        halt()
    sys.addaudithook(watch)


if __name__ == "__main__":
    _, folder, moment, *words = sys.argv
    if os.environ.get("RANK", "0") == "0":  # the process that writes
        halt_at(os.path.join(folder, ""), int(moment))
    sys.argv = ["gramcert", *words]
    from gramcert.cli import main

    main()
