// Puts the page together: what no chart and no table shows, and what the controls do.
const SHOWN_AT_FIRST = 5;  // arms besides the baseline in the charts of samples

function drawAnswer() {
  $("answer").hidden = !DATA.answer;
  if (!DATA.answer) return;
  $("answer-lines").replaceChildren(...DATA.answer.lines.map((line) =>
    make("li", {}, make("p", {}, line.text), ...(line.command ? [command(line.command, line.text)] : []))));
  $("answer-remarks").replaceChildren(...DATA.answer.remarks.map((remark) => make("p", { class: "muted" }, remark)));
}

// Figures that are estimated: their key, heading, measured value and how both are shown.
const ESTIMATED = [
  { key: "prompt_seconds", title: "first token", measured: (row) => row.time_to_first_token_s, show: milliseconds },
  { key: "token_seconds", title: "a step", measured: (row) => known(row.decode_tok_s) ? 1 / row.decode_tok_s : null, show: milliseconds },
  { key: "tokens_per_second", title: "tok/s, all rows", measured: (row) => row.tok_s_all_rows, show: (value) => fixed(value, 2) },
  { key: "peak_memory_bytes", title: "peak memory", measured: (row) => peak(row, "generate"), show: bytes },
  { key: "joules_per_token", title: "J/token", measured: (row) => row.joules_per_token, show: (value) => fixed(value, 4) },
];

const NO_COUNTER = "no counter; power limit × time is an upper bound";

function drawEstimates() {
  const rows = ROWS.filter((row) => row.estimated);
  $("estimates").hidden = !rows.length;
  if (!rows.length) return;
  const headings = ["Arm", "Figure", "Estimated", "Measured", "Error"];
  $("estimated").tHead.replaceChildren(make("tr", {}, ...headings.map((title, number) =>
    make("th", { scope: "col", class: number < 2 ? "words" : "" }, title))));
  const figures = rows.flatMap((row) => ESTIMATED.filter(({ key }) => known(row.estimated[key])).map((figure) => ({ row, ...figure })));
  $("estimated").tBodies[0].replaceChildren(...figures.map(({ row, key, title, measured, show }) => {
    const [value, error] = [measured(row), (row.estimate_errors || {})[key]];
    const bound = key === "joules_per_token" && !known(value) && whyNoJoules(row).startsWith(NO_COUNTER) ? "≤ " : "";
    return make("tr", { "data-arm": row.arm, "data-figure": key },
      make("th", { scope: "row", class: "words" }, row.arm), make("td", { class: "words" }, title),
      make("td", {}, bound + show(row.estimated[key])), make("td", {}, show(value)),
      make("td", {}, known(error) ? `${error < 0 ? "−" : "+"}${fixed(100 * Math.abs(error), 1, " %")}` : "–"));
  }));
  const unmeasured = rows.find((row) => known(row.estimated.joules_per_token) && !known(row.joules_per_token));
  $("energy-note").textContent = unmeasured ? `Energy: ${whyNoJoules(unmeasured)}.` : "";
}

function whyNoJoules(row) {
  return row.why_no_joules || NO_COUNTER;
}

function drawNotes() {
  const notes = ROWS.flatMap((row) => [
    ...(row.failed ? [`${row.arm} failed: ${row.failed}`] : []),
    ...(row.why_no_quality ? [`${row.arm}, no quality: ${row.why_no_quality}`] : []),
    ...(row.late_sentence ? [`${row.arm}: ${row.late_sentence}`] : []),
    ...(row.why || []).map((reason) => `${row.arm}: ${reason}`),
  ]);
  if (!notes.length) return;
  $("notes").append(make("ul", {}, ...notes.map((note) => make("li", {}, note))));
}

function drawChoice() {
  const speed = (arm) => POINTS.get(arm.name)?.tok_s || 0;
  const measured = DATA.arms.map((arm, number) => ({ arm, number })).filter(({ arm }) => arm.samples.tok_s.length);
  const fastest = measured.filter(({ number }) => number).sort((a, b) => speed(b.arm) - speed(a.arm)).slice(0, SHOWN_AT_FIRST);
  [...measured.filter(({ number }) => !number), ...fastest].forEach(({ number }) => chosen.add(number));
  const say = () => { $("chosen-names").textContent = `${chosen.size} of ${measured.length}`; };
  $("chosen-boxes").replaceChildren(...measured.map(({ arm, number }) => {
    const box = make("input", { type: "checkbox", id: `arm-${number}` });
    box.checked = chosen.has(number);
    box.addEventListener("change", () => {
      chosen[box.checked ? "add" : "delete"](number);
      say(); drawSamples(); drawLatency();
    });
    return make("label", { for: `arm-${number}` }, box, arm.name);
  }));
  say();
}

function drawRan() {
  $("ran").replaceChildren(...DATA.arms.map((arm) => {
    const facts = Object.entries(arm.ran).map(([name, value]) => `${name} ${value}`).join(" · ") || arm.about || "it never ran";
    return make("div", { class: "ran" }, make("h3", {}, arm.name), make("p", { class: "muted" }, facts),
      command(arm.command || arm.options, arm.name));
  }));
  $("repeat").replaceChildren(command(DATA.repeat, "the whole comparison"));
  $("machine").replaceChildren(...Object.entries(DATA.machine).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  $("remarks").replaceChildren(...DATA.remarks.map((remark) => make("li", {}, remark)));
}

function wordForBars() {
  const points = DATA.points.filter((point) => known(point.low));
  if (!points.length) return "";
  const sure = points.find((point) => known(point.confidence));
  const ranges = points.some((point) => !known(point.confidence));
  const words = [sure ? `intervals of ${fixed(100 * sure.confidence, 0)} %` : "", ranges ? "ranges of processes" : ""];
  return `Bars are ${words.filter(Boolean).join(" or ")}.`;
}

function start() {
  const verdicts = [...new Set(ROWS.map((row) => row.verdict))];
  $("verdict").append(...verdicts.map((verdict) => make("option", { value: verdict }, verdict)));
  $("bars-are").textContent = wordForBars();
  drawAnswer(); drawHead(); drawBody(); drawEstimates(); drawNotes(); drawChoice(); drawRan();
  for (const id of ["filter", "verdict", "worst", "all-columns"]) $(id).addEventListener("input", drawBody);
  $("pareto-y").addEventListener("input", drawPareto);
  $("pareto").addEventListener("keydown", walkPareto);
  $("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    chosenTheme(theme);
    setTheme(theme);
  });
  darkSystem.addEventListener("change", () => { if (!chosenTheme()) setTheme(darkSystem.matches ? "dark" : "light"); });
  redraw.push(drawPareto, drawSamples, drawLatency, drawLayers);
  setTheme(document.documentElement.dataset.theme);
  let wasNarrow = narrow();
  addEventListener("resize", () => { if (wasNarrow !== narrow()) { wasNarrow = narrow(); redraw.forEach((draw) => draw()); } });
  document.documentElement.dataset.ready = "yes";  // for tests
}

start();
