// The view of one run: held-out rewards first, then training, settings and lineage.
const MAIN_SETTINGS = [
  "preset", "rewards", "evaluate.rewards", "prompts", "seed", "explore.prompts", "explore.candidates", "explore.steps", "explore.precision", "explore.keep",
  "regenerate.steps", "algorithm.name", "optimizer.learning_rate", "optimizer.updates", "lora.rank", "solver", "guidance",
];

function runHead(run, settings, samples) {
  const [state, on] = standing(run), last = run.last;
  const made = samples ? ` · explored in ${samples.precision.toUpperCase()}${samples.numerics === "emulated" ? " (emulated)" : ""}` : "";
  const left = last && last.planned !== null ? last.planned - last.iteration - 1 : 0;
  const parts = [el("span", { className: on ? "on" : "" }, state)];
  if (last) parts.push(` · iteration ${counted(last.iteration)}${last.planned === null ? "" : ` of ${last.planned}`}`);
  if (last && last.ended) parts.push(`: ${last.ended}`);
  if (on && left && last) parts.push(` · about ${duration(left * spent(last))} left`);
  const way = el("div", { className: "way" }, el("i"));
  way.hidden = !last || last.planned === null;
  if (!way.hidden) way.firstChild.style.width = `${Math.min(1, (last.iteration + 1) / last.planned) * 100}%`;
  const lag = last ? last.iteration - last.explored_version : 0;
  const about = `${run.model} · version ${run.head}${lag > 0 ? `, explored ${plural(lag, "version")} behind` : ""}${made}`;
  const trains = settings ? [el("p", {}, "trains on ", el("b", {}, formula(settings.trained)))] : [];
  return [
    el("div", { className: "head" }, el("div", {}, el("h2", {}, run.run), ...trains, el("p", { className: "dim small" }, about)), el("p", { className: "small" }, ...parts)),
    way,
  ];
}

/** A reward's held-out curve with the interval of its gain, in a box of its own. */
function heldOutChart(evaluations, reward) {
  const box = el("div", { className: "chart axes" }), factor = factorOf(reward);
  const having = evaluations.filter((one) => reward in one.rewards), values = (key) => having.map((one) => one.rewards[reward][key] * factor);
  draw(box, {
    label: `${labelOf(reward)} on held-out prompts by version`, xs: having.map((one) => one.version), lines: [{ name: "mean", values: values("mean") }],
    range: [values("low"), values("high")], ends: ["low", "high"], axes: true, at: (x) => `version ${x}`,
  });
  return box;
}

function heldOutView(evaluations) {
  const newest = evaluations[evaluations.length - 1], [lead, ...others] = Object.keys(newest.rewards);
  const gain = gainText(evaluations, lead);
  const main = el("div", { className: "lead" },
    el("div", {}, el("h3", {}, `Held out: ${labelOf(lead)}${factorOf(lead) === 100 ? ", %" : ""}`),
      el("div", { className: "value" }, valueOf(lead, newest.rewards[lead].mean)),
      ...(gain ? [el("p", { className: `gain ${verdict(evaluations, lead)}` }, gain), el("p", { className: "dim small" }, "gain over version 0 and its 95 % interval")] : []),
      el("p", { className: "dim small" }, `version ${newest.version}, averaged weights, ${plural(newest.images, "image")}; the same prompts and seeds at each version`)),
    heldOutChart(evaluations, lead));
  const few = el("div", { className: "small-charts" }, ...others.map((reward) => el("div", {},
    el("h3", {}, `${labelOf(reward)}: ${valueOf(reward, newest.rewards[reward].mean)}`),
    el("p", { className: "dim small" }, gainText(evaluations, reward) || "held out"), heldOutChart(evaluations, reward))));
  return el("div", { className: "held-out" }, main, ...(others.length ? [few] : []));
}

