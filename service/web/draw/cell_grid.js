// A grid of short texts on colours, with a heading for each row and column. One tab stop: the arrow keys move inside.

import { around, el, emit, findAll, svg } from "../dom.js";
import { cut } from "../format.js";
import { colour, css, textOn } from "./colours.js";
import { DrawnElement } from "./drawn_element.js";
import { moveFocus, placeAfter } from "./grid_keys.js";

const [NARROW, WIDE] = [66, 86]; // pixels from one column to the next on the page
const CELL = { width: 84, height: 36, heading: 150 }; // pixels, of the picture for a download

/**
 * A cell: its text, a smaller one below, its colour as a share from 0 to 1, whether it is bold, whether it is
 * underlined, and what a screen reader says.
 * @typedef {{
 *   text: string, small: string, share: number, strong: boolean, isChanged: boolean, says: string,
 * }} GridCell
 * @typedef {{ label: string, title: string, mark: boolean }} Column
 * @typedef {{ label: string, title: string, cells: GridCell[] }} Row
 * @typedef {{ label: string, columns: Column[], rows: Row[] }} Grid
 * @typedef {{ row: number, column: number }} Place
 */

/**
 * <cell-grid>. `show({label, columns, rows})` draws it. `select({row, column})` marks a cell. Event "choose" with
 * {row, column}.
 */
export class CellGrid extends DrawnElement {
  /** @type {Grid} */
  #shown;
  #at = { row: 0, column: 0 };
  #body = el("tbody");
  #pitch = 0; // pixels from one column to the next
  #fitting = 1; // how many columns can be seen at once
  #table = el("table");
  #box = el("div", { class: "scroll" });

