// The chat: its settings, the conversation, and one answer at a time as it comes.
const $ = id => document.getElementById(id);
const round = (x, digits = 3) => x >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(digits));
const spell = s => s === null ? "–" : s < 1 ? `${round(s * 1000)} ms` : `${round(s)} s`;
function make(tag, className, parent, text = "") {
  const element = document.createElement(tag);
  element.className = className; element.textContent = text; parent.append(element);
  return element;
}

// The clipboard API exists on pages of HTTPS and of this machine only.
async function copyText(text, button) {
  let done = true;
  try { await navigator.clipboard.writeText(text); }
  catch {
    const area = make("textarea", "unseen", document.body);
    area.value = text; area.select();
    done = document.execCommand("copy");
    area.remove(); button.focus();
  }
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

const DRAW_MS = 60, MOST_TOKENS = 2048;
const talk = [];  // {role, content, reasoning, article, ...} of the conversation
let running = null, context = 0;  // context: tokens
const headers = () => $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
const ownLimit = () => context ? Math.min(MOST_TOKENS, Math.ceil(context / 4)) : 256;

async function name() {
  const answer = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (answer?.status === 401) { $("lock").hidden = false; return; }
  if (!answer?.ok) return;
  const models = (await answer.json()).data;
  $("model").textContent = models.map(model => model.id).join(", ");
  context = models[0].max_model_len || 0;
  $("limit").placeholder = ownLimit();
}

async function* events(answer) {
  const decoder = new TextDecoder(), reader = answer.body.getReader();
  let rest = "";
  for (let piece; !(piece = await reader.read()).done;) {
    const lines = (rest + decoder.decode(piece.value, { stream: true })).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

// ---- messages on the page

const atEnd = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
const toEnd = () => { $("talk").scrollTop = $("talk").scrollHeight; };

function addMessage(role, content) {
  const article = make("article", role, $("talk")), message = { role, content, reasoning: "", article, end: "", problem: "" };
  make("h3", "unseen", article, role === "user" ? "You" : "Model");
  if (role === "assistant") {
    message.thoughts = make("details", "thoughts", article);
    message.thoughts.hidden = true;
    message.summary = make("summary", "", message.thoughts, "Reasoning");
    message.thought = make("div", "text", message.thoughts);
    message.body = make("div", "text", article);
    message.note = make("p", "note end", article);
    message.foot = make("div", "row foot", article);
  } else make("div", "text", article, content);
  talk.push(message);
  $("hint").hidden = true;
  return message;
}

function button(parent, text, action) {
  const element = make("button", "quiet", parent, text);
  element.type = "button";
  element.addEventListener("click", () => action(element));
  return element;
}

// Draw an answer: what has come so far, and once it has ended how.
function draw(message) {
  const follow = atEnd();
  message.thoughts.hidden = !message.reasoning;
  message.summary.textContent = message.reasoning && !message.content && message === running?.message ? "Reasoning …" : "Reasoning";
  if (message.thoughts.open) Markdown.show(message.thought, message.reasoning);
  Markdown.show(message.body, message.content);
  message.note.textContent = message.problem || message.end;
  message.note.hidden = !message.note.textContent;
  message.note.classList.toggle("error", !!message.problem);
  message.article.setAttribute("aria-busy", String(message === running?.message));
  if (follow) toEnd();
}

// The buttons below the answers: those of the last one act on it.
function drawFeet() {
  for (const message of talk.filter(one => one.foot)) {
    message.foot.textContent = "";
    if (message === running?.message) continue;
    if (message.content) button(message.foot, "Copy", element => copyText(message.content, element));
    if (message !== talk[talk.length - 1]) continue;
    if (message.cut && message.content) button(message.foot, "Continue", () => answer(message));
    button(message.foot, message.problem ? "Try again" : "Regenerate", regenerate);
  }
  $("send").disabled = !!running; $("stop").disabled = !running; $("new").disabled = !talk.length;
}

// ---- answers

function requestBody(message) {
  const past = talk.slice(0, talk.indexOf(message)).map(({ role, content, reasoning }) =>
    ({ role, content, ...(!content && reasoning ? { reasoning_content: reasoning } : {}) }));
  const system = $("system").value.trim(), goes = message.content ? [{ role: "assistant", content: message.content }] : [];
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...past, ...goes],
    ...(goes.length ? { continue_final_message: true, add_generation_prompt: false } : {}),
    max_tokens: +$("limit").value || ownLimit(), ...($("temperature").value === "" ? {} : { temperature: +$("temperature").value }),
    stream: true, stream_options: { include_usage: true },
  };
}

function ending(reason, usage) {
  if (reason !== "length") return reason ? "" : "The answer broke off.";
  const full = context && usage && usage.total_tokens >= context;
  return full ? `Cut off: the context of ${round(context, 6)} tokens is full.` : `Cut off at the limit of ${round(usage?.completion_tokens || 0, 6)} tokens.`;
}

// Fill an answer, or go on with one that was cut off.
async function answer(message) {
  const own = running = { message, control: new AbortController() }, begin = performance.now();
  let first = 0, usage = null, reason = "", timer = 0, cost = 0, body;
  const later = () => {
    timer ||= setTimeout(() => {
      const from = performance.now();
      timer = 0; draw(message);
      cost = performance.now() - from;
    }, Math.max(DRAW_MS, 8 * cost));
  };
  Object.assign(message, { end: "", problem: "", cut: false });
  $("speed").textContent = "waiting for an answer"; drawFeet(); draw(message); toEnd();
  try {
    if (!$("model").textContent) await name();
    body = requestBody(message);
    const reply = await fetch("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body), signal: own.control.signal });
    if (reply.status === 401) { $("lock").hidden = false; $("key").focus(); }
    if (!reply.ok) throw new Error((await reply.json().catch(() => null))?.error?.message || `The server answered with status ${reply.status}.`);
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      first ||= performance.now();
      usage = event.usage || usage;
      const choice = event.choices[0], delta = choice?.delta || {};
      reason = choice?.finish_reason || reason;
      message.reasoning += delta.reasoning_content || ""; message.content += delta.content || "";
      later();
    }
    message.end = ending(reason, usage); message.cut = reason === "length";
  } catch (error) {
    if (error.name === "AbortError") message.end = "Stopped.";
    else message.problem = error instanceof TypeError ? "The server does not answer." : error.message;
  }
  clearTimeout(timer);
  if (running === own) running = null;
  if (!talk.includes(message)) return;  // of a conversation that was closed
  const seconds = (performance.now() - first) / 1000, tokens = usage?.completion_tokens;
  $("speed").textContent = !first ? "" : `first token after ${spell((first - begin) / 1000)}`
    + (tokens > 1 ? `; ${tokens} tokens, ${round((tokens - 1) / seconds)} a second` : "");
  draw(message); drawFeet();
}

function regenerate() {
  if (running) return;
  talk.pop().article.remove();
  answer(addMessage("assistant", ""));
}

function send() {
  const text = $("text").value.trim();
  if (!text || running || !$("form").reportValidity()) return;
  const last = talk[talk.length - 1];
  if (last?.problem && !last.content) talk.pop().article.remove();  // the failed answer makes way
  $("text").value = "";
  addMessage("user", text);
  answer(addMessage("assistant", ""));
}

function restart() {
  running?.control.abort();
  running = null; talk.length = 0;
  $("talk").textContent = ""; $("speed").textContent = ""; $("hint").hidden = false;
  drawFeet(); $("text").focus();
}

$("key").addEventListener("change", name);
$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("form").addEventListener("invalid", () => { $("settings").open = true; }, true);
$("stop").addEventListener("click", () => running?.control.abort());
$("new").addEventListener("click", restart);
$("example").addEventListener("click", () => { $("text").value = $("example").textContent; send(); });
$("talk").addEventListener("toggle", event => {
  const message = talk.find(one => one.thoughts === event.target);
  if (message) draw(message);
}, true);
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
