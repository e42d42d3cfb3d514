// The status page: draws what /events says. Nothing is loaded from elsewhere, and no text becomes markup.

const KEY = "gpu-migrate-token";
const STATES = {
  free: ["·", "free"],
  legacy: ["L", "legacy: a whole card through nvidia.com/gpu"],
  shared: ["0–100", "shared: cores that shares hold"],
  unhealthy: ["✕", "unhealthy"],
  cordoned: ["C", "cordoned"],
  closed: ["?", "closed: its holders are not known for sure"],
  disputed: ["!", "disputed: two kinds of holders"],
};

const byId = (id) => document.getElementById(id);
const nodes = new Map();
const projects = new Map();
const events = new Map();
/** So many of the newest Events are shown. */
const SHOWN_EVENTS = 30;
let last = "";
let complete = false;

function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const gib = (mib) => `${(mib / 1024).toFixed(1)} GiB`;
const sign = (card) => (card.state === "shared" ? String(card.cores) : STATES[card.state][0]);

function summary(node, index, card) {
  const state = card.state === "shared" ? `shared, ${card.cores} of 100 cores` : STATES[card.state][1];
  const who = card.holders.map((holder) => holder.pod).join(", ");
  return `${node.name} card ${index}: ${state}${who ? `; ${who}` : ""}${card.why ? `; ${card.why}` : ""}`;
}

function draw(node) {
  const cards = element("div", { class: "cards", role: "group", "aria-label": `cards of ${node.name}` });
  node.cards.forEach((card, index) => {
    const button = element("button", {
      text: sign(card), type: "button", class: `card ${card.state}`, tabindex: "-1",
      "aria-label": summary(node, index, card), title: summary(node, index, card),
      "data-node": node.name, "data-card": index,
    });
    if (card.state === "shared") button.style.setProperty("--fill", `${Math.min(card.cores, 100)}%`);
    cards.append(button);
  });
  const about = [node.cards[0]?.model, node.isolation && `isolation ${node.isolation}`, node.driver && `driver ${node.driver}`];
  const row = element("div", { class: "node", "data-row": node.name },
    element("h3", { text: node.name }), cards, element("span", { class: "of", text: about.filter(Boolean).join(", ") }));
  for (const note of node.notes) row.append(element("p", { class: "note", text: note }));
  return row;
}

const rowOf = (name) => byId("nodes").querySelector(`[data-row="${CSS.escape(name)}"]`);

function place(name) {
  const node = nodes.get(name);
  const old = rowOf(name);
  if (!node) return old?.remove();
  const focused = old?.contains(document.activeElement) ? document.activeElement.dataset.card : undefined;
  const row = draw(node);
  if (old) old.replaceWith(row);
  else {
    const after = [...byId("nodes").children].find((other) => other.dataset.row.localeCompare(name, undefined, { numeric: true }) > 0);
    byId("nodes").insertBefore(row, after ?? null);
  }
  hide(row);
  if (focused !== undefined) row.querySelector(`[data-card="${CSS.escape(focused)}"]`)?.focus();
}

function drawAll() {
  const sorted = [...nodes.values()].sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  byId("nodes").replaceChildren(...sorted.map(draw));
  for (const row of byId("nodes").children) hide(row);
}

function hide(row) {
  const node = nodes.get(row.dataset.row);
  const wanted = byId("filter").value.trim().toLowerCase();
  const texts = [node.name, ...node.cards.flatMap((card) => [card.uuid, card.model, ...card.holders.map((holder) => holder.pod)])];
  row.hidden = wanted !== "" && !texts.some((text) => text.toLowerCase().includes(wanted));
}

function drawProjects() {
  const sorted = [...projects.values()].sort((a, b) => a.project.localeCompare(b.project) || a.name.localeCompare(b.name));
  byId("projects").replaceChildren(...sorted.map((one) => {
    const pods = `${one.sharedPods} shared, ${one.legacyPods} legacy` + (one.unconvertiblePods ? `, ${one.unconvertiblePods} unconvertible` : "");
    const wave = one.waves ? `${one.wave ?? 0} of ${one.waves}` : "–";
    const texts = [one.project, one.name, one.mode, one.phase, wave, `${one.converted} of ${one.workloads} ready`, pods, (one.stalled ? "Stalled: " : "") + one.message];
    return element("tr", one.stalled ? { class: "stalled" } : {}, ...texts.map((text, column) => (column ? element("td", { text }) : element("th", { text, scope: "row" }))));
  }));
}

function drawEvents() {
  const sorted = [...events.values()].sort((a, b) => Date.parse(b.time) - Date.parse(a.time) || a.name.localeCompare(b.name));
  for (const old of sorted.splice(SHOWN_EVENTS)) events.delete(old.name);
  byId("events").replaceChildren(...sorted.map((one) => element("tr", one.warning ? { class: "warning" } : {},
    element("td", {}, element("time", { text: new Date(one.time).toLocaleString(), datetime: one.time, title: one.time })),
    element("th", { text: (one.warning ? "⚠ " : "") + one.reason, scope: "row" }),
    ...[one.about, one.note, one.by].map((text) => element("td", { text })))));
}

