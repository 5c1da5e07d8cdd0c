"""The tables of docs/models.md, which the tests of models hold."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows(section: str) -> dict[str, tuple[str, ...]]:
    """The cells of a section's table by the first one."""
    _, found, rest = PAGE.read_text().partition(f"\n## {section}\n")
    assert found, section
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return {first: tuple(others) for first, *others in cells}
