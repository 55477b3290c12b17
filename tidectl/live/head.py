"""Above the map: what is served, how well, how that went, and what the signs mean."""

import math

from rich.text import Text

from tidectl.live.look import LABEL, RESIDENT_STYLES, STYLES, Glyphs, Look, joined, label_of, styled
from tidectl.live.sea import HOT, LOADING, MISSING, Sea, between
from tidectl.output import visible


def title(sea: Sea, look: Look) -> Text:
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
    name = styled("TideLM ", "bold") + Text(visible(sea.model))
    return joined([part for part in (name, state, speed, lanes, waiting, Text(look.url, "dim")) if part], look.width)


def coverage_line(sea: Sea, look: Look) -> Text:
    found = sea.coverage()
    held = sea.samples[-1].held if sea.samples else None
    since = " since the start" if found.since_start and found.covered is not None else ""
    parts = [label_of("coverage") + Text(percent(found.covered), "bold") + Text(since)]
    parts.append(Text(f"substituted {percent(found.substituted, 2)}"))
    if held is not None:
        parts.append(Text(f"expected next {percent(held)}"))
    line = joined(parts, look.width)
    room = look.width - line.cell_len - 3
    if found.covered is None or room < 10:
        return line
    return line + "   " + _bar(found.covered, min(room, 40), look.glyphs)


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _bar(share: float, columns: int, glyphs: Glyphs) -> Text:
    full = round(share * columns)
    return styled(glyphs.resident * full, RESIDENT_STYLES[2]) + Text(glyphs.missing * (columns - full), STYLES[MISSING])


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


def tide_line(sea: Sea, look: Look) -> Text:
    ends = 7
    columns = _columns(sea, look, look.width - LABEL - 2 * ends)
    known = [share for share, _ in columns if share is not None]
    low = math.floor(20 * min([0.95, *known])) / 20
    marks = look.glyphs.levels
    line = "".join(
        " " if share is None else marks[min(len(marks) - 1, int((share - low) / (1 - low) * len(marks)))]
        for share, _ in columns
    )
    label = label_of(f"{look.span_s // 60} min")
    return label + Text(f"{100 * low:3.0f} %  ", "dim") + Text(line, RESIDENT_STYLES[2]) + Text("  100 %", "dim")


def moved(sea: Sea, look: Look) -> Text:
    ends = 7
    columns = _columns(sea, look, look.width - LABEL - 2 * ends)
    most = max(1, *(moved for _, moved in columns))
    marks = look.glyphs.levels
    line = "".join(
        marks[math.ceil(math.sqrt(moved / most) * (len(marks) - 1))] if moved else " " for _, moved in columns
    )
    whole = sum(moved for _, moved in columns)
    return label_of("moved") + Text(" " * ends) + Text(line, STYLES[HOT]) + Text(f"  {whole:,}", "dim")


def legend(sea: Sea, look: Look) -> Text:
    counts = sea.now.counts if sea.now else {}
    glyphs = look.glyphs
    kinds = (
        (glyphs.resident, RESIDENT_STYLES[2], "resident", "resident"),
        (glyphs.hot, STYLES[HOT], "transient", "hot"),
        (glyphs.loading, STYLES[LOADING], "loading", "loading"),
        (glyphs.missing, STYLES[MISSING], "not_loaded", "missing"),
    )
    parts = [label_of("experts") + Text(f"{sea.layers} x {sea.experts}")]
    parts += [styled(glyph, style) + f" {word} {counts.get(key, 0):,}" for glyph, style, key, word in kinds]
    return joined(parts, look.width)
