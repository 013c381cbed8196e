"""Run the command line with `python -m spmoe`."""

from spmoe.cli.main import main

if __name__ == "__main__":
    main()
