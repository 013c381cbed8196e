"""`python -m spmoe`: the command line."""

from spmoe.cli.main import main

if __name__ == "__main__":
    main()
