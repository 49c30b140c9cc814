// The pages: the list of runs, one run, its episodes, and several runs side by side.
import { drawChart, number, percent, spark, svg } from "./charts.js";
import { ask, el, place, ready, repeat } from "./dashboard.js";

const WINDOWS = [[120, "2 min"], [600, "10 min"], [1800, "30 min"]];

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 1 ? Number(seconds.toPrecision(2)) : seconds < 10 ? Number(seconds.toFixed(1)) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${count(Math.floor(whole / 86400))} days ${Math.floor((whole % 86400) / 3600)} h`;
}

const count = (value) => value.toLocaleString("en");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const runLink = (id, tab = "") => `#/run/${encodeURIComponent(id)}${tab ? `/${tab}` : ""}`;
const STATES = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "killed", unknown: "not begun" };
const pill = (state, text) => el("span", { class: `pill ${state}` }, el("i", { "aria-hidden": "true" }), text || STATES[state] || state);

// Puts new content in place only if it says something new, so that nothing flickers and no selection is lost.
function keeper(node) {
  let last;
  return (value, build) => {
    const text = JSON.stringify(value);
    if (text === last) return;
    last = text;
    node.replaceChildren(...[build(value)].flat().filter(Boolean));
  };
}

// --- list -------------------------------------------------------------------------------------------------------------

const FIGURES = { "reward/mean": "reward", "sft/loss": "loss", "loss/total": "loss", "loss/accuracy": "accuracy", "loss/kl_teacher": "KL to teacher", "eval/pass@1": "held-out success", "eval/reward": "held-out reward", "eval/accuracy": "held-out accuracy", "eval/loss": "held-out loss" };
const SHARES = ["eval/pass@1", "eval/accuracy", "loss/accuracy"];

export function listPage(main) {
  place(["Runs", null]);
  const chosen = new Set();
  const head = el("div", { class: "page-head" });
  const list = el("div", { class: "runs" });
  const compare = el("button", { class: "primary", disabled: true, onclick: () => { location.hash = `#/compare?${new URLSearchParams([...chosen].map((id) => ["run", id]))}`; } }, "Compare");
  const note = el("p", { class: "note" });
  head.append(el("h1", {}, "Runs"), note, compare);
  main.replaceChildren(head, list);
  const show = keeper(list);
  const choose = (id, on) => {
    if (on) chosen.add(id); else chosen.delete(id);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
  };
  return repeat(async () => {
    const { runs, left } = await ask("/api/runs");
    const going = runs.filter((run) => run.state === "running").length;
    note.textContent = runs.length ? `${plural(runs.length, "run")}, ${going} of them running${left ? `; ${left} more are being read` : ""}.${runs.length > 1 ? " Choose two or more to compare them." : ""}` : "";
    compare.hidden = runs.length < 2;
    show(runs, () => (runs.length || left ? runs.map((run) => runCard(run, chosen, choose)) : el("p", { class: "card none" }, "There are no runs here yet. ", el("code", {}, "headrace train run.toml"), " begins one, and this page shows it as it begins.")));
    ready();
    return left ? 300 : 2500;
  }, 2500);
}

function runCard(run, chosen, choose) {
  const share = run.step !== null && run.steps ? Math.min(1, run.step / run.steps) : null;
  const bar = el("span", { class: "fill" });
  bar.style.setProperty("width", `${100 * (share ?? 0)}%`);
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, onchange: (event) => choose(run.id, event.target.checked) });
  box.checked = chosen.has(run.id);
  const figures = Object.entries(run.figures).map(([name, value]) => el("div", {}, el("dt", {}, FIGURES[name] || name), el("dd", {}, typeof value === "number" ? (SHARES.includes(name) ? percent(value) : number(value)) : "–")));
  return el("article", { class: "card run" },
    el("label", { class: "pick" }, box),
    el("a", { class: "run-link", href: runLink(run.id) },
      el("span", { class: "run-name" }, run.name, pill(run.state)),
      el("span", { class: "run-folder" }, run.id),
      el("span", { class: "track" }, bar),
      el("span", { class: "run-step" }, run.step === null ? "no step yet" : `${(run.stage || "").toUpperCase()} step ${count(run.step)}${run.steps ? ` of ${count(run.steps)}` : ""}`, run.seconds !== null ? ` · ${duration(run.seconds)}` : ""),
      run.reason ? el("span", { class: "reason" }, run.reason) : null,
      run.problems.length ? el("span", { class: "reason" }, run.problems[0]) : null),
    el("dl", { class: "run-figures" }, figures));
}

