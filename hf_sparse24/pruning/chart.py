"""A plain SVG of lines; no plotting library is needed."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 130, 40, 40
# Told apart by people who see few colours (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def draw_lines(title: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Draw each series over 0, 1, 2, ...; the axis of values begins at 0.

    Args:
        title: Above the picture.
        lines: Name -> values, of any length.

    Returns:
        An SVG document.
    """
    highest = max((value for values in lines.values() for value in values), default=0) or 1.0
    longest = max((len(values) for values in lines.values()), default=1)

    def x(index: float) -> float:
        return LEFT + index / max(1, longest - 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / highest * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(5):
        value = highest * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    for index in sorted({0, (longest - 1) // 2, longest - 1}):
        parts.append(f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{index}</text>')
    for number, (name, values) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(index), y(value)) for index, value in enumerate(values)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * number + 8}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
