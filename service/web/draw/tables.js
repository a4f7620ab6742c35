// Parts of tables, and the box in which a wide one scrolls.

import { el } from "../dom.js";

/** @import { Child } from "../dom.js" */

/**
 * A row of headings of columns.
 * @param {string[]} names
 */
export function headRow(names) {
  return el(
    "tr",
    {},
    names.map((name) => el("th", { scope: "col" }, name)),
  );
}

/**
 * A row with a heading.
 * @param {Child} heading
 * @param {Child[]} cells
 */
export function bodyRow(heading, cells) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, heading),
    cells.map((cell) => el("td", {}, cell)),
  );
}

/**
 * A box that scrolls what is too wide, also with the keyboard.
 * @param {string} label
 * @param {...Child} content
 */
export function scrollRegion(label, ...content) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
}