// --- one run ----------------------------------------------------------------------------------------------------------

export function runPage(main, id, tab, query) {
  place(["Runs", "#/"], [id, null]);
  const head = el("div", { class: "run-head" });
  const body = el("div", { class: "body" });
  const tabs = [["overview", "Overview"], ["episodes", "Episodes"], ["notes", "Warnings and log"]];
  const nav = el("nav", { class: "tabs", "aria-label": "Parts of the run" }, tabs.map(([name, title]) => el("a", { href: runLink(id, name), "aria-current": name === tab ? "page" : null }, title)));
  main.replaceChildren(head, nav, body);
  const base = `/api/run/${encodeURIComponent(id)}`;
  const heading = keeper(head);
  const state = { overview: null };
  const inner = tab === "episodes" ? episodesTab(body, id, base, query) : tab === "notes" ? notesTab(body, base) : overviewTab(body, base);
  const stop = repeat(async () => {
    let run;
    try { run = await ask(base); } catch (error) {
      if (!state.overview) { head.replaceChildren(el("h1", {}, id), el("p", { class: "note" }, error.message)); ready(); }
      throw error;
    }
    state.overview = run;
    heading([run.name, run.state, run.stages, run.model, run.about, run.by, run.reason, run.problems, run.silent_s > 30 ? Math.round(run.silent_s / 10) : 0, run.reading < 1 ? run.reading : 1], () => headOf(run));
    const alerts = run.warnings.length + run.alerts.length + run.findings.length + run.problems.length;
    nav.lastChild.replaceChildren("Warnings and log", alerts ? el("span", { class: "count" }, String(alerts)) : "");
    inner.update(run);
    ready();
    return run.reading < 1 ? 200 : run.state === "running" ? 1500 : 4000;
  }, 2000);
  return () => { stop(); inner.stop(); };
}

function headOf(run) {
  const about = [run.model && ["model", run.model], ...run.about].filter(Boolean);
  const silent = run.silent_s > 30 ? `, silent for ${duration(run.silent_s)}` : "";
  return [
    el("div", { class: "title" }, el("h1", {}, run.name), pill(run.silent_s > 30 ? "stopped" : run.state, run.state === "running" && silent ? `running${silent}` : null)),
    el("p", { class: "about" }, about.map(([label, text]) => el("span", {}, el("b", {}, label), text)), run.by ? el("span", {}, el("b", {}, "by"), run.by) : null),
    run.reason ? el("p", { class: "reason" }, run.reason) : null,
    ...run.problems.map((problem) => el("p", { class: "reason" }, problem)),
    run.reading < 1 ? el("p", { class: "note" }, `Reading the metrics: ${percent(run.reading)}`) : null,
  ];
}

function overviewTab(body, base) {
  const hero = el("section", { class: "hero" }), advice = el("section", { class: "advice-box" }), lanes = el("section", { class: "card lanes" });
  const curves = el("section", { class: "curves" }, el("p", { class: "note" }, "Reading the curves …"));
  const others = el("section", { class: "others" });
  body.replaceChildren(hero, advice, lanes, curves, others);
  lanes.hidden = true;
  const showHero = keeper(hero), showAdvice = keeper(advice);
  let version = "", asking = false, mini = null, running = true, window_s = WINDOWS[0][0];
  const lanesView = lanesCard(lanes, () => window_s, (value) => { window_s = value; askLanes(); });
  const askLanes = async () => {
    const { view } = await ask(`${base}/lanes`, { window: window_s });
    if (view) { lanes.hidden = false; lanesView(view, running); }
    return running ? 1000 : 5000;
  };
  const stopLanes = repeat(askLanes, 1000);
  return {
    stop: stopLanes,
    update: async (run) => {
      running = run.state === "running";
      const drawHero = () => showHero([run.bars, run.held_out, run.figures_now, run.step, run.steps, run.stage, run.left_s && Math.round(run.left_s), run.step_s, run.state, run.seconds && Math.round(run.seconds / 5), mini], () => heroOf(run, mini));
      drawHero();
      showAdvice([run.advice, run.findings, run.warnings, run.alerts.slice(0, 3)], () => adviceOf(run));
      if (run.version !== version && !asking) {
        asking = true;
        try {
          const answer = await ask(`${base}/curves`, { version });
          if (!answer.same) {
            version = answer.version;
            mini = run.bars.length < 3 ? answer.charts.find((chart) => chart.title === "Reward") || answer.charts.find((chart) => chart.title.startsWith("Loss")) || null : null;
            curves.replaceChildren(...chartsOf(answer.charts));
            otherMetrics(others, base, answer.others);
            drawHero();
            body.dataset.drawn = version;
          }
        } finally { asking = false; }
      }
    },
  };
}

