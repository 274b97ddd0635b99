"""``python -m gramcert``."""

from gramcert.cli import main

if __name__ == "__main__":
    main()
