// Follows the server's events and shows them. Each event has what changed since the last.

import { call, events } from "./api.js";
import { showBudget } from "./budget.js";
import { reopenTalk, showChat, useTree } from "./chat.js";
import { $, follow, h, say } from "./dom.js";
import { showPages } from "./pages.js";
import { showPlots } from "./plots.js";
import { showPrefix } from "./prefix.js";
import { showRequests } from "./requests.js";
import { fork, rewind, showSessions } from "./sessions.js";

useTree({ fork, rewind });
const PANELS = [showBudget, showSessions, showPages, showPrefix, showRequests, showChat, showPlots];
const QUIET_MS = 10_000; // without an event the figures are old; the server sends one each second
const GONE_MS = 60_000; // a connection that nobody ended, as after a sleep
let state = {};
let heard = Infinity; // when; before the first event nothing is missed
let stop = new AbortController();

function live(kind, text) {
  $("live").dataset.state = kind;
  say($("live"), text);
}

function models({ model, models = [] }) {
  if (!model) return "no model loaded";
  return models.length > 1 ? models.join(", ") : `${model.id}, context of ${model.n_ctx.toLocaleString("en")}`;
}

/** A new session is with one of the server's models: which, is asked where there are several. */
async function offerModels() {
  const { data } = await call("GET", "/v1/models");
  const make = (one) => h("option", { value: one.id }, one.id);
  follow($("new-model"), data, (one) => one.id, make, () => {});
  $("new-model").hidden = data.length < 2;
}

async function watch() {
  state = {};
  stop = new AbortController();
  heard = Infinity;
  await offerModels();
  await reopenTalk();
  for await (const change of events("GET", "/v1/memory/events", undefined, stop.signal)) {
    heard = Date.now();
    Object.assign(state, change);
    live("live", "live");
    say($("model"), models(state));
    for (const show of PANELS) show(state);
  }
}

setInterval(() => {
  if ($("live").dataset.state === "lost") return;
  if (Date.now() - heard > QUIET_MS) live("waiting", "no news from the server");
  if (Date.now() - heard > GONE_MS) stop.abort();
}, 1000);

/** A key that is held down is one press: holding Enter does not close a session, or make ten. */
addEventListener("keydown", (event) => {
  if (event.repeat && event.key === "Enter" && event.target.closest?.("button")) event.preventDefault();
});

for (let wait = 500; ; wait = Math.min(wait * 2, 5000)) {
  try {
    const before = Date.now();
    await watch();
    if (Date.now() - before > 5000) wait = 250;
  } catch (error) {
    console.debug(error);
  }
  live("lost", "not connected; trying again");
  await new Promise((resolve) => setTimeout(resolve, wait));
}
