// What runs, what waits, and what just ended.

import { $, count, follow, h, plural, say, seconds } from "./dom.js";

const STATES = { waiting: "waits", reading: "reads", generating: "generates", sending: "sends" };

export function showRequests({ requests = [] }) {
  const running = requests.filter((one) => one.state === "reading" || one.state === "generating").length;
  const waiting = requests.filter((one) => one.state === "waiting").length;
  say($("requests-sum"), `${plural(running, "running", "running")}, ${count(waiting)} waiting`);
  $("requests-empty").hidden = requests.length > 0;
  $("requests-table").hidden = requests.length === 0;
  const make = (one) => h("tr", { data: { request: one.id } }, ...Array.from({ length: 7 }, () => h("td")));
  const seen = new Map(); // clients choose ids, and may choose one twice
  const key = ({ id }) => `${id} ${seen.set(id, (seen.get(id) ?? 0) + 1).get(id)}`;
  const rows = requests.map((one) => ({ ...one, key: key(one) }));
  follow($("requests-table").tBodies[0], rows, (one) => one.key, make, (node, one) => {
    node.dataset.state = one.state;
    const cells = [
      one.session ?? one.id,
      STATES[one.state] ?? one.finished,
      count(one.prompt_tokens), count(one.cached_tokens), count(one.tokens),
      seconds(one.first_token_s),
      one.tokens_per_s ? one.tokens_per_s.toFixed(1) : "–",
    ];
    cells.forEach((text, i) => say(node.children[i], text));
    node.firstChild.title = one.id;
  });
}
