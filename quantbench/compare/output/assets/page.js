// Helpers of the whole page. Text of the results is only ever set as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const ROWS = DATA.rows;
const POINTS = new Map(DATA.points.map((point) => [point.arm, point]));
const $ = (id) => document.getElementById(id);

/** An element with attributes and children, which are elements or text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "line", "circle"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
                      : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function announce(text) { $("live").textContent = text; }

// ---------------------------------------------------------------- numbers; null is shown as –
const known = (value) => value !== null && value !== undefined;
const fixed = (value, digits, suffix = "") => known(value) ? value.toFixed(digits) + suffix : "–";
const times = (value) => fixed(value, 2, " ×");
const milliseconds = (value) => known(value) ? fixed(1e3 * value, 3 - Math.max(0, Math.min(2, Math.floor(Math.log10(1e3 * value)))), " ms") : "–";
const percent = (value) => known(value) ? fixed(100 * value, 1, " %") : "–";
const bytes = (value) => !known(value) ? "–"
  : value >= 1e9 ? fixed(value / 1e9, 2, " GB") : fixed(value / 1e6, 2, " MB");
const interval = (low, high, confidence, digits = 2) => !known(low) ? ""
  : `${known(confidence) ? "" : "range "}${low.toFixed(digits)} to ${high.toFixed(digits)}`;

// ---------------------------------------------------------------- commands to copy
function command(text, label) {
  const button = make("button", { type: "button", "aria-label": `Copy the command of ${label}` }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text);
    button.textContent = "Copied";
    announce("Copied");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return make("div", { class: "command" }, make("code", { tabindex: "0" }, text), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not every browser lets a file do that
    const area = make("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// ---------------------------------------------------------------- light and dark
const redraw = [];  // functions that draw again in other colours
const isDark = () => document.documentElement.dataset.theme === "dark";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = isDark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  redraw.forEach((draw) => draw());
}
