"""Reads fenced blocks and commands from pages of documentation."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block."""
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), re.M | re.S):
        yield match[2], match[3]


def commands(page: Path) -> Iterator[str]:
    """Yield every command line of the page, without comments; lines that end in a backslash are joined."""
    for language, text in fences(page):
        lines = text.replace("\\\n", " ").splitlines()
        if language != "sh":  # A terminal: commands after a prompt, and their output.
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if words := shlex.split(line, comments=True):
                yield " ".join(shlex.quote(word) if " " in word else word for word in words)
