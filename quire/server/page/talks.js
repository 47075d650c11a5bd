// What was said in sessions, as this tab remembers it: their tokens do not tell who said what.

const KEPT = "quire-said";
const MOST = 50;
const talks = new Map(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")); // id -> { turns, created }
const taken = new Set(talks.keys()); // what was made a moment ago may not have been told of yet

/** The first of prefix1, prefix2… that is free; the server finds one where that is too long. */
export function freeName(prefix, sessions) {
  for (let n = 1; prefix.length < 100; n++) {
    const name = prefix + n;
    if (!sessions.has(name) && !taken.has(name)) return taken.add(name) && name;
  }
}

const NONE = [];

export const turnsOf = (id) => talks.get(id)?.turns ?? NONE;

/** Where what was said ends in its session. */
export const endOf = (id) => turnsOf(id).findLast((turn) => turn.end)?.end ?? 0;

export function setTurns(id, turns) {
  talks.set(id, { ...talks.get(id), turns });
}

/** Until the tab is closed. */
export function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify([...talks].slice(-MOST)));
  } catch {
    sessionStorage.removeItem(KEPT); // more than a tab may keep: it is forgotten with a reload
  }
}

/** A fork knows what was said before it; those turns are marked as shared. */
export function forkTurns(id, made) {
  setTurns(made, turnsOf(id).map((turn) => ({ ...turn, from: turn.from ?? id })));
  keep();
}

/** A session went back: so do the turns that came later. */
export function rewindTurns(id, position) {
  const turns = turnsOf(id);
  const last = turns.findLastIndex((turn) => turn.end && turn.end <= position);
  if (last + 1 === turns.length) return;
  setTurns(id, turns.slice(0, last + 1));
  keep();
}

/** Others may have closed a session and made another of its name: nothing was said in that one. */
export function recognise({ id, created }) {
  const talk = talks.get(id);
  if (!talk) return;
  talk.created ??= created;
  if (talk.created !== created) talks.delete(id);
}
