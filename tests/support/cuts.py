"""The parts of a page that are cut, overflow or lie outside the window, as its boxes are in
Chromium."""

from __future__ import annotations

import copy
from typing import Any, Literal

from playwright.async_api import Page

from tests.support import forms

SIZES = ((1280, 800), (1024, 768), (390, 844))
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_FIND = """() => {
  const SLACK = 1.5; // pixels: boxes end between them
  const found = new Set();
  const width = document.documentElement.clientWidth;
  const report = (fault, element) => {
    const name = [element.localName, ...element.classList].join(".");
    found.add(`${fault}: ${name} ${JSON.stringify(element.textContent.trim().slice(0, 50))}`);
  };
  const within = (inner, outer) =>
    inner.left >= outer.left - SLACK && inner.right <= outer.right + SLACK
    && inner.top >= outer.top - SLACK && inner.bottom <= outer.bottom + SLACK;
  const overlap = (one, other) =>
    one.left < other.right - SLACK && other.left < one.right - SLACK
    && one.top < other.bottom - SLACK && other.top < one.bottom - SLACK;
  const NO_BOXES =
    ".folded thead, .folded thead *, title, desc, defs, defs *, option, script, style";
  const TYPED = "input, textarea, select"; // their own text scrolls
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || element.matches(NO_BOXES)) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    if (box.left < -SLACK || box.right > width + SLACK) report("outside the window", element);
    const drawing = element.ownerSVGElement;
    if (drawing) {
      if (element.localName !== "text") continue;
      const frame = element.parentElement.querySelector("rect.frame");
      if (!within(box, drawing.getBoundingClientRect())) report("outside its drawing", element);
      if (frame && !within(box, frame.getBoundingClientRect())) {
        report("wider than its frame", element);
      }
      continue;
    }
    const style = getComputedStyle(element);
    if (style.display === "inline" || element.matches(TYPED)) continue;
    if (element.scrollWidth > element.clientWidth + SLACK) report("wider than its box", element);
    const isHigher = element.scrollHeight > element.clientHeight + SLACK;
    if (style.overflowY !== "visible" && isHigher) report("higher than its box", element);
  }
  const nodes = [...document.querySelectorAll(".map .node")];
  nodes.forEach((one, index) => nodes.slice(index + 1).forEach((other) => {
    if (overlap(one.getBoundingClientRect(), other.getBoundingClientRect())) {
      report("on another node", one);
    }
  }));
  for (const canvas of document.querySelectorAll("canvas")) {
    const { width: wide, height: high } = canvas;
    if (!wide || !high) continue;
    const pen = canvas.getContext("2d");
    const isOpaque = (value, index) => index % 4 === 3 && value;
    const isDrawn = (...area) => pen.getImageData(...area).data.some(isOpaque);
    const labels = Math.round(20 * devicePixelRatio); // the height of its labels of times
    const figure = canvas.closest("figure") ?? canvas;
    if (isDrawn(0, 0, 1, high)) report("its labels are cut at the left", figure);
    if (isDrawn(wide - 1, high - labels, 1, labels)) {
      report("its labels are cut at the right", figure);
    }
    if (isDrawn(0, high - 1, wide, 1)) report("its labels are cut below", figure);
  }
  return [...found];
}"""
_DRAWN = """() => new Promise((done) => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 60)));
})"""


async def cuts(page: Page) -> list[str]:
    """The faults of the page as it is now, with all its details open; empty if all of it fits."""
    await page.evaluate(_DRAWN)
    return list(await page.evaluate(_FIND))


async def cuts_at_all_sizes(page: Page) -> list[str]:
    """The faults of the page at each width, each with its width; in the long form in both
    schemes."""
    found = list[str]()
    for scheme in SCHEMES if forms.LONG else SCHEMES[:1]:
        await page.emulate_media(color_scheme=scheme)
        for width, height in SIZES:
            await page.set_viewport_size({"width": width, "height": height})
            found += [f"{width} {scheme}: {fault}" for fault in await cuts(page)]
    return found


