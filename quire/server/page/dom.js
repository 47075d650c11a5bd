// Small tools for elements and figures. Nothing is written as HTML: text stays text.

export const $ = (id) => document.getElementById(id);

/** An element with attributes (`on…` are listeners, `data` its dataset) and children. */
export function h(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Changes text only where it differs, so that readers and selections are left in peace. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes a parent's children follow a list: each is made once, so focus survives updates. */
export function follow(parent, items, key, make, update) {
  const known = (parent._known ??= new Map());
  const wanted = new Set(items.map(key));
  for (const [id, node] of known) {
    if (wanted.has(id)) continue;
    node.remove(); // first, so that those that stay need not be moved
    known.delete(id);
  }
  let before = parent.firstChild;
  for (const item of items) {
    const id = key(item);
    let node = known.get(id);
    if (!node) known.set(id, (node = make(item)));
    if (node === before) before = before.nextSibling;
    else parent.insertBefore(node, before);
    update(node, item);
  }
}

const trim = (text) => text.replace(/\.0+$/, "");
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function bytes(n) {
  for (const [unit, size] of UNITS) {
    if (Math.abs(n) >= size) return `${trim((n / size).toFixed(n / size < 10 ? 2 : 1))} ${unit}`;
  }
  return `${n} B`;
}

export const count = (n) => Math.round(n).toLocaleString("en");
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

export function seconds(s) {
  if (s == null) return "–";
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

let hide;

/** Tells something at the edge of the page; screen readers hear it too. */
export function notice(text) {
  const node = $("notice");
  say(node, text);
  node.dataset.shown = "1";
  clearTimeout(hide);
  hide = setTimeout(() => {
    delete node.dataset.shown;
    say(node, ""); // so that the same words are heard again
  }, Math.max(4500, 60 * text.length)); // as long as reading takes
}
