"""Below the map: lanes, what moved last, memory, the disk."""

from rich.text import Text

from tidectl.live.look import LABEL, LEAST_ROWS, RESIDENT_STYLES, STYLES, Look, joined, label_of
from tidectl.live.sea import HOT, RESIDENT, Lane, Sea
from tidectl.output import visible


def lane_lines(sea: Sea, look: Look) -> list[Text]:
    now = sea.now
    assert now is not None, "there is something to show"
    most = max(1, min(now.lanes_total, (look.height - LEAST_ROWS) // 4))
    shown = [_lane(lane, look) for lane in now.lanes[:most]]
    free = now.lanes_total - len(now.lanes)
    if len(now.lanes) > most:
        shown[-1] = label_of("lanes") + Text(f"{len(now.lanes) - most + 1} more")
    elif len(shown) < most and free:
        shown.append(label_of("lanes") + Text(f"{free} free", "dim"))
    return [*shown, *[Text("")] * (most - len(shown))]


def _lane(lane: Lane, look: Look) -> Text:
    tokens = f"{lane.answer_tokens:,} tokens"
    if lane.phase == "prompt":
        tokens = f"{lane.computed_tokens:,} of {lane.prompt_tokens:,} tokens"
    speed = "" if lane.tok_s is None else f"{lane.tok_s:.1f} tok/s"
    drafts = f"{100 * lane.accepted / lane.drafted:.0f} % of drafts taken" if lane.drafted else ""
    parts: list[Text | str] = [label_of(f"lane {lane.lane}") + f"{visible(lane.phase):<6} {tokens}"]
    parts += [part for part in (Text(speed, "bold"), drafts, visible(lane.fidelity)) if part]
    return joined(parts, look.width)


def latest(sea: Sea, look: Look, now_s: float) -> Text:
    signs = {RESIDENT: (look.glyphs.came, RESIDENT_STYLES[3]), HOT: (look.glyphs.hot, STYLES[HOT])}
    parts: list[Text | str] = []
    for move in list(sea.moves)[: look.width // 8]:
        glyph, style = signs.get(move.state, (look.glyphs.left, "dim"))
        parts.append(Text(f"{glyph} {move.layer}/{move.expert}", style))
    line = joined(parts, look.width - LABEL, "  ")
    return label_of("latest") + (line if line.plain else Text("nothing moved yet", "dim"))


def memory(sea: Sea, look: Look) -> Text:
    now = sea.now
    assert now is not None, "there is something to show"
    parts = [f"experts {_bytes(now.arena_bytes)}"]
    if now.kv_tokens_capacity:
        parts.append(f"contexts {_short(now.kv_tokens_used or 0)} of {_short(now.kv_tokens_capacity)} tokens")
    parts += [f"device {_bytes(now.device_bytes)}"] if now.device_bytes else []
    parts += [f"left on rank {rank} {_bytes(free)}" for rank, free in now.available_bytes.items()]
    return joined([label_of("memory") + parts[0], *parts[1:]], look.width)


def disk(sea: Sea, look: Look, keys: str) -> Text:
    """With the keys behind it, which always fit."""
    now = sea.now
    assert now is not None, "there is something to show"
    samples = list(sea.samples)[-6:]
    span_s = samples[-1].at - samples[0].at if samples else 0.0
    rate = (samples[-1].read_bytes - samples[0].read_bytes) / span_s if span_s else 0.0
    speed = label_of("NVMe") + f"{rate / 1e6:,.1f} MB/s"
    parts: list[Text | str] = [speed, f"{(now.reads_nbytes or 0) / 1e9:,.2f} GB read"]
    parts += [Text(f"{now.reads_failed} reads failed", "bold red")] if now.reads_failed else []
    parts += [f"{now.reads_hot_issued:,} hot reads"] if now.reads_hot_issued else []
    if speed.cell_len + 3 + len(keys) > look.width:
        keys = keys[: keys.find("  ")]
    line = joined(parts, look.width - len(keys) - 3)
    return line + " " * (look.width - line.cell_len - len(keys)) + Text(keys, "dim") if keys else line


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
