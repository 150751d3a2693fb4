"""Run the command line with `python -m coterie`."""

from coterie.cli import main

main()