function heroOf(run, mini) {
  const result = el("div", { class: "card result" });
  const title = el("h2", {}, run.state === "running" ? "The result so far" : "The result");
  if (run.bars.length) {
    result.append(title, el("p", { class: "note" }, "Share of held-out tasks that are solved at the first try."));
    for (const bar of run.bars) {
      const fill = el("span", { class: "fill" });
      fill.style.setProperty("width", `${Math.max(0.5, 100 * Math.min(1, bar.value))}%`);
      result.append(el("div", { class: `meter s-${bar.style}` }, el("span", { class: "label" }, bar.label), el("span", { class: "delta" }, bar.change), el("span", { class: "value" }, bar.text), el("span", { class: "track" }, fill)));
    }
  } else {
    const yet = run.state === "running" ? " yet" : "";
    result.append(title);
    if (!run.held_out.length) result.append(el("p", { class: "note" }, run.step ? `No held-out evaluation was made${yet}; the other figures are of training.` : `Nothing was measured${yet}.`));
  }
  result.append(...run.held_out.map((sentence) => el("p", { class: "note" }, sentence)));
  if (mini) result.append(el("div", { class: "mini" }, el("span", { class: "note" }, `${mini.title} so far`), drawChart(mini)));
  const share = run.step !== null && run.steps ? Math.min(1, run.step / run.steps) : 0;
  const round = 2 * Math.PI * 42;
  const ring = svg("svg", { class: "ring-chart", viewBox: "0 0 100 100", role: "img", "aria-label": `${percent(share)} done` },
    svg("circle", { class: "ring-back", cx: 50, cy: 50, r: 42 }),
    svg("circle", { class: "ring-front", cx: 50, cy: 50, r: 42, "stroke-dasharray": `${share * round} ${round}`, transform: "rotate(-90 50 50)" }),
    svg("text", { x: 50, y: 50, class: "ring-text" }, percent(share)), svg("text", { x: 50, y: 65, class: "ring-note" }, (run.stage || "").replace("_", " ").toUpperCase()));
  const left = run.left_s !== null ? `about ${duration(run.left_s)} left` : run.seconds !== null ? `${duration(run.seconds)} in all` : "";
  const progress = el("div", { class: "card progress" }, ring, el("div", { class: "steps-now" },
    el("span", { class: "big" }, run.step === null ? "–" : count(run.step), el("small", {}, run.steps ? ` of ${count(run.steps)} steps` : " steps")),
    el("span", { class: "note" }, [run.step_s !== null ? `${duration(run.step_s)} a step` : "", left].filter(Boolean).join(", "))),
    el("dl", { class: "figures" }, run.figures_now.map((figure) => el("div", {}, el("dt", {}, figure.label), el("dd", {}, figure.text), spark(figure.recent)))));
  return [result, progress];
}

function adviceOf(run) {
  const items = [
    ...run.advice.map((one) => ["advice", one.text]),
    ...run.alerts.slice(0, 3).map((one) => ["alert", `Alert: ${one.text}`]),
    ...run.findings.map((text) => ["warning", text[0].toUpperCase() + text.slice(1)]),
    ...run.warnings.slice(0, 4).map((one) => ["warning", one.text[0].toUpperCase() + one.text.slice(1)]),
  ];
  if (!items.length) return [];
  return el("div", { class: "card advice" }, el("h2", {}, "What would help"), el("ul", {}, items.map(([kind, text]) => el("li", { class: kind }, text))));
}

