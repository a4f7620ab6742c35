// Shares as horizontal bars in a table: a bar for each row, beside its texts.

import { el } from "../dom.js";
import { percent, shown } from "../format.js";
import { legendBar } from "./colours.js";
import { columnHeading, scrollRegion, table } from "./tables.js";

/**
 * @import { Prediction } from "../answers.js"
 * @import { Child } from "../dom.js"
 * @import { ColourMap } from "./colours.js"
 */

/**
 * A table of bars. `columns`: headings; `rows`: {cells, shares, mark}: texts or elements, the lengths of the bars from
 * −1 to 1 (of two, the first one is thin), and whether the row stands out. The first cell is the heading of its row,
 * and the bars follow it. The longest bar fills its column, and the caption says its share if that is less than 1. If
 * there are negative shares, all bars begin at a line for zero.
 * @param {{
 *   caption: string, columns: string[], rows: { cells: Child[], shares: (number | null)[], mark?: boolean }[],
 * }} table
 */
export function barTable({ caption, columns: [first, ...others], rows }) {
  const all = rows.flatMap((row) => row.shares.map((share) => share ?? 0));
  const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const scale = { low, size: high - low || 1 };
  const longest =
    low === 0 && high > 0 && high < 1 ? `${caption.endsWith(".") ? "" : "."} The longest bar is ${percent(high)}.` : "";
  const head = el("tr", {}, columnHeading(first), el("td"), others.map(columnHeading));
  const body = rows.map(({ cells: [name, ...cells], shares, mark }) => {
    const texts = cells.map((cell) => el("td", {}, cell));
    return el("tr", { class: mark && "marked" }, el("th", { scope: "row" }, name), barCell(shares, scale), texts);
  });
  const bars = table({ class: "bars", "aria-label": caption }, { head, rows: body });
  return el("div", {}, el("p", { class: "faint" }, caption, longest), scrollRegion(caption, bars));
}

/**
 * @param {(number | null)[]} shares
 * @param {{ low: number, size: number }} scale
 */
function barCell(shares, { low, size }) {
  const place = (/** @type {number} */ share) => `${(100 * (share - low)) / size}%`;
  const bars = shares.map((value, index) => {
    const share = value ?? 0;
    const kind = `bar${index < shares.length - 1 ? " thin" : ""}${share < 0 ? " negative" : ""}`;
    return el("span", {
      class: kind,
      "aria-hidden": "true",
      style: { width: `${(100 * Math.abs(share)) / size}%`, marginLeft: place(Math.min(0, share)) },
    });
  });
  return el(
    "td",
    low < 0 ? { class: "bar-cell signed", style: { backgroundPosition: `${place(0)} 0` } } : { class: "bar-cell" },
    bars,
  );
}

/**
 * Likely tokens with their ids and probabilities.
 * @param {string} caption
 * @param {Prediction[]} top
 * @param {number} [marked] the id of the token that stands out
 */
export function predictionTable(caption, top, marked) {
  return barTable({
    caption,
    columns: ["token", "id", "probability"],
    rows: top.map((each) => ({
      cells: [shown(each), String(each.id), percent(each.probability)],
      shares: [each.probability],
      mark: each.id === marked,
    })),
  });
}

/**
 * A bar alone, of a length from 0 to 1.
 * @param {number} share
 */
export function bar(share) {
  return el("span", { class: "bar", "aria-hidden": "true", style: { width: `${100 * share}%` } });
}

/**
 * A legend for colours between two texts.
 * @param {string} low
 * @param {string} high
 * @param {ColourMap} map
 */
export function barLegend(low, high, map = "sequential") {
  return el("span", { class: "legend-scale" }, low, " ", legendBar(map), " ", high);
}
