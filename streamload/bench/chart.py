"""A bar chart as SVG, written by hand: no plotting library is worth a dependency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f6feb", "#9ecbff", "#8250df", "#d4b9ff")
_OURS = ("#1a7f37", "#8fd6a4", "#9a6700", "#e8c77a")
_LEFT, _RIGHT, _WIDTH, _BAR, _GAP, _TOP = 190, 90, 860, 16, 14, 78


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one name.

    Attributes:
        name: what stands on the left.
        values: one for each series; None where there is none.
        ours: drawn in other colours.
    """

    name: str
    values: tuple[float | None, ...]
    ours: bool = False


def draw(
    title: str,
    subtitle: str,
    unit: str,
    series: Sequence[str],
    rows: Sequence[Bars],
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """Draw horizontal bars.

    Args:
        title: the headline.
        subtitle: a line below.
        unit: of the values.
        series: what the bars of a row are, at most four.
        rows: from top to bottom.
        limits: names and values of vertical lines.

    Returns:
        The text of an SVG file.
    """
    shown = [v for row in rows for v in row.values if v is not None]
    most = max([*shown, *(value for _, value in limits), 1e-9]) * 1.05
    row_height = _BAR * len(series) + _GAP
    bottom = _TOP + row_height * len(rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    out = [
        _text(20, 28, title, 'font-size="18" font-weight="bold"'),
        _text(20, 48, subtitle, 'fill="#57606a"'),
    ]
    for place, name in enumerate(series):
        left = _LEFT + 170 * place
        out.append(f'<rect x="{left}" y="57" width="12" height="12" fill="{_COLOURS[place]}"/>')
        out.append(_text(left + 18, 68, name))
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
            out.append(
                f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colours[place]}"/>'
            )
            out.append(_text(_LEFT + width + 6, top + _BAR - 4, f"{value:.3g} {unit}"))
    for place, (name, value) in enumerate(limits):
        x = _LEFT + value * scale
        out.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}" '
            'stroke="#cf222e" stroke-dasharray="4 3"/>'
        )
        label = f"{name}: {value:.3g} {unit}"
        out.append(_text(x, bottom + 16 * (place + 1), label, 'fill="#cf222e" text-anchor="end"'))
    height = bottom + 16 * len(limits) + 16
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
