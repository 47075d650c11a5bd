// A chat on sessions. Each talk is a session on the server; this page remembers who said what.

import { at, call, events } from "./api.js";
import { mark as color } from "./colors.js";
import { $, follow, h, notice, plural, say } from "./dom.js";

const KEPT = "quire-talks";
const TEXT = { temperature: 0.6, top_p: 0.9 }; // of texts that go on; chats are as the model's makers say
const MOST = 1024; // tokens of an answer, or an eighth of the context where that is less
let most = MOST;
const talks = new Map(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")); // id -> turns
let open = null; // the session that is shown
let sessions = new Map();
let running = null;
let forkHere, rewindTo; // given by the tree, which gives them for its own buttons too

export const talkOf = () => open;

const taken = new Set(talks.keys()); // what was made a moment ago may not have been told of yet

/** The first of prefix1, prefix2… that is free; the server finds one where that is too long. */
export function freeName(prefix) {
  for (let n = 1; prefix.length < 100; n++) {
    const name = prefix + n;
    if (!sessions.has(name) && !taken.has(name)) return taken.add(name) && name;
  }
}

/** A new session; its id. */
export async function newTalk() {
  const model = $("new-model").value || undefined;
  const { id } = await call("POST", "/v1/sessions", { id: freeName("chat-"), model });
  talks.set(id, []);
  return id;
}

export function useTree(tree) {
  forkHere = tree.fork;
  rewindTo = tree.rewind;
}

export function openTalk(id) {
  showTalk(id);
  $("message").focus({ preventScroll: true });
}

function showTalk(id) {
  open = id;
  say($("chat-h"), id ? `Chat in ${id}` : "Chat");
  show();
  const at = document.activeElement; // whoever has gone on to something else is left there
  if (at === document.body || $("composer").contains(at)) $("message").focus({ preventScroll: true });
}

/** A server that was started again opens a session from its file, as soon as somebody asks for it. */
export async function reopenTalk() {
  if (open) await call("GET", at(open)).catch(() => null);
}

/** A fork knows what was said before it; those turns are marked as shared. */
export function talkForked(id, made) {
  if (talks.has(id)) {
    talks.set(made, talks.get(id).map((turn) => ({ ...turn, from: turn.from ?? id })));
    keep();
  }
  if (open === id) openTalk(made);
}

/** A session went back: so do the turns that came later. */
export function talkRewound(id, position) {
  const turns = talks.get(id);
  if (turns) {
    const last = turns.findLastIndex((turn) => turn.end && turn.end <= position);
    talks.set(id, turns.slice(0, last + 1));
    keep();
  }
  if (open === id) show();
}

export function showChat(state) {
  if (!state.sessions) return;
  if (state.model) most = Math.min(MOST, Math.floor(state.model.n_ctx / 8));
  sessions = new Map(state.sessions.map((one) => [one.id, one]));
  if (open && !sessions.has(open) && !running) showTalk(state.sessions[0]?.id ?? null);
  show();
}

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify([...talks].slice(-50)));
}

const modelOf = (id) => sessions.get(id)?.model;
const isChat = (id) => talks.has(id) || !sessions.get(id)?.position;

function show() {
  const here = sessions.get(open);
  say($("chat-at"), here ? plural(here.position, "token") : "");
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  const tree = here ? [...sessions.values()].filter((one) => one.root === here.root) : [];
  const chip = (one) => h("button", { type: "button", onclick: () => openTalk(one.id) }, one.id);
  const chips = here ? [...tree, { id: "+", kind: "fork" }] : [];
  const make = (one) => (one.kind === "fork" ? h("button", { type: "button", id: "fork-here", onclick: () => forkHere(open) }, "Fork here") : chip(one));
  follow($("branches"), chips, (one) => one.id, make, (node, one) => {
    if (one.kind === "fork") return void (node.disabled = running !== null);
    node.setAttribute("aria-pressed", String(one.id === open));
    color(node, { kind: "session", id: one.id });
  });
  if (open === null || isChat(open)) showTurns(talks.get(open) ?? []);
  else showContext(here);
}

