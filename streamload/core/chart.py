"""Bar charts as SVG and as text, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

_COLOURS = ("#1f6feb", "#9ecbff", "#8250df", "#d4b9ff", "#eaeef2")
_OURS = ("#1a7f37", "#8fd6a4", "#9a6700", "#e8c77a")
_LEFT, _RIGHT, _WIDTH, _BAR, _GAP, _TOP = 190, 90, 860, 16, 14, 78


@dataclass(frozen=True, slots=True)
class Bars:
    """A row of a chart: one bar for each series, one below the other."""

    name: str  # written on the left
    values: tuple[float | None, ...]  # one for each series; None draws no bar
    ours: bool = False  # in other colours, to stand out


@dataclass(frozen=True, slots=True)
class Stack:
    """A row of a chart: one bar of parts, end to end."""

    name: str  # written on the left
    parts: tuple[int, ...]  # the length of each part; one for each series
    label: str  # written on the right


#: Characters for the parts of a bar in text, in the order of the series.
BLOCKS, ASCII = "\u2588\u2593\u2592\u2591\u00b7", "#=~-."


def draw_text(
    series: Sequence[str], rows: Sequence[Stack], *, width: int, marks: str = BLOCKS
) -> list[str]:
    """Return a chart of stacked bars as lines of text; the last line is the legend.

    A line is ``width`` columns wide at most, unless names and labels leave fewer than eight columns
    for the longest bar. There are at most five series; the legend lists those in use. ``marks`` has
    a character for each series: `BLOCKS` or `ASCII`.
    """
    name = max((len(row.name) for row in rows), default=0)
    label = max((len(row.label) for row in rows), default=0)
    room = max(width - name - label - 4, 8)
    most = max([sum(row.parts) for row in rows] + [1])
    lines = []
    for row in rows:
        ends = [end * room // most for end in accumulate(row.parts, initial=0)]
        bar = "".join(
            mark * (stop - start)
            for mark, (start, stop) in zip(marks, pairwise(ends), strict=False)
        )
        lines.append(f"{row.name.ljust(name)}  {bar.ljust(room)}  {row.label}")
    used = (place for place in range(len(series)) if any(row.parts[place] for row in rows))
    return [*lines, "  ".join(f"{marks[place]} {series[place]}" for place in used)]


def draw_stacks(title: str, subtitle: str, series: Sequence[str], rows: Sequence[Stack]) -> str:
    """Return the text of an SVG file: a chart of stacked bars, of at most five series."""
    most = max([sum(row.parts) for row in rows] + [1])
    right = max(_RIGHT, 7 * max((len(row.label) for row in rows), default=0) + 20)
    scale = (_WIDTH - _LEFT - right) / most
    out = _head(title, subtitle, series, step=120)
    for at, row in enumerate(rows):
        y = _TOP + (_BAR + _GAP) * at
        out.append(_text(_LEFT - 10, y + _BAR / 2 + 4, row.name, 'text-anchor="end"'))
        for place, (start, stop) in enumerate(pairwise(accumulate(row.parts, initial=0))):
            if stop > start:
                out.append(_bar(_LEFT + start * scale, y, (stop - start) * scale, _COLOURS[place]))
        end = _LEFT + sum(row.parts) * scale
        out.append(_text(end + 6, y + _BAR - 4, row.label))
    return _file(out, _TOP + (_BAR + _GAP) * len(rows) + 16)


def as_html(text: str, series: Sequence[str] = (), rows: Sequence[Stack] = ()) -> str:
    """Return HTML for a notebook: ``text``, escaped, as <pre>; below it a chart of any rows."""
    if not rows:
        return f"<pre>{escape(text)}</pre>"
    bars = draw_stacks("What each device or node holds", "", series, rows)
    return f"<pre>{escape(text)}</pre>\n{bars}"


class Shown:
    """Base of results whose text notebooks show in columns."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        return as_html(str(self))


def draw(
    title: str,
    subtitle: str,
    unit: str,
    series: Sequence[str],
    rows: Sequence[Bars],
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """Return the text of an SVG file: a chart with a bar for each series, up to four, in each row.

    ``unit`` is written after values and limits; a limit, (name, value), is a vertical line.
    """
    shown = [v for row in rows for v in row.values if v is not None]
    most = max([*shown, *(value for _, value in limits), 1e-9]) * 1.05
    row_height = _BAR * len(series) + _GAP
    bottom = _TOP + row_height * len(rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    out = _head(title, subtitle, series, step=170)
    for at, row in enumerate(rows):
        y = _TOP + row_height * at
        middle = y + _BAR * len(series) / 2 + 4
        weight = 'font-weight="bold" ' if row.ours else ""
        out.append(_text(_LEFT - 10, middle, row.name, f'{weight}text-anchor="end"'))
        colours = _OURS if row.ours else _COLOURS
        for place, value in enumerate(row.values):
            if value is None:
                continue
            top = y + _BAR * place
            width = max(value * scale, 1)
            out.append(_bar(_LEFT, top, width, colours[place]))
            out.append(_text(_LEFT + width + 6, top + _BAR - 4, f"{value:.3g} {unit}"))
    for place, (name, value) in enumerate(limits):
        x = _LEFT + value * scale
        out.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}" '
            'stroke="#cf222e" stroke-dasharray="4 3"/>'
        )
        label = f"{name}: {value:.3g} {unit}"
        out.append(_text(x, bottom + 16 * (place + 1), label, 'fill="#cf222e" text-anchor="end"'))
    return _file(out, bottom + 16 * len(limits) + 16)


def _head(title: str, subtitle: str, series: Sequence[str], *, step: int) -> list[str]:
    out = [
        _text(20, 28, title, 'font-size="18" font-weight="bold"'),
        _text(20, 48, subtitle, 'fill="#57606a"'),
    ]
    for place, name in enumerate(series):
        left = _LEFT + step * place
        out.append(f'<rect x="{left}" y="57" width="12" height="12" fill="{_COLOURS[place]}"/>')
        out.append(_text(left + 18, 68, name))
    return out


def _bar(x: float, y: float, width: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{_BAR - 2}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{colour}"/>'


def _file(parts: Sequence[str], height: int) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
