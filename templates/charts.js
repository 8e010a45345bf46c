"use strict";
// Adds interaction to the charts of a report: values at the pointer, zoom, lines to hide, and the data as CSV.
// trainkit/capabilities/report/charts.py draws each chart first, so both files must have the same rules for axes.
const WIDTH = 2000, HEIGHT = 500, LOG_FROM = 50, TINY = 1e-300, FAR = 10, MAX_LOG_TICKS = 6, MAX_ROWS = 8, MIN_DRAG = 6, MAX_CROSSES = 20, MIN_TYPICAL = 5, FAR_OUT = 1000, FAR_DECADES = 10;
const near = (a, b) => b * (1 + 1e-9 * a);

function niceTicks(low, high, count) {
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * base).find(one => one >= raw) ?? 10 * base;
  const first = Math.floor(low / step), last = Math.ceil(high / step);
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

function tickText(value, step, largest) {
  if (value === 0) return "0";
  if (largest >= 1e9 || largest < 1e-3) {
    const digits = Math.min(12, Math.max(0, Math.ceil(Math.log10(Math.abs(value) / step) - 1e-9)));
    const [mantissa, power] = value.toExponential(digits).split("e");
    return `${mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa}e${Number(power)}`;
  }
  const [unit, name] = largest >= 1e6 ? [1e6, "M"] : largest >= 1e4 ? [1e3, "k"] : [1, ""];
  const digits = Math.min(12, Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)));
  return (value / unit).toFixed(digits) + name;
}

function scaleOf(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) [low, high] = [0, 1];
  if (low >= TINY && high / low > LOG_FROM) return logScale(low, high);
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < TINY) [low, high] = [0, 1];
  else if (high - low <= 1e-9 * size) [low, high] = [low - 0.1 * size, high + 0.1 * size];
  const ticks = niceTicks(low, high, 4);
  return linear(Math.min(low, ticks[0]), Math.max(high, ticks.at(-1)), ticks);
}

// Returns the sorted values without outliers, as `typical` in trainkit/capabilities/report/plot.py does.
function typical(values) {
  const found = values.sort((a, b) => a - b), hasOneSign = found.length > 0 && (found[0] >= 0 || found.at(-1) <= 0);
  const decades = value => Math.log10(Math.abs(value));
  const scaled = hasOneSign ? found.filter(value => value !== 0).map(decades).sort((a, b) => a - b) : found;
  if (scaled.length < MIN_TYPICAL) return found;
  const last = scaled.length - 1, low = scaled[Math.floor(last / 4)], middle = scaled[Math.floor(last / 2)], high = scaled[Math.ceil(3 * last / 4)];
  const around = Math.max(high - middle, middle - low, hasOneSign ? 1 : Math.abs(middle));
  if (hasOneSign) return found.filter(value => value === 0 || Math.abs(decades(value) - middle) <= around * FAR_DECADES);
  return around ? found.filter(value => Math.abs(value - middle) <= around * FAR_OUT) : found;
}

const isWide = sorted => sorted.length > 0 && sorted[0] > 0 && sorted.at(-1) / sorted[0] > LOG_FROM;
const fits = (scale, value) => value !== null && scale.low <= value && value <= scale.high;

function linear(low, high, ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : high - low, largest = Math.max(0, ...ticks.map(Math.abs));
  return { low, high, ticks, place: value => (value - low) / (high - low), text: tick => tickText(tick, step, largest) };
}

function logScale(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), round = [], powers = [];
  for (let power = first; power <= last; power++) {
    for (const factor of [1, 2, 5]) round.push(Number(`${factor}e${power}`));
    powers.push(power);
  }
  const below = round.filter(tick => tick <= near(1, low)).at(-1), above = round.find(tick => tick >= near(-1, high));
  const within = tick => below <= tick && tick <= above, every = Math.ceil((last - first) / MAX_LOG_TICKS);
  let ticks = round.filter(within);
  if (ticks.length > MAX_LOG_TICKS)
    ticks = powers.filter(power => power % every === 0).map(power => Number(`1e${power}`)).filter(within);
  const bottom = Math.min(below, low), size = Math.log(Math.max(above, high)) - Math.log(bottom);
  return { low: Math.min(below, low), high: Math.max(above, high), ticks, place: value => value > 0 ? (Math.log(value) - Math.log(bottom)) / size : -FAR, text: tick => tickText(tick, tick, tick) };
}

