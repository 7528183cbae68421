"""The command line: results on stdout, everything else on stderr, exit codes that mean something."""

from transfusion.cli.app import main

__all__ = ["main"]
