// The numbers behind a picture as a table, which is built when it is opened.

import { actionButton, el } from "../dom.js";
import { number } from "../format.js";
import { bodyRow, headRow, scrollRegion, table } from "./tables.js";

/**
 * @typedef {string | number | null | undefined} Cell
 * @typedef {{ columns: string[], rows: Cell[][], caption: string }} Table
 * @typedef {HTMLDetailsElement & { refresh: () => void }} DataTable
 */

const PAGE_ROWS = 50;
const PAGE_COLUMNS = 20;

/**
 * A closed <details> with a table. `read`: a function that returns {columns, rows, caption}: the heading of each column
 * (of the row headings too, at first), and for each row its heading and its cells. Large tables have pages.
 * @param {() => Table} read
 * @returns {DataTable}
 */
export function dataTable(read, label = "Show as a table") {
  const summary = el("summary", {}, label);
  const box = el("details", { class: "data-table" }, summary);
  const place = { row: 0, column: 0 };
  const draw = () => {
    const { columns, rows, caption } = read();
    const [corner, ...names] = columns;
    const fromRow = Math.max(0, Math.min(place.row, rows.length - 1));
    const fromColumn = Math.max(0, Math.min(place.column, names.length - 1));
    const some = rows.slice(fromRow, fromRow + PAGE_ROWS);
    const head = headRow([corner, ...names.slice(fromColumn, fromColumn + PAGE_COLUMNS)]);
    const body = some.map(([name, ...cells]) => {
      const seen = cells.slice(fromColumn, fromColumn + PAGE_COLUMNS);
      const texts = seen.map((cell) => (typeof cell === "number" ? number(cell) : cell));
      return bodyRow(String(name), texts);
    });
    const pages = /** @type {const} */ ([
      ["row", { from: fromRow, size: PAGE_ROWS, total: rows.length }],
      ["column", { from: fromColumn, size: PAGE_COLUMNS, total: names.length }],
    ]).map(([axis, page]) => {
      const go = (/** @type {number} */ from) => {
        place[axis] = from;
        draw();
      };
      return page.total > page.size ? el("p", {}, pager(`${axis}s`, page, go)) : "";
    });
    box.replaceChildren(summary, ...pages, scrollRegion(caption, table({}, { caption, head, rows: body })));
  };
  box.addEventListener("toggle", () => box.open && draw());
  return Object.assign(box, { refresh: () => box.open && draw() });
}

/**
 * Buttons that lead to the pages before and after one, and which part this one is. `go` gets the beginning of a page.
 * @param {string} name of the parts, such as "rows"
 * @param {{ from: number, size: number, total: number }} page
 * @param {(from: number) => unknown} go
 */
export function pager(name, { from, size, total }, go) {
  return [
    actionButton(`Earlier ${name}`, () => go(Math.max(0, from - size)), { disabled: from === 0 }),
    ` ${name} ${from} to ${Math.min(from + size, total) - 1} of ${total} `,
    actionButton(`Later ${name}`, () => go(from + size), { disabled: from + size >= total }),
  ];
}
