"""Text for people: markdown tables that also read well as they are, and counts."""

from collections.abc import Collection, Sequence


def markdown_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> str:
    """Return a padded table; the columns whose titles are in `right` are aligned so.

    Cells may come from files: a bar or a line break in one stays inside its cell.
    """
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    widths = [
        max(3, len(title), *(len(row[index]) for row in cells))
        for index, title in enumerate(titles)
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + (":" if title in right else "-")
        for width, title in zip(widths, titles, strict=True)
    ]
    return "\n".join([line(titles), line(rule), *map(line, cells)])


def counted_noun(count: int, word: str) -> str:
    """Return "1 run" or "2 runs"."""
    plural = "es" if word.endswith("s") else "s"
    return f"{count} {word}{plural * (count != 1)}"
