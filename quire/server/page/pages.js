// A map of pages: one cell each, coloured by who holds it, with a dot where several do.

import { paint, mark } from "./colors.js";
import { $, bytes, count, follow, h, plural, say } from "./dom.js";

const CELL = 11;
const GAP = 2;
const ROWS = 3; // at least so many are drawn, so that free room is seen

let chosen = null; // a holder whose pages stand out

/** Makes one session's pages stand out; null for none. */
export function pointOut(id) {
  chosen = id;
  for (const node of $("pools").children) draw(node);
}

export function showPages({ pools = [], sessions = [] }) {
  follow($("pools"), pools, (pool) => `${pool.model}/${pool.name}`, makePool, updatePool);
  const held = new Map();
  for (const pool of pools) {
    for (const by of pool.held) {
      const key = `${by.kind} ${by.id}`;
      const known = held.get(key) ?? { ...by, pages: 0, bytes: 0 };
      known.pages += by.pages;
      known.bytes += by.pages * pool.page_bytes;
      held.set(key, known);
    }
  }
  const order = new Map(sessions.map((one, i) => [one.id, i]));
  const list = [...held.values()].sort((a, b) => (order.get(a.id) ?? 1e9) - (order.get(b.id) ?? 1e9));
  follow($("holders"), list, (one) => `${one.kind} ${one.id}`, makeHolder, updateHolder);
}

function makeHolder(holder) {
  const node = h("div", {}, h("dt"), h("dd"));
  if (holder.kind === "session") {
    node.addEventListener("pointerenter", () => pointOut(holder.id));
    node.addEventListener("pointerleave", () => pointOut(null));
  }
  return node;
}

function updateHolder(node, holder) {
  mark(node, holder);
  node.dataset.holder = `${holder.kind} ${holder.id}`;
  node.dataset.pages = holder.pages;
  say(node.firstChild, nameOf(holder));
  say(node.lastChild, `${plural(holder.pages, "page")}, ${bytes(holder.bytes)}`);
}

function nameOf(holder) {
  if (holder.kind === "cached") return "cached prefixes";
  if (holder.kind === "session") return holder.id || "other sessions";
  return holder.id ? `${holder.kind} ${holder.id.replace(/~turn$/, "last turn")}` : `${holder.kind}s`;
}

function makePool(pool) {
  const canvas = h("canvas", { role: "img", tabindex: "0" });
  const probe = h("p", { class: "probe", "aria-live": "polite" });
  const caption = h("div", { class: "caption" }, h("b"), h("span", { class: "fig muted" }));
  const node = h("div", { class: "pool", data: { pool: pool.name } }, caption, canvas, probe);
  node._at = -1;
  const look = (cell) => {
    node._at = cell;
    say(probe, cell < 0 ? "" : tell(node._pool, cell));
    draw(node);
  };
  canvas.addEventListener("pointermove", (event) => look(cellUnder(node, event)));
  canvas.addEventListener("pointerleave", () => look(-1));
  canvas.addEventListener("blur", () => look(-1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(node), ArrowUp: -columns(node) };
    if (!(event.key in step)) return;
    event.preventDefault();
    look(Math.min(Math.max(node._at + step[event.key], 0), drawn(node) - 1));
  });
  new ResizeObserver(() => draw(node)).observe(node);
  return node;
}

function updatePool(node, pool) {
  node._pool = pool;
  const [caption, canvas] = node.children;
  say(caption.firstChild, pool.model ? `${pool.name} (${pool.model})` : pool.name);
  const each = pool.per_cell > 1 ? `; a cell stands for ${pool.per_cell} pages` : "";
  const facts = `${count(pool.pages_used)} of ${count(pool.pages_max)} pages of ${bytes(pool.page_bytes)}, ${count(pool.pages_shared)} shared${each}`;
  say(caption.lastChild, facts);
  canvas.setAttribute("aria-label", `Pages of ${pool.name}: ${facts}. Arrow keys go through them.`);
  Object.assign(node.dataset, { used: pool.pages_used, shared: pool.pages_shared });
  if (node._at >= 0) say(node.lastChild, tell(pool, node._at));
  draw(node);
}

const cells = (pool) => Math.ceil(pool.pages_max / pool.per_cell);
const drawn = (node) => Math.min(Math.max(node._pool.cells, columns(node) * (ROWS - 1) + 1), cells(node._pool));
const columns = (node) => Math.max(Math.floor((node.clientWidth + GAP) / (CELL + GAP)), 1);

function cellUnder(node, event) {
  const n = columns(node);
  const x = Math.floor(event.offsetX / (CELL + GAP));
  const cell = Math.floor(event.offsetY / (CELL + GAP)) * n + x;
  return x < n && cell < cells(node._pool) ? cell : -1;
}

const within = (runs, cell) => {
  for (let i = 0; i < runs.length; i += 2) {
    if (cell >= runs[i] && cell < runs[i] + runs[i + 1]) return true;
  }
  return false;
};

function tell(pool, cell) {
  const first = cell * pool.per_cell;
  const what = pool.per_cell > 1 ? `Pages ${first} to ${Math.min(first + pool.per_cell, pool.pages_max) - 1}` : `Page ${first}`;
  const names = pool.held.filter((by) => within(by.at, cell)).map(nameOf);
  if (!names.length) return `${what}: free`;
  return `${what}: held by ${names.join(", ")}${within(pool.shared, cell) ? "; shared" : ""}`;
}

function draw(node) {
  const pool = node._pool;
  const canvas = node.children[1];
  if (!pool || !node.clientWidth) return;
  const style = getComputedStyle(document.documentElement);
  const n = columns(node);
  const rows = Math.ceil(drawn(node) / n);
  const scale = devicePixelRatio || 1;
  const height = rows * (CELL + GAP);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(node.clientWidth * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const each = (runs, paintCell) => {
    for (let i = 0; i < runs.length; i += 2) {
      for (let c = runs[i]; c < runs[i] + runs[i + 1]; c++) paintCell((c % n) * (CELL + GAP), Math.floor(c / n) * (CELL + GAP));
    }
  };
  pen.fillStyle = style.getPropertyValue("--soft");
  each([0, Math.min(rows * n, cells(pool))], (x, y) => box(pen, x, y));
  for (const by of [...pool.held].reverse()) {
    pen.globalAlpha = chosen && by.id !== chosen ? 0.25 : 1;
    pen.fillStyle = paint(style, by);
    each(by.at, (x, y) => box(pen, x, y));
  }
  pen.globalAlpha = 1;
  const one = chosen && pool.held.find((by) => by.kind === "session" && by.id === chosen);
  if (one) {
    pen.fillStyle = paint(style, one);
    each(one.at, (x, y) => box(pen, x, y));
  }
  pen.fillStyle = style.getPropertyValue("--dot");
  each(pool.shared, (x, y) => {
    pen.beginPath();
    pen.arc(x + CELL / 2, y + CELL / 2, 2, 0, 7);
    pen.fill();
  });
  if (node._at >= 0) {
    pen.strokeStyle = style.getPropertyValue("--ink");
    pen.strokeRect((node._at % n) * (CELL + GAP) + 0.5, Math.floor(node._at / n) * (CELL + GAP) + 0.5, CELL - 1, CELL - 1);
  }
}

function box(pen, x, y) {
  pen.beginPath();
  pen.roundRect(x, y, CELL, CELL, 2.5);
  pen.fill();
}