PICTURE = "import('/dashboard/assets/store.js').then((store) => store.now().picture)"
"""The newest picture of a page, as JavaScript."""
SCRIPTED_STREAM = """
const fetchAnything = window.fetch;
let began;
window.streaming = new Promise((done) => { began = done; });
window.fetch = (url, options) => {
  if (!String(url).endsWith("/dashboard/stream")) return fetchAnything(url, options);
  const encoder = new TextEncoder();
  const start = (queue) => {
    window.send = (kind, value) => {
      const text = `event: ${kind}\\ndata: ${JSON.stringify(value)}\\n\\n`;
      queue.enqueue(encoder.encode(text));
    };
    began();
    options.signal.addEventListener("abort", () => queue.error(options.signal.reason));
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""
"""A script for a page before its own: its stream has only what `send(kind, value)` sends once
`streaming` is done."""


def crowded(picture: dict[str, Any], nodes: int, deployments: int) -> dict[str, Any]:
    """The picture of a site with `nodes` nodes and `deployments` deployments, made of one with a
    ready deployment.

    Names, devices, failures and figures are as long as the product lets them be, or nearly.
    """
    site = copy.deepcopy(picture)
    names = [f"workstation-{index:02d}.second-floor.example" for index in range(nodes)]
    examples = list(picture["nodes"].values())
    site["nodes"] = {
        name: copy.deepcopy(examples[index % len(examples)]) for index, name in enumerate(names)
    }
    for index, node in enumerate(site["nodes"].values()):
        sizes = dict.fromkeys(("weights", "kv"), 100 << 30) | {
            "kv_used": 99 << 30,
            "budget": 1 << 41,
            "free": 1 << 40,
        }
        node |= {
            "model": "NVIDIA H200 NVL 141GB HBM3e with a long name",
            "cores": 192,
            "load": 1.0,
            **sizes,
        }
        if index % 4 == 1:
            node |= {
                "status": "silent",
                "silent_s": 9,
                "measuring": True,
                "twin": "192.168.100.100:65535",
            }
    link = {"bps": 123_400_000, "latency_s": 0.1234}
    pairs = [
        (one, other) for number, one in enumerate(names) for other in names[number + 1 : number + 4]
    ]
    site["links"] = {f"{one} {other}": link for one, other in pairs}
    example = next(iter(picture["deployments"].values()))
    site["deployments"] = {
        f"fairy-tales-of-all-times-{number}": copy.deepcopy(example)
        for number in range(deployments)
    }
    for number, deployment in enumerate(site["deployments"].values()):
        deployment |= {
            "running": 120,
            "waiting": 1200,
            "served": 123_456_789,
            "tokens_per_s": 12345.6,
        }
        percentiles = {"p50": 0.1234, "p95": 12.34, "p99": 99.9}
        deployment["recent"] = {"first_token": percentiles, "between_tokens": percentiles}
        for index, stage in enumerate(deployment["stages"].values()):
            stage |= {
                "node": names[(number + index) % nodes],
                "kv_used": 99 << 30,
                "kv": 100 << 30,
                "busy": 1.0,
            }
            if number % 3 == 2:
                loading = {"phase": "loading", "filled": 123 << 30, "to_fill": 160 << 30}
                stage |= loading | {"work": "quantising", "left_s": 5999.0}
        if number % 3 == 2:
            deployment |= {
                "phase": "loading",
                "failure": "stage 1 on workstation-01 failed: " + "out of memory; " * 9,
            }
    request = {
        "who": "key/a-shop-with-a-long-name-for-its-key",
        "deployment": "fairy-tales-of-all-times-1", "state": "reading", "prompt": 131072,
        "read": 123456, "new": 0, "limit": 131072, "age_s": 5999,
    }  # fmt: skip
    site["requests"] = {f"r{number}": request for number in range(50)}
    event: dict[str, Any] = {
        "time": "2026-11-29T12:34:56.789Z",
        "subject": "deployment",
        "name": "fairy-tales-of-all-times-1",
    }
    event |= {
        "what": "is being built anew",
        "detail": "/srv/edgeshard/" + "a" * 90,
        "warning": True,
    }
    site["events"] = {str(number): event for number in range(100)}
    return site


_TAKERS = ", ".join(
    f"workstation-{index:02d}.second-floor.example {index}:{index + 1}" for index in range(9)
)
OUTLOOK = {
    "losses": [
        {"node": "workstation-00.second-floor.example", "pause_s": 123.4, "taken_by": _TAKERS}
    ]
}
"""The forecast of a loss's cost for each of these deployments."""

_UPDATE = """(change) => new Promise((done) => {
  const WAIT_MS = 400; // for the first of the page's changes
  const QUIET_MS = 40; // after the last one
  const began = performance.now();
  let ended = null;
  const end = () => {
    observer.disconnect();
    done(ended === null ? null : (ended - began) / 1000);
  };
  let ending = setTimeout(end, WAIT_MS);
  const observer = new MutationObserver(() => {
    document.body.getBoundingClientRect();
    ended = performance.now();
    clearTimeout(ending);
    ending = setTimeout(end, QUIET_MS);
  });
  const options = { subtree: true, childList: true, characterData: true, attributes: true };
  observer.observe(document.body, options);
  send("change", change);
})"""


def busy_change(picture: dict[str, Any], number: int) -> dict[str, Any]:
    """The change of a picture in which all figures move: of each node, deployment, stage and
    request."""
    nodes = {
        name: {"load": number % 100 / 100, "kv_used": number << 20} for name in picture["nodes"]
    }
    deployments = {}
    for name, one in picture["deployments"].items():
        stages = {
            index: {"kv_used": number << 20, "busy": number % 100 / 100} for index in one["stages"]
        }
        deployments[name] = {
            "running": number,
            "served": number,
            "tokens_per_s": 0.1 * number,
            "stages": stages,
        }
    requests = {name: {"read": number, "age_s": number} for name in picture["requests"]}
    return {"nodes": nodes, "deployments": deployments, "requests": requests}


async def update_s(page: Page, change: dict[str, Any]) -> float | None:
    """Seconds from the arrival of a change until it is drawn and laid out; None if nothing of the
    page changed."""
    found = await page.evaluate(_UPDATE, change)
    return None if found is None else float(found)