function lanesCard(card, now, set) {
  const choice = el("div", { class: "segments", role: "group", "aria-label": "Time shown" });
  const sentence = el("p", { class: "note" }), rows = el("div", { class: "lane-rows" }), doing = el("p", { class: "note doing" });
  const buttons = WINDOWS.map(([seconds, title]) => el("button", { type: "button", onclick: () => set(seconds) }, title));
  choice.append(...buttons);
  card.append(el("div", { class: "card-head" }, el("h2", {}, "What each part is doing"), choice), sentence, rows, doing);
  return (view, running) => {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(WINDOWS[index][0] === now())));
    card.classList.toggle("ended", !running);
    sentence.textContent = running ? view.sentence : view.sentence.replace("In the last minute", "In its last minute");
    rows.replaceChildren(...view.lanes.map((lane) => laneRow(lane, view, running)), timeAxis(view, running));
    doing.textContent = running && view.now.length ? `Now: ${view.now.join(" · ")}` : "";
  };
}

function laneRow(lane, view, running) {
  const columns = lane.shares.length;
  const strip = svg("svg", { class: "strip", viewBox: `0 0 ${columns} 10`, preserveAspectRatio: "none", role: "img", "aria-label": `${lane.title}: ${lane.state.text}` });
  lane.shares.forEach((share, index) => {
    if (share === null) return;
    strip.append(svg("rect", { class: "seen", x: index, y: 0, width: 1.02, height: 10 }));
    const waited = lane.lane === "training" ? view.waiting[index] : 0;
    if (waited > 0.01) strip.append(svg("rect", { class: "wait", x: index, y: 10 - 10 * waited, width: 1.02, height: 10 * waited }));
    if (share > 0.004) strip.append(svg("rect", { class: "busy", x: index, y: 10 - Math.max(0.6, 10 * share), width: 1.02, height: Math.max(0.6, 10 * share) }));
  });
  const kind = running ? lane.state.kind : "idle";
  const waitedFor = running && view.waits_for === lane.lane;
  return el("div", { class: `lane l-${lane.lane} k-${kind}${waitedFor ? " waited-for" : ""}` },
    el("span", { class: "lane-name" }, el("i", { "aria-hidden": "true" }), lane.title), strip,
    el("span", { class: "lane-state" }, running ? lane.state.text : "", waitedFor ? el("b", {}, "the trainer waits for this") : null));
}

function timeAxis(view, running) {
  const span = view.window_s >= 600 ? `${view.window_s / 60} min` : `${view.window_s} s`;
  return el("div", { class: "lane axis" }, el("span", {}), el("span", { class: "times" }, el("span", {}, `${span} before`), el("span", { class: "keys" }, el("i", { class: "key-busy" }), "busy", el("i", { class: "key-wait" }), "waits"), el("span", {}, running ? `now, step ${count(view.step)}` : `the end, step ${count(view.step)}`)), el("span", {}));
}

function chartsOf(charts) {
  if (!charts.length) return [el("p", { class: "card none" }, "There are no metrics yet. Curves appear here with the first training step.")];
  return [el("h2", {}, "How it got there"), el("div", { class: "grid" }, charts.map(chartCard))];
}

function chartCard(chart) {
  const form = chart.share ? percent : number;
  const labels = [...new Map(chart.series.map((one) => [one.label, one])).values()];
  const order = chart.stages || [], values = chart.series.filter((one) => one.label === chart.series[0].label).sort((a, b) => order.indexOf(a.stage) - order.indexOf(b.stage)).flatMap((one) => one.mean);
  const change = values.length > 1 ? `${form(values[0])} → ${form(values[values.length - 1])}` : form(values[0]); // over all stages
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, chart.title), el("span", { class: "change" }, chart.unit === "s" ? "" : change)),
    labels.length > 1 || chart.unit === "s" ? el("div", { class: "legend" }, labels.map((one) => el("span", {}, el("i", { class: `c${one.style} ${chart.unit === "s" ? "" : `s-${one.stage}`}` }), one.label))) : null,
    drawChart(chart), chart.explanation ? el("p", { class: "note" }, chart.explanation) : null);
}

function otherMetrics(section, base, names) {
  if (!names.length || section.firstChild) {
    const list = section.querySelector("datalist");
    if (list && list.childElementCount !== names.length) list.replaceChildren(...names.map((name) => el("option", { value: name })));
    return;
  }
  const shown = el("div", { class: "grid small" });
  const field = el("input", { type: "search", list: "metric-names", placeholder: "name of a metric, such as loss/clip_frac_high", "aria-label": "Another metric" });
  const add = async () => {
    if (![...section.querySelectorAll("option")].some((option) => option.value === field.value)) return;
    const chart = await ask(`${base}/metric`, { name: field.value });
    shown.prepend(chartCard(chart));
    field.value = "";
  };
  field.addEventListener("change", add);
  section.replaceChildren(el("h2", {}, "Any other metric"), el("div", { class: "filters" }, field), el("datalist", { id: "metric-names" }, names.map((name) => el("option", { value: name }))), shown);
}

