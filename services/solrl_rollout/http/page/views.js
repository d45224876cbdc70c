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

/** State of a run, and whether it is active. */
function standing(run) {
  if (!run.last) return ["waiting for its first iteration", false];
  if (run.last.planned !== null && run.last.iteration + 1 >= run.last.planned) return ["finished", false];
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

function showNow({ queue, throughput, runs }) {
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
  $("now").replaceChildren(...parts);
}

function scoreChart(curve, axes, label) {
  const { best, mean, worst, proxy } = curve.series;
  const lines = [{ name: "proxy", values: proxy, style: "proxy" }, { name: "mean", values: mean }];
  return { label, xs: curve.iterations.map(counted), range: [worst, best], lines, axes };
}

function makeCard(name) {
  const part = (className) => el("div", { className });
  const card = el("a", { className: "card", href: `#run=${name}` });
  card.parts = { name: part("name"), value: part("value"), state: part("small dim"), chart: part("chart"), done: part("small dim") };
  card.append(card.parts.name, el("div", { className: "line" }, card.parts.value, card.parts.done), card.parts.state, card.parts.chart);
  card.parts.name.textContent = name;
  return card;
}

function showCard(card, run, curve, chosen) {
  const [state, on] = standing(run), last = run.last;
  card.parts.value.textContent = last ? figure(last.score.mean) : "–";
  card.parts.done.textContent = last ? `${counted(last.iteration)}${last.planned === null ? "" : ` of ${last.planned}`}` : "";
  card.parts.state.replaceChildren(el("span", { className: on ? "on" : "" }, state), ` · version ${run.head}`);
  card.setAttribute("aria-current", String(chosen));
  if (curve && card.curve !== curve) draw(card.parts.chart, scoreChart(curve, false, `Score of ${run.run}`));
  card.curve = curve;
}

function runHead(run, samples) {
  const [state, on] = standing(run), last = run.last;
  const made = samples ? ` · explored in ${samples.precision.toUpperCase()}${samples.numerics === "emulated" ? " (emulated)" : ""}` : "";
  const left = last && last.planned !== null ? last.planned - last.iteration - 1 : 0;
  const parts = [el("span", { className: on ? "on" : "" }, state)];
  if (last) parts.push(` · iteration ${counted(last.iteration)}${last.planned === null ? "" : ` of ${last.planned}`}`);
  if (on && left) parts.push(` · about ${duration(left * spent(last))} left`);
  const way = el("div", { className: "way" }, el("i"));
  way.hidden = !last || last.planned === null;
  if (!way.hidden) way.firstChild.style.width = `${Math.min(1, (last.iteration + 1) / last.planned) * 100}%`;
  const lag = last ? last.iteration - last.explored_version : 0;
  const about = `${run.model} · version ${run.head}${lag > 0 ? `, explored ${plural(lag, "version")} behind` : ""}${made}`;
  return [
    el("div", { className: "head" }, el("div", {}, el("h2", {}, run.run), el("p", { className: "dim small" }, about)), el("p", { className: "small" }, ...parts)),
    way,
  ];
}

function smallChart(title, curve, values) {
  const box = el("div", { className: "chart axes" });
  draw(box, { label: title, xs: curve.iterations.map(counted), lines: [{ name: title.toLowerCase(), values }], axes: true, fewest: 2 });
  return el("div", {}, el("h3", {}, title), box);
}

function phasesView(point) {
  const phases = apart(point.seconds), beside = "explore" in phases ? undefined : point.seconds.explore;
  const names = [...new Set([...PHASES, ...Object.keys(phases)])].filter((name) => name in phases);
  const bar = el("div", { className: "phases" }), list = el("div", { className: "times" });
  names.forEach((name, i) => {
    const part = el("i", { className: `p${Math.min(i, 3)}` });
    part.style.flex = `${phases[name]} 0 0`;
    bar.append(part);
    list.append(el("b", { className: `p${Math.min(i, 3)}` }, name), el("span", {}, duration(phases[name])));
  });
  const note = beside === undefined ? [] : [el("p", { className: "dim small" }, `exploration took ${duration(beside)}, partly in parallel`)];
  return el("div", {}, el("h3", {}, `Time per iteration: ${duration(spent(point))}`), bar, list, ...note);
}

const place = ({ by, server }) => (server ? `at ${server}, for the ${by}` : `in the ${by}`);

function scoringView(times) {
  const list = el("div", { className: "times rewards" });
  for (const one of times) list.append(el("b", {}, one.reward, el("span", { className: "dim" }, `${one.of}, ${place(one)}`)), el("span", {}, duration(one.seconds)));
  return el("div", {}, el("h3", {}, "Time of rewards per iteration"), list);
}

function samplesView(samples) {
  const order = [...samples.pairs].sort((one, other) => (one.place < other.place ? -1 : one.place > other.place ? 1 : 0));
  const half = Math.ceil(order.length / 2);
  const rows = order.slice(0, half).flatMap((one, i) => [one, order[half + i]]).filter(Boolean);
  const image = (data, alt) => el("img", { src: `data:image/webp;base64,${data}`, alt, decoding: "async" });
  return el("div", {},
    el("h3", {}, `Best and worst of iteration ${counted(samples.iteration)}`),
    el("p", { className: "dim small" }, "each seed as explored and as regenerated for training"),
    el("div", { className: "pairs" }, ...rows.map((pair) => el("figure", {},
      el("figcaption", { title: pair.prompt }, el("b", {}, pair.place === "best" ? "Best " : "Worst "), pair.prompt),
      el("div", { className: "couple" },
        image(pair.explored, `${pair.place}, as explored`), image(pair.regenerated, `${pair.place}, in BF16`),
        el("span", {}, samples.precision.toUpperCase(), el("b", {}, figure(pair.proxy))),
        el("span", {}, "BF16", el("b", {}, figure(pair.true))))))));
}

function lineageView(held) {
  const pinned = new Set(held.pinned), rows = [...held.versions].reverse();
  const body = rows.map((info, i) => {
    const cut = info.parent !== (rows[i + 1] ? rows[i + 1].version : null);
    const row = el("tr", { className: [info.version === held.head ? "head-version" : "", cut ? "cut" : "", info.parent === null ? "root" : ""].join(" ") });
    const name = el("td", {}, `v${info.version}`);
    if (info.version === held.head) name.append(el("span", { className: "tag" }, "head"));
    if (pinned.has(info.version)) name.append(el("span", { className: "tag" }, "pinned"));
    row.append(name, el("td", { className: "wide" }, info.parent !== null ? `v${info.parent}` : info.version ? "–" : "base"),
      el("td", { title: info.digest }, el("code", {}, info.digest.slice(7, 19))),
      el("td", { className: "wide" }, `${info.rank}`), el("td", { className: "wide" }, `${info.modules}`), el("td", { className: "right" }, bytes(info.size)));
    return row;
  });
  const head = el("tr", {}, el("th", {}, "Version"), el("th", { className: "wide" }, "Parent"), el("th", {}, "Digest"),
    el("th", { className: "wide" }, "Rank"), el("th", { className: "wide" }, "Modules"), el("th", { className: "right" }, "Size"));
  return el("div", { className: "lineage" }, el("h3", {}, "Adapter lineage"),
    el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body))));
}

