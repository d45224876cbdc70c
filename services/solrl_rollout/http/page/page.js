// Polls the service every few seconds and caches its answers.
const EVERY = 2000, AGAIN = 5000, KEY = "solrl-token";
/** Address of the service, with the prefix by which a proxy may offer it. */
const SERVICE = location.origin + location.pathname.replace(/\/+$/, "");
let known, timer, asking = 0;

function forget() {
  known = {
    since: null, runs: new Map(), curves: new Map(), heldOut: new Map(), cards: new Map(), chosen: null, detail: {}, shown: "",
    open: new Set(), details: new Map(), compared: "", axis: "iterations",
  };
  $("cards").replaceChildren();
  $("run").hidden = true;
}

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(SERVICE + path, { headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (answer.ok) return answer.json();
  const problem = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, problem.detail || `the service answered ${answer.status}`);
}

/** The view that the address names: experiments, compare or service. */
function view() {
  const asked = location.hash.slice(1).split("=")[0];
  return asked === "compare" || asked === "service" ? asked : "experiments";
}

function showView() {
  const shown = view(), any = known.runs.size > 0;
  $("all").hidden = $("run").hidden = shown !== "experiments" || !any;
  $("compare").hidden = shown !== "compare" || !any;
  $("service").hidden = shown !== "service";
  $("none").hidden = shown === "service" || any;
  for (const link of $("views").children) link.setAttribute("aria-current", String((link.hash.slice(1) || "experiments") === shown));
}

function chosenRun() {
  const asked = new URLSearchParams(location.hash.slice(1)).get("run");
  if (asked && known.runs.has(asked)) return asked;
  if (known.chosen && known.runs.has(known.chosen)) return known.chosen;
  const newest = [...known.runs.values()].sort((one, other) => (other.revision || 0) - (one.revision || 0))[0];
  return newest ? newest.run : null;
}

function forgetReports(name) {
  for (const kept of [known.curves, known.heldOut, known.details]) kept.delete(name);
}

function take(answer) {
  known.runs = new Map(answer.runs.map((run) => [run.run, run]));
  for (const run of answer.runs) {
    if (run.curve) {
      known.curves.set(run.run, run.curve);
      known.heldOut.set(run.run, run.held_out);
    } else if (run.revision === null) forgetReports(run.run); // deleted, and pushed again
  }
  showService(answer);
  showFoot(answer.service);
  showCards();
  $("state").className = `state ${answer.service.draining ? "" : "live"}`;
  $("state").textContent = answer.service.draining ? "stopping" : "live";
  $("main").hidden = $("views").hidden = false;
  $("door").hidden = true;
  $("leave").hidden = !sessionStorage.getItem(KEY);
}

function showCards() {
  known.chosen = chosenRun();
  const order = [...known.runs.values()].sort((one, other) => standing(other)[1] - standing(one)[1]);
  for (const name of [...known.cards.keys()]) if (!known.runs.has(name)) {
    known.cards.get(name).remove();
    known.cards.delete(name);
    forgetReports(name);
  }
  order.forEach((run, i) => {
    if (!known.cards.has(run.run)) known.cards.set(run.run, makeCard(run.run));
    const card = known.cards.get(run.run), place = $("cards").children[i];
    showCard(card, run, known.curves.get(run.run), known.heldOut.get(run.run) || [], run.run === known.chosen);
    if (place !== card) $("cards").insertBefore(card, place || null);
  });
  showView();
}

/** Request the compared runs that changed. */
async function followCompared() {
  const names = comparedRuns(), mine = known;
  await Promise.all(names.map(async (name) => {
    const { revision } = known.runs.get(name), held = known.details.get(name);
    if (revision && (!held || held.revision !== revision)) mine.details.set(name, { revision, ...(await ask(`/v1/runs/${encodeURIComponent(name)}/iterations`)) });
  }));
  const shown = `${names.map((name) => `${name} ${known.runs.get(name)?.revision}`)} of ${[...known.runs.keys()]}`;
  if (mine !== known || view() !== "compare" || `${comparedRuns()}` !== `${names}`) return; // another choice was made
  if (shown === known.compared) return;
  known.compared = shown;
  showComparison(names.filter((name) => known.details.has(name)).map((name) => known.details.get(name)));
}

/** Request details of the selected run if any of them changed. */
async function follow() {
  if (view() === "compare") return followCompared();
  const run = known.runs.get(known.chosen), mine = known;
  if (!run) return;
  const told = `${run.run} ${run.revision}`, pushed = `${told} ${run.head} ${run.versions}`, detail = known.detail;
  const name = encodeURIComponent(run.run);
  const asked = await Promise.all([
    detail.told === told ? detail.iterations : run.revision ? ask(`/v1/runs/${name}/iterations`) : null,
    detail.pushed === pushed ? detail.adapters : ask(`/v1/runs/${name}/adapters`),
  ]);
  if (mine !== known || run.run !== known.chosen) return;
  const fresh = detail.told !== told || detail.pushed !== pushed;
  known.detail = { told, pushed, iterations: asked[0], adapters: asked[1] };
  const shown = `${standing(run)[0]} ${run.run}`;
  if (fresh || known.shown !== shown) showRun(run, ...asked);
  known.shown = shown;
}

async function refresh() {
  clearTimeout(timer);
  const turn = ++asking;
  let pause = EVERY;
  try {
    // Load the curves of all runs last: they take the longest, and the rest is already visible.
    const first = known.since === null;
    const answer = await ask(`/v1/status?since=${first ? Number.MAX_SAFE_INTEGER : known.since}`);
    if (turn !== asking) return;
    known.since = first ? 0 : answer.revision;
    if (first) pause = 0;
    take(answer);
    await follow();
  } catch (error) {
    if (turn !== asking) return;
    if (error instanceof Refused && error.status === 401) return askToken(error.message);
    pause = AGAIN;
    const gone = !(error instanceof Refused) || error.status >= 500;
    $("state").className = gone ? "state lost" : "state";
    $("state").textContent = error instanceof Refused ? error.message : "no answer, retrying";
  }
  if (turn === asking && !document.hidden) timer = setTimeout(refresh, pause);
}

function askToken(fault) {
  const tried = sessionStorage.getItem(KEY);
  sessionStorage.removeItem(KEY);
  forget();
  $("main").hidden = $("leave").hidden = $("views").hidden = true;
  $("door").hidden = false;
  $("fault").textContent = tried ? `Access denied: ${fault}.` : "A token shows the runs of its tenant.";
  $("state").className = "state";
  $("state").textContent = "locked";
  $("token").value = "";
  $("token").focus();
}

$("door").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("token").value.trim());
  $("token").value = "";
  forget();
  refresh();
};
$("leave").onclick = () => {
  sessionStorage.removeItem(KEY);
  asking++;
  clearTimeout(timer);
  askToken("");
};

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `Colours: ${name}`;
  repaint();
}
$("theme").onclick = () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("solrl-theme", next);
  theme(next);
};
theme(THEMES.includes(localStorage.getItem("solrl-theme")) ? localStorage.getItem("solrl-theme") : "auto");

document.onvisibilitychange = () => { if (!document.hidden && $("door").hidden) refresh(); };
window.ononline = () => { if ($("door").hidden) refresh(); };
window.onhashchange = () => {
  showCards();
  follow().catch(() => {});
};
$("command").textContent = `solrl-train run --preset model/recipe/reward --rollout-url ${SERVICE}`;
forget();
refresh();
