// Parts of tables, and the box in which a wide one scrolls.

import { el } from "../dom.js";

/** @import { Attributes, Child } from "../dom.js" */

/** The heading of a column. @param {string} name */
export const columnHeading = (name) => el("th", { scope: "col" }, name);

/** A row of headings of columns. @param {string[]} names */
export const headRow = (names) => el("tr", {}, names.map(columnHeading));

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
 * A table.
 * @param {Attributes} attributes
 * @param {{ caption?: string, head: Child, rows: Child[] }} content
 */
export function table(attributes, { caption, head, rows }) {
  const title = caption && el("caption", {}, caption);
  return el("table", attributes, title, el("thead", {}, head), el("tbody", {}, rows));
}

/**
 * A box that scrolls what is too wide, also with the keyboard.
 * @param {string} label
 * @param {...Child} content
 */
export function scrollRegion(label, ...content) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
}
