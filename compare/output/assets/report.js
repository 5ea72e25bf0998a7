// Puts the page together: what no chart and no table shows, and what the controls do.
const SHOWN_AT_FIRST = 5;  // arms besides the baseline in the charts of samples

function drawAnswer() {
  $("answer").hidden = !DATA.answer;
  if (!DATA.answer) return;
  $("answer-lines").replaceChildren(...DATA.answer.lines.map((line) =>
    make("li", {}, make("p", {}, line.text), ...(line.command ? [command(line.command, line.text)] : []))));
  $("answer-remarks").replaceChildren(...DATA.answer.remarks.map((remark) => make("p", { class: "muted" }, remark)));
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
  drawAnswer(); drawHead(); drawBody(); drawNotes(); drawChoice(); drawRan();
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
