"""What the commands of the package share: mistakes are reported in one line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Reports errors in one line on stderr and leaves with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Writes the message, without the usage, and leaves."""
        self.exit(2, f"{self.prog}: error: {message}\n")
