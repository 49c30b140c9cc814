"use strict";
// Chooses what of the page is in sight: a group, one of its views, an episode. Without it everything is shown.
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const groups = all(".group");
const colours = all("[data-colour]").map((button) => button.dataset.colour);
let tab = "episodes";
let found = null; // the episodes with the text that is searched for; null: there is none, and all are shown

const on = (element) => element && element.classList.contains("on");
const current = () => groups.find(on) || groups[0];
const shown = (group) => all(".episode", group).filter((one) => !found || found.has(one));
const episodes = () => (current() ? shown(current()) : []);
const shownGroups = () => groups.filter((group) => !found || shown(group).length);
const episode = () => episodes().find(on) || episodes()[0];

function showGroup(group) {
  for (const one of groups) one.classList.toggle("on", one === group);
  for (const link of all(".groups a")) {
    if (link.dataset.group === group.id) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (!episodes().some(on)) showEpisode(episodes()[0]);
  showTab(tab);
}

function showTab(name) {
  tab = name;
  root.dataset.tab = name;
  for (const pane of all(".pane")) pane.classList.toggle("on", pane.dataset.pane === name);
  for (const button of all("[data-tab]")) button.setAttribute("aria-pressed", String(button.dataset.tab === name));
}

function showEpisode(chosen) {
  if (!chosen) return;
  for (const one of all(".episode", chosen.closest(".group"))) one.classList.toggle("on", one === chosen);
  for (const row of all("tr[data-episode]", chosen.closest(".group"))) row.classList.toggle("on", row.dataset.episode === chosen.id);
}

function showStep(step, scroll) {
  const group = step.closest(".group");
  for (const one of all(".step.on", group)) one.classList.remove("on");
  for (const cell of all(".at-step", group)) cell.classList.remove("at-step");
  step.classList.add("on");
  step.open = true;
  for (const link of all(".cell a", group)) if (link.hash === `#${step.id}`) link.parentElement.classList.add("at-step");
  if (scroll) step.scrollIntoView({ block: "nearest" });
}

function colourBy(name) {
  root.dataset.by = name;
  for (const button of all("[data-colour]")) button.setAttribute("aria-pressed", String(button.dataset.colour === name));
}

function showCells(name) {
  root.dataset.show = name;
  for (const button of all("[data-cells]")) button.setAttribute("aria-pressed", String(button.dataset.cells === name));
}

// What an address such as #e-0-3-2 points at comes into sight, wherever it is.
function follow() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found && target && target.closest(".episode") && !found.has(target.closest(".episode"))) {
    search.value = "";
    findText();
  }
  const group = target && target.closest(".group");
  if (!group) return;
  const pane = target.closest(".pane");
  if (pane) tab = pane.dataset.pane;
  if (target.closest(".episode")) showEpisode(target.closest(".episode"));
  showGroup(group);
  if (target.matches(".step")) showStep(target, true);
  else if (target.matches(".anchor")) {
    for (const one of all(".anchor.on")) one.classList.remove("on");
    target.classList.add("on");
    target.scrollIntoView({ block: "nearest" });
  } else if (target.matches(".group")) window.scrollTo(0, 0);
}

function beside(list, now, by) {
  return list[Math.min(Math.max(list.indexOf(now) + by, 0), list.length - 1)];
}

function moveStep(by) {
  if (!episode()) return;
  const steps = all(".step", episode());
  const now = steps.find(on);
  if (now) now.open = false;
  if (steps.length) showStep(now ? beside(steps, now, by) : steps[by > 0 ? 0 : steps.length - 1], true);
}

// An episode is found by its own text, by what rewards said and why it failed, and by its group's task and question.
const plain = (text) => text.normalize("NFKC").toLowerCase().replace(/\s+/g, " ");
const texts = new Map();
const textOf = (element) => texts.get(element) || texts.set(element, plain(element.textContent)).get(element);
const search = document.getElementById("search");

function inGroup(group, wanted) {
  return [...all("h2", group), ...all(".question", group)].some((one) => textOf(one).includes(wanted));
}

