// Who has which colour: sessions in the order in which they are first seen, the rest by kind.

const COLORS = 8;
const given = new Map();

export function colorOf(id) {
  if (!given.has(id)) given.set(id, String(given.size % COLORS));
  return given.get(id);
}

/** What an element needs to show a holder's colour. */
export function mark(node, holder) {
  if (holder.kind === "session") {
    node.dataset.color = colorOf(holder.id);
    delete node.dataset.kind;
  } else {
    node.dataset.kind = holder.kind;
  }
}

/** The colour itself, for drawing. */
export function paint(style, holder) {
  const name = holder.kind === "session" ? `--s${colorOf(holder.id)}` : NAMES[holder.kind];
  return style.getPropertyValue(name).trim();
}

const NAMES = { cached: "--cached", checkpoint: "--checkpoints", request: "--other" };
