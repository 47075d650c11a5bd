// The tree of sessions: forks stand below what they came from, marks beside their session.

import { at, call } from "./api.js";
import { nameFor, newTalk, openTalk, talkClosed, talkForked, talkOf, talkRewound } from "./chat.js";
import { mark as color } from "./colors.js";
import { $, bytes, count, follow, h, notice, plural, say } from "./dom.js";
import { pointOut } from "./pages.js";

const ACTS = [["fork", "Fork"], ["checkpoint", "Checkpoint"], ["save", "Save"], ["close", "Close"]];

export function showSessions({ sessions = [] }) {
  $("sessions-empty").hidden = sessions.length > 0;
  const known = new Set(sessions.map((one) => one.id));
  const below = new Map();
  for (const one of sessions) {
    const parent = known.has(one.parent) ? one.parent : null;
    below.set(parent, [...(below.get(parent) ?? []), one]);
  }
  showBranch($("tree"), null, below);
}

function showBranch(list, parent, below) {
  follow(list, below.get(parent) ?? [], (one) => one.id, makeSession, (node, one) => {
    updateSession(node, one);
    showBranch(node.lastChild, one.id, below);
  });
}

function makeSession({ id }) {
  const name = h("button", { type: "button", class: "name", onclick: () => openTalk(id) }, id);
  const acts = ACTS.map(([act, label]) =>
    h("button", { type: "button", "aria-label": `${label} ${id}`, data: { act }, onclick: (event) => press(event.currentTarget, act, id) }, label));
  const card = h("div", { class: "session", data: { session: id } },
    h("div", { class: "line" }, name, h("span", { class: "status" }), h("span", { class: "facts" })),
    h("ul", { class: "marks", "aria-label": `Checkpoints of ${id}` }),
    h("div", { class: "acts" }, ...acts));
  card.addEventListener("pointerenter", () => pointOut(id));
  card.addEventListener("pointerleave", () => pointOut(null));
  card.addEventListener("focusin", () => pointOut(id));
  card.addEventListener("focusout", () => pointOut(null));
  color(card, { kind: "session", id });
  return h("li", {}, card, h("ul"));
}

function updateSession(node, one) {
  const [line, marks, acts] = node.firstChild.children;
  const [name, status, facts] = line.children;
  const open = talkOf() === one.id;
  node.firstChild.dataset.open = open ? "1" : "0";
  if (open) name.setAttribute("aria-current", "true");
  else name.removeAttribute("aria-current");
  say(status, one.status);
  status.dataset.status = one.status;
  const alone = one.memory.bytes - one.memory.bytes_shared;
  const gone = one.parent && node.parentNode?.id === "tree" ? `, fork of ${one.parent} (closed)` : "";
  say(facts, `${plural(one.position, "token")}, ${bytes(alone)} alone, ${bytes(one.memory.bytes_shared)} shared${one.saved ? ", saved" : ""}${gone}`);
  Object.assign(node.firstChild.dataset, { position: one.position, bytes: one.memory.bytes, shared: one.memory.bytes_shared });
  const busy = one.status === "generating";
  const make = (mark) =>
    h("li", {}, h("button", { type: "button", data: { act: "rewind", mark: mark.name }, onclick: () => rewind(one.id, mark.name) }));
  follow(marks, one.checkpoints, (mark) => mark.name, make, (item, mark) => {
    say(item.firstChild, `Rewind to ${mark.name} at ${count(mark.position)}`);
    item.firstChild.disabled = busy;
  });
  for (const button of acts.children) button.disabled = busy;
}

/** Closing cannot be undone: it takes a second press. */
async function press(button, act, id) {
  if (act === "close" && !button.classList.contains("sure")) {
    askSure(button, id, true);
    setTimeout(() => askSure(button, id, false), 4000);
    return;
  }
  await attempt(() => DO[act](id));
}

function askSure(button, id, sure) {
  button.classList.toggle("sure", sure);
  say(button, sure ? "Close for good?" : "Close");
  button.ariaLabel = sure ? `Close for good? ${id}` : `Close ${id}`; // begins with what is seen
  if (sure) notice(`Press again to close ${id} for good`);
}

const DO = {
  async fork(id) {
    const made = await call("POST", at(id, "/fork"), { id: nameFor(`${id}.`) });
    talkForked(id, made.id);
    notice(`Forked ${id}: ${made.id} shares ${plural(made.memory.pages_shared, "page")} with it`);
    return made.id;
  },
  async checkpoint(id) {
    const made = await call("POST", at(id, "/checkpoint"), {});
    notice(`${made.name} marks ${id} at ${plural(made.position, "token")}`);
  },
  async save(id) {
    const file = await call("POST", at(id, "/save"), {});
    notice(`Saved ${file.name}: ${plural(file.position, "token")}, ${bytes(file.bytes)}`);
  },
  async close(id) {
    await call("DELETE", at(id));
    talkClosed(id);
    notice(`Closed ${id}`);
  },
};

export const fork = (id) => attempt(() => DO.fork(id));

export function rewind(id, to) {
  return attempt(async () => {
    const body = typeof to === "string" ? { to } : { tokens: to };
    const now = await call("POST", at(id, "/rewind"), body);
    talkRewound(id, now.position);
    notice(`${id} is back at ${plural(now.position, "token")}`);
  });
}

async function attempt(what) {
  try {
    return await what();
  } catch (error) {
    notice(error.message);
  }
}

$("new-session").addEventListener("click", () => attempt(async () => openTalk(await newTalk())));
