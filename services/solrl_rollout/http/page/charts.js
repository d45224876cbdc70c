"use strict";
// Charts by uPlot in the page's colours, as wide as their boxes.
const drawn = new Set();

/** Create an element. Strings become text nodes, never HTML. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const figure = (value) =>
  value === null || value === undefined ? "–"
    : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-4) ? value.toExponential(2)
      : value.toFixed(Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(Math.abs(value) || 1)))));

/** A colour of the page as canvases know it. */
function colour(box, name) {
  box.style.color = `var(--${name})`;
  return getComputedStyle(box).color;
}

/** Forget what is drawn in `box`. */
function erase(box) {
  box.watch?.disconnect();
  box.chart?.destroy();
  drawn.delete(box.chart);
  box.chart = null;
}

const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));

/** Texts of ticks, with as many decimals as tell them apart. */
function decimals(_, places, axis, space, step) {
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return places.map((place) => place.toFixed(digits));
}

/** Scale of the y axis with some room around the values, or from zero. */
const around = (zero) => (_, low, high) => {
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [zero ? Math.min(0, low) : low - room, high + room];
};

/**
 * Draw into `box`: `lines` ({name, values, style, xs}) over `xs` or their own, and a band between `range` = [low, high]
 * behind them, whose ends are named by `ends`. With `axes` it has ticks, and shows the values under the pointer, where
 * `at` says how a place is told, and `mark` how a tick is.
 */
function draw(box, { label, xs, lines, range, axes, zero, ends = ["worst", "best"], at = (x) => `iteration ${x}`, mark = String }) {
  erase(box);
  const edges = range ? [1, 0].map((end) => ({ name: ends[end], values: range[end], edge: true })) : [];
  const all = [...edges, ...lines].map((line) => ({ ...line, xs: line.xs || xs }));
  if (!all.some((line) => line.values.some((value) => value !== null))) return;
  // Not what uPlot says of them: it tells of a single place that it reaches to 100.
  const places = all.flatMap((line) => line.xs), first = Math.min(...places), last = Math.max(...places);
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", [label, ...lines.map((line) => line.name)].filter(Boolean).join(", "));
  const ink = (name) => () => colour(box, name);
  const axis = { show: Boolean(axes), stroke: ink("dim"), font: "12px system-ui, sans-serif", ticks: { show: false }, gap: 8 };
  const wide = (_, texts) => 14 + 7 * Math.max(0, ...(texts || []).map((text) => text.length));
  const options = {
    padding: axes ? [8, 14, 0, 0] : [2, 2, 2, 2],
    legend: { show: false },
    cursor: { show: Boolean(axes), y: false, drag: { x: false } },
    scales: { x: { time: false, range: () => [first, Math.max(last, first + 1)] }, y: { range: around(zero) } },
    axes: [
      { ...axis, size: 30, space: 60, incrs: WHOLE, grid: { show: false }, values: (_, places) => places.map(mark) },
      { ...axis, size: wide, space: 30, values: decimals, grid: { stroke: ink("grid"), width: 1 } },
    ],
    series: [{}, ...all.map(({ edge, style, xs: own }) => {
      if (edge) return { width: 0, points: { show: false } };
      const stroke = ink(style === "proxy" ? "grey" : style || "accent");
      return { stroke, width: 2, dash: style === "proxy" ? [4, 4] : [], points: { show: own.length === 1, size: 7, fill: stroke } };
    })],
    bands: range ? [{ series: [1, 2], fill: ink("wash") }] : [],
    hooks: { setCursor: axes ? [pointer(all, at)] : [] },
  };
  const data = uPlot.join(all.map((line) => [line.xs, line.values]));
  // A box gets its size when it is put into the page, and loses it when it is taken out.
  box.watch = new ResizeObserver(() => {
    const size = { width: box.clientWidth, height: box.clientHeight };
    if (!box.isConnected) erase(box);
    else if (box.chart && size.width) box.chart.setSize(size);
    else if (size.width) drawn.add(box.chart = new uPlot({ ...options, ...size }, data, box));
  });
  box.watch.observe(box);
}

/** Draw again in other colours. */
function repaint() {
  for (const chart of drawn) chart.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** The newest value of a line at a place; undefined before its first. */
const valueAt = (line, x) => line.values[line.xs.findLastIndex((one) => one <= x)];

/** Show the values under the pointer. */
function pointer(lines, told) {
  const says = el("div", { className: "says" });
  return (chart) => {
    const { idx, left } = chart.cursor;
    if (idx === null || idx === undefined || left < 0) return says.remove();
    const x = chart.data[0][idx], place = chart.valToPos(x, "x"), wide = chart.over.clientWidth;
    says.textContent = [told(x), ...lines.map((line) => `${line.name} ${figure(valueAt(line, x))}`)].join("\n");
    says.style.left = place < wide / 2 ? `${place + 10}px` : "auto";
    says.style.right = place < wide / 2 ? "auto" : `${wide - place + 10}px`;
    chart.over.append(says);
  };
}
