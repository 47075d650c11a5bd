// The prefix cache: what it holds, how often it helped, and why not otherwise.

import { $, bytes, count, follow, h, plural, say } from "./dom.js";

const WHY = {
  new: "never seen",
  evicted: "was evicted",
  salt: "other salt",
  "no state here": "no state there",
  short: "too short",
};

export const lookups = (prefix) => prefix.hits + Object.values(prefix.misses).reduce((a, b) => a + b, 0);

export function showPrefix({ prefix }) {
  if (prefix === undefined) return;
  const all = prefix ? lookups(prefix) : 0; // none: no model is loaded
  say($("prefix-rate"), all ? `${Math.round((100 * prefix.hits) / all)}% of ${plural(all, "prompt")} hit` : prefix ? "no prompts yet" : "");
  const figures = prefix ? [
    ["hits", "Hits", count(prefix.hits)],
    ["tokens_saved", "Tokens not computed", count(prefix.tokens_saved)],
    ["entries", "Places kept", count(prefix.entries)],
    ["pinned", "Pinned", count(prefix.pinned)],
    ["parked", "In a tier", count(prefix.parked)],
    ["evictions", "Evictions", count(prefix.evictions)],
    ["bytes_only_here", "Held by it alone", bytes(prefix.bytes_only_here)],
  ] : [];
  const make = ([name, label]) => h("div", { data: { figure: name } }, h("dt", {}, label), h("dd"));
  follow($("prefix-figures"), figures, (f) => f[0], make, (node, f) => say(node.lastChild, f[2]));
  const misses = prefix?.misses ?? {};
  const most = Math.max(1, ...Object.values(misses));
  const row = ([reason]) =>
    h("div", { data: { reason } }, h("dt", {}, WHY[reason] ?? reason), h("dd"));
  follow($("prefix-misses"), Object.entries(misses), (m) => m[0], row, (node, [, n]) => {
    node.style.setProperty("--share", n / most);
    say(node.lastChild, count(n));
  });
}
