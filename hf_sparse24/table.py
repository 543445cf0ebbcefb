"""Text in columns."""

from collections.abc import Iterable, Sequence


def render_columns(header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[str] = ()) -> str:
    """Aligned columns; those named in `numeric` to the right."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    to_the_right = set(numeric)
    right = [name in to_the_right for name in header]
    lines = [
        "  ".join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in zip(row, widths, right, strict=True))
        for row in table
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
