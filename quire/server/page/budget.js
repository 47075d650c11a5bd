// One bar for the whole budget: what its bytes are held for, and what is free.

import { $, bytes, follow, h, say } from "./dom.js";

export function showBudget({ budget, models = [] }) {
  if (budget === undefined) return;
  const parts = budget ? withFree(budget) : []; // none: no model is loaded
  const key = (part) => part.name;
  const share = (part) => `${((100 * part.bytes) / budget.limit_bytes).toFixed(1)}%`;
  say($("budget-sum"), budget ? `${bytes(budget.used_bytes)} of ${bytes(budget.limit_bytes)}` : "");
  const told = parts.map((part) => `${part.name} ${bytes(part.bytes)}`).join(", ");
  $("budget-bar").setAttribute("aria-label", `Memory by use: ${told || "no model loaded"}`);
  const make = (part) => h("i", { data: { kind: part.kind } });
  follow($("budget-bar"), parts, key, make, (node, part) => {
    node.style.flexGrow = part.bytes;
    node.hidden = part.bytes === 0;
    node.title = `${part.name}: ${bytes(part.bytes)} (${share(part)})`;
  });
  const entry = (part) =>
    h("div", { data: { kind: part.kind, part: part.name } }, h("dt", {}, part.name), h("dd"));
  follow($("budget-parts"), parts, key, entry, (node, part) => {
    say(node.lastChild, bytes(part.bytes));
    node.dataset.bytes = part.bytes;
    node.hidden = part.bytes === 0 && models.length > 1; // of many models there are many parts
  });
}

function withFree({ limit_bytes, used_bytes, parts }) {
  return [...parts, { name: "free", kind: "free", bytes: Math.max(limit_bytes - used_bytes, 0) }];
}