const shown = value => value === null ? "not finite" : Math.abs(value) >= 1e21 ? String(Number(value.toPrecision(4))) : Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
const quoted = value => { const text = String(value ?? "nan"); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };

function element(kind, attributes = {}, text = "") {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

class Plot {
  constructor(root) {
    this.root = root;
    this.box = root.querySelector(".plot");
    this.axes = root.querySelector(".axes");
    this.groups = [...root.querySelectorAll("svg g")];
    this.hidden = new Set();
    this.at = null;
    const title = root.querySelector("h3");
    this.button = element("button", { type: "button", class: "csv", "aria-label": `${title.textContent}: download the points that are drawn as CSV` }, "CSV");
    title.append(this.button);
    this.button.addEventListener("click", () => this.download());
    this.tip = element("div", { class: "tip", role: "status" });
    this.cursor = element("i", { class: "cursor" });
    this.select = element("i", { class: "select" });
    for (const made of [this.cursor, this.select, this.tip]) { made.hidden = true; this.box.append(made); }
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Arrow keys show values, + and - zoom, Escape shows all");
    const events = { pointermove: "move", pointerdown: "press", pointerup: "release", pointerleave: "leave", pointercancel: "leave", dblclick: "reset", keydown: "key", blur: "leave" };
    for (const [event, method] of Object.entries(events)) this.box.addEventListener(event, found => this[method](found));
  }

  get data() {
    if (this.known) return this.known;
    const data = JSON.parse(this.root.querySelector("script").textContent);
    for (const line of data.lines ?? []) {
      let at = 0;
      line.x = line.x.map(step => at += step);
    }
    this.ends = data.dots ? [0, 1] : data.lines.reduce(([low, high], { x }) => [Math.min(low, x[0]), Math.max(high, x.at(-1))], [Infinity, -Infinity]);
    if (this.ends[1] <= this.ends[0]) this.ends[1] = this.ends[0] + 1;
    this.view = this.ends;
    this.y = this.axis(data);
    return this.known = data;
  }

  axis(data) {
    const [left, right] = this.view, found = [], spreads = [];
    if (data.dots) return scaleOf(typical(data.dots.map(dot => dot[2]).filter(result => result !== null)));
    for (const { name, x, y, spread } of data.lines) {
      if (this.hidden.has(name)) continue;
      for (let i = 0; i < x.length; i++) {
        if (x[i] < left || x[i] > right || y[i] === null) continue;
        found.push(y[i]);
        if (spread && spread[i] !== null) spreads.push([y[i], spread[i]]);
      }
    }
    const values = typical(found);
    this.floor = -Infinity;
    if (isWide(values)) {  // a band can reach below 0, where a logarithmic axis ends
      const ends = spreads.map(([value, size]) => value - size).filter(end => values[0] / 10 <= end && end < values[0]);
      this.floor = ends.reduce((low, end) => Math.min(low, end), values[0]);
      values.push(this.floor);
    } else {
      const first = values[0], last = values.at(-1);
      for (const [value, size] of spreads) if (first <= value && value <= last) values.push(value - size, value + size);
    }
    return scaleOf(values);
  }

  show(view) {
    const data = this.data;
    this.view = view;
    this.y = this.axis(data);
    const [left, right] = view, x = linear(left, right, niceTicks(left, right, 4).filter(tick => left <= tick && tick <= right && Number.isInteger(tick)));
    const labels = [];
    for (const tick of this.y.ticks) {
      const top = `top:${(100 - 100 * this.y.place(tick)).toFixed(2)}%`;
      labels.push(element("span", { class: "grid", style: top }), element("span", { class: "y", style: top }, this.y.text(tick)));
    }
    const across = (kind, at, text, style = "", more = {}) => {
      const place = 100 * x.place(at), side = kind !== "x" ? "" : place < 4 ? " first" : place > 92 ? " last" : "";
      if (place >= 0 && place <= 100) labels.push(element("span", { class: kind + side, style: `left:${place.toFixed(2)}%;${style}`, ...more }, text));
    };
    for (const tick of x.ticks) across("x", tick, x.text(tick));
    for (const [at, text] of data.marks) across("mark", at, text);
    data.lines.forEach((line, index) => {
      const isHidden = this.hidden.has(line.name), [band, path] = this.paths(line, x);
      const group = this.groups[index];
      group.style.display = isHidden ? "none" : "";
      for (const [name, text] of [[".band", band], [".line", path]]) group.querySelector(name)?.setAttribute("d", text);
      if (isHidden) return;
      const begun = [...line.x.keys()].filter(i => !fits(this.y, line.y[i]) && (i === 0 || fits(this.y, line.y[i - 1])) && left <= line.x[i] && line.x[i] <= right);
      const crosses = begun.length > MAX_CROSSES ? [...begun.slice(0, MAX_CROSSES - 1), begun.at(-1)] : begun;
      for (const i of crosses) {
        const value = line.y[i], at = Math.round(line.x[i]).toLocaleString("en"), isLow = value === null ? line.low?.includes(i) : value < this.y.low;
        across(isLow ? "cross low" : "cross", line.x[i], "×", line.style, { title: `${line.name || data.title}: ${value === null ? `not finite from ${at}` : `${shown(value)} at ${at}`}` });
      }
    });
    this.axes.replaceChildren(...labels);
    this.root.classList.toggle("zoomed", left !== this.ends[0] || right !== this.ends[1]);
  }

  paths({ x: steps, y: values, spread }, x) {
    const at = i => Math.round(WIDTH * x.place(steps[i])), down = value => Math.round(HEIGHT * (1 - Math.min(FAR, Math.max(-FAR, this.y.place(value)))));
    const within = value => down(Math.min(Math.max(value, this.y.low, this.floor), this.y.high));
    const [left, right] = this.view;  // points outside the view continue the line to its edges
    const draws = i => values[i] !== null && (fits(this.y, values[i]) || steps[i] < left || steps[i] > right);
    let line = "", band = "";
    for (let begin = 0; begin < steps.length; begin++) {
      if (!draws(begin)) continue;
      let end = begin;
      while (end + 1 < steps.length && draws(end + 1)) end++;
      const piece = Array.from({ length: end - begin + 1 }, (_, i) => begin + i);
      line += piece.map((i, first) => `${first ? "L" : "M"}${at(i)} ${down(values[i])}`).join("") + (end > begin ? "" : "h0");
      if (spread) {
        const edge = sign => piece.map(i => `${at(i)} ${within(values[i] + sign * (spread[i] ?? 0))}`);
        band += `M${[...edge(1), ...edge(-1).reverse()].join("L")}z`;
      }
      begin = end;
    }
    return [band, line];
  }

  toggle(name) {
    if (this.data.dots || !this.data.lines.some(line => line.name === name)) return;
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.show(this.view);
    this.leave();
  }

  share(event) {
    const box = this.box.getBoundingClientRect();
    return [Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)), (event.clientY - box.top) / box.height];
  }

  move(event) {
    const data = this.data, [x, y] = this.share(event);
    if (data.dots) {
      const far = dot => !fits(this.y, dot[2]) ? Infinity : Math.hypot(dot[0] - x, (1 - this.y.place(dot[2]) - y) * 0.4);
      this.point(data.dots.reduce((best, dot) => far(dot) < far(best) ? dot : best));
      return;
    }
    if (this.from !== undefined) {
      this.select.hidden = false;
      this.select.style.left = `${100 * Math.min(this.from, x)}%`;
      this.select.style.width = `${100 * Math.abs(x - this.from)}%`;
    }
    const [left, right] = this.view;
    this.values(left + x * (right - left), 1 - y);
  }

  values(at, height = null) {
    const [left, right] = this.view, found = [];
    for (const line of this.data.lines) {
      if (this.hidden.has(line.name)) continue;
      let low = 0, high = line.x.length - 1;
      while (low < high) { const middle = (low + high) >> 1; if (line.x[middle] < at) low = middle + 1; else high = middle; }
      if (low > 0 && at - line.x[low - 1] <= line.x[low] - at) low--;
      if (line.x[low] >= left && line.x[low] <= right) found.push({ line, i: low, x: line.x[low], y: line.y[low] });
    }
    if (!found.length) return this.leave();
    const nearest = found.reduce((best, one) => Math.abs(one.x - at) < Math.abs(best.x - at) ? one : best);
    this.at = nearest.x;
    const high = one => one.y === null ? 2 : this.y.place(one.y);
    const rows = [...found].sort((a, b) => height === null ? 0 : Math.abs(high(a) - height) - Math.abs(high(b) - height)).slice(0, MAX_ROWS).sort((a, b) => high(b) - high(a));
    const place = (nearest.x - left) / (right - left);
    this.say(place, `${this.data.over} ${nearest.x.toLocaleString("en")}`, rows.map(({ line, i, x, y }) => {
      const spread = line.spread?.[i] ? ` ± ${Number(line.spread[i].toPrecision(2))}` : "", where = x === nearest.x ? "" : ` at ${x.toLocaleString("en")}`;
      return [line.style, line.name || this.data.title, shown(y) + spread + where];
    }), found.length - rows.length);
  }

  point([place, value, result, name]) {
    this.at = place;
    this.say(place, `${this.data.over} ${value}`, [["", name, shown(result)]], 0);
  }

  say(place, head, rows, more) {
    const lines = rows.map(([style, name, value]) => {
      const row = element("div");
      row.append(element("i", { style }), element("span", {}, name), element("b", {}, value));
      return row;
    });
    if (more) lines.push(element("div", { class: "dim" }, `and ${more} more`));
    this.tip.replaceChildren(element("div", { class: "dim" }, head), ...lines);
    [this.tip.style.left, this.tip.style.right] = place > 0.5 ? ["6px", ""] : ["", "6px"];
    this.cursor.style.left = `${100 * place}%`;
    this.tip.hidden = this.cursor.hidden = false;
  }

  press(event) {
    if (event.button !== 0 || this.data.dots) return;
    this.from = this.share(event)[0];
    this.box.setPointerCapture(event.pointerId);
  }

  release(event) {
    const from = this.from, to = this.share(event)[0], [left, right] = this.view;
    this.from = undefined;
    this.select.hidden = true;
    if (from === undefined || Math.abs(to - from) * this.box.clientWidth < MIN_DRAG) return;
    this.zoom(left + Math.min(from, to) * (right - left), left + Math.max(from, to) * (right - left));
  }

  zoom(left, right) {
    const [first, last] = this.ends;
    [left, right] = [Math.max(first, left), Math.min(last, right)];
    if (right - left >= 1) this.show([left, right]);
  }

  reset() { if (!this.data.dots) this.show(this.ends); }

  leave() {
    this.tip.hidden = this.cursor.hidden = this.select.hidden = true;
    this.from = undefined;
  }

  key(event) {
    const data = this.data, direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.box) return;
    if (direction && data.dots) {
      const index = data.dots.findIndex(dot => dot === this.dot) + direction;
      this.point(this.dot = data.dots[(index + data.dots.length) % data.dots.length]);
    } else if (direction) {
      const [left, right] = this.view, seen = data.lines.filter(line => !this.hidden.has(line.name)).flatMap(line => line.x).filter(x => x >= left && x <= right);
      const beyond = seen.filter(x => this.at === null || (x - this.at) * direction > 0);
      if (beyond.length) this.values(beyond.reduce((best, x) => (x - best) * direction < 0 ? x : best));
    } else if ((event.key === "+" || event.key === "-") && !data.dots) {
      const [left, right] = this.view, middle = this.at ?? (left + right) / 2, size = (right - left) * (event.key === "+" ? 0.25 : 1);
      this.zoom(middle - size, middle + size);
    } else if (event.key === "Escape") { this.reset(); this.leave(); } else return;
    event.preventDefault();
  }

  download() {
    const { title, over, lines, dots } = this.data, rows = [];
    if (dots) {
      rows.push(["run", over, title], ...dots.map(([, value, result, name]) => [name, value, result]));
    } else {
      const spreads = lines.some(line => line.spread);
      rows.push(["line", over, "value", ...(spreads ? ["standard_deviation"] : [])]);
      for (const { name, x, y, spread } of lines) x.forEach((at, i) => rows.push([name || title, at, y[i], ...(spreads ? [spread?.[i] ?? ""] : [])]));
    }
    const text = rows.map(row => row.map(quoted).join(",") + "\n").join("");
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    element("a", { href: url, download: `${title.replace(/[^\p{L}\p{N}._-]+/gu, "_") || "chart"}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}

const plots = [...document.querySelectorAll(".chart")].map(root => new Plot(root));
for (const button of document.querySelectorAll("button.key")) {
  const scope = button.closest(".scope");
  button.disabled = false;
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    for (const plot of plots) if (scope.contains(plot.root)) plot.toggle(button.dataset.name);
  });
}
