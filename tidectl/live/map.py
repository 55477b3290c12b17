"""The map: a sign for every expert, or for a few of a few layers."""

import math
from collections.abc import Sequence

from rich.text import Text

from tidectl.live.look import LABEL, RESIDENT_STYLES, STYLES, Glyphs, Look
from tidectl.live.sea import HOT, LOADING, MISSING, NO_HEAT, RESIDENT, Sea

FRESH_S = 2.0  # what changed so lately is marked
WANTED = "color(175)"


def grouped(sea: Sea, look: Look, rows: int) -> tuple[int, int]:
    """Layers of a row, experts of a column."""
    columns = look.width - LABEL - 6
    return -(-sea.layers // max(1, min(rows, sea.layers))), -(-sea.experts // columns)


def order_of(sea: Sea, look: Look, layers: int, experts: int) -> str:
    if sea.cells[0] & 15 == NO_HEAT:
        return "number"
    return look.order or ("number" if layers == experts == 1 else "heat")


def rows_of(sea: Sea, look: Look, rows: int, now_s: float) -> list[Text]:
    layers, experts = grouped(sea, look, rows)
    order = order_of(sea, look, layers, experts)
    shown = []
    for first in range(0, sea.layers, layers):
        last = min(first + layers, sea.layers) - 1
        name = str(first) if first == last else f"{first}-{last}"
        row = Text(f"{name:>{LABEL - 2}}  ", "dim")
        ordered = [_layer(sea, layer, order) for layer in range(first, last + 1)]
        for column in range(0, sea.experts, experts):
            some = [index for layer in ordered for index in layer[column : column + experts]]
            row.append(*_place(sea, some, look.glyphs, now_s))
        here = [index for layer in ordered for index in layer]
        share = sum(sea.cells[index] >> 4 == RESIDENT for index in here) / len(here)
        shown.append(row.append(f" {100 * share:3.0f} %", "dim"))
    return shown


def _layer(sea: Sea, layer: int, order: str) -> list[int]:
    indices = range(layer * sea.experts, (layer + 1) * sea.experts)
    if order == "number":
        return list(indices)
    return sorted(indices, key=lambda index: (-(sea.cells[index] & 15), sea.cells[index] >> 4 == MISSING, index))


def _place(sea: Sea, some: Sequence[int], glyphs: Glyphs, now_s: float) -> tuple[str, str]:
    """A sign and its style, of one expert or of several."""
    fresh = any(now_s - sea.changed_s.get(index, -math.inf) < FRESH_S for index in some)
    states = [sea.cells[index] >> 4 for index in some]
    heat = max((sea.cells[index] & 15) % NO_HEAT for index in some)
    if len(some) == 1:
        glyph, style = _one(states[0], heat, glyphs)
    elif LOADING in states:
        glyph, style = glyphs.loading, STYLES[LOADING]
    else:
        here = sum(state != MISSING for state in states) / len(some)
        glyph = glyphs.shares[math.ceil(here * (len(glyphs.shares) - 1))]
        style = STYLES[HOT] if HOT in states else RESIDENT_STYLES[heat * 4 // 10] if here else STYLES[MISSING]
    return glyph, f"reverse {style}" if fresh else style


def _one(state: int, heat: int, glyphs: Glyphs) -> tuple[str, str]:
    if state == RESIDENT:
        return glyphs.resident, RESIDENT_STYLES[heat * 4 // 10]
    if state == MISSING and heat >= 7:
        return glyphs.wanted, WANTED
    return {HOT: glyphs.hot, LOADING: glyphs.loading, MISSING: glyphs.missing}.get(state, "?"), STYLES.get(state, "")
