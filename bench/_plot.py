"""Line charts as SVG files, without a library: a plot should not cost a dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 46, 56
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700")


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Axis:
    """From the least to the greatest value, in equal steps or in equal factors."""

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values to write beside the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            tens = [10.0**e for e in range(first, last + 1)]
            most = 3 if last - first < 4 else 1
            round_ones = [f * ten for ten in tens for f in (1, 2, 5)[:most]]
            return [t for t in round_ones if self.low <= t <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(f for f in (1, 2, 5, 10) if (self.high - self.low) / (f * step) <= 6)
        return [step * i for i in range(math.ceil(self.low / step), int(self.high / step) + 1)]


def _axis(values: Sequence[float], log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.2, high * 1.2, True)
    return Axis(min(low, 0.0), high * 1.05 or 1.0, False)


def chart(
    path: Path, title: str, x_name: str, y_name: str, lines: Sequence[Line],
    log_x: bool = False, log_y: bool = False,
) -> None:  # fmt: skip
    """Writes a chart of these lines."""
    x_axis = _axis([x for line in lines for x in line.xs], log_x)
    y_axis = _axis([y for line in lines for y in line.ys], log_y)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x_axis.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y_axis.place(y) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_text(LEFT, 20, title, size=15)]
    for x in x_axis.ticks():
        px, _ = at(x, y_axis.low)
        parts.append(_stroke(px, TOP, px, HEIGHT - BOTTOM))
        parts.append(_text(px, HEIGHT - BOTTOM + 18, f"{x:,g}", "middle"))
    for y in y_axis.ticks():
        _, py = at(x_axis.low, y)
        parts.append(_stroke(LEFT, py, WIDTH - RIGHT, py))
        parts.append(_text(LEFT - 8, py + 4, f"{y:,g}", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, "middle"))
    parts.append(_text(8, TOP - 10, y_name))
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        places = [at(x, y) for x, y in zip(line.xs, line.ys, strict=True)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>'
                  for px, py in places]  # fmt: skip
        parts.append(_text(LEFT + 10, TOP + 16 * (i + 1), line.name, colour=colour))
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
        f"\n{body}\n</svg>\n"
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = "#333", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def _stroke(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#ddd"/>'
