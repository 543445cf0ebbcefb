"""Plain SVG of lines; no plotting library is needed."""

import math
from collections.abc import Iterable, Mapping, Sequence
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


def draw_speedups(title: str, subtitle: str, lines: Mapping[str, Iterable[tuple[int, float]]]) -> str:
    """Draw how many times faster than dense each of some layers is, over rows of x, on a scale of doublings.

    Args:
        title: Above the picture.
        subtitle: Below the title: on what this was measured.
        lines: Name -> (rows, ratio).

    Returns:
        An SVG document.

    Raises:
        ValueError: There is no point to draw.
    """
    series = {name: sorted(points) for name, points in lines.items()}
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("nothing was timed: there is no chart to draw")
    rows = sorted({m for m, _ in points})
    low = min(0.8, math.floor(min(ratio for _, ratio in points) * 5) / 5)
    high = max(2.0, math.ceil(max(ratio for _, ratio in points) * 5) / 5)
    first, last = math.log2(rows[0]), max(math.log2(rows[-1]), math.log2(rows[0]) + 1)
    left, right, top, bottom, height = 64, 180, 60, 56, max(420, 90 + 22 * len(series))
    end = WIDTH - right

    def x(m: float) -> float:
        return round(left + (math.log2(m) - first) / (last - first) * (end - left), 1)

    def y(ratio: float) -> float:
        return round(height - bottom - (ratio - low) / (high - low) * (height - top - bottom), 1)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#333333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fcfcfa"/>',
        text(left, 24, title, "start", 'font-size="16" font-weight="bold"'),
        text(left, 44, subtitle, "start", 'font-size="12" fill="#666666"'),
    ]
    for tenths in range(round(low * 10), round(high * 10) + 1, 2):
        parts.append(f'<line x1="{left}" y1="{y(tenths / 10)}" x2="{end}" y2="{y(tenths / 10)}" stroke="#e3e3de"/>')
        parts.append(text(left - 8, y(tenths / 10) + 4, f"{tenths / 10:.1f}x", "end"))
    for m in rows:
        parts.append(f'<line x1="{x(m)}" y1="{height - bottom}" x2="{x(m)}" y2="{height - bottom + 5}" stroke="#888888"/>')
        parts.append(text(x(m), height - bottom + 20, str(m)))
    parts.append(text((left + end) / 2, height - 12, "rows of x"))
    parts.append(f'<line x1="{left}" y1="{y(1)}" x2="{end}" y2="{y(1)}" stroke="#333333" stroke-width="1.5" stroke-dasharray="5 4"/>')
    parts.append(text(end + 10, y(1) + 4, "as fast as dense", "start"))
    for index, (name, line) in enumerate(series.items()):
        colour, path = COLOURS[index % len(COLOURS)], " ".join(f"{x(m)},{y(ratio)}" for m, ratio in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"/>')
        parts += [
            f'<circle cx="{x(m)}" cy="{y(ratio)}" r="3" fill="{colour}"><title>{escape(name)}, {m} rows: {ratio:.2f}x</title></circle>'
            for m, ratio in line
        ]
    # The legend, in the order of the lines' right ends, so that it reads like labels beside them.
    for place, index in enumerate(sorted(range(len(series)), key=lambda index: -list(series.values())[index][-1][1])):
        legend_y = top + 10 + 22 * place
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<line x1="{end + 10}" y1="{legend_y}" x2="{end + 30}" y2="{legend_y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(text(end + 36, legend_y + 4, list(series)[index], "start"))
    return "\n".join([*parts, "</svg>", ""])
