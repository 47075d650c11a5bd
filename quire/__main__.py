"""`python -m quire` is `quire`."""

from quire.cli import main

if __name__ == "__main__":
    main(prog_name="quire")
