"use strict";
// The page of /expert-map: reads v1/expert-map/events by fetch, so that a key goes as a header, and draws what it says.
// States and heat of an expert are one byte: state * 16 + heat (0 to 9; 15: nobody follows it).

const $ = id => document.getElementById(id);
const MISSING = 0, RESIDENT = 1, HOT = 2, LOADING = 3, NO_HEAT = 15;
const NAMES = ["missing", "resident", "hot read", "loading"];
const FLASH_S = 2.5, MOVES = 40, COVERAGE_S = 60, KEPT_S = 900;
const base = location.pathname.replace(/(expert-map\/?)?$/, "");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const view = {
  layers: 0, experts: 0, cells: new Uint8Array(0), changed: new Float64Array(0), flashing: new Set(), at: 0,
  order: "expert", places: null, now: null, tide: {}, moves: [], span: 300, box: null,
};

// Words and numbers

const whole = value => Math.round(value).toLocaleString("en");
function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 2 : 1)} ${unit}`;
  return `${whole(value)} B`;
}
/** Of disks: powers of ten. */
function read(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 2 : 1)} ${unit}`;
  return `${whole(value)} B`;
}
const short = value => value < 10_000 ? whole(value) : new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1}).format(value);
const percent = (share, digits = 1) => share == null ? "–" : `${(100 * share).toFixed(digits)} %`;
function ago(seconds) {
  if (seconds < 1.5) return "now";
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}
function make(tag, properties = {}, ...children) {
  const found = Object.assign(document.createElement(tag), properties);
  found.append(...children);
  return found;
}
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

// Theme

const THEMES = ["system", "light", "dark"], darkness = matchMedia("(prefers-color-scheme: dark)");
let theme = sessionStorage.getItem("tidelm.theme") || "system", colours = {};
function dress() {
  const shown = theme === "system" ? (darkness.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = shown;
  put("theme", `Theme: ${theme}`);
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const ramp = mix(colour("--resident-low"), colour("--resident-high"));
  colours = {
    resident: ramp, hot: colour("--hot"), loading: colour("--loading"), missing: colour("--missing"),
    wanted: mix(colour("--missing"), colour("--wanted")), ink: colour("--ink"), dim: colour("--dim"),
    line: colour("--line"), accent: colour("--accent"), card: colour("--card"),
  };
  for (const canvas of document.querySelectorAll("#legend canvas")) drawSample(canvas);
  drawAll();
}
function mix(from, to) {
  const parse = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  const [a, b] = [parse(from), parse(to)];
  return Array.from({length: 10}, (_, level) => `rgb(${a.map((part, at) => Math.round(part + (b[at] - part) * level / 9))})`);
}
function nextTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  sessionStorage.setItem("tidelm.theme", theme);
  dress();
}

// The map: a cell an expert. State is told by height and place of the filling, not by colour alone: full, full with a
// notch, half, a dot.

