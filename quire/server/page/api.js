// Calls to the server. A key lives in this tab's sessionStorage and nowhere else.

import { $ } from "./dom.js";

const KEPT = "quire-key";
let asking = null;

function headers(body) {
  const key = sessionStorage.getItem(KEPT);
  return {
    ...(key ? { authorization: `Bearer ${key}` } : {}),
    ...(body === undefined ? {} : { "content-type": "application/json" }),
  };
}

/** Asks for the key, once however many calls need it. */
function askKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (refused) $("key-why").textContent = "That key was not taken. Try another.";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEPT, $("key").value);
      $("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function request(method, path, body, signal) {
  if (document.documentElement.dataset.key && sessionStorage.getItem(KEPT) === null) await askKey(false);
  for (;;) {
    const sent = sessionStorage.getItem(KEPT);
    const answer = await reached(fetch(path, {
      method, signal, headers: headers(body), cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    }));
    if (answer.status !== 401) return answer;
    if (sessionStorage.getItem(KEPT) === sent) await askKey(sent !== null);
  }
}

/** What the network gives; browsers have only words of their own for a server that is gone. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "TypeError" ? new Error("The server cannot be reached.") : error;
  }
}

async function refusal(answer) {
  try {
    return new Error((await answer.json()).error.message);
  } catch {
    return new Error(`the server answered ${answer.status}`);
  }
}

/** One call with JSON in and out; throws what the server said where it refused. */
export async function call(method, path, body) {
  const answer = await request(method, path, body);
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/** The data of server-sent events, one by one. EventSource could not send a key. */
export async function* events(method, path, body, signal) {
  const answer = await request(method, path, body, signal);
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"));
      const text = data.map((line) => line.slice(5).trimStart()).join("\n");
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
}

/** A session's path. */
export const at = (id, what = "") => `/v1/sessions/${encodeURIComponent(id)}${what}`;