function findText() {
  const wanted = plain(search.value).trim();
  const count = search.nextElementSibling;
  found = null;
  if (wanted) {
    found = new Set();
    for (const group of groups) {
      const whole = inGroup(group, wanted);
      for (const one of all(".episode", group)) if (whole || textOf(one).includes(wanted)) found.add(one);
    }
  }
  for (const link of all(".groups a")) link.hidden = !shown(document.getElementById(link.dataset.group)).length;
  for (const row of all("tr[data-episode]")) row.hidden = Boolean(found) && !found.has(document.getElementById(row.dataset.episode));
  root.classList.toggle("nothing-found", Boolean(found) && !found.size);
  count.textContent = found ? `${found.size} of ${all(".episode").length} episodes` : "";
  if (shownGroups().length && !shownGroups().includes(current())) showGroup(shownGroups()[0]);
  if (!episodes().some(on)) showEpisode(episodes()[0]);
}

// The steps with the text, and the episodes that have it elsewhere, one after the other and round again.
function nextPlace() {
  const wanted = plain(search.value).trim();
  if (!found || !found.size) return;
  const places = groups.flatMap(shown).flatMap((one) => {
    const steps = all(".step", one).filter((step) => textOf(step).includes(wanted));
    return steps.length ? steps : [one];
  });
  const place = places[(places.findIndex((one) => one.id === search.dataset.at) + 1) % places.length];
  search.dataset.at = place.id;
  tab = "episodes";
  showEpisode(place.closest(".episode"));
  showGroup(place.closest(".group"));
  if (place.matches(".step")) showStep(place, true);
  else place.scrollIntoView({ block: "nearest" });
}

search.addEventListener("input", findText);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextPlace();
  if (event.key !== "Escape") return;
  search.value = "";
  findText();
  search.blur();
});

const keys = {
  n: () => shownGroups().length && showGroup(beside(shownGroups(), current(), 1)),
  p: () => shownGroups().length && showGroup(beside(shownGroups(), current(), -1)),
  j: () => showEpisode(beside(episodes(), episode(), 1)),
  k: () => showEpisode(beside(episodes(), episode(), -1)),
  ArrowRight: () => moveStep(1),
  ArrowLeft: () => moveStep(-1),
  1: () => showTab("episodes"),
  2: () => showTab("graph"),
  3: () => showTab("anchors"),
  o: () => {
    const steps = episode() ? all(".step", episode()) : [];
    const open = !steps.every((step) => step.open);
    for (const step of steps) step.open = open;
  },
  a: () => showCells(root.dataset.show === "A" ? "A_S" : "A"),
  c: () => colours.length && colourBy(colours[(colours.indexOf(root.dataset.by) + 1) % colours.length]),
  "/": () => search.focus(),
  "?": () => document.getElementById("keys").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("dialog, input, textarea")) return;
  const scrolls = event.key.startsWith("Arrow") && event.target.closest(".matrix, .canvas, .scroll");
  if (keys[event.key] && groups.length && !scrolls) {
    keys[event.key]();
    event.preventDefault();
  }
});
addEventListener("hashchange", follow);
for (const button of all("[data-tab]")) button.addEventListener("click", () => showTab(button.dataset.tab));
for (const button of all("[data-colour]")) button.addEventListener("click", () => colourBy(button.dataset.colour));
for (const button of all("[data-cells]")) button.addEventListener("click", () => showCells(button.dataset.cells));
for (const button of all("[data-help]")) button.addEventListener("click", keys["?"]);
for (const link of all('a[href^="#"]')) link.addEventListener("click", () => link.hash === location.hash && follow());

// A state under the pointer lights the actions that lead to it and from it.
for (const svg of all(".canvas svg")) {
  const edges = all(".edge", svg);
  const labels = all("text.label", svg);
  for (const node of all("a.node", svg)) {
    const slug = node.getAttribute("href").slice(1);
    const light = (now) => {
      svg.classList.toggle("focus", now);
      edges.forEach((edge, place) => {
        const lit = now && (edge.dataset.from === slug || edge.dataset.to === slug);
        edge.classList.toggle("lit", lit);
        labels[place].classList.toggle("lit", lit);
      });
    };
    for (const [event, now] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]]) {
      node.addEventListener(event, () => light(now));
    }
  }
}

if (groups.length) {
  root.classList.add("js");
  for (const group of groups) showEpisode(all(".episode", group)[0]);
  showGroup(groups[0]);
  follow();
}
root.dataset.ready = "yes";
