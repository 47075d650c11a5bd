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
let state = {};

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
  await offerModels();
  await reopenTalk();
  for await (const change of events("GET", "/v1/memory/events")) {
    Object.assign(state, change);
    live("live", "live");
    say($("model"), models(state));
    for (const show of PANELS) show(state);
  }
}

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
