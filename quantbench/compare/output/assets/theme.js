"use strict";
// Light or dark, before anything is painted: the person's choice, or else the system's.
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

/** The choice; null where there is none, or where the browser keeps nothing for a file. */
function chosenTheme(choice) {
  try {
    if (choice) localStorage.setItem("quantbench-theme", choice);
    return localStorage.getItem("quantbench-theme");
  } catch { return null; }
}

document.documentElement.dataset.theme = chosenTheme() || (darkSystem.matches ? "dark" : "light");