function smallChart(title, curve, values) {
  const box = el("div", { className: "chart axes" });
  draw(box, { label: title, xs: curve.iterations.map(counted), lines: [{ name: title.toLowerCase(), values }], axes: true });
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

function trainingView(run, { curve, samples, settings }) {
  const series = curve.series, box = el("div", { className: "chart axes" });
  draw(box, scoreChart(curve, true, `Score of ${run.run} by iteration`));
  const legend = [["", "mean of training samples"], ["range", "worst to best half"], ["proxy", "mean of all explored"]];
  const score = el("div", {}, el("h3", {}, `Training: ${settings ? formula(settings.trained) : "score"} by iteration`),
    el("div", { className: "legend" }, ...legend.map(([className, text]) => el("span", { className }, text))), box);
  const few = el("div", { className: "small-charts" }), rewards = Object.keys(series).filter((name) => name.startsWith("reward:"));
  if (rewards.length > 1) few.append(...rewards.map((name) => smallChart(`${name.slice(7)} in training`, curve, series[name])));
  few.append(smallChart("Loss", curve, series.loss));
  if (series.spearman) few.append(smallChart("Rank fidelity (Spearman)", curve, series.spearman));
  if (run.last && spent(run.last)) few.append(phasesView(run.last));
  if (run.last && run.last.scoring.length) few.append(scoringView(run.last.scoring));
  return [samples ? el("div", { className: "split" }, score, samplesView(samples)) : score, few];
}

/** A part that is folded until it is opened, and stays so when the view is drawn again. */
function folded(name, title, content) {
  const part = el("details", { open: known.open.has(name) }, el("summary", {}, title), content);
  part.ontoggle = () => known.open[part.open ? "add" : "delete"](name);
  return part;
}

const settingRows = (values, names) => el("dl", { className: "values" }, ...names.flatMap((name) => [el("dt", {}, name), el("dd", {}, values[name])]));

function settingsView({ values }) {
  const main = MAIN_SETTINGS.filter((name) => name in values), all = Object.keys(values);
  const parts = [el("h3", {}, "Settings"), settingRows(values, main)];
  if (all.length > main.length) parts.push(folded("settings", `all ${all.length} settings`, settingRows(values, all)));
  return el("div", { className: "settings" }, ...parts);
}

function lineageView(held) {
  const rows = [...held.versions].reverse();
  const body = rows.map((info, i) => {
    const cut = info.parent !== (rows[i + 1] ? rows[i + 1].version : null);
    const row = el("tr", { className: [info.version === held.head ? "head-version" : "", cut ? "cut" : "", info.parent === null ? "root" : ""].join(" ") });
    const name = el("td", {}, `v${info.version}`);
    if (info.version === held.head) name.append(el("span", { className: "tag" }, "head"));
    row.append(name, el("td", { className: "wide" }, info.parent !== null ? `v${info.parent}` : info.version ? "–" : "base"),
      el("td", { title: info.digest }, el("code", {}, info.digest.slice(7, 19))),
      el("td", { className: "wide" }, `${info.rank}`), el("td", { className: "wide" }, `${info.modules}`), el("td", { className: "right" }, bytes(info.size)));
    return row;
  });
  const head = el("tr", {}, el("th", {}, "Version"), el("th", { className: "wide" }, "Parent"), el("th", {}, "Digest"),
    el("th", { className: "wide" }, "Rank"), el("th", { className: "wide" }, "Modules"), el("th", { className: "right" }, "Size"));
  return folded("lineage", `Adapter lineage: ${plural(rows.length, "version")}`,
    el("div", { className: "scroll" }, el("table", { className: "lineage" }, el("thead", {}, head), el("tbody", {}, ...body))));
}

function showRun(run, detail, held) {
  const parts = runHead(run, detail && detail.settings, detail && detail.samples);
  if (detail && detail.held_out.length) parts.push(heldOutView(detail.held_out));
  if (detail && detail.curve.iterations.length) parts.push(...trainingView(run, detail));
  if (detail && detail.settings) parts.push(settingsView(detail.settings));
  if (held) parts.push(lineageView(held));
  $("run").replaceChildren(...parts);
}