// --- warnings, alerts, log --------------------------------------------------------------------------------------------

function notesTab(body, base) {
  const notes = el("section", { class: "card" }), log = el("section", { class: "card" });
  const text = el("pre", { class: "log" }), config = el("pre", {});
  log.append(el("h2", {}, "The log's last warnings"), text, el("details", {}, el("summary", {}, "The configuration"), config));
  body.replaceChildren(notes, log);
  const show = keeper(notes);
  const stop = repeat(async () => {
    const answer = await ask(`${base}/notes`);
    text.textContent = answer.log.join("\n") || "There are none.";
    config.textContent = answer.config;
    return 4000;
  }, 4000);
  return {
    stop,
    update: (run) => show([run.warnings, run.alerts, run.findings, run.advice, run.problems], () => {
      const group = (title, items, none) => [el("h2", {}, title), items.length ? el("ul", { class: "notes" }, items.map((item) => el("li", {}, item))) : el("p", { class: "note" }, none)];
      return [
        ...group("Alerts", run.alerts.map((one) => one.text), "No rule of [metrics] alerts has fired."),
        ...group("Warnings about the run", [...run.findings, ...run.warnings.map((one) => one.text)], "The run has not warned of anything."),
        ...(run.problems.length ? group("What cannot be read", run.problems, "") : []),
      ];
    }),
  };
}

// --- episodes ---------------------------------------------------------------------------------------------------------

const SORTS = [["newest", "newest first"], ["oldest", "oldest first"], ["best", "best reward first"], ["worst", "worst reward first"], ["longest", "longest first"], ["shortest", "shortest first"]];
const BADGES = { solved: "good", "not solved": "bad", failed: "warn", "no verdict": "plain" };
const FIELDS = ["words", "task", "outcome", "file", "step_from", "step_to", "reward_from", "reward_to", "tokens_from", "tokens_to", "sort", "group"];

