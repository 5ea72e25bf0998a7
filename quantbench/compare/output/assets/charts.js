// Charts, drawn by plotly from DATA in the colours of the style sheet.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const narrow = () => window.innerWidth < 640;
// plotly reads some markup in texts: a name shall be what it is.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const shortened = (text, most = 28) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const CONFIG = { responsive: true, displayModeBar: false, scrollZoom: false, doubleClick: "reset" };
const SYMBOLS = { same: "circle", near: "diamond", worse: "triangle-down", broken: "x-thin-open", unknown: "square" };
const BAND_NAMES = { same: "≤ 1 %", near: "≤ 5 %", worse: "worse", broken: "broken (> 2 ×)", unknown: "not measured" };

function axis(title, more = {}) {
  return { title: { text: title, standoff: 10 }, gridcolor: colour("grid"), linecolor: colour("line"),
           zeroline: false, automargin: true, fixedrange: narrow(), ...more };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    margin: { l: 52, r: 14, t: 12, b: 46 }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("muted"), font: { color: colour("text") }, align: "left" },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, title: { text: "" }, itemclick: false, itemdoubleclick: false },
    ...more,
  };
}

/** 1, 2 and 5 of each power of ten within the values, finer where that gives too few. */
function logTicks(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  for (const steps of [[1, 2, 5], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(3))));
    }
    const inside = ticks.filter((tick) => tick >= low * 0.85 && tick <= high * 1.18);
    if (inside.length >= 4) return inside;
  }
  return undefined;
}

function logAxis(title, values, more = {}) {
  const ticks = logTicks(values);
  const reach = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
  const room = Math.max(0.05, 0.09 * (reach[1] - reach[0]));
  return axis(`${title} (${narrow() ? "log" : "log scale"})`, { type: "log", tickvals: ticks, ticktext: ticks && ticks.map((tick) => String(tick)),
                       range: [reach[0] - room, reach[1] + room], ...more });
}

// ---------------------------------------------------------------- speed × memory × quality
function paretoText(point) {
  const row = ROWS.find((row) => row.arm === point.arm);
  const span = interval(point.low, point.high, point.confidence);
  return [
    `<b>${plain(point.arm)}</b>`,
    known(point.speed_up) ? `${times(point.speed_up)} the baseline's speed${span ? ` (${span})` : ""}` : null,
    `${fixed(point.tok_s, 2)} tokens per second`,
    `${bytes(point.memory_bytes)} of weights and KV cache`,
    known(point.perplexity_ratio) ? `perplexity ${fixed(point.perplexity_ratio, 3)} × the baseline's`
      : row.why_no_quality ? `no quality: ${plain(row.why_no_quality)}` : null,
  ].filter(Boolean).join("<br>");
}

/** The fastest of each size among these bands, as corners of a staircase. */
function staircase(points, bands, field) {
  const able = points.filter((point) => bands.includes(point.band) && known(point[field]))
    .sort((a, b) => a.memory_bytes - b.memory_bytes || b[field] - a[field]);
  const front = [];
  for (const point of able) if (!front.length || point[field] > front.at(-1)[field]) front.push(point);
  return front;
}

function drawPareto() {
  const field = $("pareto-y").value;
  const points = DATA.points.filter((point) => known(point[field]));
  if (!points.length) { $("pareto").textContent = "No arm was measured."; return; }
  const unit = Math.max(...points.map((point) => point.memory_bytes)) >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
  const x = (point) => point.memory_bytes / unit[0];
  const starred = new Set(["same", "near"].flatMap((band, i, all) =>
    staircase(points, all.slice(0, i + 1), field)).map((point) => point.arm));
  if (!starred.size) staircase(points, ["unknown"], field).forEach((point) => starred.add(point.arm));
  const traces = Object.keys(DATA.bands).map((band) => {
    const shown = points.filter((point) => point.band === band);
    const bars = field === "speed_up" && shown.some((point) => known(point.low));
    return {
      type: "scatter", mode: narrow() ? "markers" : "markers+text", name: BAND_NAMES[band],
      x: shown.map(x), y: shown.map((point) => point[field]),
      text: shown.map((point) => starred.has(point.arm) || point.baseline ? plain(shortened(point.arm)) : ""),
      textposition: "top center", textfont: { size: 12, color: colour("text") }, cliponaxis: false,
      hovertext: shown.map(paretoText), hoverinfo: "text", meta: shown.map((point) => point.arm),
      marker: { color: colour(band), size: 11, symbol: SYMBOLS[band], line: { width: band === "broken" ? 2 : 1, color: band === "broken" ? colour(band) : colour("card") } },
      error_y: bars ? { type: "data", symmetric: false, color: colour(band), thickness: 1.5, width: 4,
        array: shown.map((point) => known(point.high) ? point.high - point[field] : 0),
        arrayminus: shown.map((point) => known(point.low) ? point[field] - point.low : 0) } : undefined,
    };
  }).filter((trace) => trace.x.length);
  const values = points.flatMap((point) => field === "speed_up" && known(point.low)
    ? [point.low, point.high] : [point[field]]);
  const edge = { right: 10 * Math.max(...points.map(x)), bottom: Math.min(...values) / 10 };
  const lines = [["same", ["same"]], ["near", ["same", "near"]]].map(([band, bands]) => {
    const front = staircase(points, bands, field);
    const corners = front.map((point) => [x(point), point[field]]);
    if (corners.length) corners.unshift([corners[0][0], edge.bottom]), corners.push([edge.right, corners.at(-1)[1]]);
    return { type: "scatter", mode: "lines", x: corners.map(([x]) => x), y: corners.map(([, y]) => y),
             line: { shape: "hv", color: colour(band), dash: "dash", width: 1.5 }, hoverinfo: "skip", showlegend: false };
  }).filter((line) => line.x.length > 1);
  const title = field !== "speed_up" ? "tokens per second" : narrow() ? "speed-up, ×" : "speed-up over the baseline, ×";
  Plotly.react("pareto", [...lines, ...traces], layout({
    xaxis: logAxis(`weights ${narrow() ? "+ cache" : "and KV cache"}, ${unit[1]}`, points.map(x)),
    yaxis: logAxis(title, values),
    legend: { ...layout({}).legend, title: { text: "Perplexity over the baseline's:", side: "top" } },
  }), CONFIG);
  $("pareto").order = [...traces].flatMap((trace, i) => trace.x.map((_, j) => (
    { curveNumber: i + lines.length, pointNumber: j, x: trace.x[j], arm: trace.meta[j] })))
    .sort((a, b) => a.x - b.x);
}

