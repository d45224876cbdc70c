"use strict";
// Charts as SVG, stretched to their box; labels are HTML next to it, so that they are not stretched.
const WIDE = 1000, HIGH = 400;

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

function shape(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const figure = (value) =>
  value === null || value === undefined ? "–"
    : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-4) ? value.toExponential(2)
      : value.toFixed(Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(Math.abs(value) || 1)))));

/** Return at least `least` round numbers between two values, and their number of decimals. */
function ticks(low, high, least) {
  const power = 10 ** Math.floor(Math.log10(high - low));
  for (const step of [power * 5, power * 2, power, power / 2, power / 5, power / 10, power / 20]) {
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    if (found.length >= least) return [found, Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)))];
  }
  return [[low, high], 8];
}

function path(xs, values, placeX, placeY) {
  let text = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) pen = "M";
    else {
      text += `${pen}${placeX(xs[i]).toFixed(1)} ${placeY(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return text;
}

/**
 * Draw into `box`: `lines` ({name, values, style, xs}) over `xs` or their own, and a band between `range` = [low, high]
 * behind them, whose ends are named by `ends`. With `axes` it has ticks, and shows the values under the pointer, where
 * `at` says how a place is told, and `mark` how a tick is.
 */
function draw(box, { label, xs, lines, range, axes, zero, fewest = 3, ends = ["worst", "best"], at = (x) => `iteration ${x}`, mark = String }) {
  const values = [...lines.map((line) => line.values), ...(range || [])].flat().filter((value) => value !== null);
  if (!values.length) return box.replaceChildren();
  let low = Math.min(...values, ...(zero ? [0] : [])), high = Math.max(...values);
  const least = Math.max(Math.abs(high) * 1e-3, 1e-9);
  if (high - low < least) [low, high] = [low - (zero ? 0 : least), high + least];
  const all = [...xs, ...lines.flatMap((line) => line.xs || [])], first = Math.min(...all), last = Math.max(...all);
  const placeX = (x) => (last > first ? ((x - first) / (last - first)) * WIDE : WIDE / 2);
  const placeY = (y) => HIGH - ((y - low) / (high - low)) * HIGH;
  const picture = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const parts = [picture];
  if (axes) {
    const [rungs, digits] = ticks(low, high, fewest);
    for (const rung of rungs) {
      picture.append(shape("path", { class: "rule", d: `M0 ${placeY(rung)}H${WIDE}` }));
      const text = el("span", { className: "y" }, rung.toFixed(digits));
      text.style.top = `${(placeY(rung) / HIGH) * 100}%`;
      parts.push(text);
    }
    const marks = last > first ? ticks(first, last, 4)[0].filter(Number.isInteger) : [first];
    for (const one of marks.length > 8 ? marks.filter((_, i) => i % 2 === 0) : marks) {
      const text = el("span", { className: "x" }, mark(one));
      text.style.left = `${(placeX(one) / WIDE) * 100}%`;
      parts.push(text);
    }
  }
  if (range && xs.length > 1) {
    const there = path(xs, range[1], placeX, placeY);
    const back = path([...xs].reverse(), [...range[0]].reverse(), placeX, placeY);
    picture.append(shape("path", { class: "range", d: `${there}L${back.slice(1)}Z` }));
  }
  for (const line of lines) {
    const own = line.xs || xs;
    let d = path(own, line.values, placeX, placeY);
    if (own.length === 1) d += "h0.01";
    picture.append(shape("path", { class: `${line.style || ""}${own.length === 1 ? " spot" : ""}`, d }));
  }
  box.replaceChildren(...parts);
  const edges = range ? [{ name: ends[1], values: range[1] }, { name: ends[0], values: range[0] }] : [];
  if (axes) point(box, [...new Set(all)].sort((one, other) => one - other), [...lines, ...edges].map((line) => ({ ...line, xs: line.xs || xs })), placeX, at);
}

/** The newest value of a line at a place; undefined before its first. */
const valueAt = (line, x) => line.values[line.xs.findLastIndex((one) => one <= x)];

/** Show the values under the pointer. */
function point(box, xs, lines, placeX, told) {
  const hair = el("div", { className: "hair", hidden: true }), says = el("div", { className: "says", hidden: true });
  box.append(hair, says);
  box.onpointerleave = () => { hair.hidden = says.hidden = true; };
  box.onpointermove = (event) => {
    const area = box.getBoundingClientRect(), at = ((event.clientX - area.left) / area.width) * WIDE;
    let near = 0;
    xs.forEach((x, i) => { if (Math.abs(placeX(x) - at) < Math.abs(placeX(xs[near]) - at)) near = i; });
    const share = placeX(xs[near]) / WIDE;
    hair.hidden = says.hidden = false;
    hair.style.left = `${share * 100}%`;
    says.textContent = [told(xs[near]), ...lines.map((line) => `${line.name} ${figure(valueAt(line, xs[near]))}`)].join("\n");
    says.style.left = share < 0.5 ? `calc(${share * 100}% + 10px)` : "auto";
    says.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
  };
}
