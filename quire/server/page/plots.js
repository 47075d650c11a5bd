// Three plots over the last minutes, from what this page has seen since it was opened.

import { $, bytes, h, say } from "./dom.js";
import { lookups } from "./prefix.js";

const KEPT_S = 300;
const SPAN_S = 2; // speeds are those of so many seconds
const HEIGHT = 120;
const rows = []; // what was seen: time, counters, and what is drawn of them
const counted = {}; // the counters as they were last told
const totals = {};
let plots = [];

const BINARY = Array.from({ length: 30 }, (_, n) => 2 ** (n + 14)); // so that ticks are round
const speed = (v) => `${v.toFixed(1)} /s`;
const PLOTS = [
  { id: "plot-tokens", title: "Tokens per second", tick: (v) => v,
    lines: [["made", "made", "0", speed], ["read", "read", "1", speed]] },
  { id: "plot-memory", title: "Memory used", tick: bytes, steps: BINARY, lines: [["used", "used", "4", bytes]] },
  { id: "plot-hits", title: "Prompts that hit", tick: (v) => `${v}%`, top: 105,
    lines: [["rate", "of these minutes", "3", (v) => `${v.toFixed(0)}%`]] },
];

export function showPlots({ time, counters, budget, prefix }) {
  if (!counters || !budget || !prefix || typeof uPlot === "undefined") return;
  const { generated_tokens: generated, computed_tokens: computed } = counters;
  const now = { time, ...grown({ generated, computed, hits: prefix.hits, asked: lookups(prefix) }) };
  const recent = rows.findLast((one) => one.time <= time - SPAN_S) ?? rows[0] ?? now;
  const span = Math.max(time - recent.time, 0.25);
  const first = rows[0] ?? now;
  now.made = (now.generated - recent.generated) / span;
  now.read = (now.computed - recent.computed) / span;
  now.used = budget.used_bytes;
  now.rate = now.asked > first.asked ? (100 * (now.hits - first.hits)) / (now.asked - first.asked) : null;
  rows.push(now);
  while (rows[0].time < time - KEPT_S) rows.shift();
  if (rows.length < 2) return;
  if (!plots.length) plots = PLOTS.map(build);
  const times = rows.map((one) => one.time);
  PLOTS.forEach((plot, i) => {
    plots[i].setData([times, ...plot.lines.map(([field]) => rows.map((one) => one[field]))]);
    plot.lines.forEach(([field, label, , tell], n) =>
      say(plots[i].told[n], `${label} ${now[field] == null ? "–" : tell(now[field])}`));
  });
}

/** By how much counters have grown since the page was opened; they fall where a server or a model ended. */
function grown(told) {
  for (const [name, n] of Object.entries(told)) {
    totals[name] = (totals[name] ?? 0) + Math.max(n - (counted[name] ?? n), 0);
    counted[name] = n;
  }
  return totals;
}

function build({ id, title, tick, top, steps, lines }) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const node = $(id);
  const told = lines.map(([, , c]) => h("span", { data: { color: c } }));
  node.replaceChildren(h("figcaption", {}, h("b", {}, title), ...told));
  const axis = { stroke: color("--muted"), font: "11px system-ui", ticks: { show: false }, grid: { stroke: color("--line"), width: 1 } };
  const ago = (plot, ticks) => ticks.map((t) => {
    const s = Math.round(plot.scales.x.max - t);
    return s === 0 ? "now" : s % 60 ? `−${s} s` : `−${s / 60} min`;
  });
  const span = (_, low, high) => [Math.min(low ?? 0, (high ?? 60) - 60), high ?? 60];
  const every = (plot, i, low, high) => {
    const step = high - low > 150 ? 60 : 20;
    const n = Math.min(Math.floor((high - low) / step) + 1, KEPT_S / 20);
    return Array.from({ length: n }, (_, at) => high - (n - 1 - at) * step);
  };
  const plot = new uPlot({
    width: Math.max(node.clientWidth, 100), height: HEIGHT,
    series: [{}, ...lines.map(([, , c]) => ({ stroke: color(`--s${c}`), width: 1.6, points: { show: false } }))],
    axes: [{ ...axis, size: 26, splits: every, values: ago }, { ...axis, size: 64, space: 34, ...(steps ? { incrs: steps } : {}), values: (_, ticks) => ticks.map(tick) }],
    scales: { x: { time: false, range: span }, y: { range: (_, low, high) => [0, top ?? Math.max((high ?? 0) * 1.15, 1)] } },
    cursor: { show: false }, legend: { show: false },
  }, null, node);
  plot.root.setAttribute("aria-hidden", "true");
  plot.told = told;
  plot.watch = new ResizeObserver(() => plot.setSize({ width: node.clientWidth, height: HEIGHT }));
  plot.watch.observe(node);
  return plot;
}

/** Drawn anew in the other colours. */
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of plots) {
    plot.watch.disconnect();
    plot.destroy();
  }
  plots = [];
});
