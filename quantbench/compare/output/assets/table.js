// The table of all arms: columns are data, a click on a heading sorts, the controls filter.
// `value` is what a column sorts by, and what data-value holds: a number of the row as results.json has it.
const point = (row) => POINTS.get(row.arm);
const peak = (row, phase) => Object.values((row.peak_memory_bytes || {})[phase] || {})[0];
const COLUMNS = [
  { key: "arm", title: "Arm", words: true, value: (row) => row.arm },
  { key: "verdict", title: "Verdict", words: true, value: (row) => row.verdict, cell: verdictCell },
  { key: "speed_up", title: "Speed-up", value: (row) => point(row)?.speed_up, cell: speedCell, bestFirst: true },
  { key: "typical_step", title: "typical step", value: (row) => row.typical_step?.value, cell: stepCell, bestFirst: true },
  { key: "tok_s", title: "tok/s", value: (row) => row.tok_s, show: (value) => fixed(value, 2), bestFirst: true },
  { key: "decode_tok_s", title: "decode tok/s", value: (row) => row.decode_tok_s, show: (value) => fixed(value, 2), bestFirst: true },
  { key: "memory", title: "memory", value: (row) => point(row)?.memory_bytes, show: bytes },
  { key: "perplexity_ratio", title: "perplexity ÷ baseline", value: (row) => point(row)?.perplexity_ratio, cell: qualityCell },
  { key: "perplexity", title: "perplexity", value: (row) => row.perplexity, show: (value) => fixed(value, 3), wide: true },
  { key: "kl", title: "KL, nats", value: (row) => row.kl, cell: klCell },
  { key: "top1", title: "top-1", value: (row) => row.top1, show: percent, wide: true, bestFirst: true },
  { key: "time_to_first_token_s", title: "first token", value: (row) => row.time_to_first_token_s, show: milliseconds },
  { key: "token_p50_s", title: "p50", value: (row) => row.token_p50_s, show: milliseconds },
  { key: "token_p90_s", title: "p90", value: (row) => row.token_p90_s, show: milliseconds, wide: true },
  { key: "token_p99_s", title: "p99", value: (row) => row.token_p99_s, show: milliseconds },
  { key: "weight_bytes", title: "weights", value: (row) => row.weight_bytes, show: bytes, wide: true },
  { key: "kv_cache_bytes", title: "KV cache", value: (row) => row.kv_cache_bytes, show: bytes, wide: true },
  { key: "peak_load", title: "peak, loading", value: (row) => peak(row, "load"), show: bytes, wide: true },
  { key: "peak_generate", title: "peak, generating", value: (row) => peak(row, "generate"), show: bytes, wide: true },
  { key: "bandwidth_share", title: "of bandwidth", value: (row) => row.bandwidth_share, show: percent, wide: true, bestFirst: true },
  { key: "joules_per_token", title: "J/token", value: (row) => row.joules_per_token, show: (value) => fixed(value, 4), wide: true },
  { key: "samples", title: "samples", value: (row) => row.samples, show: (value) => String(value), wide: true },
  { key: "kernel", title: "Kernel", words: true, value: (row) => row.kernel },
  { key: "decoder", title: "Decoder", words: true, value: (row) => row.decoder },
];
let sorted = { key: null, descending: false };

function verdictCell(row) {
  const kind = ["faster", "slower", "failed"].find((word) => row.verdict === word) || "";
  return [make("span", { class: `verdict ${kind}` }, row.verdict)];
}

function speedCell(row) {
  const known_ = point(row);
  if (!known_ || !known(known_.speed_up)) return ["–"];
  return [...withEnds(known_.speed_up, known_), bar(known_)];
}

/** The speed-up of the median decoding step. */
function stepCell(row) {
  return row.typical_step ? withEnds(row.typical_step.value, row.typical_step) : ["–"];
}

function withEnds(value, ends) {
  const span = interval(ends.low, ends.high, ends.confidence);
  return [times(value), ...(span ? [" ", make("span", { class: "interval" }, `(${span})`)] : [])];
}

