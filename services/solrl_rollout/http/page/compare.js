// The comparison of several runs: curves over one another, held-out figures, and settings that differ.
const MOST_COMPARED = 8;
const AXES = {
  iterations: { title: "by iteration", at: (x) => `iteration ${Math.round(x)}`, mark: String },
  seconds: { title: "by time", at: (x) => duration(x), mark: (x) => (x ? duration(x) : "0") },
  candidates: { title: "by candidates", at: (x) => `${Math.round(x).toLocaleString("en")} candidates`, mark: (x) => (x >= 1e6 ? `${x / 1e6} M` : x >= 1e4 ? `${x / 1e3} k` : String(x)) },
};
/** Settings that differ between any two runs, or matter to none of their figures. */
const OWN_SETTINGS = new Set(["run"]);

/** Names in the address, perhaps none; without `=`, the runs that reported last. */
function comparedRuns() {
  const asked = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)).get("compare") : null;
  if (asked !== null) return asked.split(",").filter((name) => known.runs.has(name)).slice(0, MOST_COMPARED);
  const told = [...known.runs.values()].filter((run) => run.revision).sort((one, other) => other.revision - one.revision);
  return told.slice(0, 4).map((run) => run.run);
}

/** Place of a version on an axis; null if the run's reports do not tell it. */
function placeOf(detail, version, axis) {
  const { iterations, series } = detail.curve;
  if (axis === "iterations") return version;
  if (axis === "seconds") return version ? series.elapsed[iterations.findLastIndex((iteration) => counted(iteration) <= version)] ?? null : 0;
  const values = detail.settings ? detail.settings.values : {}, each = values["explore.prompts"] * values["explore.candidates"];
  return each ? version * each : null;
}

function lineOf(one, index, points, axis) {
  const placed = points.map(([version, value]) => [placeOf(one, version, axis), value]).filter(([x, value]) => x !== null && value !== null);
  return { name: one.run, style: `run${index}`, xs: placed.map(([x]) => x), values: placed.map(([, value]) => value) };
}

function overlay(title, lines, axis) {
  const found = lines.filter((line) => line.xs.length);
  if (!found.some((line) => line.xs.length > 1)) return null;
  const box = el("div", { className: "chart axes" });
  draw(box, { label: title, xs: [], lines: found, axes: true, ...AXES[axis] });
  return el("div", {}, el("h3", {}, title), box);
}

const key = (index) => el("b", { className: `key run${index}` });
const rewardsOf = (runs) => [...new Set(runs.flatMap((one) => one.held_out.flatMap((held) => Object.keys(held.rewards))))];

function gainsTable(runs) {
  const rows = rewardsOf(runs).flatMap((reward) => runs.map((one, index) => {
    const [base, newest] = ends(one.held_out, reward);
    if (!newest) return null;
    const before = base === newest ? "" : `${valueOf(reward, base.rewards[reward].mean)} → `;
    return el("tr", {}, el("td", {}, labelOf(reward)), el("td", {}, key(index), one.run),
      el("td", { className: "right" }, before, el("b", {}, valueOf(reward, newest.rewards[reward].mean))),
      el("td", { className: "right" }, gainText(one.held_out, reward)), el("td", { className: "right dim" }, `v${newest.version}`));
  }).filter(Boolean));
  return rows.length ? [el("h3", {}, "Held out, before and now, and the gain with its 95 % interval"), el("div", { className: "scroll" }, el("table", { className: "plain" }, el("tbody", {}, ...rows)))] : [];
}

function settingsTable(runs) {
  const having = runs.filter((one) => one.settings);
  if (having.length < 2) return [];
  const names = [...new Set(having.flatMap((one) => Object.keys(one.settings.values)))].filter((name) => !OWN_SETTINGS.has(name));
  const different = names.filter((name) => new Set(having.map((one) => one.settings.values[name])).size > 1);
  if (!different.length) return [el("h3", {}, "Settings that differ"), el("p", { className: "dim small" }, "none")];
  const head = el("tr", {}, el("th", {}, "Setting"), ...having.map((one) => el("th", {}, key(runs.indexOf(one)), one.run)));
  const body = different.map((name) => el("tr", {}, el("td", {}, name), ...having.map((one) => el("td", {}, key(runs.indexOf(one)), one.settings.values[name] ?? "–"))));
  return [el("h3", {}, "Settings that differ"), el("div", { className: "scroll" }, el("table", { className: "plain differ" }, el("thead", {}, head), el("tbody", {}, ...body)))];
}

/** Buttons that add a run to the comparison, or take it out. */
function runChoice(chosen) {
  const names = [...known.runs.values()].filter((run) => run.revision).map((run) => run.run);
  return el("div", { className: "choice" }, ...names.map((name) => {
    const index = chosen.indexOf(name), now = index < 0 ? [...chosen, name] : chosen.filter((one) => one !== name);
    const button = el("button", { type: "button" }, index < 0 ? "" : key(index), name);
    button.setAttribute("aria-pressed", String(index >= 0));
    button.disabled = index < 0 && chosen.length >= MOST_COMPARED;
    button.onclick = () => { location.hash = `compare=${now.join(",")}`; };
    return button;
  }));
}

function axisChoice() {
  return el("div", { className: "choice" }, ...Object.entries(AXES).map(([name, { title }]) => {
    const button = el("button", { type: "button" }, title);
    button.setAttribute("aria-pressed", String(known.axis === name));
    button.onclick = () => { known.axis = name; known.compared = ""; follow().catch(() => {}); };
    return button;
  }));
}

function showComparison(runs) {
  const axis = known.axis, chosen = runs.map((one) => one.run), parts = [el("h2", {}, "Compare experiments"), runChoice(chosen)];
  if (!runs.length) parts.push(el("p", { className: "dim" }, "Choose runs that have reported an iteration."));
  else {
    const held = rewardsOf(runs).map((reward) => overlay(`${labelOf(reward)}${factorOf(reward) === 100 ? ", %" : ""}`, runs.map((one, index) =>
      lineOf(one, index, one.held_out.filter((at) => reward in at.rewards).map((at) => [at.version, at.rewards[reward].mean * factorOf(reward)]), axis)), axis));
    const trained = [["mean", "Score of training samples"], ["proxy", "Score of all explored"], ["loss", "Loss"]].map(([name, title]) => overlay(title, runs.map((one, index) =>
      lineOf(one, index, one.curve.iterations.map((iteration, i) => [counted(iteration), one.curve.series[name][i]]), axis)), axis));
    const charts = (title, found) => (found.some(Boolean) ? [el("h3", { className: "part-title" }, title), el("div", { className: "over" }, ...found.filter(Boolean))] : []);
    parts.push(axisChoice(), ...charts("Held out", held), ...gainsTable(runs), ...charts("Training", trained), ...settingsTable(runs));
  }
  $("compare").replaceChildren(...parts);
}