function layOut() {
  const sea = $("sea"), dpr = devicePixelRatio || 1, width = sea.clientWidth;
  const tall = width < 640, layers = view.layers, experts = view.experts;
  if (!layers || !width) return;
  const margin = {label: Math.round(24 * dpr), bar: Math.round(34 * dpr)}, room = Math.floor(width * dpr);
  const across = tall ? layers : experts, down = tall ? experts : layers;
  const side = tall ? 0 : margin.label + margin.bar, top = tall ? margin.label : Math.round(4 * dpr), foot = tall ? margin.bar : top;
  const w = Math.max(1, Math.min(Math.floor((room - side) / across), Math.round(26 * dpr)));
  const most = tall ? 620 : 400;
  const h = Math.max(tall ? 1 : 3, Math.min(Math.floor(most * dpr / down), Math.round(26 * dpr)));
  const gap = (size) => size >= 9 * dpr ? Math.round(2 * dpr) : size >= 4 ? 1 : 0;
  view.box = {
    tall, w, h, x: tall ? 0 : margin.label, y: top, dpr, gw: gap(w), gh: gap(h), width: side + w * across,
    height: top + h * down + foot, across, down, bar: margin.bar,
  };
  if (tall) view.box.x = Math.max(0, Math.floor((room - w * across) / 2)), view.box.width = room;
  const map = $("map");
  map.width = view.box.width, map.height = view.box.height;
  map.style.width = `${view.box.width / dpr}px`, map.style.height = `${view.box.height / dpr}px`;
}
function placeOf(index) {
  const layer = Math.floor(index / view.experts), expert = index % view.experts;
  const along = view.places ? view.places[index] : expert, box = view.box;
  return box.tall ? [box.x + layer * box.w, box.y + along * box.h] : [box.x + along * box.w, box.y + layer * box.h];
}
function indexAt(x, y) {
  const box = view.box, column = Math.floor((x - box.x) / box.w), row = Math.floor((y - box.y) / box.h);
  if (column < 0 || row < 0 || column >= box.across || row >= box.down) return -1;
  return at(box.tall ? column : row, box.tall ? row : column);
}
/** The expert at a place along its layer. */
function at(layer, along) {
  if (!view.places) return layer * view.experts + along;
  for (let index = layer * view.experts, end = index + view.experts; index < end; index++)
    if (view.places[index] === along) return index;
  return -1;
}
function drawCell(context, index, now) {
  const [x, y] = placeOf(index), {w, h, gw, gh} = view.box, cell = view.cells[index];
  context.clearRect(x, y, w, h);
  paint(context, x, y, w - gw, h - gh, cell >> 4, cell & 15);
  const age = (now - view.changed[index]) / 1000;
  if (age < FLASH_S && view.changed[index]) {
    context.globalAlpha = (still.matches ? 0.8 : 1 - age / FLASH_S) * 0.9;
    context.fillStyle = context.strokeStyle = colours.ink;
    const edge = Math.max(1, Math.round(view.box.dpr * 1.5));
    if (w - gw > 4 * edge) {
      context.lineWidth = edge;
      context.strokeRect(x + edge / 2, y + edge / 2, w - gw - edge, h - gh - edge);
    } else context.fillRect(x, y, w - gw, Math.max(1, Math.floor((h - gh) / 3)));
    context.globalAlpha = 1;
    return true;
  }
  return false;
}
function paint(context, x, y, w, h, state, heat) {
  const level = heat === NO_HEAT ? 4 : heat;
  if (state === RESIDENT) {
    context.fillStyle = colours.resident[level];
    context.fillRect(x, y, w, h);
    return;
  }
  context.fillStyle = colours.missing;
  context.fillRect(x, y, w, h);
  if (state === HOT) {
    context.fillStyle = colours.hot;
    const notch = Math.max(1, Math.round(h * 0.4)), half = Math.max(1, Math.ceil(w / 2));
    context.fillRect(x, y + notch, w, h - notch);
    context.fillRect(x, y, half, notch);
  } else if (state === LOADING) {
    context.fillStyle = colours.loading;
    const fill = Math.max(1, Math.round(h / 2));
    context.fillRect(x, y + h - fill, w, fill);
  } else if (heat !== NO_HEAT && heat >= 5) {
    context.fillStyle = colours.wanted[Math.min(9, 2 * heat - 9)];
    const side = Math.max(1, Math.round(Math.min(w, h) * 0.36));
    context.fillRect(x + Math.floor((w - side) / 2), y + Math.floor((h - side) / 2), side, side);
  }
}
function drawMap() {
  if (!view.box) return;
  const context = $("map").getContext("2d"), now = performance.now();
  context.clearRect(0, 0, view.box.width, view.box.height);
  for (let index = 0; index < view.cells.length; index++) if (drawCell(context, index, now)) view.flashing.add(index);
  drawEdges(context);
  moveCursor();
}
/** Numbers of layers on one side, and on the other how much of each is resident. */
function drawEdges(context) {
  const {tall, x, y, w, h, dpr, across, down, bar} = view.box, pitch = tall ? w : h;
  const every = [1, 2, 5, 10, 20].find(step => step * pitch >= (tall ? 22 : 13) * dpr) || 50;
  context.font = `${11 * dpr}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = tall ? "center" : "right";
  const end = tall ? y + down * h : x + across * w;
  context.clearRect(tall ? 0 : end, tall ? end : 0, tall ? view.box.width : bar, tall ? bar : view.box.height);
  for (let layer = 0; layer < view.layers; layer++) {
    let here = 0;
    for (let index = layer * view.experts, last = index + view.experts; index < last; index++)
      here += view.cells[index] >> 4 === RESIDENT;
    const long = Math.round(here / view.experts * (bar - 8 * dpr)), thick = Math.max(1, pitch - Math.max(1, Math.round(dpr)));
    context.fillStyle = colours.line;
    const from = 6 * dpr, most = bar - 8 * dpr;
    if (tall) context.fillRect(x + layer * w, end + from, thick, most);
    else context.fillRect(end + from, y + layer * h, most, thick);
    context.fillStyle = colours.accent;
    if (tall) context.fillRect(x + layer * w, end + from, thick, long);
    else context.fillRect(end + from, y + layer * h, long, thick);
    if (layer % every) continue;
    context.fillStyle = colours.dim;
    if (tall) context.fillText(layer, x + (layer + 0.5) * w, y - 12 * dpr);
    else context.fillText(layer, x - 6 * dpr, y + (layer + 0.5) * h);
  }
}
function drawFlashes() {
  if (!view.flashing.size || !view.box) return;
  const context = $("map").getContext("2d"), now = performance.now();
  for (const index of view.flashing) if (!drawCell(context, index, now)) view.flashing.delete(index);
}
/** Places along a layer: by number, or the hottest first and among equals what is in memory. */
function sortExperts() {
  if (view.order === "expert") {
    view.places = null;
    return;
  }
  view.places = view.places?.length === view.cells.length ? view.places : new Uint16Array(view.cells.length);
  const rank = cell => ((cell & 15) === NO_HEAT ? 0 : (cell & 15) * 4) + [0, 3, 2, 1][cell >> 4];
  for (let first = 0; first < view.cells.length; first += view.experts) {
    const layer = Array.from(view.cells.subarray(first, first + view.experts), (cell, expert) => [rank(cell), expert]);
    layer.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    layer.forEach(([, expert], place) => { view.places[first + expert] = place; });
  }
}
function setOrder(order) {
  view.order = order;
  for (const button of $("orders").children) button.setAttribute("aria-pressed", button.value === order);
  sortExperts();
  drawMap();
}

// Looking at one expert

function moveCursor() {
  const cursor = $("cursor"), {box} = view;
  if (!box || cursor.hidden) return;
  const [x, y] = placeOf(view.at), left = $("map").offsetLeft;
  const wide = Math.max(box.w / box.dpr, 9) + 4, high = Math.max(box.h / box.dpr, 9) + 4;
  cursor.style.width = `${wide}px`, cursor.style.height = `${high}px`;
  cursor.style.left = `${left + (x + (box.w - box.gw) / 2) / box.dpr - wide / 2}px`;
  cursor.style.top = `${(y + (box.h - box.gh) / 2) / box.dpr - high / 2}px`;
}
function look(index) {
  if (index < 0 || index >= view.cells.length) return;
  view.at = index;
  $("cursor").hidden = false;
  moveCursor();
  tell();
}
function tell() {
  if ($("cursor").hidden || !view.cells.length) return;
  const cell = view.cells[view.at], state = cell >> 4, heat = cell & 15;
  const layer = Math.floor(view.at / view.experts), expert = view.at % view.experts;
  const warmth = heat === NO_HEAT ? "" : heat === 9 ? ", among the tenth that is wanted most" : `, wanted more than ${10 * heat} % of all`;
  const changed = view.changed[view.at] ? `, changed ${ago((performance.now() - view.changed[view.at]) / 1000)}` : "";
  put("detail", `Layer ${layer}, expert ${expert}: ${NAMES[state]}${warmth}${changed}`);
}
function walk(event) {
  const {layers, experts} = view, layer = Math.floor(view.at / experts), expert = view.at % experts;
  const along = view.places ? view.places[view.at] : expert, tall = view.box?.tall;
  const go = (l, a) => look(at(Math.min(layers - 1, Math.max(0, l)), Math.min(experts - 1, Math.max(0, a))));
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0]};
  if (event.key in steps) {
    const [down, right] = steps[event.key];
    if (tall && event.key.startsWith("Arrow")) go(layer + right, along + down);
    else go(layer + down, along + right);
  } else if (event.key === "Home") go(layer, 0);
  else if (event.key === "End") go(layer, experts - 1);
  else return;
  event.preventDefault();
}

// What comes

const decode = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const take = {
  map(found) {
    const first = !view.cells.length, cells = decode(found.cells), same = cells.length === view.cells.length;
    put("model", found.model);
    document.title = `TideLM: ${found.model}`;
    if (same) return change(Array.from(cells.keys()).filter(index => cells[index] !== view.cells[index]).map(index => [index, cells[index]]));
    Object.assign(view, {layers: found.layers, experts: found.experts, cells, changed: new Float64Array(cells.length), at: 0});
    put("shape", `${found.layers} layers of ${found.experts}`);
    sortExperts();
    layOut();
    drawMap();
    if (first) tell();
  },
  cells(found) {
    const codes = decode(found.cells), changes = [];
    for (let at = 0; at < codes.length; at += 3) {
      const code = codes[at] << 16 | codes[at + 1] << 8 | codes[at + 2];
      changes.push([code >> 6, code & 63]);
    }
    change(changes);
  },
  now(found) {
    view.now = found;
    showState(found);
    showCounts(found.counts);
    showLanes(found);
    showMemory(found);
    showDisk(found);
  },
  tide(found) {
    const {whole, ...columns} = found;
    for (const [name, column] of Object.entries(columns))
      view.tide[name] = whole ? column : [...(view.tide[name] || []), ...column].slice(-KEPT_S);
    showCoverage();
    drawTide();
    if (view.now) showDisk(view.now);
  },
};
function change(changes) {
  const now = performance.now(), context = $("map").getContext("2d"), moved = [];
  for (const [index, cell] of changes) {
    const before = view.cells[index] >> 4, state = cell >> 4;
    view.cells[index] = cell;
    if (before !== state) {
      view.changed[index] = now;
      view.flashing.add(index);
      if (state !== LOADING) moved.push([index, state, before]);
    }
  }
  for (const [index, state, before] of moved) view.moves.unshift({index, state, before, now});
  view.moves.length = Math.min(view.moves.length, MOVES);
  if (view.places) sortExperts(), drawMap();
  else if (view.box) {
    for (const [index] of changes) drawCell(context, index, now);
    drawEdges(context);
  }
  if (moved.length) showMoves();
  tell();
}

// The cards

function showState(now) {
  const words = {starting: "loading", ready: now.lanes.length ? "serving" : "at rest", draining: "ending", fault: "stopped"};
  const pill = $("state");
  pill.dataset.kind = now.state !== "ready" ? "bad" : now.lanes.length ? "busy" : "rest";
  put("state", now.fault ? `stopped: ${now.fault}` : words[now.state] + (now.queue ? `, ${now.queue} waiting` : ""));
}
function showCounts(counts) {
  const shown = [["resident", counts.resident], ["hot read", counts.transient], ["loading", counts.loading], ["missing", counts.not_loaded]];
  if (!$("legend").children.length) {
    for (const [name] of shown) {
      const sample = make("canvas", {width: 32, height: 32});
      sample.dataset.state = NAMES.indexOf(name);
      $("legend").append(make("li", {}, sample, make("span", {textContent: name}), make("b")));
      drawSample(sample);
    }
  }
  shown.forEach(([, count], at) => { $("legend").children[at].lastChild.textContent = whole(count); });
}
function drawSample(canvas) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, 32, 32);
  paint(context, 2, 2, 28, 28, +canvas.dataset.state, 9);
}
/** Over the last `seconds` before sample `last`: shares of the routing weight, and sums. null where nothing was routed. */
function over(seconds, last = (view.tide.at?.length || 0) - 1) {
  const {at, weight, missed, substituted, swaps, hot_reads, read_bytes} = view.tide;
  if (!at || last < 1) return null;
  let first = last;
  while (first > 0 && at[last] - at[first] < seconds) first--;
  const routed = weight[last] - weight[first];
  return {
    seconds: at[last] - at[first], routed, moved: swaps[last] - swaps[first] + hot_reads[last] - hot_reads[first],
    bytes: read_bytes[last] - read_bytes[first],
    missed: routed > 0 ? (missed[last] - missed[first]) / routed : null,
    substituted: routed > 0 ? (substituted[last] - substituted[first]) / routed : null,
  };
}
function showCoverage() {
  const {at, weight, held} = view.tide, last = (at?.length || 0) - 1;
  if (last < 0) return;
  // The newest minute in which anything was routed.
  let end = last;
  while (end > 0 && weight[end] - weight[end - 1] <= 0) end--;
  let found = over(COVERAGE_S, end), about = "of the routing weight found its expert in memory";
  const since = at[last] - at[end], expected = held[last];
  let share = found?.missed == null ? null : 1 - found.missed;
  if (share == null && view.tide.weight[last] > 0) {
    share = 1 - view.tide.missed[last] / view.tide.weight[last];
    about += ", since the start";
  } else if (share != null) about += since > 5 ? `, the minute up to ${ago(since)}` : ", in the last minute";
  if (share == null) share = expected, about = expected == null ? "nothing was asked yet" : "of what is expected next is in memory; nothing was asked yet";
  put("coverage", share == null ? "–" : (100 * share).toFixed(1));
  put("coverage-about", about);
  document.querySelector(".water").style.setProperty("--level", `${share == null ? 0 : 100 * share * 0.92}%`);
  const facts = [["substituted", percent(found?.substituted, 2)], ["read before use", found?.missed == null ? "–" : percent(found.missed - found.substituted, 2)], ["expected next", percent(expected)]];
  $("missed").replaceChildren(...facts.map(([name, text]) => make("div", {}, make("dt", {textContent: name}), make("dd", {textContent: text}))));
}
function showLanes(now) {
  const lanes = $("lanes"), rows = now.lanes.map(lane => {
    const row = make("div", {className: "lane"}), prompt = lane.phase === "prompt";
    const speed = lane.tok_s == null ? "" : `${lane.tok_s < 100 ? lane.tok_s.toFixed(1) : whole(lane.tok_s)} tok/s`;
    row.append(make("div", {className: "row"}, make("b", {textContent: `Lane ${lane.lane}`}), make("span", {className: "big", textContent: speed})));
    const share = prompt ? lane.computed_tokens / Math.max(1, lane.prompt_tokens) : 1;
    const bar = make("i");
    bar.style.width = `${100 * share}%`;
    row.append(make("div", {className: "bar"}, bar));
    const told = prompt ? `prompt, ${whole(lane.computed_tokens)} of ${whole(lane.prompt_tokens)} tokens`
      : `${lane.phase === "parked" ? "parked" : "answer"}, ${whole(lane.answer_tokens)} tokens`;
    const drafts = lane.drafted ? `, ${Math.round(100 * lane.accepted / lane.drafted)} % of ${whole(lane.drafted)} drafts taken` : "";
    row.append(make("div", {className: "dim", textContent: `${told}${drafts}, ${lane.fidelity}`}));
    return row;
  });
  for (let free = now.lanes_total - rows.length; free > 0; free--)
    rows.push(make("div", {className: "lane dim", textContent: "a free lane"}));
  const drafts = now.drafted ? `${Math.round(100 * now.accepted / now.drafted)} % of ${whole(now.drafted)} drafts taken since the start` : "no drafts since the start";
  const all = now.tok_s == null ? "" : `, ${now.tok_s.toFixed(1)} tok/s in all`;
  rows.push(make("div", {className: "lane dim", textContent: drafts + all}));
  lanes.replaceChildren(...rows);
}
function fact(name, value, share) {
  const row = make("div", {className: "fact"}, make("div", {className: "row"}, make("span", {textContent: name}), make("b", {textContent: value})));
  if (share != null) {
    const bar = make("i");
    bar.style.width = `${Math.min(100, 100 * share)}%`;
    row.append(make("div", {className: "bar"}, bar));
  }
  return row;
}
function showMemory(now) {
  const rows = [fact("experts", now.arena_bytes ? bytes(now.arena_bytes) : "–")];
  if (now.kv_tokens_capacity) rows.push(fact("contexts", `${short(now.kv_tokens_used)} of ${short(now.kv_tokens_capacity)} tokens`, now.kv_tokens_used / now.kv_tokens_capacity));
  if (now.device_bytes) rows.push(fact("device", bytes(now.device_bytes)));
  for (const [rank, free] of Object.entries(now.available_bytes)) rows.push(fact(`left on rank ${rank}'s node`, bytes(free)));
  $("memory").replaceChildren(...rows);
}
function showDisk(now) {
  const recent = over(5), rate = recent && recent.seconds ? recent.bytes / recent.seconds : 0;
  const rows = [fact("reads now", `${read(rate)}/s`), fact("since the start", read(now.reads_nbytes || 0)), fact("plans moved", `${whole(now.swaps || 0)} experts`)];
  if (now.reads_hot_issued) rows.push(fact("hot reads", `${whole(now.reads_hot_issued)}, ${Math.round(100 * now.reads_hot_used / now.reads_hot_issued)} % used`));
  if (now.reads_waited_reads) rows.push(fact("read before use", whole(now.reads_waited_reads)));
  if (now.reads_failed) rows.push(fact("reads that failed", whole(now.reads_failed)));
  $("disk").replaceChildren(...rows);
}
function showMoves() {
  const signs = {1: ["▲", "came", "came"], 2: ["◆", "hot", "hot read"], 0: ["▽", "left", "left"]}, now = performance.now();
  $("moves").replaceChildren(...view.moves.slice(0, 14).map(move => {
    const [sign, kind, word] = signs[move.state], layer = Math.floor(move.index / view.experts);
    return make("li", {},
      make("span", {className: `sign ${kind}`, textContent: sign}),
      make("span", {textContent: `layer ${layer}, expert ${move.index % view.experts} ${word}`}),
      make("span", {className: "when", textContent: ago((now - move.now) / 1000)}));
  }));
  if (!view.moves.length) $("moves").replaceChildren(make("li", {className: "dim", textContent: "nothing since this page was opened"}));
}

