// The one script of the pages: theme, live updates, keyboard. Every page works without it.

const root = document.documentElement;
const main = document.querySelector("main");

// Theme: follows the system until the reader chooses.
const theme = document.querySelector("#theme");
const kept = localStorage.getItem("theme");
if (kept) root.dataset.theme = kept;
if (theme) {
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
  });
}

// Live pages: the element #live is replaced by the one of a new answer, unless the reader is using it.
const EVERY_MS = 3000;
let tag = null;
let failures = 0;
let updated = new Date();
const stale = document.createElement("p");
stale.className = "warn";
stale.setAttribute("role", "status");
stale.hidden = true;

// Whether the reader is using it, which the page then says.
function waitsFor(live) {
  const selection = getSelection();
  const isUsed = live?.contains(document.activeElement) || (live && selection && !selection.isCollapsed && selection.containsNode(live, true));
  if (!isUsed) return false;
  stale.textContent = `Updates wait while a part of this page is selected or in focus; not updated since ${updated.toLocaleTimeString()}.`;
  stale.hidden = false;
  return true;
}

async function refresh() {
  const live = document.querySelector("#live");
  if (document.hidden || waitsFor(live)) return;
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(main.dataset.live, { headers, signal: AbortSignal.timeout(60000) });
    if (answer.status !== 304 && !answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    failures = 0;
    // The reader may have begun to use it while the answer was on its way: its tag is not kept, so it is asked for again.
    if (answer.status !== 304 && waitsFor(live)) return;
    updated = new Date();
    stale.hidden = true;
    if (answer.status === 304) return;
    const first = tag === null;
    tag = answer.headers.get("etag");
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("#live");
    if (!fresh || !live || (first && fresh.innerHTML === live.innerHTML)) return;
    const open = new Set([...live.querySelectorAll("details[open][id]")].map((one) => one.id));
    for (const box of live.querySelectorAll("input:checked")) fresh.querySelector(`input[value="${CSS.escape(box.value)}"]`)?.setAttribute("checked", "");
    for (const id of open) fresh.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    live.replaceWith(fresh);
    main.dispatchEvent(new CustomEvent("refreshed"));
  } catch {
    failures += 1; // the server may have ended, or want another key; the page keeps what it has and asks less often
    stale.textContent = `Not updated since ${updated.toLocaleTimeString()}.`;
    stale.hidden = false;
  }
}

if (main?.dataset.live) {
  main.querySelector("h1").after(stale);
  const loop = async () => {
    await refresh();
    setTimeout(loop, EVERY_MS * 2 ** Math.min(failures, 4));
  };
  setTimeout(loop, EVERY_MS);
}

// A page that is still being made: waits for it, then shows it in place of this one.
if (main?.dataset.waiting !== undefined) {
  fetch(location.href, { signal: AbortSignal.timeout(300000) })
    .then(() => location.reload())
    .catch(() => {
      document.querySelector("#waiting").textContent = "The server did not answer. Load this page again to see it.";
    });
}

// A key that leads to another page is the last one on this page: the next one is meant for that.
const LEAVING_MS = 10000;
let leavingUntil = 0;
addEventListener("pageshow", () => (leavingUntil = 0));

// Keyboard: j and k move through the rows of tables that lead somewhere, Enter opens, / goes to the first filter.
function rows() {
  return [...document.querySelectorAll("main tbody tr")].filter((row) => row.querySelector("a[href]"));
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.closest(".labels")) event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const keyed = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (keyed) {
    event.preventDefault();
    if (event.repeat || Date.now() < leavingUntil) return;
    if (keyed.matches("textarea")) return keyed.focus();
    leavingUntil = Date.now() + LEAVING_MS;
    return keyed.click();
  }
  if (event.key === "j" || event.key === "k") {
    const all = rows();
    if (!all.length) return;
    const here = all.findIndex((row) => row.contains(document.activeElement));
    const next = here < 0 ? (event.key === "j" ? 0 : all.length - 1) : here + (event.key === "j" ? 1 : -1);
    all[Math.min(Math.max(next, 0), all.length - 1)].querySelector("a[href]").focus();
    event.preventDefault();
  } else if (event.key === "/") {
    const first = document.querySelector("main form:not([method=post]) :is(input:not([type=hidden]), textarea)");
    if (first) {
      first.focus();
      event.preventDefault();
    }
  }
});