function episodesTab(body, id, base, query) {
  const filter = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) || ""]));
  let rows = [], skip = 0, current = null, timer = 0, indexed = "", asked = 0; // `indexed`: how far the index was when the rows that are shown were asked
  const stateOf = (index) => `${index.episodes} ${index.refused} ${index.share >= 1}`;
  const input = (name, type, title, options = {}) => el("input", { type, name, value: filter[name], "aria-label": title, placeholder: title, ...options, oninput: change });
  const select = (name, title, choices) => el("select", { name, "aria-label": title, onchange: change }, choices.map(([value, text]) => { const option = el("option", { value }, text); option.selected = filter[name] === value; return option; }));
  const files = select("file", "Which episodes", [["", "training and held-out"], ["train", "training"], ["eval", "held-out"]]);
  const pair = (title, low, high) => el("fieldset", {}, el("legend", {}, title), input(low, "number", `${title} from`, { step: "any", placeholder: "any" }), el("span", {}, "to"), input(high, "number", `${title} to`, { step: "any", placeholder: "any" }));
  const form = el("form", { class: "card filters", onsubmit: (event) => event.preventDefault() },
    input("words", "search", "search in questions and answers", { class: "wide" }), input("task", "search", "task"),
    select("outcome", "Outcome", [["", "any outcome"], ["solved", "solved"], ["not solved", "not solved"], ["no verdict", "no verdict"], ["failed", "failed"], ["cut off", "cut off"]]), files,
    pair("reward", "reward_from", "reward_to"), pair("tokens", "tokens_from", "tokens_to"), pair("step", "step_from", "step_to"),
    select("sort", "Order", SORTS), el("button", { type: "button", class: "quiet", onclick: () => { location.hash = runLink(id, "episodes"); } }, "clear"));
  const summary = el("p", { class: "summary", role: "status" }, "Looking …");
  const building = el("div", { class: "building", hidden: true }, el("span", { class: "track" }, el("span", { class: "fill" })), el("span", { class: "note" }));
  const list = el("div", { class: "episode-list", role: "list" }), more = el("button", { class: "more", hidden: true, onclick: () => { skip = rows.length; look(true); } }, "More");
  const reader = el("article", { class: "card reader", "aria-live": "polite", tabindex: "-1" }, el("p", { class: "note" }, "Choose an episode to read it. j and k go to the next and the one before."));
  body.replaceChildren(form, building, summary, el("div", { class: "episodes" }, el("div", { class: "list-side" }, list, more), reader));
  body.dataset.answered = "0";

  function change(event) {
    filter[event.target.name] = event.target.value;
    filter.group = "";
    clearTimeout(timer);
    timer = setTimeout(() => { skip = 0; const search = new URLSearchParams(Object.entries(filter).filter(([, value]) => value)); history.replaceState(null, "", `${runLink(id, "episodes")}${search.size ? `?${search}` : ""}`); look(false); }, event.target.tagName === "INPUT" ? 180 : 0);
  }

  async function look(append) {
    const number_asked = ++asked;
    let answer;
    try { answer = await ask(`${base}/episodes`, { ...filter, skip, limit: 40 }); } catch (error) { summary.textContent = error.message; return; }
    if (number_asked !== asked) return; // a newer filter was asked meanwhile
    rows = append ? [...rows, ...answer.rows] : answer.rows;
    indexed = stateOf(answer.index);
    const { summary: all, index, choices } = answer;
    const parts = [plural(all.count, "episode")];
    if (all.reward !== null) parts.push(`mean reward ${number(all.reward)}`);
    if (all.solved !== null) parts.push(`${percent(all.solved)} solved`);
    if (all.tokens !== null) parts.push(`${number(Math.round(all.tokens))} tokens on average`);
    summary.replaceChildren(el("b", {}, `${all.is_cut ? "at least " : ""}${parts[0]}`), parts.length > 1 ? `: ${parts.slice(1).join(", ")}.` : ".", el("span", { class: "took" }, ` Answered in ${answer.seconds < 0.01 ? "less than 0.01" : answer.seconds.toFixed(2)} s.${index.refused ? ` ${plural(index.refused, "line")} of the rollout files cannot be read.` : ""}`));
    showIndex(index);
    if (files.childElementCount === 3) files.append(...choices.evaluations.map((name) => { const option = el("option", { value: name }, name.replace(/^eval_|\.jsonl$/g, "held-out: ").replace(/held-out: $/, "")); option.selected = filter.file === name; return option; }));
    list.replaceChildren(...rows.map(rowOf));
    if (!rows.length) list.replaceChildren(el("p", { class: "none" }, index.share < 1 ? "Nothing yet: the episodes are being indexed." : all.count || index.episodes ? "No episode is like that." : "The run has saved no episodes ([rl.save] says which)."));
    more.hidden = rows.length >= all.count || rows.length === 0;
    body.dataset.answered = String(asked);
    ready();
  }

  function showIndex(index) {
    building.hidden = index.share >= 1 && !index.is_full;
    building.querySelector(".fill").style.setProperty("width", `${100 * index.share}%`);
    building.querySelector(".note").textContent = index.is_full ? `The newest ${count(index.episodes)} episodes are indexed; older ones are left out.` : `Indexing, the newest first: ${count(index.episodes)} episodes of ${count(index.files_done)} of ${count(index.files)} files, ${percent(index.share)}.`;
  }

  function rowOf(row) {
    const where = row.step === null ? row.file.replace(/^eval_|\.jsonl$/g, "") : `step ${count(row.step)}`;
    const node = el("button", { type: "button", class: "episode-row", role: "listitem", onclick: () => read(row) },
      el("span", { class: "row-top" }, el("span", { class: `badge ${BADGES[row.outcome]}` }, row.outcome), row.truncated ? el("span", { class: "badge warn" }, "cut off") : null, el("span", { class: "where" }, `${where} · group ${row.group}`), el("span", { class: "reward" }, row.reward === null ? "–" : number(row.reward))),
      el("span", { class: "asked" }, row.question || row.task),
      el("span", { class: "row-foot" }, el("span", { class: "task" }, row.task), el("span", {}, `${plural(row.tokens, "token")}, ${plural(row.turns, "turn")}`)));
    if (current === row.id) node.classList.add("on");
    row.node = node;
    return node;
  }

  async function read(row) {
    current = row.id;
    for (const other of rows) other.node.classList.toggle("on", other === row);
    row.node.scrollIntoView({ block: "nearest" });
    try {
      const episode = await ask(`${base}/episode`, { id: row.id });
      reader.replaceChildren(...readerOf(id, row, episode).filter(Boolean));
    } catch (error) { reader.replaceChildren(el("p", { class: "note" }, error.message)); }
    reader.dataset.episode = String(row.id);
    if (innerWidth < 900) reader.scrollIntoView({ block: "start" });
    reader.scrollTop = 0;
  }

  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const by = { j: 1, k: -1 }[event.key];
    if (!by || !rows.length) return;
    const at = rows.findIndex((row) => row.id === current);
    read(rows[Math.min(Math.max(at + by, 0), rows.length - 1)]);
    event.preventDefault();
  };
  addEventListener("keydown", keys);
  look(false);
  return {
    stop: () => { removeEventListener("keydown", keys); clearTimeout(timer); },
    update: (run) => {
      showIndex(run.index);
      if (indexed !== "" && indexed !== stateOf(run.index) && skip === 0 && rows.length <= 40) look(false); // new ones have come, or the index is done
    },
  };
}

