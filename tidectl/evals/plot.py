"""Loss against budget: as a picture, and in letters."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tided.errors import UnavailableError
from tided.files import whole

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Curves = dict[str, list[tuple[float, float]]]  # (experts held in percent, loss in nats a token), by budget

SIZE, MARGIN = (960, 600), (90, 40, 40, 110)  # pixels; left, top, right, bottom
# Okabe and Ito's, which differ for every kind of colour vision; the marks differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = "ox+*#%"
INK, GRID, PAPER = "#222222", "#DDDDDD", "#FFFFFF"


def series(rows: Sequence[dict[str, Any]]) -> Curves:
    """A curve for each case. What has all experts ends every curve of the same weights."""
    whole = {row["overlay"]: (row["share"], row["mean"]["loss"]) for row in rows if row["residents"] == row["experts"]}
    curves: Curves = {}
    for row in rows:
        name = row["case"] + (f" {row['overlay'][:12]}" if row["overlay"] else "")
        ends = {whole[row["overlay"]]} if row["overlay"] in whole else set()
        curves[name] = sorted({*curves.get(name, ()), *ends, (row["share"], row["mean"]["loss"])})
    return curves


def terminal(curves: Curves, width: int = 60, height: int = 12) -> list[str]:
    """Lines of text: every curve has a mark of its own."""
    (left, right), (low, high) = ranges(curves)
    grid = [[" "] * width for _ in range(height)]
    for mark, points in zip(_turning(MARKS, len(curves)), curves.values(), strict=True):
        for share, loss in points:
            column = round((share - left) / (right - left) * (width - 1))
            grid[round((high - loss) / (high - low) * (height - 1))][column] = mark
    labels = [
        f"{high - (high - low) * at / (height - 1):8.3f}" if at % 4 in (0, 3) else " " * 8 for at in range(height)
    ]
    lines = [f"{label} │{''.join(cells)}" for label, cells in zip(labels, grid, strict=True)]
    ends = f"{left:g} %"
    lines += [" " * 9 + "└" + "─" * width, " " * 10 + ends + f"{right:g} % of experts held".rjust(width - len(ends))]
    marked = zip(_turning(MARKS, len(curves)), curves, strict=True)
    return [*lines, "  ".join(f"{mark} {name}" for mark, name in marked)]


def ranges(curves: Curves) -> tuple[tuple[float, float], tuple[float, float]]:
    """From and to, of shares and of losses; never nothing between them."""
    found = []
    for at in (0, 1):
        values = [point[at] for points in curves.values() for point in points]
        low, high = min(values), max(values)
        room = (high - low) * 0.05 or 0.05 * abs(high) or 1.0
        found.append(
            (max(low - room, min(low, 0.0)), high + room)
            if at
            else (low, high)
            if high > low
            else (low - room, high + room)
        )
    return found[0], found[1]


def _turning(of: Sequence[str], count: int) -> list[str]:
    return [of[at % len(of)] for at in range(count)]


def draw(file: Path, curves: Curves, title: str) -> None:
    """A PNG, whole or not at all. Raises UnavailableError where it cannot be written."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", SIZE, PAPER)
    _draw(ImageDraw.Draw(image), curves, title)
    try:
        with whole(file) as out:
            image.save(out, format="PNG")
    except OSError as error:
        raise UnavailableError(f"the plot cannot be written ({error.strerror})", where=str(file)) from error


def _draw(on: "ImageDraw", curves: Curves, title: str) -> None:
    from PIL import ImageFont

    font, large = ImageFont.load_default(16), ImageFont.load_default(20)
    left, top, right, bottom = MARGIN[0], MARGIN[1], SIZE[0] - MARGIN[2], SIZE[1] - MARGIN[3]
    (first, last), (low, high) = ranges(curves)

    def place(share: float, loss: float) -> tuple[float, float]:
        x = left + (share - first) / (last - first) * (right - left)
        return x, bottom - (loss - low) / (high - low) * (bottom - top)

    on.text((left, 10), title, fill=INK, font=large)
    for step in range(6):
        loss = low + (high - low) * step / 5
        y = place(first, loss)[1]
        on.line((left, y, right, y), fill=GRID)
        on.text((left - 8, y), f"{loss:.3f}", fill=INK, font=font, anchor="rm")
        share = first + (last - first) * step / 5
        x = place(share, low)[0]
        on.line((x, top, x, bottom), fill=GRID)
        on.text((x, bottom + 8), f"{share:.0f}", fill=INK, font=font, anchor="mt")
    on.text(((left + right) / 2, bottom + 30), "experts held, %", fill=INK, font=font, anchor="mt")
    on.text((left - 80, top - 4), "nats", fill=INK, font=font, anchor="lb")
    for at, (name, points) in enumerate(curves.items()):
        colour, places = COLOURS[at % len(COLOURS)], [place(*point) for point in points]
        if len(places) > 1:
            on.line(places, fill=colour, width=3)
        for x, y in places:
            _mark(on, at, x, y, colour)
        x, y = left + 20 + at % 4 * 210, bottom + 60 + at // 4 * 22
        _mark(on, at, x, y, colour)
        on.text((x + 12, y), name, fill=INK, font=font, anchor="lm")


def _mark(on: "ImageDraw", at: int, x: float, y: float, colour: str) -> None:
    """A disc, a square, a triangle, a diamond."""
    r = 6
    corners = [
        [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)],
        [(x, y - r), (x + r, y + r), (x - r, y + r)],
        [(x, y - r), (x + r, y), (x, y + r), (x - r, y)],
    ]
    if at % 4 == 0:
        on.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    else:
        on.polygon(corners[at % 4 - 1], fill=colour)
