// The figures: /metrics every two seconds, as tiles with the last two minutes, and a table of tenants.
const PERIOD = 2000, KEPT = 60, E = "blinkpy_engine_", T = "blinkpy_tenant_", SHOWN_TENANTS = 12;

// name -> value over all workers and states; of histograms {le: count}; of tenants {tenant: value}
function parse(text) {
  const values = {}, buckets = {}, tenants = {};
  for (const line of text.split("\n")) {
    const found = /^(blinkpy_\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const [, name, labels = "", value] = found;
    const le = /le="([^"]+)"/.exec(labels), state = /state="(\w+)"/.exec(labels), tenant = /tenant="([^"]+)"/.exec(labels);
    if (tenant) { const table = tenants[name] ??= {}; table[tenant[1]] = (table[tenant[1]] || 0) + +value; }
    else if (le) { const table = buckets[name.replace(/_bucket$/, "")] ??= {}; table[le[1]] = (table[le[1]] || 0) + +value; }
    else if (state) { if (+value) values.state = state[1]; }
    else values[name] = (values[name] || 0) + +value;
  }
  return { values, buckets, tenants, at: performance.now() / 1000 };
}

// A quantile of the values between two looks, by linear interpolation in its bucket; null without any.
function quantile(now, before, name, q) {
  const rows = Object.entries(now.buckets[name] || {}).map(([le, n]) =>
    [le === "+Inf" ? Infinity : +le, n - ((before?.buckets[name] || {})[le] || 0)]).sort((a, b) => a[0] - b[0]);
  const total = rows.length ? rows[rows.length - 1][1] : 0;
  if (!(total > 0)) return null;
  let low = 0, under = 0;
  for (const [bound, count] of rows) {
    if (count >= q * total) return bound === Infinity ? low : low + (bound - low) * (q * total - under) / (count - under);
    low = bound; under = count;
  }
  return low;
}

const looks = [];  // the last ones, up to two minutes
const recent = () => looks[Math.max(0, looks.length - 6)];
const now = () => looks[looks.length - 1];
const value = name => now().values[name];
const count = name => value(name) || 0;
// A second; null at the first look, which has none before it.
const rate = name => {
  const a = recent(), b = now();
  return b.at > a.at ? Math.max(0, (b.values[name] || 0) - (a.values[name] || 0)) / (b.at - a.at) : null;
};
const shown = (x, unit) => x === null ? "–" : `${round(x)} ${unit}`;
const share = (a, b) => b > 0 ? `${round(100 * a / b)}\u00a0%` : "–";
const many = (n, one) => `${round(n, 6)} ${one}${n === 1 ? "" : "s"}`;
// The median and P99 of the last two minutes: before a second look, of all the time, which the line leaves out.
const times = name => {
  const before = looks[0] === now() ? null : looks[0], metric = `blinkpy_${name}_seconds`;
  const [half, most] = [.5, .99].map(q => quantile(now(), before, metric, q));
  return { shown: spell(half), note: half === null ? "no requests lately" : `99 % within ${spell(most)}`, line: before && half };
};

// Title, and its content: {shown, note, line}, line null for no value; null where the tile has no meaning here.
const TILES = [
  ["Output", () => ({ shown: shown(rate("blinkpy_generated_tokens_total"), "tokens/s"),
    note: `Input: ${shown(rate("blinkpy_prompt_tokens_total"), "tokens/s")}`, line: rate("blinkpy_generated_tokens_total") })],
  ["Requests running", () => ({ shown: round(count(E + "requests_running")),
    note: `${round(count(E + "requests_waiting") + count("blinkpy_waiting_requests"))} waiting`, line: count(E + "requests_running") })],
  ["Time to first token", () => times("time_to_first_token")],
  ["Time per token", () => times("time_per_output_token")],
  ["Time in the queue", () => times("queue_time")],
  ["KV cache in use", () => {
    const [held, cached, free] = ["held", "cached", "free"].map(kind => count(E + "pages_" + kind)), all = held + cached + free;
    return { shown: share(held, all), note: all ? `${share(cached, all)} kept for reuse` : "", line: all ? held / all : null };
  }],
  ["Prompts from cache", () => {
    const [hits, all] = ["hit", "lookup"].map(kind => count(`${E}prefix_${kind}_tokens_total`)), preempted = count(E + "preemptions_total");
    return { shown: share(hits, all), note: preempted ? many(preempted, "preemption") : all ? `of ${many(all, "token")}` : "no prompts yet",
      line: rate(E + "prefix_hit_tokens_total") };
  }],
  ["Last step", () => ({ shown: many(count(E + "batch_rows"), "request"),
    note: `${many(count(E + "batch_tokens"), "token")}; ${shown(rate(E + "steps_total"), "steps/s")}`, line: count(E + "batch_rows") })],
  ["Slots in use", () => {
    const gone = count("blinkpy_disconnects_total");
    return { shown: `${count("blinkpy_requests_in_flight")} of ${count("blinkpy_slots")}`,
      note: gone ? `${many(gone, "client")} left early` : "", line: count("blinkpy_requests_in_flight") };
  }],
  ["Power", () => {
    const watts = value("blinkpy_gpu_power_watts"), joules = rate("blinkpy_gpu_energy_joules_total"), tokens = rate("blinkpy_generated_tokens_total");
    return watts === undefined ? null : { shown: `${round(watts)}\u00a0W`, note: tokens && joules ? `${round(joules / tokens)} J per token` : "", line: watts };
  }],
];
const NS = "http://www.w3.org/2000/svg";
const tiles = TILES.map(([title, read]) => {
  const card = make("div", "card", $("tiles"));
  make("h3", "", card, title);
  const tile = { read, card, value: make("div", "value", card, "–"), note: make("div", "note", card), history: [] };
  const svg = tile.svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 100 30"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  tile.paths = ["area", "line"].map(kind => {
    const path = document.createElementNS(NS, "path");
    path.setAttribute("class", kind); svg.append(path);
    return path;
  });
  card.append(svg);
  return tile;
});