// Labels: who labels is kept for the next page, and a form is sent once.
const who = document.querySelector("input[data-keep]");
if (who) {
  who.value = localStorage.getItem("labels-by") || who.value;
  who.addEventListener("change", () => localStorage.setItem("labels-by", who.value));
}

document.addEventListener("submit", (event) => {
  if (!event.target.matches(".labels form[method=post]")) return;
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});

addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

// Rollouts and groups
// Tokens: what is known about the one that is pointed at, or that the arrow keys reach.
const parsed = new WeakMap();

function numbersOf(pre) {
  if (!parsed.has(pre)) {
    const list = (name) => (pre.dataset[name] === undefined ? null : pre.dataset[name].split(","));
    parsed.set(pre, { tokens: [...pre.querySelectorAll("i")], ids: list("ids"), logprobs: list("logprobs"), values: list("values") });
  }
  return parsed.get(pre);
}

function describe(pre, token) {
  const { tokens, ids, logprobs, values } = numbersOf(pre);
  const place = tokens.indexOf(token);
  const say = pre.closest("section")?.querySelector(".say");
  if (place < 0 || !say) return;
  pre.querySelector("i.at")?.classList.remove("at");
  token.classList.add("at");
  const parts = [`token ${Number(pre.dataset.start) + place}`, JSON.stringify(token.textContent), `id ${ids[place]}`];
  const value = values && (values.length === 1 ? values[0] : values[place]);
  if (value !== null) parts.push(`${pre.dataset.name} ${value || "–"}`);
  parts.push(`log-probability ${logprobs[place] || "–"}`);
  say.textContent = parts.join(" · ");
}

document.addEventListener("pointerover", (event) => {
  const token = event.target.closest?.("pre.tokens[data-ids] i");
  if (token) describe(token.closest("pre"), token);
});

document.addEventListener("keydown", (event) => {
  const pre = event.target.closest?.("pre.tokens[data-ids]");
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
  if (!pre || !step || event.ctrlKey || event.metaKey || event.altKey) return;
  const { tokens } = numbersOf(pre);
  const here = tokens.indexOf(pre.querySelector("i.at"));
  const token = tokens[Math.min(Math.max(here + step, 0), tokens.length - 1)];
  describe(pre, token);
  token.scrollIntoView({ block: "nearest" });
  event.preventDefault();
});

// Another overlay replaces the tokens in place, and the address says which one it is.
async function exchange(address) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(60000) });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("#tokens");
  if (!answer.ok || !fresh) throw new Error("no tokens");
  document.querySelector("#tokens").replaceWith(fresh);
}

document.addEventListener("click", async (event) => {
  const chosen = event.target.closest?.("#tokens nav a");
  if (!chosen || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  try {
    await exchange(chosen.href);
    history.pushState({ tokens: true }, "", chosen.href);
    document.querySelector("#tokens nav a[aria-current]")?.focus();
  } catch {
    location.assign(chosen.href);
  }
});

addEventListener("popstate", () => {
  if (document.querySelector("#tokens")) exchange(location.href).catch(() => location.reload());
  else if (document.querySelector("#what-if")) recompute(location.href).catch(() => location.reload());
});

// Copying an id that is shown cut: where the browser allows no writing to the clipboard, the whole id is shown.
document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch {
    button.textContent = button.dataset.copy;
  }
});

// What if: a changed setting is computed at once, and the browser's Back takes it back.
async function recompute(address, isOld = () => false) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(60000) });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("#what-if");
  if (isOld()) return null;
  if (!fresh) throw new Error("no answer");
  document.querySelector("#what-if").replaceWith(fresh);
  fresh.open = true;
  return fresh;
}

document.addEventListener("change", async (event) => {
  const form = event.target.closest?.("#what-if form");
  if (!form) return;
  const addressNow = () => `${form.getAttribute("action").split("#")[0]}?${new URLSearchParams(new FormData(form))}`;
  const address = addressNow();
  // A setting that was changed meanwhile is asked for by its own event, together with this one.
  const isOld = () => !form.isConnected || addressNow() !== address;
  const place = form.closest("#what-if");
  place.setAttribute("aria-busy", "true");
  try {
    const fresh = await recompute(address, isOld);
    if (!fresh) return;
    history.pushState(null, "", address);
    fresh.querySelector(`[name="${CSS.escape(event.target.name)}"]`)?.focus();
  } catch {
    if (!isOld()) form.requestSubmit();
  }
});