// The chart

function drawTide() {
  const canvas = $("tide"), dpr = devicePixelRatio || 1, width = Math.round(canvas.clientWidth * dpr), height = Math.round(canvas.clientHeight * dpr);
  if (!width || !height) return;
  if (canvas.width !== width || canvas.height !== height) canvas.width = width, canvas.height = height;
  const context = canvas.getContext("2d"), {at, held} = view.tide, last = (at?.length || 0) - 1;
  context.clearRect(0, 0, width, height);
  const pad = {left: 52 * dpr, right: 6 * dpr, top: 8 * dpr, bottom: 20 * dpr};
  const end = last >= 0 ? at[last] : 0, x = time => width - pad.right - (end - time) / view.span * (width - pad.left - pad.right);
  const first = at ? Math.max(0, at.findIndex(time => time >= end - view.span)) : 0;
  const points = [], moved = [];
  for (let index = first; index <= last; index++) {
    const near = over(Math.max(3, view.span / 60), index), step = over(0.5, index);
    points.push([at[index], near?.missed == null ? null : 1 - near.missed]);
    if (step?.moved) moved.push([at[index], step.moved]);
  }
  const shown = [...points.map(point => point[1]), ...(held || []).slice(first)].filter(value => value != null);
  const low = Math.max(0, Math.floor((Math.min(0.95, ...shown) - 0.02) * 20) / 20), y = share => pad.top + (1 - share) / (1 - low) * (height - pad.top - pad.bottom);
  context.font = `${11 * dpr}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.lineWidth = dpr;
  for (let line = 0; line <= 4; line++) {
    const share = low + (1 - low) * line / 4;
    context.strokeStyle = colours.line, context.fillStyle = colours.dim;
    context.beginPath(), context.moveTo(pad.left, y(share)), context.lineTo(width - pad.right, y(share)), context.stroke();
    context.fillText(`${+(100 * share).toFixed(2)} %`, pad.left - 6 * dpr, y(share));
  }
  context.fillStyle = colours.dim;
  const marks = width / dpr < 420 && view.span === 300 ? 2.5 : view.span === 300 ? 5 : view.span === 900 ? 5 : 4;
  for (let mark = 0; mark <= marks; mark++) {
    const past = view.span * mark / marks;
    context.textAlign = mark === 0 ? "right" : mark === marks ? "left" : "center";
    context.fillText(mark ? `−${past < 120 ? `${past} s` : `${past / 60} min`}` : "now", x(end - past), height - 8 * dpr);
  }
  const floor = height - pad.bottom, most = Math.max(8, ...moved.map(point => point[1]));
  fillArea(context, points, x, y, floor, dpr);
  context.fillStyle = colours.hot;
  const wide = Math.max(2 * dpr, (width - pad.left - pad.right) / view.span * 0.7);
  for (const [time, count] of moved) {
    const tall = Math.max(3 * dpr, Math.sqrt(count / most) * (floor - pad.top) * 0.35);
    context.fillRect(x(time) - wide / 2, floor - tall, wide, tall);
  }
  context.strokeStyle = colours.ink, context.lineWidth = 1.5 * dpr, context.setLineDash([5 * dpr, 4 * dpr]), context.beginPath();
  let open = false;
  for (let index = first; index <= last; index++) {
    if (held[index] != null) open ? context.lineTo(x(at[index]), y(held[index])) : context.moveTo(x(at[index]), y(held[index]));
    open = held[index] != null;
  }
  context.globalAlpha = 0.75, context.stroke(), context.globalAlpha = 1, context.setLineDash([]);
  canvas.setAttribute("aria-label", `Coverage over the last ${view.span / 60} minutes, now ${$("coverage").textContent} percent`);
}
/** Each run of known shares as water: an area up to its line. */
function fillArea(context, points, x, y, floor, dpr) {
  const runs = [[]];
  for (const point of points) point[1] == null ? runs.push([]) : runs.at(-1).push(point);
  for (const run of runs.filter(found => found.length)) {
    if (run.length === 1) run.push([run[0][0] + 1, run[0][1]]);
    const line = new Path2D(), area = new Path2D();
    run.forEach(([time, share], at) => at ? line.lineTo(x(time), y(share)) : line.moveTo(x(time), y(share)));
    area.addPath(line);
    area.lineTo(x(run.at(-1)[0]), floor), area.lineTo(x(run[0][0]), floor), area.closePath();
    context.fillStyle = colours.accent, context.strokeStyle = colours.accent;
    context.globalAlpha = 0.22, context.fill(area), context.globalAlpha = 1;
    context.lineWidth = 2 * dpr, context.lineJoin = "round", context.stroke(line);
  }
}
function drawAll() {
  layOut();
  drawMap();
  drawTide();
}

// The stream

let key = sessionStorage.getItem("tidelm.key") || "", reading = null, retry = 0, pause = 1;
async function follow() {
  clearTimeout(retry);
  const mine = reading = new AbortController();
  try {
    const headers = key ? {Authorization: `Bearer ${key}`} : {};
    const reply = await fetch(`${base}v1/expert-map/events`, {headers, cache: "no-store", signal: mine.signal});
    if (reply.status === 401) return askKey();
    if (!reply.ok) throw new Error({429: "too many viewers", 503: "the model is being loaded"}[reply.status] || `the server answers ${reply.status}`);
    pause = 1;
    await listen(reply.body.pipeThrough(new TextDecoderStream()).getReader());
    throw new Error("the server has ended the stream");
  } catch (error) {
    if (mine.signal.aborted) return;  // let go on purpose: hidden, or again() follows anew
    $("state").dataset.kind = "bad";
    put("state", `${error instanceof TypeError ? "the server does not answer" : error.message}; again in ${pause} s`);
    retry = setTimeout(() => document.hidden || follow(), 1000 * pause);
    pause = Math.min(10, 2 * pause);
  }
}
async function listen(reader) {
  for (let text = "", part; !(part = await reader.read()).done;) {
    text += part.value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const name = /^event: (\w+)$/m.exec(event)?.[1], data = /^data: (.*)$/m.exec(event)?.[1];
      if (name && Object.hasOwn(take, name)) take[name](JSON.parse(data));
    }
  }
}
function askKey() {
  put("state", "a key is wanted");
  $("state").dataset.kind = "bad";
  if (!$("ask").open) $("ask").showModal();
}
function again() {
  reading?.abort();
  follow();
}

// Hands

$("ask").addEventListener("close", () => {
  if (!$("ask-key").value) return;
  sessionStorage.setItem("tidelm.key", key = $("ask-key").value.trim());
  $("ask-key").value = "";
  again();
});
$("key").addEventListener("click", () => $("ask").showModal());
$("theme").addEventListener("click", nextTheme);
$("sea").addEventListener("keydown", walk);
$("sea").addEventListener("focus", () => look(view.at));
$("map").addEventListener("pointermove", event => {
  if (view.box) look(indexAt(event.offsetX * view.box.dpr, event.offsetY * view.box.dpr));
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("ask").open) return;
  const hands = {
    t: nextTheme, o: () => setOrder(view.order === "expert" ? "heat" : "expert"), k: () => $("ask").showModal(),
    m: () => view.moves.length && ($("sea").focus(), look(view.moves[0].index)),
  };
  if (hands[event.key.toLowerCase()]) hands[event.key.toLowerCase()](), event.preventDefault();
});
for (const [order, word] of [["expert", "By number"], ["heat", "By heat"]]) {
  const button = make("button", {type: "button", value: order, textContent: word});
  button.addEventListener("click", () => setOrder(order));
  $("orders").append(button);
}
for (const minutes of [2, 5, 15]) {
  const button = make("button", {type: "button", textContent: `${minutes} min`});
  button.setAttribute("aria-pressed", minutes * 60 === view.span);
  button.addEventListener("click", () => {
    view.span = minutes * 60;
    for (const other of $("spans").children) other.setAttribute("aria-pressed", other === button);
    drawTide();
  });
  $("spans").append(button);
}
darkness.addEventListener("change", dress);
document.addEventListener("visibilitychange", () => document.hidden ? reading?.abort() : again());
new ResizeObserver(drawAll).observe($("sea"));
setInterval(() => { showMoves(); tell(); }, 1000);
(function frame() { drawFlashes(); requestAnimationFrame(frame); })();
put("state", "asking");
setOrder("expert");
dress();
showMoves();
follow();