// Pieces of a history without gaps, each as points [x, y].
function pieces(history) {
  const most = Math.max(...history.map(y => y || 0)), start = KEPT - history.length, found = [];
  if (!(most > 0)) return [];
  let piece = [];
  history.forEach((y, i) => {
    if (y === null) { piece = []; return; }
    if (!piece.length) found.push(piece);
    piece.push([((start + i) * 100 / (KEPT - 1)).toFixed(2), (29 - 27 * y / most).toFixed(2)]);
  });
  return found.filter(one => one.length > 1);
}

function drawTile(tile) {
  const found = tile.read();
  tile.card.hidden = found === null;
  if (found === null) return;
  tile.value.textContent = found.shown; tile.note.textContent = found.note;
  tile.history.push(found.line ?? null);
  if (tile.history.length > KEPT) tile.history.shift();
  const lines = pieces(tile.history).map(piece => piece.map(point => point.join(" ")));
  tile.svg.toggleAttribute("hidden", !lines.length);
  tile.paths[1].setAttribute("d", lines.map(points => `M${points.join("L")}`).join(""));
  tile.paths[0].setAttribute("d", lines.map(points =>
    `M${points[0].split(" ")[0]} 30L${points.join("L")}L${points[points.length - 1].split(" ")[0]} 30Z`).join(""));
}

function drawTenants() {
  const a = recent(), b = now(), of = (look, name) => look.tenants[T + name] || {};
  const found = Object.keys(of(b, "requests_in_flight")).map(name => {
    const tokens = (of(b, "tokens_total")[name] || 0) - (of(a, "tokens_total")[name] || 0);
    const counts = ["requests_in_flight", "waiting_requests"].map(kind => of(b, kind)[name] || 0);
    return { name, counts, rate: b.at > a.at ? Math.max(0, tokens) / (b.at - a.at) : 0 };
  }).sort((x, y) => y.rate - x.rate || y.counts[0] - x.counts[0] || y.counts[1] - x.counts[1] || (x.name < y.name ? -1 : 1));
  $("tenants").hidden = !found.length; $("rows").textContent = "";
  for (const { name, counts, rate } of found.slice(0, SHOWN_TENANTS)) {
    const row = make("tr", "", $("rows"));
    for (const text of [name, ...counts.map(number => round(number, 6)), round(rate)]) make("td", "", row, text);
  }
  $("others").hidden = found.length <= SHOWN_TENANTS;
  $("others").textContent = `and ${found.length - SHOWN_TENANTS} more tenants`;
}

function say(text, good) {
  if ($("state").textContent === text) return;  // or a screen reader repeats it
  $("state").textContent = text; $("state").className = good ? "good" : "bad";
}

async function look() {
  try {
    const answer = await fetch("metrics", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const found = parse(await answer.text());
    const last = now();
    if (last && (found.values[E + "steps_total"] ?? 0) < (last.values[E + "steps_total"] ?? 0)) looks.length = 0;  // a new engine
    looks.push(found);
    if (looks.length > KEPT) looks.shift();
    tiles.forEach(drawTile); drawTenants();
    const up = value(E + "up") === 1, state = now().values.state;
    say(up ? state : "no engine", up && state === "ready");
  } catch (error) {
    say("the server does not answer", false);
  }
  setTimeout(look, document.hidden ? 5 * PERIOD : PERIOD);
}

drawFeet(); name(); look();
