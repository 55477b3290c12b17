"""`tidectl top` as lines of a width and a height: of a `Sea`, and of nothing else."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from tidectl.live.sea import HOT, LOADING, MISSING, NO_HEAT, RESIDENT, Lane, Sea, between
from tidectl.output import visible

SPANS_S = (120, 300, 900)
FRESH_S = 2.0  # what changed so lately is marked
LEAST_COLUMNS, LEAST_ROWS = 40, 12
LABEL = 9
FOOT = 3  # lines below the lanes


class Glyphs(NamedTuple):
    """`shares`: of a place that stands for several experts, from none resident to all. `levels`: of a line."""

    resident: str
    hot: str
    loading: str
    missing: str
    wanted: str
    shares: str
    levels: str
    came: str
    left: str


WIDE = Glyphs("█", "◆", "▄", "·", "○", "·░▒▓█", "▁▂▃▄▅▆▇█", "▲", "▽")
ASCII = Glyphs("#", "@", "+", ".", "o", ".:-=#", "_.-~=*%#", "^", "v")

RESIDENT_STYLES = ("color(24)", "color(31)", "color(38)", "color(80)")  # by heat; blue to light cyan
STYLES = {HOT: "color(214)", LOADING: "bold color(231)", MISSING: "color(239)"}
WANTED = "color(175)"


class Look(NamedTuple):
    """What the viewer has chosen. `order`: "number" or "heat"; "": as suits the size."""

    width: int
    height: int
    glyphs: Glyphs = WIDE
    order: str = ""
    span_s: int = 300
    url: str = ""
    trouble: str = ""


def lines(sea: Sea, look: Look, now_s: float) -> list[Text]:
    """`look.height` lines of at most `look.width` columns."""
    if look.width < LEAST_COLUMNS or look.height < LEAST_ROWS:
        return _cut([Text(f"{LEAST_COLUMNS} columns and {LEAST_ROWS} lines are needed")], look)
    if sea.now is None or not sea.cells:
        return _cut([Text(look.trouble or f"asking {look.url}", "bold" if look.trouble else "")], look)
    head = [_title(sea, look), _coverage(sea, look), _tide(sea, look), _moved(sea, look), _legend(sea, look)]
    lanes = _lanes(sea, look)
    rows = max(1, look.height - len(head) - len(lanes) - FOOT)
    drawn = _map(sea, look, rows, now_s)
    keys = f"q quit  o by {_order(sea, look, *_grouped(sea, look, rows))}  s {look.span_s // 60} min"
    foot = [*lanes, _latest(sea, look, now_s), _memory(sea, look), _disk(sea, look, keys)]
    return _cut([*head, *drawn, *[Text("")] * (rows - len(drawn)), *foot], look)


def small_map(sea: Sea, look: Look, now_s: float) -> list[Text]:
    """What is now, without what only makes sense while it moves."""
    head = [_title(sea, look), _coverage(sea, look), _tide(sea, look), _legend(sea, look)]
    foot = [_memory(sea, look), _disk(sea, look, "")]
    return [line for line in [*head, *_map(sea, look, min(16, sea.layers), now_s), *foot] if line.plain]


def _cut(shown: Sequence[Text], look: Look) -> list[Text]:
    for line in shown:
        line.truncate(look.width)
    return [*shown[: look.height], *[Text("")] * (look.height - len(shown))]


def _joined(parts: Sequence[Text | str], width: int, gap: str = "   ") -> Text:
    """As many as fit, the first ones first."""
    found = Text("")
    for part in parts:
        more = part if isinstance(part, Text) else Text(part)
        if found.cell_len + len(gap) + more.cell_len > width and found.plain:
            continue
        found = found + gap + more if found.plain else found + more
    return found


def _title(sea: Sea, look: Look) -> Text:
    now = sea.now
    assert now is not None, "there is something to show"
    words = {"starting": "loading", "ready": "serving" if now.lanes else "at rest", "draining": "ending"}
    state = Text(words.get(now.state, now.state), "green" if now.state == "ready" else "bold red")
    if look.trouble:
        state = Text(look.trouble, "bold red")
    elif now.fault:
        state = Text(f"stopped: {visible(now.fault)}", "bold red")
    speed = "" if now.tok_s is None else f"{now.tok_s:.1f} tok/s"
    waiting = f"{now.queue} waiting" if now.queue else ""
    lanes = f"{len(now.lanes)} of {now.lanes_total} lanes"
    name = _styled("TideLM ", "bold") + Text(visible(sea.model))
    return _joined([part for part in (name, state, speed, lanes, waiting, Text(look.url, "dim")) if part], look.width)


def _label(word: str) -> Text:
    return _styled(f"{word:<{LABEL}}", "dim")


def _styled(text: str, style: str) -> Text:
    """A style of this text alone: what is added to it has none."""
    return Text().append(text, style)


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _coverage(sea: Sea, look: Look) -> Text:
    found = sea.coverage()
    held = sea.samples[-1].held if sea.samples else None
    since = " since the start" if found.since_start and found.covered is not None else ""
    parts = [_label("coverage") + Text(_percent(found.covered), "bold") + Text(since)]
    parts.append(Text(f"substituted {_percent(found.substituted, 2)}"))
    if held is not None:
        parts.append(Text(f"expected next {_percent(held)}"))
    line = _joined(parts, look.width)
    room = look.width - line.cell_len - 3
    if found.covered is None or room < 10:
        return line
    return line + "   " + _bar(found.covered, min(room, 40), look.glyphs)


def _bar(share: float, columns: int, glyphs: Glyphs) -> Text:
    full = round(share * columns)
    return _styled(glyphs.resident * full, RESIDENT_STYLES[2]) + Text(
        glyphs.missing * (columns - full), STYLES[MISSING]
    )


def _columns(sea: Sea, look: Look, columns: int) -> list[tuple[float | None, int]]:
    """Coverage and moves of equal parts of the span, the oldest first."""
    if not sea.samples:
        return [(None, 0)] * columns
    samples, end, part = list(sea.samples), sea.samples[-1].at, look.span_s / columns
    found: list[tuple[float | None, int]] = []
    before, at = None, 0
    for column in range(columns):
        until = end - (columns - 1 - column) * part
        last = None
        while at < len(samples) and samples[at].at <= until + 1e-6:
            last = samples[at]
            at += 1
        if last is None or before is None:
            found.append((None, 0))
        else:
            found.append((between(before, last).covered, last.moved - before.moved))
        before = last or before
    return found


def _tide(sea: Sea, look: Look) -> Text:
    ends = 7
    columns = _columns(sea, look, look.width - LABEL - 2 * ends)
    known = [share for share, _ in columns if share is not None]
    low = math.floor(20 * min([0.95, *known])) / 20
    marks = look.glyphs.levels
    line = "".join(
        " " if share is None else marks[min(len(marks) - 1, int((share - low) / (1 - low) * len(marks)))]
        for share, _ in columns
    )
    label = _label(f"{look.span_s // 60} min")
    return label + Text(f"{100 * low:3.0f} %  ", "dim") + Text(line, RESIDENT_STYLES[2]) + Text("  100 %", "dim")


def _moved(sea: Sea, look: Look) -> Text:
    ends = 7
    columns = _columns(sea, look, look.width - LABEL - 2 * ends)
    most = max(1, *(moved for _, moved in columns))
    marks = look.glyphs.levels
    line = "".join(
        marks[math.ceil(math.sqrt(moved / most) * (len(marks) - 1))] if moved else " " for _, moved in columns
    )
    whole = sum(moved for _, moved in columns)
    return _label("moved") + Text(" " * ends) + Text(line, STYLES[HOT]) + Text(f"  {whole:,}", "dim")


def _legend(sea: Sea, look: Look) -> Text:
    counts = sea.now.counts if sea.now else {}
    glyphs = look.glyphs
    kinds = (
        (glyphs.resident, RESIDENT_STYLES[2], "resident", "resident"),
        (glyphs.hot, STYLES[HOT], "transient", "hot"),
        (glyphs.loading, STYLES[LOADING], "loading", "loading"),
        (glyphs.missing, STYLES[MISSING], "not_loaded", "missing"),
    )
    parts = [_label("experts") + Text(f"{sea.layers} x {sea.experts}")]
    parts += [_styled(glyph, style) + f" {word} {counts.get(key, 0):,}" for glyph, style, key, word in kinds]
    return _joined(parts, look.width)


def _grouped(sea: Sea, look: Look, rows: int) -> tuple[int, int]:
    """Layers of a row, experts of a column."""
    columns = look.width - LABEL - 6
    return -(-sea.layers // max(1, min(rows, sea.layers))), -(-sea.experts // columns)


def _order(sea: Sea, look: Look, layers: int, experts: int) -> str:
    if sea.cells[0] & 15 == NO_HEAT:
        return "number"
    return look.order or ("number" if layers == experts == 1 else "heat")


def _map(sea: Sea, look: Look, rows: int, now_s: float) -> list[Text]:
    layers, experts = _grouped(sea, look, rows)
    order = _order(sea, look, layers, experts)
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


def _lanes(sea: Sea, look: Look) -> list[Text]:
    now = sea.now
    assert now is not None, "there is something to show"
    most = max(1, min(now.lanes_total, (look.height - LEAST_ROWS) // 4))
    shown = [_lane(lane, look) for lane in now.lanes[:most]]
    free = now.lanes_total - len(now.lanes)
    if len(now.lanes) > most:
        shown[-1] = _label("lanes") + Text(f"{len(now.lanes) - most + 1} more")
    elif len(shown) < most and free:
        shown.append(_label("lanes") + Text(f"{free} free", "dim"))
    return [*shown, *[Text("")] * (most - len(shown))]


def _lane(lane: Lane, look: Look) -> Text:
    tokens = f"{lane.answer_tokens:,} tokens"
    if lane.phase == "prompt":
        tokens = f"{lane.computed_tokens:,} of {lane.prompt_tokens:,} tokens"
    speed = "" if lane.tok_s is None else f"{lane.tok_s:.1f} tok/s"
    drafts = f"{100 * lane.accepted / lane.drafted:.0f} % of drafts taken" if lane.drafted else ""
    parts: list[Text | str] = [_label(f"lane {lane.lane}") + f"{visible(lane.phase):<6} {tokens}"]
    parts += [part for part in (Text(speed, "bold"), drafts, visible(lane.fidelity)) if part]
    return _joined(parts, look.width)


def _memory(sea: Sea, look: Look) -> Text:
    now = sea.now
    assert now is not None, "there is something to show"
    parts = [f"experts {_bytes(now.arena_bytes)}"]
    if now.kv_tokens_capacity:
        parts.append(f"contexts {_short(now.kv_tokens_used or 0)} of {_short(now.kv_tokens_capacity)} tokens")
    parts += [f"device {_bytes(now.device_bytes)}"] if now.device_bytes else []
    parts += [f"left on rank {rank} {_bytes(free)}" for rank, free in now.available_bytes.items()]
    return _joined([_label("memory") + parts[0], *parts[1:]], look.width)


def _disk(sea: Sea, look: Look, keys: str) -> Text:
    """With the keys behind it, which always fit."""
    now = sea.now
    assert now is not None, "there is something to show"
    samples = list(sea.samples)[-6:]
    span_s = samples[-1].at - samples[0].at if samples else 0.0
    rate = (samples[-1].read_bytes - samples[0].read_bytes) / span_s if span_s else 0.0
    speed = _label("NVMe") + f"{rate / 1e6:,.1f} MB/s"
    parts: list[Text | str] = [speed, f"{(now.reads_nbytes or 0) / 1e9:,.2f} GB read"]
    parts += [Text(f"{now.reads_failed} reads failed", "bold red")] if now.reads_failed else []
    parts += [f"{now.reads_hot_issued:,} hot reads"] if now.reads_hot_issued else []
    if speed.cell_len + 3 + len(keys) > look.width:
        keys = keys[: keys.find("  ")]
    line = _joined(parts, look.width - len(keys) - 3)
    return line + " " * (look.width - line.cell_len - len(keys)) + Text(keys, "dim") if keys else line


def _latest(sea: Sea, look: Look, now_s: float) -> Text:
    signs = {RESIDENT: (look.glyphs.came, RESIDENT_STYLES[3]), HOT: (look.glyphs.hot, STYLES[HOT])}
    parts: list[Text | str] = []
    for move in list(sea.moves)[: look.width // 8]:
        glyph, style = signs.get(move.state, (look.glyphs.left, "dim"))
        parts.append(Text(f"{glyph} {move.layer}/{move.expert}", style))
    line = _joined(parts, look.width - LABEL, "  ")
    return _label("latest") + (line if line.plain else Text("nothing moved yet", "dim"))


def _bytes(value: int | None) -> str:
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if value is not None and value >= size:
            return f"{value / size:.1f} {unit}"
    return "-" if value is None else f"{value:,} B"


def _short(value: int) -> str:
    for size, unit in ((1_000_000, "M"), (10_000, "k")):
        if value >= size:
            return f"{value / (size if size > 10_000 else 1000):.1f}{unit}"
    return f"{value:,}"
