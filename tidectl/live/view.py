"""`tidectl top` as lines of a width and a height: of a `Sea`, and of nothing else."""

from collections.abc import Sequence

from rich.text import Text

from tidectl.live.foot import disk, lane_lines, latest, memory
from tidectl.live.head import coverage_line, legend, moved, tide_line, title
from tidectl.live.look import LEAST_COLUMNS, LEAST_ROWS, Look
from tidectl.live.map import grouped, order_of, rows_of
from tidectl.live.sea import Sea

FOOT = 3  # lines below the lanes


def lines(sea: Sea, look: Look, now_s: float) -> list[Text]:
    """`look.height` lines of at most `look.width` columns."""
    if look.width < LEAST_COLUMNS or look.height < LEAST_ROWS:
        return _cut([Text(f"{LEAST_COLUMNS} columns and {LEAST_ROWS} lines are needed")], look)
    if sea.now is None or not sea.cells:
        return _cut([Text(look.trouble or f"asking {look.url}", "bold" if look.trouble else "")], look)
    head = [title(sea, look), coverage_line(sea, look), tide_line(sea, look), moved(sea, look), legend(sea, look)]
    lanes = lane_lines(sea, look)
    rows = max(1, look.height - len(head) - len(lanes) - FOOT)
    drawn = rows_of(sea, look, rows, now_s)
    keys = f"q quit  o by {order_of(sea, look, *grouped(sea, look, rows))}  s {look.span_s // 60} min"
    foot = [*lanes, latest(sea, look, now_s), memory(sea, look), disk(sea, look, keys)]
    return _cut([*head, *drawn, *[Text("")] * (rows - len(drawn)), *foot], look)


def small_map(sea: Sea, look: Look, now_s: float) -> list[Text]:
    """What is now, without what only makes sense while it moves."""
    head = [title(sea, look), coverage_line(sea, look), tide_line(sea, look), legend(sea, look)]
    foot = [memory(sea, look), disk(sea, look, "")]
    return [line for line in [*head, *rows_of(sea, look, min(16, sea.layers), now_s), *foot] if line.plain]


def _cut(shown: Sequence[Text], look: Look) -> list[Text]:
    for line in shown:
        line.truncate(look.width)
    return [*shown[: look.height], *[Text("")] * (look.height - len(shown))]
