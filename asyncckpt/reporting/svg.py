"""Pictures as SVG text: axes, lines, bars, lanes. Colours are names of CSS variables, so that a page can be dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 880, 64, 16, 24, 36
N_TICKS = 5
FINEST, TINIEST = 1e-15, 1e-300
"""Of a range, by its largest end and absolutely: what is smaller has no ticks in floats."""


@dataclass(slots=True)
class Picture:
    """One chart: linear axes from `x` and `y` ranges to pixels.

    Args:
        x, y: (low, high); equal ends are widened.
        height: Pixels of the plot.
        x_labels: (value, text); None: round whole numbers.
        y_label: What the vertical axis counts.
        x_label: What the horizontal one does.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 180
    x_label: str = ""
    y_label: str = ""
    x_labels: Sequence[tuple[float, str]] | None = None
    grid: bool = True
    _parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.y = _widened(self.x), _widened(self.y)

    def px(self, value: float) -> float:
        """Return the pixel of a value of x."""
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        """Return the pixel of a value of y."""
        return TOP + self.height - (value - self.y[0]) / (self.y[1] - self.y[0]) * self.height

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        """Draw a line."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="var(--{colour})" stroke-width="2"{dash}/>')

    def dot(self, x: float, y: float, colour: str, title: str, *, radius: float = 3.5) -> None:
        """Draw a dot that says `title` when pointed at."""
        self._parts.append(
            f'<circle cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="{radius:g}" fill="var(--{colour})" '
            f'stroke="var(--surface)" stroke-width="1"><title>{escape(title)}</title></circle>'
        )

    def bar(self, x: float, low: float, high: float, colour: str, title: str, *, width: float) -> None:
        """Draw an upright bar of `width` pixels around x."""
        top, bottom = self.py(high), self.py(low)
        self._parts.append(
            f'<rect x="{self.px(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(bottom - top, 0.5):.1f}" fill="var(--{colour})"><title>{escape(title)}</title></rect>'
        )

    def lane(self, begin: float, end: float, row: int, rows: int, colour: str, title: str) -> None:
        """Draw a lying bar in one of `rows` lanes of equal height."""
        height = self.height / rows
        left, width = self.px(begin), max(self.px(end) - self.px(begin), 1.0)
        inset = min(2.0, height * 0.15)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{TOP + row * height + inset:.1f}" width="{width:.1f}" '
            f'height="{height - 2 * inset:.1f}" fill="var(--{colour})"><title>{escape(title)}</title></rect>'
        )

    def text(self, x: float, y_pixel: float, text: str, *, anchor: str = "end") -> None:
        """Write at a value of x and a pixel of y."""
        self._parts.append(f'<text x="{x:.1f}" y="{y_pixel:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def lane_name(self, row: int, rows: int, text: str) -> None:
        """Name a lane at the left."""
        self.text(LEFT - 8, TOP + (row + 0.5) * self.height / rows + 4, text)

    def svg(self, label: str) -> str:
        """Return the picture; `label` says what it shows to who cannot see it."""
        whole = TOP + self.height + BOTTOM
        return (
            f'<svg viewBox="0 0 {WIDTH} {whole}" role="img" aria-label="{escape(label, quote=True)}">'
            + "".join([*self._axes(), *self._parts])
            + "</svg>"
        )

    def _axes(self) -> list[str]:
        bottom, found = TOP + self.height, []
        if self.grid:
            for value in ticks(*self.y):
                at = self.py(value)
                found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
                found.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>')
        named = (
            self.x_labels
            if self.x_labels is not None
            else [(value, number(value)) for value in ticks(*self.x) if value == int(value)]
        )
        for value, text in named:
            found.append(f'<text x="{self.px(value):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>')
        if self.x_label:
            found.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 32}" text-anchor="end">{escape(self.x_label)}</text>')
        if self.y_label:
            found.append(f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">{escape(self.y_label)}</text>')
        return found


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, about `N_TICKS`."""
    rough = (high - low) / N_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number as an axis shows it."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def thinned(values: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Return at most about `limit` points: of each stretch the lowest and the highest."""
    if len(values) <= limit:
        return list(values)
    size = math.ceil(2 * len(values) / limit)
    found: list[tuple[float, float]] = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return found


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    largest = max(abs(low), abs(high))
    if high - low > max(TINIEST, largest * FINEST):
        return low, high
    half = max(0.5, largest * 1e-9)  # so that it is more than what a float of that size can tell apart
    return (low - half, high + half) if low else (0.0, 1.0)