/** The interval on a log scale that all rows share, with a dashed line at 1. */
function bar(shown) {
  const all = DATA.points.flatMap((point) => [point.low, point.high, point.speed_up]).filter((value) => value > 0);
  const [low, high] = [Math.log(Math.min(1, ...all)), Math.log(Math.max(1.05, ...all))];
  const x = (value) => (6 + 98 * (Math.log(value) - low) / (high - low)).toFixed(1);
  const svg = make("svg", { class: "bar", viewBox: "0 0 110 14", "aria-hidden": "true" },
    make("line", { class: "whole", x1: 2, x2: 108, y1: 7, y2: 7 }),
    make("line", { class: "one", x1: x(1), x2: x(1), y1: 0, y2: 14 }));
  if (known(shown.low) && shown.low > 0) svg.append(make("line", { class: "span", x1: x(shown.low), x2: x(shown.high), y1: 7, y2: 7 }));
  svg.append(make("circle", { class: "value", cx: x(shown.speed_up), cy: 7, r: 3.5 }));
  return svg;
}

function qualityCell(row) {
  const shown = point(row);
  if (!shown || !known(shown.perplexity_ratio)) return [shown?.band === "broken" ? make("span", { class: "broken" }, "broken") : "–"];
  return [make("span", { class: shown.band }, fixed(shown.perplexity_ratio, 3) + (shown.band === "broken" ? " broken" : ""))];
}

function klCell(row) {
  if (!known(row.kl)) return ["–"];
  const error = known(row.kl_standard_error) ? [make("span", { class: "interval" }, ` ± ${fixed(row.kl_standard_error, 4)}`)] : [];
  return [fixed(row.kl, 4), ...error];
}

function cell(row, column) {
  const value = column.value(row);
  const attributes = { class: `${column.words ? "words" : ""} ${column.wide ? "wide" : ""}`.trim(), "data-column": column.key };
  if (typeof value === "number") attributes["data-value"] = String(value);
  const content = column.cell ? column.cell(row) : [column.show ? column.show(value) : known(value) ? String(value) : "–"];
  if (column.key === "arm") return make("th", { ...attributes, scope: "row" }, ...content);
  return make("td", attributes, ...content);
}

function drawHead() {
  const headings = COLUMNS.map((column) => {
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => sortBy(column));
    return make("th", { scope: "col", class: `${column.words ? "words" : ""} ${column.wide ? "wide" : ""}`.trim(),
                        "data-column": column.key, "aria-sort": "none" }, button);
  });
  $("results").tHead.replaceChildren(make("tr", {}, ...headings));
}

/** First the best of the column first, then the other way round. */
function sortBy(column) {
  const descending = sorted.key === column.key ? !sorted.descending : Boolean(column.bestFirst);
  sorted = { key: column.key, descending };
  for (const heading of $("results").tHead.rows[0].cells) {
    const active = heading.dataset.column === column.key;
    heading.setAttribute("aria-sort", !active ? "none" : descending ? "descending" : "ascending");
  }
  drawBody();
  announce(`Sorted by ${column.title}, ${descending ? "largest" : "smallest"} first`);
}

/** Rows without the figure come last, whichever way. */
function compareRows(a, b, column) {
  const [one, two] = [column.value(a), column.value(b)];
  if (!known(one) || !known(two)) return known(two) - known(one);
  const order = typeof one === "number" ? one - two : one.localeCompare(two, undefined, { numeric: true });
  return sorted.descending ? -order : order;
}

function shownRows() {
  const words = $("filter").value.toLowerCase();
  const verdict = $("verdict").value;
  const worst = Number($("worst").value) || null;
  return ROWS.filter((row) =>
    [row.arm, row.scheme, row.kernel].some((text) => (text || "").toLowerCase().includes(words))
    && (!verdict || row.verdict === verdict)
    && (!worst || (known(point(row)?.perplexity_ratio) && point(row).perplexity_ratio <= worst)));
}

function drawBody() {
  const rows = shownRows();
  const column = COLUMNS.find((column) => column.key === sorted.key);
  if (column) rows.sort((a, b) => compareRows(a, b, column));
  $("results").tBodies[0].replaceChildren(...rows.map((row) => make("tr", {}, ...COLUMNS.map((column) => cell(row, column)))));
  $("count").textContent = `${rows.length} of ${ROWS.length} arms`;
  $("results").classList.toggle("all", $("all-columns").checked);
}
