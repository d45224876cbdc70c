// Views of the service's answers.
const $ = (id) => document.getElementById(id);
const MOST_ROWS = 8;
const PHASES = ["explore", "wait", "regenerate", "train", "push"];
const total = (values) => values.reduce((sum, value) => sum + value, 0);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** Iterations are numbered from 0 and counted from 1. */
const counted = (iteration) => iteration + 1;
const bytes = (size) => (size < 1e9 ? `${(size / 1e6).toFixed(1)} MB` : `${(size / 1e9).toFixed(2)} GB`);
// Exploration runs in parallel with the other phases. If a trainer reports its wait, only the wait counts.
const apart = ({ explore, ...phases }) => ("wait" in phases || explore === undefined ? phases : { explore, ...phases });
const spent = (point) => total(Object.values(apart(point.seconds)));

const SHARES = { verifier: "strict accuracy (verifier)", judge: "strict accuracy (judge)", "read right": "read right (ocr)" };
/** Rewards that are a share of images are shown in per cent. */
const labelOf = (reward) => SHARES[reward] || reward;
const factorOf = (reward) => (reward in SHARES ? 100 : 1);
const valueOf = (reward, value) => (reward in SHARES ? `${(100 * value).toFixed(1)} %` : figure(value));
const signed = (text, value) => (value < 0 ? "−" : "+") + text;
const gainOf = (reward, gain) => signed(reward in SHARES ? (100 * Math.abs(gain)).toFixed(1) : figure(Math.abs(gain)), gain);

/** The first evaluation that has a reward, and the newest. */
function ends(evaluations, reward) {
  const having = evaluations.filter((one) => reward in one.rewards);
  return [having[0], having[having.length - 1]];
}

/** Gain of the newest evaluation over version 0 with its interval, as text; empty without version 0. */
function gainText(evaluations, reward) {
  const [base, newest] = ends(evaluations, reward);
  if (base === newest || base.version !== 0) return "";
  const was = base.rewards[reward].mean, { mean, low, high } = newest.rewards[reward];
  return `${gainOf(reward, mean - was)}${reward in SHARES ? " points" : ""} [${gainOf(reward, low - was)}, ${gainOf(reward, high - was)}]`;
}

/** Class of a gain: whether its interval is above zero, below, or has it. */
function verdict(evaluations, reward) {
  const [base, newest] = ends(evaluations, reward), was = base.rewards[reward].mean;
  return newest.rewards[reward].low > was ? "on" : newest.rewards[reward].high < was ? "bad" : "";
}

/** The trained score as a formula, such as "clipscore + 0.2 × hpsv2". */
function formula(trained) {
  const terms = Object.entries(trained).map(([name, weight]) =>
    [weight < 0 ? "−" : "+", Math.abs(weight) === 1 ? name : `${Math.abs(weight)} × ${name}`]);
  return terms.map(([sign, term]) => `${sign} ${term}`).join(" ").replace(/^\+ /, "");
}

/** State of a run, and whether it is active. */
function standing(run) {
  if (run.last && run.last.planned !== null && run.last.iteration + 1 >= run.last.planned) return ["finished", false];
  if (run.last && run.last.ended) return ["ended early", false];
  if (!run.last) return ["waiting for its first iteration", false];
  if (run.age < Math.max(60, 4 * spent(run.last))) return ["running", true];
  return [`quiet for ${duration(run.age)}`, false];
}

function tile(name, value, unit, under, ...more) {
  const number = el("div", { className: "value" }, value);
  if (unit) number.append(el("span", { className: "unit" }, unit));
  return el("div", { className: "tile" }, el("h3", {}, name), number, el("div", { className: "small dim" }, under), ...more);
}

function queueView(rows) {
  const list = el("div", { className: "tile", id: "queue" }, el("h3", {}, "Queue"));
  const most = Math.max(...rows.map((one) => one.candidates)), name = (one) => one.run ?? "without an adapter";
  rows.sort(rows.length > MOST_ROWS ? (one, other) => other.candidates - one.candidates : (one, other) => (name(one) < name(other) ? -1 : 1));
  for (const one of rows.slice(0, MOST_ROWS)) {
    const bar = el("i");
    bar.style.width = `${most ? (one.candidates / most) * 100 : 0}%`;
    const [count, age] = one.candidates ? [plural(one.candidates, "candidate"), `for ${duration(one.age)}`] : ["", "nothing"];
    list.append(el("b", {}, name(one)), bar, el("span", {}, count), el("span", { className: "dim" }, age));
  }
  if (rows.length > MOST_ROWS) list.append(el("b", { className: "dim" }, `and ${plural(rows.length - MOST_ROWS, "run")} more`));
  return list;
}