function showTurns(turns) {
  const list = turns.map((turn, i) => ({ ...turn, i }));
  const make = (turn) => h("div", { class: "turn", data: { role: turn.role } },
    h("div", { class: "who" }, h("span"), h("button", { type: "button" }, "Rewind to here")),
    h("div", { class: "reasoning" }), h("span"));
  if (!list.length) list.push({ i: "none", role: "nobody", content: open ? "Nothing said yet." : "Say something, and a session is made for it." });
  const log = $("log");
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  follow(log, list, (turn) => `${open} ${turn.i} ${turn.role}`, make, (node, turn) => {
    const [who, button] = node.firstChild.children;
    const notes = [turn.from && `shared with ${turn.from}`, turn.cut].filter(Boolean);
    say(who, turn.role === "context" || turn.role === "nobody" ? "" : [turn.role, ...notes].join(", "));
    say(node.children[1], turn.reasoning ?? "");
    node.children[1].hidden = !turn.reasoning;
    say(node.lastChild, turn.content);
    if (turn.from) color(node, { kind: "session", id: turn.from });
    const back = turn.end && turn.end < (sessions.get(open)?.position ?? 0) && !running;
    button.hidden = !back;
    if (back) button.onclick = () => rewindTo(open, sessions.get(open).position - turn.end);
  });
  if (low) log.scrollTop = log.scrollHeight;
}

/** A session that others made: its context as text, asked for again when it has moved. */
const contexts = new Map();

function showContext(here) {
  const known = contexts.get(here.id);
  const now = { role: "context", content: known?.text ?? "…", i: "context" };
  showTurns([now]);
  if (known?.position === here.position || here.status === "generating") return;
  contexts.set(here.id, { position: here.position, text: known?.text ?? "…" });
  readContext(here).catch((error) => notice(error.message));
}

async function readContext({ id, position }) {
  const { tokens } = await call("GET", at(id, "?tokens=1"));
  const found = await call("POST", "/detokenize", { tokens, model: modelOf(id) });
  contexts.set(id, { position, text: found.content ?? found.prompt });
  if (open === id) show();
}

async function send(text) {
  running = new AbortController();
  let heard = false;
  try {
    open ??= await newTalk();
    const id = open;
    heard = await (isChat(id) ? converse(id, text) : carryOn(id, text));
    if (!heard) notice("The model answered nothing.");
  } catch (error) {
    heard = error.heard;
    if (error.name !== "AbortError") notice(error.message);
  } finally {
    if (!heard) giveBack(text);
    running = null;
    $("composer").dataset.answers = Number($("composer").dataset.answers ?? 0) + 1;
    showTalk(open);
  }
}

/** What was not answered can be sent again. */
function giveBack(text) {
  if (!$("message").value) $("message").value = text;
}

/** Has the model answer; whether it said anything, which is also told of what went wrong. */
async function converse(id, text) {
  const turns = talks.get(id) ?? [];
  const answer = { role: "assistant", content: "", reasoning: "" };
  const heard = () => Boolean(answer.content || answer.reasoning);
  talks.set(id, [...turns, { role: "user", content: text }, answer]);
  showTalk(id);
  const messages = talks.get(id).slice(0, -1).map(({ role, content }) => ({ role, content }));
  const stream_options = { include_usage: true };
  const body = { model: modelOf(id), messages, session_id: id, stream: true, stream_options, max_tokens: most };
  try {
    for await (const part of events("POST", "/v1/chat/completions", body, running.signal)) {
      if (part.error) throw new Error(part.error.message);
      const [choice] = part.choices ?? [];
      answer.content += choice?.delta?.content ?? "";
      answer.reasoning += choice?.delta?.reasoning_content ?? "";
      if (choice?.finish_reason === "length") answer.cut = "cut: the context is full";
      if (answer.cut && part.usage?.completion_tokens >= most) answer.cut = `cut after ${plural(most, "token")}`;
      if (open === id) show();
    }
    return heard();
  } catch (error) {
    error.heard = heard();
    throw error;
  } finally {
    if (!heard()) talks.set(id, turns);
    else answer.end = (await call("GET", at(id)).catch(() => ({}))).position; // gone: it was told
    keep();
  }
}

/** A context that is no conversation goes on as text. */
async function carryOn(id, text) {
  const known = contexts.get(id) ?? { text: "" };
  const body = { model: modelOf(id), prompt: text, session_id: id, stream: true, max_tokens: most, ...TEXT };
  known.text += text;
  try {
    for await (const part of events("POST", "/v1/completions", body, running.signal)) {
      if (part.error) throw new Error(part.error.message);
      known.text += part.choices?.[0]?.text ?? "";
      if (open === id) showTurns([{ role: "context", content: known.text, i: "context" }]);
    }
    return true;
  } finally {
    contexts.set(id, { ...known, position: -1 }); // what it holds now is asked for: it may have been refused
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  send(text).catch((error) => notice(error.message));
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
