// Asks the server again and again, and shows what it answers. Texts of runs are only ever set as text.
import { comparePage, listPage, runPage } from "./pages.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const pulse = document.getElementById("pulse");
let leave = () => {};

export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

export async function ask(path, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  let answer;
  try {
    answer = await fetch(search.size ? `${path}?${search}` : path, { headers: { accept: "application/json" } });
  } catch {
    pulse.textContent = "the server does not answer";
    pulse.dataset.state = "lost";
    throw new Error("the server does not answer");
  }
  if (answer.status === 401) { login(); throw new Error("the key is missing"); }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  if (pulse.dataset.state === "lost") { pulse.textContent = ""; pulse.dataset.state = ""; }
  return content;
}

// Call `work` now and then until the page is left; the pause may depend on what it returns.
export function repeat(work, pause_ms) {
  let ended = false, timer = 0;
  const turn = async () => {
    let next = pause_ms;
    if (!document.hidden) {
      try { next = (await work()) || pause_ms; } catch { next = Math.max(pause_ms, 3000); }
    }
    if (!ended) timer = setTimeout(turn, next);
  };
  turn();
  return () => { ended = true; clearTimeout(timer); };
}

export function place(...parts) {
  crumbs.replaceChildren(...parts.map(([text, href]) => (href ? el("a", { href }, text) : el("span", {}, text))));
  document.title = `${parts.map(([text]) => text).join(" · ") || "Runs"} · Headrace`;
}

export function ready() { document.documentElement.dataset.ready = "yes"; }

function login() {
  leave();
  place(["Key", null]);
  const field = el("input", { type: "password", name: "key", autocomplete: "current-password", "aria-label": "Key", placeholder: "the key of this dashboard" });
  const said = el("p", { class: "note", role: "alert" });
  const form = el("form", { class: "card login" }, el("h1", {}, "This dashboard has a key"), el("p", { class: "note" }, "It was given to headrace dashboard when it was started."), field, el("button", { class: "primary" }, "Open"), said);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await fetch("/login", { method: "POST", body: field.value });
    if (answer.ok) route();
    else { said.textContent = "This is not the key."; field.select(); }
  });
  main.replaceChildren(form);
  field.focus();
  ready();
}

function route() {
  leave();
  const [where, search = ""] = location.hash.replace(/^#/, "").split("?");
  const parts = where.split("/").filter(Boolean).map(decodeURIComponent);
  const query = new URLSearchParams(search);
  document.getElementById("tip").hidden = true;
  if (parts[0] === "run" && parts[1]) leave = runPage(main, parts[1], parts[2] || "overview", query);
  else if (parts[0] === "compare") leave = comparePage(main, query.getAll("run"));
  else leave = listPage(main);
}

addEventListener("hashchange", route);
route();