function readerOf(id, row, episode) {
  const badges = [el("span", { class: `badge ${BADGES[row.outcome]}` }, row.outcome), episode.truncated ? el("span", { class: "badge warn" }, "cut off") : null, el("span", { class: "badge plain" }, `reward ${episode.reward}`)];
  const facts = [...(episode.parts.length > 1 ? episode.parts : []), ["tokens", String(episode.tokens)], episode.ended ? ["ended by", episode.ended] : null, episode.versions ? ["version", episode.versions[0] === episode.versions[1] ? String(episode.versions[0]) : episode.versions.join(" to ")] : null, ["credit", episode.credit], ["temperature", episode.temperature], ["seed", episode.seed]].filter(Boolean);
  const whole = `/view/${encodeURIComponent(id)}?${new URLSearchParams({ file: episode.file, group: episode.group })}`;
  return [
    el("header", {}, el("h2", {}, `Episode ${episode.id}`), ...badges.filter(Boolean), el("a", { class: "whole", href: whole, target: "_blank", rel: "noopener" }, "its whole group, step by step")),
    el("div", { class: "question" }, el("span", { class: "role" }, "asked"), el("div", { class: "text" }, episode.question || "(the environment speaks first)"), episode.expected !== null ? [el("span", { class: "role" }, "expected"), el("div", { class: "text expected" }, episode.expected)] : null),
    episode.failed ? el("p", { class: "reason" }, episode.failed) : null,
    el("dl", { class: "facts" }, facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))),
    episode.printed ? el("pre", { class: "log" }, `printed by ${episode.printed}`) : null,
    el("div", { class: "turns" }, episode.turns.map(turnOf), episode.left_out ? el("p", { class: "note" }, `${plural(episode.left_out, "message")} more.`) : null),
  ];
}

function turnOf(turn) {
  const role = ["system", "user", "assistant", "tool"].includes(turn.role) ? turn.role : "user";
  const figures = turn.step === undefined ? null : el("span", { class: "turn-figures" }, turn.valid ? null : el("span", { class: "badge warn" }, "invalid"), `${plural(turn.tokens, "token")} · r ${turn.reward}`, turn.advantage === null ? null : el("span", { class: `adv t${turn.tone}` }, `A ${turn.advantage}`));
  return el("div", { class: `turn ${role}` }, el("span", { class: "role" }, role === "assistant" && turn.step !== undefined ? `policy, step ${turn.step}` : turn.role, turn.name ? ` ${turn.name}` : "", figures),
    turn.text ? el("div", { class: "text" }, turn.text) : null,
    turn.calls.map(([call, result]) => el("div", { class: "call" }, el("code", {}, call), el("span", { class: "arrow" }, " -> "), el("code", { class: "result" }, result === null ? "(no answer)" : result))),
    !turn.text && !turn.calls.length ? el("div", { class: "text empty" }, "(nothing)") : null);
}

// --- several runs -----------------------------------------------------------------------------------------------------

