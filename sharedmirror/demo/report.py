"""Prints the story and keeps its verdict: every check that was made, and which failed."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text


class Report:
    """Steps with the seconds since the start, checks with their outcome."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.failed: list[str] = []
        self._checks = 0
        self._began = time.monotonic()

    def step(self, text: str, style: str = "") -> None:
        """Print what happened."""
        self._print((f"{time.monotonic() - self._began:6.2f} s  ", "dim"), (text, style))

    def check(self, name: str, held: bool) -> None:
        """Record and print whether ``name`` held."""
        self._checks += 1
        if not held:
            self.failed.append(name)
        self._print(" " * 10, ("ok     ", "green") if held else ("FAILED ", "bold red"), name)

    def verdict(self) -> int:
        """Print the outcome and return the exit code: 0 if checks were made and all held."""
        if self._checks and not self.failed:
            self.step(f"all {self._checks} checks held", "bold green")
            return 0
        for name in self.failed:
            self.step(f"failed: {name}", "bold red")
        return 1

    def _print(self, *parts: str | tuple[str, str]) -> None:
        # As Text, so that brackets in a traceback are no markup.
        self.console.print(Text.assemble(*parts))
