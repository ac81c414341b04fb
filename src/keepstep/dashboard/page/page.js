"use strict";
// The page's script. Comes in: one document about a job, whole and then by changes (delta.py says
// what a change is). Goes out: the page. Whatever the document says is put there as text, never as
// markup. Asks nobody but where it came from.

// -- pure

const ROWS = 100; // ranks and lines that are in the page at once
const SILENT_MS = 5000; // after which the page says that it has heard nothing

/** Apply a change to a document, in place: [value] sets, [] removes, an object goes deeper. */
function apply(document_, change) {
  for (const [name, said] of Object.entries(change)) {
    if (!Array.isArray(said)) apply(document_[name], said);
    else if (said.length) document_[name] = said[0];
    else delete document_[name];
  }
  return document_;
}

/** How long ago, to the precision that matters. */
function age(ms) {
  if (ms === null || ms === undefined) return "-";
  const s = Math.max(0, ms) / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${(s / 60).toFixed(0)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(0)} days`;
}

/** How long, precisely. */
function span(ms) {
  if (ms >= 120000) return age(ms);
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 1 ? `${ms.toFixed(1)} ms` : `${(ms * 1000).toFixed(0)} us`;
}

function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Which ranks a person means by "3, 8-15": a function that tells; null where that says nothing. */
function meant(text) {
  const ranges = [];
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const found = /^(\d+)(?:-(\d*))?$/.exec(part);
    if (!found) return null;
    const first = Number(found[1]);
    ranges.push([first, found[2] === undefined ? first : Number(found[2] || Infinity)]);
  }
  return (rank) => !ranges.length || ranges.some(([a, b]) => a <= rank && rank <= b);
}

/** The ranks that a person wants to see, in order. */
function chosenRanks(rows, text, which) {
  const wanted = meant(text);
  return rows.filter(
    ([rank, row]) =>
      (wanted === null || wanted(Number(rank))) &&
      (which !== "odd" || row.tone === "bad" || row.tone === "warn"),
  );
}

/** What the rows of all ranks have in common: how many are in which state. */
function rankCounts(rows) {
  const counts = { good: 0, warn: 0, bad: 0, quiet: 0 };
  for (const [, row] of rows) counts[row.tone || "quiet"] += 1;
  const words = [
    [counts.good, "as they should be"],
    [counts.warn, "to look at"],
    [counts.bad, "gone"],
    [counts.quiet, "done"],
  ];
  const said = words.filter(([count]) => count).map(([count, what]) => `${count} ${what}`);
  return `${counted(rows.length, "rank")}: ${said.join(", ") || "none"}`;
}

/** A rank of which only the journal tells, as a row. */
function rowOfLife(life) {
  const tones = { joined: "good", trained: "good", left: "bad", ended: "quiet", unknown: "quiet" };
  return {
    pid: life.pid, alive: null, doing: life.state, tone: tones[life.state] || "", done: life.step,
    newest: null, since_ms: null, at_risk: null, holds: "", loss: null, step_ms: null,
    stall_ms: null, captured: null, skipped: null, torn: null, bytes: null, why: life.why,
  };
}

/** Points of a line, [[ms, step]], as SVG has them, in a box of 1000 x 100. */
function polyline(points, length, most) {
  const x = (ms) => (1000 * Math.min(ms, length)) / Math.max(1, length);
  const y = (step) => 100 - (95 * Math.max(0, step)) / Math.max(1, most);
  return points.map(([ms, step]) => `${x(ms).toFixed(1)},${y(step).toFixed(1)}`).join(" ");
}

/** Where a stage's bar lies in its recovery, in percent: [from, wide]. */
function barOf(stage, total) {
  const took = stage.took_us / 1000;
  const from = (100 * Math.max(0, stage.at_ms - took)) / Math.max(1, total);
  return [Math.min(100, from), Math.min(100, (100 * took) / Math.max(1, total))];
}

// -- the page

function start() {
  const at = (id) => document.getElementById(id);
  let doc = null; // the document
  let heardAt = null; // Date.now() of the last message
  let skew = 0; // the server's clock less ours
  let live = []; // [[ms since the run began, step]], as it was seen here
  let past = null; // {run, account}: a run before, which was chosen
  let earlier = {}; // lines of the log that were asked for
  let page = 0; // of the ranks
  let isOver = false;
  const drawn = new Map(); // recoveries by number: [their JSON, their element]

  const now = () => Date.now() + skew;
  const shownRun = () => (past ? past.run : doc.run);

  function put(element, text) {
    const said = text === null || text === undefined ? "-" : String(text);
    if (element.textContent !== said) element.textContent = said;
  }

  function tell(element, text, tone) {
    put(element, text);
    if ((element.dataset.tone || "") !== (tone || "")) element.dataset.tone = tone || "";
  }

  function make(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** An element that shows how old something is, and goes on doing so. */
  function aged(element, sinceMs) {
    if (sinceMs === null || sinceMs === undefined) {
      delete element.dataset.since;
      put(element, "-");
    } else {
      element.dataset.since = sinceMs;
      put(element, age(now() - sinceMs));
    }
  }

  /** As many rows as there are entries, each filled by `fill(cells, entry)`; rows are kept. */
  function rows(body, entries, columns, fill) {
    while (body.rows.length > entries.length) body.deleteRow(-1);
    entries.forEach((entry, index) => {
      let row = body.rows[index];
      if (!row) {
        row = body.insertRow();
        for (const kind of columns) row.insertCell().className = kind;
      }
      fill(row.cells, entry, row);
    });
  }

  // -- what is protected

  function drawTop() {
    put(at("job"), doc.job);
    tell(at("state"), doc.state, doc.tone);
    put(at("why"), doc.why);
    put(at("release"), doc.release);
    document.title = `${doc.state}: ${doc.job}`;
    const goodput = doc.account ? `${(100 * doc.account.goodput).toFixed(1)} %` : "-";
    const risk = doc.at_risk_steps;
    const horizon = doc.horizon;
    figures([
      ["newest restorable step", horizon ? horizon.step : "none", null],
      ["how old it is", null, horizon ? horizon.since_ms : null],
      ["a killed process costs now", risk === null ? "unknown" : counted(risk, "step"), null],
      ["goodput so far", goodput, null],
    ]);
    const period = at("period");
    period.hidden = !doc.period;
    if (doc.period) tell(period, doc.period.text, doc.period.tone);
    rows(
      at("protection").tBodies[0], Object.values(doc.protection), ["", "tone", "number", ""],
      (cells, row) => {
        put(cells[0], row.against);
        tell(cells[1], row.upto, row.tone);
        aged(cells[2], row.since_ms);
        put(cells[3], row.why);
      },
    );
    if (doc.memory) tell(at("memory"), doc.memory.text, doc.memory.tone);
    else put(at("memory"), "The job has no memory here.");
  }

  function figures(found) {
    const list = at("figures");
    found.forEach(([name, value, since], index) => {
      let box = list.children[index];
      if (!box) list.append((box = make("div", {}, make("dt"), make("dd"))));
      put(box.children[0], name);
      if (value === null) aged(box.children[1], since);
      else put(box.children[1], value);
    });
  }

  function drawHealth() {
    const run = doc.run;
    const found = Object.values(doc.health).map((f) => [f.text, f.tone, f.why]);
    for (const trouble of Object.values(run ? run.troubles : {})) {
      const times = trouble.times === 1 ? "once" : `${trouble.times} times`;
      const when = `${span(trouble.last_ms)} into the run`;
      found.push([`${trouble.what}: ${times}`, "warn", `${when}: ${trouble.why}`]);
    }
    if (!found.length) found.push(["Nothing calls for a look.", "good", ""]);
    at("findings").replaceChildren(
      ...found.map(([text, tone, why]) => {
        const line = make("span", { class: "tone", "data-tone": tone });
        line.textContent = text;
        const item = make("li", {}, line);
        if (why) {
          const small = make("small");
          small.textContent = why;
          item.append(small);
        }
        return item;
      }),
    );
  }

  // -- ranks and nodes

  const COLUMNS = [
    ["rank", "number", (cell, rank) => put(cell, rank)],
    ["doing", "tone", (cell, rank, row) => tell(cell, row.doing, row.tone)],
    ["done", "number", (cell, rank, row) => put(cell, row.done)],
    ["newest snapshot", "number", (cell, rank, row) => put(cell, row.newest)],
    ["age", "number", (cell, rank, row) => aged(cell, row.since_ms)],
    ["may be lost", "number", (cell, rank, row) =>
      put(cell, row.at_risk === null ? "-" : counted(row.at_risk, "step"))],
    ["a step takes", "number wide", (cell, rank, row) =>
      put(cell, row.step_ms ? span(row.step_ms) : "-")],
    ["waited in all", "number wide", (cell, rank, row) =>
      put(cell, row.stall_ms === null ? "-" : span(row.stall_ms))],
    ["captured, skipped, torn", "number wide", (cell, rank, row) =>
      put(cell, row.captured === null ? "-" : `${row.captured}, ${row.skipped}, ${row.torn}`)],
    ["state", "number wide", (cell, rank, row) => put(cell, row.bytes ? size(row.bytes) : "-")],
    ["loss", "number wide", (cell, rank, row) =>
      put(cell, row.loss === null ? "-" : row.loss.toPrecision(5))],
    ["slots", "wide", (cell, rank, row) => put(cell, row.holds || row.why || "-")],
    ["process", "number wide", (cell, rank, row) => put(cell, row.pid)],
  ];

  /** Ranks that have a page here, and others that only the journal tells of. */
  function allRanks() {
    const found = {};
    const run = shownRun();
    for (const [rank, life] of Object.entries(run ? run.ranks : {})) found[rank] = rowOfLife(life);
    if (!past) Object.assign(found, doc.ranks);
    return Object.entries(found);
  }

  function drawRanks() {
    const all = allRanks();
    put(at("ranks-count"), rankCounts(all));
    const text = at("ranks-find").value;
    at("ranks-find").setAttribute("aria-invalid", String(meant(text) === null));
    const chosen = chosenRanks(all, text, at("ranks-which").value);
    page = Math.max(0, Math.min(page, Math.ceil(chosen.length / ROWS) - 1));
    const shown = chosen.slice(page * ROWS, (page + 1) * ROWS);
    at("ranks-pages").hidden = chosen.length <= ROWS;
    put(at("ranks-place"), `${page * ROWS + 1} to ${page * ROWS + shown.length} of ${chosen.length}`);
    at("ranks-before").disabled = page === 0;
    at("ranks-after").disabled = (page + 1) * ROWS >= chosen.length;
    const body = at("ranks-table").tBodies[0];
    rows(body, shown, COLUMNS.map((column) => column[1]), (cells, [rank, row], element) => {
      element.id = `rank-${rank}`;
      COLUMNS.forEach((column, index) => column[2](cells[index], rank, row));
    });
  }

  function drawNodes() {
    const nodes = doc.nodes;
    at("nodes").hidden = at("to-nodes").hidden = !nodes;
    if (!nodes) return;
    at("nodes-words").replaceChildren(
      ...nodes.words.map(([text, tone]) => {
        const line = make("p", { class: "tone", "data-tone": tone });
        line.textContent = text;
        return line;
      }),
    );
    const columns = ["number", "", "", "", "", "tone"];
    rows(at("nodes-table").tBodies[0], Object.values(nodes.rows), columns, (cells, row) => {
      put(cells[0], row.node);
      put(cells[1], row.is_here ? `${row.host} (here)` : row.host);
      put(cells[2], row.rack);
      put(cells[3], row.ranks);
      put(cells[4], row.link);
      tell(cells[5], row.fate, row.tone);
    });
  }

  // -- a run

  function drawRuns() {
    const runs = Object.values(doc.runs);
    const choice = at("run");
    at("run-choice").hidden = runs.length < 2;
    if (choice.options.length !== runs.length) {
      const kept = past ? String(past.run.number) : null;
      choice.replaceChildren(
        ...runs.map((run) => {
          const option = make("option", { value: run.number });
          const begun = new Date(run.begun_ms).toLocaleString();
          option.textContent = `${run.number}, begun ${begun}: ${run.outcome}`;
          return option;
        }),
      );
      choice.value = kept || String(runs.length);
    }
    const run = shownRun();
    const begun = run ? `Begun ${new Date(run.begun_ms).toLocaleString()}: ` : "";
    put(at("run-words"), run ? `${begun}${run.outcome}; ${run.end.text}.` : "No run yet.");
  }

  function drawChart() {
    const run = shownRun();
    if (!run) return;
    const isLive = !past && !run.is_over && doc.horizon !== null;
    const length = Math.max(1, run.length_ms, isLive ? now() - run.begun_ms : 0);
    const points = [...run.steps, ...(past ? [] : live.filter(([ms]) => ms >= run.length_ms))];
    const most = points.reduce((high, [, step]) => Math.max(high, step), 1);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const part = (tag, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      svg.append(made);
      return made;
    };
    const failures = Object.values(run.recoveries);
    svg.setAttribute("viewBox", "0 0 1000 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    const outline = `up to step ${most} in ${span(length)}; ${run.outcome}`;
    svg.setAttribute("aria-label", `Steps over time: ${outline}. The log has the same as text.`);
    for (const failure of failures) {
      const x = (1000 * failure.at_ms) / length;
      const width = Math.max(2, (1000 * (failure.took_ms + failure.away_ms)) / length);
      const band = part("rect", { x, y: 0, width, height: 100 });
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = failure.title;
      band.append(title);
    }
    for (const [ms] of run.checkpoints) {
      const x = (1000 * ms) / length;
      part("line", { x1: x, x2: x, y1: 94, y2: 100 });
    }
    part("polyline", { points: polyline(points, length, most) });
    const axis = make("div", { class: "axis", "aria-hidden": "true" });
    for (const quarter of [0, 1, 2, 3, 4]) {
      axis.append(make("span", {}, span((length * quarter) / 4)));
    }
    at("chart").replaceChildren(svg, axis);
  }

  function drawRecoveries() {
    const run = shownRun();
    const found = run ? Object.entries(run.recoveries) : [];
    const words = found.length ? "" : "No failure in this run.";
    const more = run && run.earlier_recoveries ? `The newest ${found.length}; ` +
      `${run.earlier_recoveries} before them: keepstep explain.` : "";
    put(at("recoveries-words"), words || more);
    const list = at("recoveries-list");
    const wanted = [];
    for (const [number, recovery] of found.reverse()) {
      const key = `${run.number}/${number}`;
      const text = JSON.stringify(recovery);
      const known = drawn.get(key);
      if (known && known[0] === text) {
        wanted.push(known[1]);
        continue;
      }
      const made = recoveryElement(recovery);
      made.open = known ? known[1].open : !wanted.length;
      drawn.set(key, [text, made]);
      wanted.push(made);
    }
    if (list.children.length !== wanted.length || wanted.some((w, i) => list.children[i] !== w)) {
      list.replaceChildren(...wanted);
    }
  }

  function recoveryElement(recovery) {
    const title = make("summary", { class: "tone", "data-tone": recovery.tone });
    title.textContent = `${recovery.title} (${span(recovery.at_ms)} into the run)`;
    const total = recovery.stages.reduce((last, stage) => Math.max(last, stage.at_ms), 1);
    const steps = make("ol", { class: "waterfall" });
    let before = "";
    for (const stage of recovery.stages) {
      const bar = make("i");
      const [from, wide] = barOf(stage, total);
      bar.style.setProperty("--from", `${from.toFixed(2)}%`);
      bar.style.setProperty("--wide", `${wide.toFixed(2)}%`);
      const cells = ["link quiet", "name", "number", "why"].map((kind) => make("span", { class: kind }));
      cells[0].textContent = stage.link === before ? "" : stage.link;
      cells[1].textContent = stage.name;
      cells[2].textContent = `+${span(stage.took_us / 1000)}`;
      cells[3].textContent = stage.why;
      cells[3].dataset.tone = stage.tone;
      before = stage.link;
      const track = make("span", { class: "track", "aria-hidden": "true" }, bar);
      steps.append(
        make("li", { "data-link": stage.link }, cells[0], cells[1], track, cells[2], cells[3]),
      );
    }
    const made = make("details", {}, title, steps);
    for (const [label, why] of recovery.remarks) {
      const line = make("p", { "data-tone": label ? "bad" : "quiet" });
      line.textContent = label ? `${label}: ${why}` : why;
      made.append(line);
    }
    return made;
  }

  function drawAccount() {
    const spent = past ? past.account : doc.account;
    if (!spent) {
      put(at("account-words"), "No rank has trained yet.");
      return;
    }
    const whole = Math.max(1, spent.wall_ms);
    const words = `Goodput ${(100 * spent.goodput).toFixed(2)} % of ${span(spent.wall_ms)}.`;
    put(at("account-words"), spent.doubt ? `${words} ${spent.doubt}.` : words);
    const parts = Object.entries(spent.parts).filter(([, ms]) => ms > 0);
    const bar = at("account-bar");
    while (bar.children.length > parts.length) bar.lastChild.remove();
    parts.forEach(([name, ms], index) => {
      const piece = bar.children[index] || bar.appendChild(make("i"));
      piece.style.setProperty("--of", `var(--${name})`);
      piece.style.setProperty("--wide", `${((100 * ms) / whole).toFixed(3)}%`);
    });
    const columns = ["", "number", "number", ""];
    rows(at("account-table").tBodies[0], parts, columns, (cells, [name, ms]) => {
      if (!cells[0].firstChild) {
        cells[0].append(make("span", { class: "swatch", "aria-hidden": "true" }), make("span"));
      }
      cells[0].firstChild.style.setProperty("--of", `var(--${name})`);
      put(cells[0].lastChild, name);
      put(cells[1], span(ms));
      put(cells[2], `${((100 * ms) / whole).toFixed(1)} %`);
      put(cells[3], spent.what[name]);
    });
  }

  function drawCopies() {
    const words = Object.values(doc.copies);
    at("copies").hidden = at("to-copies").hidden = !words.length;
    at("copies-words").replaceChildren(
      ...words.map(({ text, tone }) => {
        const line = make("li", { "data-tone": tone });
        line.textContent = text;
        return line;
      }),
    );
  }

  function drawLog() {
    const run = shownRun();
    const all = run ? { ...earlier, ...run.log } : {};
    const wanted = at("log-find").value.toLowerCase();
    const isOdd = at("log-odd").checked;
    const lines = Object.entries(all)
      .sort((one, other) => other[0] - one[0])
      .filter(([, line]) => (!isOdd || line.tone === "bad") &&
        (!wanted || `${line.who} ${line.why} ${line.kind}`.toLowerCase().includes(wanted)));
    const count = run ? run.log_lines : 0;
    put(at("log-count"), `${lines.length} of ${counted(count, "line")}, the newest first`);
    rows(at("log-table").tBodies[0], lines, ["number", "", ""], (cells, [, line]) => {
      put(cells[0], `${(line.at_ms / 1000).toFixed(3)} s`);
      put(cells[1], line.who);
      tell(cells[2], line.why, line.tone);
    });
    at("log-earlier").hidden = !run || Math.min(...Object.keys(all).map(Number), count) <= 0;
  }

  // -- what comes in

  function draw() {
    if (!doc) return;
    drawTop();
    drawHealth();
    drawRanks();
    drawNodes();
    drawRuns();
    drawChart();
    drawRecoveries();
    drawAccount();
    drawCopies();
    drawLog();
  }

  const PARTS = [
    [["ranks", "run"], drawRanks],
    [["health", "run"], drawHealth],
    [["nodes"], drawNodes],
    [["runs", "run"], drawRuns],
    [["run"], drawRecoveries],
    [["account"], drawAccount],
    [["copies"], drawCopies],
    [["run"], drawLog],
  ];

  function drawChanged(change) {
    drawTop();
    for (const [names, drawPart] of PARTS) {
      if (names.some((name) => name in change)) drawPart();
    }
    drawChart();
  }

  function hear(said) {
    heardAt = Date.now();
    skew = said.now_ms - heardAt;
    isOver = false;
  }

  /** Remember what was seen, for the line over time: at most one point a second. */
  function remember() {
    const run = doc.run;
    const done = Object.values(doc.ranks).reduce((most, row) => Math.max(most, row.done), -1);
    if (!run || done < 0) return;
    const ms = now() - run.begun_ms;
    if (live.length && (ms < live[live.length - 1][0] || live.length > 3600)) live = live.slice(-1800);
    live.push([ms, done]);
  }

  function listen() {
    const source = new EventSource("live");
    source.addEventListener("whole", (event) => {
      const said = JSON.parse(event.data);
      hear(said);
      doc = said.whole;
      earlier = past ? earlier : {};
      remember();
      draw();
    });
    source.addEventListener("change", (event) => {
      const said = JSON.parse(event.data);
      hear(said);
      if (!doc) return;
      const before = doc.run && doc.run.number;
      apply(doc, said.change);
      if (doc.run && doc.run.number !== before) [live, earlier] = [[], {}];
      remember();
      drawChanged(said.change);
    });
    source.addEventListener("over", () => { isOver = true; });
  }

  function tick() {
    for (const element of document.querySelectorAll("[data-since]")) {
      put(element, age(now() - Number(element.dataset.since)));
    }
    const silent = heardAt === null ? 0 : Date.now() - heardAt;
    const heard = at("heard");
    heard.hidden = !(isOver || silent > SILENT_MS);
    if (isOver || silent > SILENT_MS) {
      const when = new Date(heardAt || Date.now()).toLocaleTimeString();
      put(heard, isOver
        ? `The process that served this page has ended: this is how it was at ${when}. ` +
          "keepstep dashboard shows the run from its journal."
        : `Nothing heard since ${when}: the process that serves this page may be gone. ` +
          "The page goes on when it answers.");
    }
  }

  async function ask(path) {
    const answer = await fetch(path);
    return answer.ok ? answer.json() : null;
  }

  async function chooseRun(number) {
    earlier = {};
    past = number === Object.keys(doc.runs).length ? null : await ask(`run?number=${number}`);
    page = 0;
    draw();
  }

  async function askEarlier() {
    const run = shownRun();
    const first = Math.min(...Object.keys({ ...earlier, ...run.log }).map(Number));
    Object.assign(earlier, (await ask(`log?number=${run.number}&before=${first}`)) || {});
    drawLog();
  }

  const head = at("ranks-table").tHead.insertRow();
  for (const [name, kind] of COLUMNS) {
    const cell = make("th", { scope: "col", class: kind.replace("tone", "") });
    cell.textContent = name;
    head.append(cell);
  }
  for (const form of ["ranks-choice", "log-choice"]) {
    at(form).addEventListener("submit", (event) => event.preventDefault());
  }
  at("ranks-find").addEventListener("input", () => { page = 0; if (doc) drawRanks(); });
  at("ranks-which").addEventListener("change", () => { page = 0; if (doc) drawRanks(); });
  at("ranks-before").addEventListener("click", () => { page -= 1; drawRanks(); });
  at("ranks-after").addEventListener("click", () => { page += 1; drawRanks(); });
  at("log-find").addEventListener("input", () => doc && drawLog());
  at("log-odd").addEventListener("change", () => doc && drawLog());
  at("log-earlier").addEventListener("click", askEarlier);
  at("run").addEventListener("change", (event) => chooseRun(Number(event.target.value)));
  listen();
  setInterval(tick, 1000);
}

if (typeof document !== "undefined") start();
if (typeof module !== "undefined") {
  module.exports = { apply, age, span, size, meant, chosenRanks, rankCounts, polyline, barOf };
}