export function comparePage(main, ids) {
  place(["Runs", "#/"], ["Compare", null]);
  const head = el("div", { class: "page-head" }, el("h1", {}, "Runs side by side"), el("p", { class: "note" }, "Curves of the same name on the same axes; held-out tasks that all have played are paired with the first run."));
  const tables = el("section", {}), curves = el("section", { class: "curves" });
  main.replaceChildren(head, tables, curves);
  const showTables = keeper(tables), versions = new Map(), charts = new Map();
  return repeat(async () => {
    const answer = await ask(`/api/compare?${new URLSearchParams(ids.map((id) => ["run", id]))}`);
    showTables(answer, () => comparedTables(answer));
    let changed = false;
    for (const { id } of answer.runs) {
      const drawn = await ask(`/api/run/${encodeURIComponent(id)}/curves`, { version: versions.get(id) });
      if (!drawn.same) { versions.set(id, drawn.version); charts.set(id, drawn.charts); changed = true; }
    }
    if (changed) curves.replaceChildren(el("h2", {}, "How they got there"), el("div", { class: "grid" }, overlays(answer.runs.map((run) => run.id), charts)));
    ready();
    return 3000;
  }, 3000);
}

function comparedTables(answer) {
  const heads = () => answer.runs.map((run, index) => el("th", { scope: "col" }, el("i", { class: `arm a${index % 8}` }), el("a", { href: runLink(run.id) }, run.id)));
  const cell = (row, value) => el("td", {}, value === null ? "–" : row.share ? percent(value) : number(value));
  const table = (title, rows, empty) => el("div", { class: "card scroll" }, el("h2", {}, title), rows.length ? el("table", {}, el("thead", {}, el("tr", {}, el("th", {}), heads())), el("tbody", {}, rows)) : el("p", { class: "note" }, empty));
  return [
    table("What they came to", answer.figures.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name), row.values.map((value) => cell(row, value)))), "There are no figures yet."),
    ...heldOutTables(answer.held_out, table),
    table("Settings that differ", answer.differences.map((row) => el("tr", {}, el("th", { scope: "row" }, row.key), row.arms.map((value) => el("td", {}, String(value))))), "They have the same configuration."),
  ];
}

function heldOutTables(found, table) {
  const scores = table("On held-out tasks", found.scores.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name), row.values.map((value) => el("td", {}, value)))), "There is no held-out evaluation of all of them yet.");
  scores.append(...found.notes.map((note) => el("p", { class: "note" }, note)));
  if (!found.paired.length) return [scores];
  const head = el("thead", {}, el("tr", {}, found.columns.map((name) => el("th", { scope: "col" }, name))));
  const rows = found.paired.map(([run, ...cells]) => el("tr", {}, el("th", { scope: "row" }, run), cells.map((cell) => el("td", {}, cell))));
  const words = el("p", { class: "note" }, "Each task of a run against the same task of the first run: the mean difference, its 95 % interval over tasks, and the p-value of a permutation test.");
  return [scores, el("div", { class: "card scroll paired" }, el("h2", {}, "Paired with the first run, task by task"), el("table", {}, head, el("tbody", {}, rows)), words)];
}

function overlays(ids, charts) {
  const stages = [...new Set(ids.map((id) => (charts.get(id) || [])[0]?.stages || []).sort((a, b) => b.length - a.length).flat())];
  const titles = [...new Set(ids.flatMap((id) => (charts.get(id) || []).map((chart) => chart.title)))];
  const cards = [];
  for (const title of titles) {
    const found = ids.map((id) => (charts.get(id) || []).find((chart) => chart.title === title));
    const model = found.find(Boolean);
    if (model.unit === "s") continue;
    for (const label of new Set(found.flatMap((chart) => (chart ? chart.series.map((one) => one.label) : [])))) {
      const series = found.flatMap((chart, index) => (chart ? chart.series.filter((one) => one.label === label).map((one) => ({ ...one, low: undefined, high: undefined, arm: index, run: ids[index] })) : []));
      const several = new Set(model.series.map((one) => one.label)).size > 1;
      const chart = { ...model, stages, title: several ? `${title}: ${label}` : title, series };
      const arms = [...new Set(series.map((one) => one.arm))];
      cards.push(el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, chart.title)), el("div", { class: "legend" }, arms.map((arm) => el("span", {}, el("i", { class: `arm a${arm % 8}` }), ids[arm]))), drawChart(chart, (one) => `arm a${one.arm % 8}`), el("p", { class: "note" }, chart.explanation)));
    }
  }
  return cards;
}
