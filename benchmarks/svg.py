"""A few shapes as SVG text, in colours that are read on a light page and on a dark one. Nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 13px; } .note { font-size: 11px; fill: #59636e; }
.a { fill: #0b6e4f; } .b { fill: #9aa5b1; } .c { fill: #c8553d; } .d { fill: #3b73b9; } .e { fill: #b08900; }
.f { fill: #7a5aa6; } .line { stroke: #1f2328; } .limit { stroke: #c8553d; stroke-dasharray: 4 3; }
.grid { stroke: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .note { fill: #9198a1; }
  .a { fill: #2ea583; } .b { fill: #656c76; } .c { fill: #e8836d; } .d { fill: #6ba5e7; } .e { fill: #d9b53a; }
  .f { fill: #ab8bd8; } .line { stroke: #e6edf3; } .limit { stroke: #e8836d; } .grid { stroke: #3d444d; }
}
"""
"""Two sets of colours; the page says which. A picture in an `img` element follows the reader's setting as well."""


class Picture:
    """Shapes, added one after the other; the same calls always give the same text.

    Args:
        width, height: In pixels.
        title: Read to those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'width="{_n(width)}" height="{_n(height)}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
        ]

    def text(self, x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> None:
        """Write at a baseline; `anchor` is start, middle or end."""
        self._lines.append(f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> None:
        """Fill a rectangle; `hint` is shown by viewers that can."""
        shape = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.5))}" height="{_n(height)}" class="{kind}"'
        self._lines.append(f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        """Draw a line."""
        self._lines.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], width: float) -> None:
        """Name the kinds of boxes, one beside the other."""
        for n, (kind, name) in enumerate(entries):
            self.box(x + n * width, y - 9, 10, 10, kind)
            self.text(x + n * width + 15, y, name, kind="note")

    def rendered(self) -> str:
        """Return the file's text."""
        return "\n".join([*self._lines, "</svg>", ""])


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