function show(button) {
  const node = nodes.get(button?.dataset.node);
  const card = node?.cards[button.dataset.card];
  if (!card) return byId("detail").replaceChildren();
  for (const other of document.querySelectorAll(".card[aria-current]")) other.removeAttribute("aria-current");
  button.setAttribute("aria-current", "true");
  const holders = card.holders.map((holder) => element("li", {
    text: `${holder.pod}, container ${holder.container}: ` + (holder.cores === undefined ? "legacy" : `${holder.cores} cores, ${gib(holder.mib)}`),
  }));
  byId("detail").replaceChildren(
    element("p", { text: summary(node, button.dataset.card, { ...card, holders: [] }) }),
    element("p", { text: `${card.uuid}, ${card.model}, ${gib(card.memoryMib)}` + (card.state === "shared" ? `, ${gib(card.heldMib)} held` : "") }),
    element("ul", {}, ...holders));
}

function apply(batch) {
  if (batch.all) { nodes.clear(); projects.clear(); events.clear(); }
  for (const node of batch.nodes) nodes.set(node.name, node);
  for (const project of batch.projects) projects.set(project.name, project);
  for (const event of batch.events ?? []) events.set(event.name, event);
  for (const gone of batch.gone) (gone.kind === "node" ? nodes : projects).delete(gone.name);
  const current = document.querySelector(".card[aria-current]");
  const chosen = current && `[data-node="${CSS.escape(current.dataset.node)}"][data-card="${CSS.escape(current.dataset.card)}"]`;
  if (batch.all) drawAll();
  else [...batch.nodes, ...batch.gone.filter((gone) => gone.kind === "node")].forEach(({ name }) => place(name));
  drawProjects();
  complete = batch.complete;
  byId("no-nodes").hidden = !complete || nodes.size > 0;
  byId("no-projects").hidden = !complete || projects.size > 0;
  // Absent for who may not list Events.
  byId("events-section").hidden = batch.events === undefined;
  byId("no-events").hidden = !complete || events.size > 0;
  if (batch.all || batch.events?.length) drawEvents();
  byId("content").hidden = false;
  if (chosen) show(byId("nodes").querySelector(chosen));
  // One card can be reached by Tab; arrow keys go on from there.
  if (!byId("nodes").querySelector('.card[tabindex="0"]')) byId("nodes").querySelector(".card")?.setAttribute("tabindex", "0");
}

// Server-sent events by fetch: EventSource sends no Authorization header.
async function stream(token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(`events?after=${encodeURIComponent(last)}`, { headers, cache: "no-store" });
  if (!response.ok) throw Object.assign(new Error((await response.text()).trim()), { status: response.status });
  byId("token").hidden = true;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const fields = text.slice(0, end).split("\n").filter((line) => !line.startsWith(":"));
      const field = (name) => fields.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).replace(/^ /, "")).join("\n");
      if (field("event") !== "changes") continue;
      apply(JSON.parse(field("data")));
      last = field("id");
      byId("live").textContent = complete ? "live" : "reading the cluster";
    }
  }
}

function ask(why) {
  byId("refusal").textContent = why;
  byId("token").hidden = false;
  byId("content").hidden = true;
  byId("detail").replaceChildren();
  byId("forget").hidden = true;
  byId("live").textContent = "waiting for a token";
  byId("secret").focus();
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function run() {
  for (let wait = 500; ; ) {
    const token = sessionStorage.getItem(KEY);
    try {
      byId("forget").hidden = !token;
      await stream(token);
      wait = 500;
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        sessionStorage.removeItem(KEY);
        return ask(token ? error.message : "");
      }
      byId("live").textContent = `not live: ${error.message}; trying again`;
      wait = Math.min(wait * 2, 10_000);
      await pause(wait);
    }
  }
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("secret").value.trim());
  byId("secret").value = "";
  run();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
byId("filter").addEventListener("input", () => { for (const row of byId("nodes").children) hide(row); });

const map = byId("nodes");
for (const kind of ["focusin", "click", "mouseover"]) {
  map.addEventListener(kind, (event) => { const card = event.target.closest(".card"); if (card) show(card); });
}
map.addEventListener("focusin", (event) => {
  const card = event.target.closest(".card");
  if (!card) return;
  for (const other of map.querySelectorAll('.card[tabindex="0"]')) other.setAttribute("tabindex", "-1");
  card.setAttribute("tabindex", "0");
});
map.addEventListener("keydown", (event) => {
  const card = event.target.closest(".card");
  if (!card) return;
  const rows = [...map.children].filter((row) => !row.hidden);
  const row = rows.findIndex((one) => one.contains(card));
  const cards = [...rows[row].querySelectorAll(".card")];
  const column = cards.indexOf(card);
  const at = (index) => { const found = [...(rows[index]?.querySelectorAll(".card") ?? [])]; return found[Math.min(column, found.length - 1)]; };
  const to = {
    ArrowLeft: cards[column - 1], ArrowRight: cards[column + 1], Home: cards[0], End: cards[cards.length - 1],
    ArrowUp: at(row - 1), ArrowDown: at(row + 1),
  }[event.key];
  if (!to) return;
  event.preventDefault();
  to.focus();
});

for (const [state, [text, means]] of Object.entries(STATES)) {
  byId("legend").append(element("li", {}, element("span", { class: `card ${state}`, text, "aria-hidden": "true" }), element("span", { text: means })));
}
run();
