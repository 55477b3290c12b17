"""GET /expert-map: the map as a page. One file without anything from elsewhere; it asks for the key where there is one,
and polls /v1/expert-map once a second."""

from aiohttp import web

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


async def expert_page(_: web.Request) -> web.Response:
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return web.Response(text=PAGE, content_type="text/html", charset="utf-8", headers=headers)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>TideLM: experts</title>
<style>
  body { background: #10151c; color: #cfd8e3; font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem }
  canvas { image-rendering: pixelated; width: 100%; border: 1px solid #2a3442 }
  b { display: inline-block; width: .8em; height: .8em; margin: 0 .4em 0 1.2em }
</style>
<p id="told"></p>
<noscript><p>The map is drawn by JavaScript, which is off here. Its data is JSON:
<a href="v1/expert-map">v1/expert-map</a> (where the server wants a key, with it).</p></noscript>
<canvas id="map" width="1" height="1"></canvas>
<p id="names"></p>
<script>
"use strict";
const colours = [[26, 34, 46], [46, 134, 171], [242, 166, 90], [255, 244, 214]];
const told = document.getElementById("told"), map = document.getElementById("map");
const names = document.getElementById("names");
told.textContent = "asking";
let key = sessionStorage.getItem("key") || "", tag = "", asked = false;
const shade = (colour, heat) => colour.map(part => Math.round(part * (0.55 + 0.05 * heat)));
function draw(found) {
  const experts = found.experts_per_layer, layers = found.layers;
  map.width = experts; map.height = layers;
  const image = new ImageData(experts, layers);
  found.states.forEach((row, layer) => [...row].forEach((digit, expert) => {
    const heat = found.heat ? +found.heat[layer][expert] : 9;
    image.data.set([...shade(colours[+digit], heat), 255], 4 * (layer * experts + expert));
  }));
  map.getContext("2d").putImageData(image, 0, 0);
  map.style.height = Math.max(160, layers * 9) + "px";
  told.textContent = `${found.model}, ${layers} layers of ${experts} experts, generation ${found.generation}`
    + (found.fault ? `, stopped: ${found.fault}` : found.busy ? ", busy" : ", at rest");
  names.replaceChildren(...found.state_names.flatMap((name, digit) => {
    const swatch = document.createElement("b");
    swatch.style.background = `rgb(${colours[digit]})`;
    return [swatch, `${name.replace("_", " ")} ${found.counts[name]}`];
  }));
}
async function look() {
  try {
    const headers = key ? {Authorization: `Bearer ${key}`} : {};
    const reply = await fetch(`v1/expert-map?since=${encodeURIComponent(tag)}`, {headers, cache: "no-store"});
    if (reply.status === 401 && !asked) {
      asked = true;
      key = prompt("API key") || "";
      sessionStorage.setItem("key", key);
    } else if (reply.status === 200) {
      tag = (reply.headers.get("ETag") || "").replaceAll('"', "");
      draw(await reply.json());
    } else if (reply.status !== 304) told.textContent = `the server answers ${reply.status}`;
  } catch { told.textContent = "the server does not answer"; }
  setTimeout(look, 1000);
}
look();
</script>
</html>
"""