/** Arrow keys go from arm to arm by memory, and say what hovering shows. */
function walkPareto(event) {
  const order = $("pareto").order || [];
  const step = { ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, ArrowUp: 1 }[event.key];
  if (event.key === "Escape") Plotly.Fx.unhover($("pareto"));
  if (!step || !order.length) return;
  event.preventDefault();
  const last = $("pareto").place;
  $("pareto").place = last === undefined ? (step > 0 ? 0 : order.length - 1)
    : (last + step + order.length) % order.length;
  const place = order[$("pareto").place];
  Plotly.Fx.hover($("pareto"), [{ curveNumber: place.curveNumber, pointNumber: place.pointNumber }]);
  announce(paretoText(POINTS.get(place.arm)).replace(/<[^>]*>/g, ", ").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&"));
}

// ---------------------------------------------------------------- samples, latency, layers
const chosen = new Set();  // numbers of arms
const DASHES = ["solid", "dash", "dot", "dashdot"];

function seriesStyle(number) {
  const colours = colour("series").split(" ");
  return { color: colours[number % colours.length], dash: DASHES[Math.floor(number / colours.length) % 4], width: 1.6 };
}

const chosenArms = () => DATA.arms.map((arm, number) => ({ ...arm, number })).filter((arm) => chosen.has(arm.number));

function drawSamples() {
  const traces = chosenArms().map((arm) => {
    const { round, process, tok_s } = arm.samples;
    const perRound = new Map();
    round.forEach((value) => perRound.set(value, (perRound.get(value) || 0) + 1));
    const [x, y, text] = [[], [], []];
    const seen = new Map();
    round.forEach((value, i) => {
      if (i && process[i] !== process[i - 1]) { x.push(null); y.push(null); text.push(""); }
      const place = seen.get(value) || 0;
      seen.set(value, place + 1);
      x.push(value + 1 + place / perRound.get(value));
      y.push(tok_s[i]);
      text.push(`${plain(arm.name)}<br>${fixed(tok_s[i], 2)} tokens per second<br>round ${value + 1}, process ${process[i] + 1}`);
    });
    return { type: "scatter", mode: "lines+markers", name: plain(shortened(arm.name)), x, y, hovertext: text,
             hoverinfo: "text", line: seriesStyle(arm.number), marker: { size: 4, color: seriesStyle(arm.number).color } };
  });
  Plotly.react("samples", traces, layout({ xaxis: axis("round"), yaxis: axis("tokens per second", { rangemode: "tozero" }) }), CONFIG);
}

function drawLatency() {
  // By log odds, so that both tails have room; the longest step a little beyond 99.9 %.
  const places = DATA.percents.map((percent) => percent === 100 ? 3.7 : Math.log10(percent / (100 - percent)));
  const shown = [1, 10, 50, 90, 99, 99.9, 100];
  const traces = chosenArms().filter((arm) => arm.latency_s.length).map((arm) => ({
    type: "scatter", mode: "lines+markers", name: plain(shortened(arm.name)), x: places,
    y: arm.latency_s.map((seconds) => 1e3 * seconds), line: seriesStyle(arm.number),
    marker: { size: 4, color: seriesStyle(arm.number).color }, hoverinfo: "text",
    hovertext: arm.latency_s.map((seconds, i) => `${plain(arm.name)}<br>${DATA.percents[i]} % of steps took at most ${milliseconds(seconds)}`),
  }));
  const values = traces.flatMap((trace) => trace.y);
  Plotly.react("latency", traces, layout({
    xaxis: axis("share of steps", { tickangle: 0, tickvals: shown.map((percent) => places[DATA.percents.indexOf(percent)]),
      ticktext: shown.map((percent) => percent === 100 ? "most" : `${percent}%`) }),
    yaxis: values.length ? logAxis("milliseconds", values) : axis("milliseconds"),
  }), CONFIG);
}

function drawLayers() {
  const arms = DATA.arms.map((arm, number) => ({ ...arm, number })).filter((arm) => arm.layers.length);
  $("by-layer").hidden = !arms.length;
  if (!arms.length) return;
  const traces = arms.map((arm) => ({
    type: "scatter", mode: "lines+markers", name: plain(shortened(arm.name)), line: seriesStyle(arm.number), marker: { size: 5 },
    x: arm.layers.map((layer) => plain(layer.name)), y: arm.layers.map((layer) => layer.outputs), hoverinfo: "text",
    hovertext: arm.layers.map((layer) => `${plain(arm.name)}<br>${plain(layer.name)}<br>outputs ${fixed(layer.outputs, 1)} dB, weights ${fixed(layer.weights, 1)} dB`),
  }));
  Plotly.react("layers", traces, layout({ xaxis: axis("", { showticklabels: !narrow(), tickfont: { size: 10 } }), yaxis: axis("dB") }), CONFIG);
}