function showRun(run, detail, held) {
  const parts = runHead(run, detail && detail.samples);
  if (detail && detail.curve.iterations.length) {
    const { curve, samples } = detail, series = curve.series;
    const box = el("div", { className: "chart axes" });
    draw(box, scoreChart(curve, true, `Score of ${run.run} by iteration`));
    const legend = [["", "mean of training samples"], ["range", "worst to best half"], ["proxy", "mean of all explored"]];
    const score = el("div", {}, el("h3", {}, "Score by iteration"),
      el("div", { className: "legend" }, ...legend.map(([className, text]) => el("span", { className }, text))), box);
    parts.push(samples ? el("div", { className: "split" }, score, samplesView(samples)) : score);
    const rewards = Object.keys(series).filter((name) => name.startsWith("reward:"));
    const few = el("div", { className: "small-charts" });
    if (rewards.length > 1) few.append(...rewards.map((name) => smallChart(name.slice(7), curve, series[name])));
    few.append(smallChart("Loss", curve, series.loss));
    if (series.spearman) few.append(smallChart("Rank fidelity (Spearman)", curve, series.spearman));
    if (run.last && spent(run.last)) few.append(phasesView(run.last));
    if (run.last && run.last.scoring.length) few.append(scoringView(run.last.scoring));
    parts.push(few);
  }
  if (held) parts.push(lineageView(held));
  $("run").replaceChildren(...parts);
}

function showFoot(service) {
  const models = service.models.map((model) => {
    const tiers = model.precisions.map((tier) => tier.precision.toUpperCase() + (tier.numerics === "emulated" ? " (emulated)" : ""));
    return el("span", {}, `${model.name}, ${model.width}×${model.height}: ${tiers.join(", ")}`);
  });
  const kept = service.store === "redis" ? "adapters in Redis" : "adapters in memory";
  // A single worker needs no line of its own.
  const workers = service.workers.length < 2 ? [] : service.workers.map(({ name, serving, chunks, restarts }) => {
    const died = restarts ? `, restarted ${plural(restarts, "time")}` : "";
    return el("span", { className: serving ? "" : "bad" }, `${name}: ${serving ? plural(chunks, "chunk") : "does not serve"}${died}`);
  });
  $("foot").replaceChildren(...models, ...workers, el("span", {}, kept), el("span", {}, `tenant ${service.tenant}`), el("span", {}, `solrl ${service.version}, up ${duration(service.uptime)}`));
}
