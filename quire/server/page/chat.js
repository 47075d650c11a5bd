// A chat on sessions. Each talk is a session on the server; this page remembers who said what.

import { at, call, events } from "./api.js";
import { mark as color } from "./colors.js";
import { $, follow, h, notice, plural, say } from "./dom.js";
import { endOf, forkTurns, freeName, keep, recognise, rewindTurns, setTurns, turnsOf } from "./talks.js";

const TEXT = { temperature: 0.6, top_p: 0.9 }; // of texts that go on; chats are as the model's makers say
const MOST = 1024; // tokens of an answer, or an eighth of the context where that is less
const PATIENCE = 3; // looks for a session that was made and not told of
let most = MOST;
let open = null; // the session that is shown
let lost = null; // one that was shown, and was ended by others
let missing = 0; // looks without the one that is shown
const closed = new Set(); // those that were closed here
let sessions = new Map();
let running = null; // the session that answers, and what stops it
let forkHere, rewindTo; // given by the tree, which gives them for its own buttons too

export const talkOf = () => open;

/** A name for a session, which nobody has. */
export const nameFor = (prefix) => freeName(prefix, sessions);

/** A new session; its id. */
export async function newTalk() {
  const model = $("new-model").value || undefined;
  const { id } = await call("POST", "/v1/sessions", { id: nameFor("chat-"), model });
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
  if (id !== null) lost = null;
  if (id !== open) missing = 0;
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

export function talkForked(id, made) {
  forkTurns(id, made);
  if (open === id) openTalk(made);
}

export function talkRewound(id, position) {
  rewindTurns(id, position);
  if (open === id) show();
}

export const talkClosed = (id) => closed.add(id);

export function showChat(state) {
  if (!state.sessions) return;
  if (state.model) most = Math.min(MOST, Math.floor(state.model.n_ctx / 8));
  const told = sessions.has(open);
  sessions = new Map(state.sessions.map((one) => [one.id, one]));
  state.sessions.forEach(recognise);
  missing = sessions.has(open) ? 0 : missing + 1;
  if (open && missing && !running && (told || missing > PATIENCE)) leave(state.sessions[0]?.id ?? null);
  show();
}

/** The session that was shown is no more. Who ended it goes on with another; others are told. */
function leave(next) {
  if (closed.has(open)) return showTalk(next);
  lost = open;
  showTalk(null);
}

const modelOf = (id) => sessions.get(id)?.model;
const isChat = (id) => turnsOf(id).length > 0 || !sessions.get(id)?.position;

function show() {
  const here = sessions.get(open);
  say($("chat-at"), here ? plural(here.position, "token") : "");
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("log").ariaBusy = String(running !== null); // readers are told of an answer once, when it is whole
  const tree = here ? [...sessions.values()].filter((one) => one.root === here.root) : [];
  const chip = (one) => h("button", { type: "button", onclick: () => openTalk(one.id) }, one.id);
  const chips = here ? [...tree, { id: "+", kind: "fork" }] : [];
  const make = (one) => (one.kind === "fork" ? h("button", { type: "button", id: "fork-here", onclick: () => forkHere(open) }, "Fork here") : chip(one));
  follow($("branches"), chips, (one) => one.id, make, (node, one) => {
    if (one.kind === "fork") return void (node.disabled = running !== null);
    node.setAttribute("aria-pressed", String(one.id === open));
    color(node, { kind: "session", id: one.id });
  });
  showTurns(turnsOf(open ?? lost), here ? restOf(here) : "");
}

/** What stands where nothing, or nothing more, can be said of a session. */
function word(turns) {
  if (lost) {
    const next = turns.length ? "a new session goes on with this conversation" : "a session is made for it";
    return `${lost} is not on the server any more: it was closed, or was not saved when the server ended. Say something, and ${next}.`;
  }
  if (turns.length) return "";
  return open ? "Nothing said yet." : "Say something, and a session is made for it.";
}

function showTurns(turns, rest = "") {
  const list = turns.map((turn, i) => ({ ...turn, i }));
  const make = (turn) => h("div", { class: "turn", data: { role: turn.role } },
    h("div", { class: "who" }, h("span"), h("button", { type: "button" }, "Rewind to here")),
    h("div", { class: "reasoning" }), h("span"));
  const from = turns.length ? "not of this conversation: what you say next takes its place" : "";
  if (rest) list.push({ i: "rest", role: "context", content: rest, who: from });
  else if (word(turns)) list.push({ i: "none", role: "nobody", content: word(turns), who: "" });
  const log = $("log");
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  follow(log, list, (turn) => `${open} ${turn.i} ${turn.role}`, make, (node, turn) => {
    const [who, button] = node.firstChild.children;
    const notes = [turn.from && `shared with ${turn.from}`, turn.cut].filter(Boolean);
    say(who, turn.who ?? [turn.role, ...notes].join(", "));
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

const rests = new Map(); // id -> what a session holds behind what was said, as text
const reading = new Set();

/** Of a session that others made that is all of it. It is asked for again when the session has moved. */
function restOf(here) {
  const known = rests.get(here.id);
  const text = known?.text ?? (turnsOf(here.id).length ? "" : "…");
  if (running?.id === here.id) return isChat(here.id) ? "" : text;
  if (here.position === endOf(here.id)) return rests.delete(here.id), "";
  const same = known?.position === here.position && known.created === here.created;
  if (!same && here.status !== "generating" && !reading.has(here.id)) readRest(here.id);
  return text;
}

async function textOf(id, tokens) {
  const { content } = await call("POST", "/detokenize", { tokens, model: modelOf(id) });
  return content;
}

async function readRest(id) {
  reading.add(id);
  try {
    const before = turnsOf(id);
    const { tokens, position, created } = await call("GET", at(id, "?tokens=1"));
    if (running?.id === id || turnsOf(id) !== before) return; // it has gone on since
    rewindTurns(id, position);
    const rest = tokens.slice(endOf(id));
    rests.set(id, { position, created, text: rest.length ? await textOf(id, rest) : "" });
  } catch (error) {
    notice(error.message);
    await new Promise((resolve) => setTimeout(resolve, 5000)); // and then again
  } finally {
    reading.delete(id);
    if (open === id) show();
  }
}

async function send(text) {
  running = { id: open, stop: new AbortController() };
  let heard = false;
  try {
    const id = open ?? (await begin());
    running.id = id;
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

/** A session for what is said without one; it goes on with a conversation that was lost. */
async function begin() {
  const said = turnsOf(lost).map(({ role, content, reasoning, cut }) => ({ role, content, reasoning, cut }));
  const id = await newTalk();
  setTurns(id, said);
  showTalk(id);
  return id;
}

/** What was not answered can be sent again. */
function giveBack(text) {
  if (!$("message").value) $("message").value = text;
}

/** Has the model answer; whether it said anything, which is also told of what went wrong. */
async function converse(id, text) {
  const turns = turnsOf(id);
  const answer = { role: "assistant", content: "", reasoning: "" };
  const heard = () => Boolean(answer.content || answer.reasoning);
  setTurns(id, [...turns, { role: "user", content: text }, answer]);
  showTalk(id);
  const messages = turnsOf(id).slice(0, -1).map(({ role, content }) => ({ role, content }));
  const asked = { stream: true, stream_options: { include_usage: true }, timings_per_token: true };
  const body = { model: modelOf(id), messages, session_id: id, max_tokens: most, ...asked };
  let prompt; // how many tokens the session has before the answer
  try {
    for await (const part of events("POST", "/v1/chat/completions", body, running.stop.signal)) {
      if (part.error) throw new Error(part.error.message);
      if (part.timings) prompt = part.timings.cache_n + part.timings.prompt_n;
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
    if (!heard()) setTurns(id, turns);
    else await settle(id, answer, running.stop.signal.aborted ? prompt : undefined).catch(() => null); // gone: it was told
    keep();
  }
}

/** Where an answer ends; of one that was stopped, also what was made before the server heard of it. */
async function settle(id, answer, prompt) {
  let now = await call("GET", at(id, prompt ? "?tokens=1" : ""));
  while (prompt && now.status === "generating") {
    await new Promise((resolve) => setTimeout(resolve, 50));
    now = await call("GET", at(id, "?tokens=1"));
  }
  const { position, tokens } = now;
  answer.end = position;
  if (!prompt) return;
  const text = await textOf(id, tokens.slice(prompt));
  const part = answer.content ? "content" : "reasoning";
  const from = text.indexOf(answer[part], answer.content ? answer.reasoning.length : 0);
  if (from >= 0) answer[part] = text.slice(from);
}

/** A context that is no conversation goes on as text. */
async function carryOn(id, text) {
  const known = rests.get(id) ?? { text: "" };
  const body = { model: modelOf(id), prompt: text, session_id: id, stream: true, max_tokens: most, ...TEXT };
  const goesOn = (more) => {
    known.text += more;
    rests.set(id, { ...known, position: -1 }); // what it holds then is asked for: it may be refused
    if (open === id) show();
  };
  goesOn(text);
  for await (const part of events("POST", "/v1/completions", body, running.stop.signal)) {
    if (part.error) throw new Error(part.error.message);
    goesOn(part.choices?.[0]?.text ?? "");
  }
  return true;
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
$("stop").addEventListener("click", () => running?.stop.abort());