  build() {
    this.#box.addEventListener("scroll", () => this.#hint());
    this.append(this.#box);
  }

  /** @param {Grid} shown */
  show(shown) {
    this.#shown = shown;
    const hadFocus = this.contains(document.activeElement);
    const heading = (/** @type {Column} */ { label, title, mark }) =>
      el("th", { scope: "col", title, class: mark ? "is-marked" : null }, el("span", {}, label));
    const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }), shown.columns.map(heading)));
    const rows = shown.rows.map(({ label, title, cells }, row) => {
      const content = cells.map((cell, column) => this.#cell(cell, { row, column }));
      return el("tr", {}, el("th", { scope: "row", title }, label), content);
    });
    this.#body = el("tbody", {}, rows);
    this.#table = el("table", { role: "grid", "aria-label": shown.label }, head, this.#body);
    this.#table.addEventListener("keydown", (event) => this.#press(event));
    this.#table.addEventListener("click", (event) => this.#choose(around(event, "td")));
    this.#box.replaceChildren(this.#table);
    this.redraw();
    const { row, column } = this.#at;
    this.select({ row: Math.min(row, shown.rows.length - 1), column: Math.min(column, shown.columns.length - 1) });
    this.resized();
    if (hadFocus) this.#cellOf(this.#at).focus({ preventScroll: true });
  }

  /** @param {Place} place */
  select(place) {
    for (const cell of this.#body.querySelectorAll("[aria-selected=true]")) cell.setAttribute("aria-selected", "false");
    for (const cell of findAll(this.#body, "[tabindex='0']")) cell.tabIndex = -1;
    this.#at = place;
    const cell = this.#cellOf(place);
    cell.setAttribute("aria-selected", "true");
    cell.tabIndex = 0;
    this.#reveal(place.column);
  }

  /** How many columns can be seen at once. */
  get room() {
    return Math.max(1, Math.floor((this.clientWidth - headingIn(this.clientWidth) - 2) / NARROW));
  }

  /** Narrow the columns until all fit; if they cannot, show a whole number of them, so that none is cut. */
  resized() {
    if (!this.#shown || this.clientWidth === 0) return;
    const heading = headingIn(this.clientWidth);
    const [room, number] = [this.clientWidth - heading - 2, this.#shown.columns.length];
    this.#fitting = this.room;
    this.#pitch = number <= this.#fitting ? Math.min(WIDE, room / number) : room / this.#fitting;
    this.style.setProperty("--heading", `${heading}px`);
    this.#table.style.width = `${heading + 2 + number * this.#pitch}px`;
    this.#reveal(this.#at.column);
    this.#hint();
  }

  /** Say by shadows where columns are out of sight. */
  #hint() {
    const { scrollLeft, clientWidth, scrollWidth } = this.#box;
    this.classList.toggle("more-left", scrollLeft > 1);
    this.classList.toggle("more-right", scrollLeft + clientWidth < scrollWidth - 1);
  }

  /** The grid as SVG. */
  picture() {
    const { columns, rows } = this.#shown;
    const { width, height, heading } = CELL;
    const [w, h] = [heading + columns.length * width, height * (rows.length + 1)];
    /** @type {(x: number, y: number, text: string, size: number, fill: string, anchor?: "start") => SVGElement} */
    const text = (x, y, content, size, fill, anchor) =>
      svg(
        "text",
        { x, y, "font-size": size, "font-family": "sans-serif", "text-anchor": anchor ?? "middle", fill },
        anchor === undefined ? cut(content, 12) : content,
      );
    const page = getComputedStyle(this).color;
    const names = columns.map(({ label }, column) => text(heading + (column + 0.5) * width, 22, label, 12, page));
    const drawn = rows.map(({ label, cells }, row) => {
      const top = (row + 1) * height;
      const boxes = cells.map((cell, column) => {
        const background = colour(cell.share);
        const left = heading + column * width;
        return [
          svg("rect", { x: left, y: top, width, height, fill: css(background), stroke: "gray", "stroke-width": 0.5 }),
          text(left + width / 2, top + 16, cell.text, 12, textOn(background)),
          text(left + width / 2, top + 31, cell.small, 10, textOn(background)),
        ];
      });
      return [text(4, top + 22, label, 12, page, "start"), boxes];
    });
    return svg("svg", { width: w, height: h, viewBox: `0 0 ${w} ${h}` }, names, drawn.flat(3));
  }

  /**
   * @param {GridCell} cell
   * @param {Place} place
   */
  #cell({ text, small, strong, isChanged, says }, place) {
    const kinds = [strong && "is-strong", isChanged && "is-changed"].filter(Boolean).join(" ");
    const look = { role: "gridcell", tabindex: "-1", "aria-selected": "false", title: says, class: kinds };
    return el("td", { ...look, dataset: place }, el("span", {}, text), el("small", {}, small));
  }

  /** Colours, which depend on the theme. */
  redraw() {
    for (const cell of this.#body.querySelectorAll("td")) {
      const { row, column } = placeOf(cell);
      const background = colour(this.#shown.rows[row].cells[column].share);
      cell.style.background = css(background);
      cell.style.color = textOn(background);
    }
  }

  /** @param {Place} place */
  #cellOf({ row, column }) {
    return this.#body.rows[row]?.cells[column + 1];
  }

  /**
   * Scroll the grid, never the page, so that a column is in sight beside the headings of rows.
   * @param {number} column
   */
  #reveal(column) {
    const first = this.#box.scrollLeft / (this.#pitch || 1);
    if (column < first) this.#box.scrollLeft = column * this.#pitch;
    else if (column + 1 > first + this.#fitting) this.#box.scrollLeft = (column + 1 - this.#fitting) * this.#pitch;
  }

  /** @param {HTMLElement | null} cell */
  #choose(cell) {
    if (cell) emit(this, "choose", placeOf(cell));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const cell = around(event, "td");
    if (!cell) return;
    const { row, column } = placeOf(cell);
    const place = placeAfter(event.key, row, column, this.#shown.columns.length);
    if (event.key === "Enter" || event.key === " ") this.#choose(cell);
    else if (place) this.#focus(cell, place[1] < 0 ? null : this.#cellOf({ row: place[0], column: place[1] }));
    else return;
    event.preventDefault();
  }

  /**
   * @param {HTMLElement} from
   * @param {HTMLElement | null | undefined} to
   */
  #focus(from, to) {
    if (!to) return;
    moveFocus(from, to, { preventScroll: true });
    to.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.#reveal(Number(to.dataset.column));
  }
}

/**
 * The pixels of the headings of rows.
 * @param {number} width of the grid
 */
function headingIn(width) {
  return width < 480 ? 84 : 120;
}

/**
 * @param {HTMLElement} cell
 * @returns {Place}
 */
function placeOf({ dataset }) {
  return { row: Number(dataset.row), column: Number(dataset.column) };
}

customElements.define("cell-grid", CellGrid);