function showService({ queue, throughput, runs }) {
  const rate = throughput.candidates_per_second, step = throughput.step_seconds;
  const made = tile("Candidates", rate.toFixed(rate < 10 ? 1 : 0), "per second", `over the last ${duration(throughput.window)}`, el("div", { className: "chart" }));
  made.classList.add("made");
  const xs = throughput.history.map((_, i) => i);
  draw(made.lastChild, { label: "Candidates per second over the last minute", xs, lines: [{ values: throughput.history }], zero: true });
  const parts = [
    made,
    tile("Waiting", queue.candidates.toLocaleString("en"), "", queue.candidates ? `the oldest for ${duration(queue.oldest)}` : "nothing in the queue"),
    tile("Step", step === null ? "–" : step < 1 ? (step * 1000).toFixed(0) : step.toFixed(2), step === null ? "" : step < 1 ? "ms" : "s", "for up to 24 candidates"),
    tile("Switches", String(throughput.switches), "", "adapters merged in the last minute"),
  ];
  // Active runs keep their row even if none of their work waits, so that the page does not jump.
  const waiting = new Map(queue.runs.map((one) => [one.run, one]));
  for (const run of runs) if (standing(run)[1] && !waiting.has(run.run)) waiting.set(run.run, { run: run.run, candidates: 0, age: 0 });
  if (waiting.size) parts.push(queueView([...waiting.values()]));
  $("service").replaceChildren(...parts);
}

function scoreChart(curve, axes, label) {
  const { best, mean, worst, proxy } = curve.series;
  const lines = [{ name: "all explored", values: proxy, style: "proxy" }, { name: "mean", values: mean }];
  return { label, xs: curve.iterations.map(counted), range: [worst, best], lines, axes };
}

function makeCard(name) {
  const part = (className) => el("div", { className });
  const card = el("a", { className: "card", href: `#run=${name}` });
  card.parts = { name: part("name"), reward: part("small dim"), value: part("value"), gain: part("small dim"), state: part("small dim"), chart: part("chart") };
  card.append(card.parts.name, card.parts.state, card.parts.reward, el("div", { className: "line" }, card.parts.value, card.parts.gain), card.parts.chart);
  card.parts.name.textContent = name;
  return card;
}

function showCard(card, run, curve, evaluations, chosen) {
  const [state, on] = standing(run), last = run.last, newest = evaluations[evaluations.length - 1];
  const [reward] = newest ? Object.keys(newest.rewards) : [];
  card.parts.reward.textContent = newest ? `${labelOf(reward)}, held out` : last ? "score in training" : "";
  card.parts.value.textContent = newest ? valueOf(reward, newest.rewards[reward].mean) : last ? figure(last.score.mean) : "–";
  card.parts.gain.textContent = newest ? gainText(evaluations, reward).split(" [")[0] : "";
  const done = last ? ` · ${counted(last.iteration)}${last.planned === null ? "" : ` of ${last.planned}`}` : "";
  card.parts.state.replaceChildren(el("span", { className: on ? "on" : "" }, state), done);
  card.setAttribute("aria-current", String(chosen));
  if (!curve) erase(card.parts.chart);
  else if (card.curve !== curve) draw(card.parts.chart, scoreChart(curve, false, `Score of ${run.run}`));
  card.curve = curve;
}

function showFoot(service) {
  const models = service.models.map((model) => {
    const precisions = model.precisions.map((info) => info.precision.toUpperCase() + (info.numerics === "emulated" ? " (emulated)" : ""));
    return el("span", {}, `${model.name}, ${model.width}×${model.height}${model.frames ? `×${model.frames}` : ""}: ${precisions.join(", ")}`);
  });
  const kept = service.store === "redis" ? "adapters in Redis" : "adapters in memory";
  // A single worker needs no line of its own.
  const workers = service.workers.length < 2 ? [] : service.workers.map(({ name, serving, given_up, chunks, restarts }) => {
    const died = restarts ? `, restarted ${plural(restarts, "time")}` : "";
    return el("span", { className: serving ? "" : "bad" }, `${name}: ${serving ? plural(chunks, "chunk") : given_up ? "given up" : "is loaded again"}${died}`);
  });
  $("foot").replaceChildren(...models, ...workers, el("span", {}, kept), el("span", {}, `tenant ${service.tenant}`), el("span", {}, `solrl ${service.version}, up ${duration(service.uptime)}`));
}
