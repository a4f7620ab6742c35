// A matrix as a heat map on a canvas: labelled rows and columns, the value under the pointer, a legend, and a table.

import { context2d, el, emit } from "../dom.js";
import { cut, number } from "../format.js";
import { barLegend } from "./bars.js";
import { pixelColours, scaleOf, shareOf } from "./colours.js";
import { dataTable } from "./data_table.js";
import { DrawnElement } from "./drawn_element.js";
import { placeAfter } from "./grid_keys.js";

/**
 * @import { Numbers } from "../api.js"
 * @import { Scale } from "./colours.js"
 * @typedef {Numbers | (number | null)[]} Values
 * @typedef {{
 *   values: Values, rowLabels: string[], columnLabels: string[], rowName: string, columnName: string,
 *   valueName: string,
 * }} Data
 * @typedef {{ scale: Scale, missing: string }} Look
 * @typedef {{ row: number, column: number }} Place
 */

const MAX_CELL = 26;
const MIN_CELL = 2;
const SQUARE = { cell: 48, picture: 560 }; // the largest cells of a small square map, and its size
export const LETTERS = 14; // of the longest label
const LABEL_PIXELS = 12; // the height of a label
const FONT = `${LABEL_PIXELS - 1}px system-ui, sans-serif`;
const MASKED = 0x5a808080; // a pixel of a masked cell: grey, in part transparent
const SLANT = Math.PI / 3; // the angle of the labels of columns

/**
 * <heat-map>. Set `data`, which draws it:
 * - `values`: numbers in row order; a number that is not finite is drawn as masked (hatched)
 * - `rowLabels`, `columnLabels`: a text for each row and column
 * - `rowName`, `columnName`, `valueName`: the names of the axes and of the value, such as "position"
 * - `scale`: {map, low, high} of colours.js, and `ends`, two texts for the legend; default: from the values
 * - `missing`: what a number that is not finite is called; default: "masked"
 * Events: "cell", with detail {row, column} (or null), when the pointer or the keyboard moves to a cell; "choose", when
 * a cell is clicked or Enter is pressed.
 */
export class HeatMap extends DrawnElement {
  /** @type {Data & Look & { rows: number, columns: number }} */
  #data;
  /** @type {Place | null} the cell under the pointer or the keyboard */
  #at = null;
  /** @type {Place | null} the cell that was clicked */
  #kept = null;
  #labels = { rows: 0, columns: 0 }; // the widths of the longest labels
  canvas = el("canvas", { tabindex: "0", role: "img" });
  #value = el("p", { class: "under-pointer", "aria-live": "polite" });
  #legend = el("p", { class: "legend" });
  #frame = el("div", { class: "row-frame", hidden: true });
  #cell = el("div", { class: "row-frame", hidden: true }); // around the cell whose value is shown
  #tip = el("p", { class: "cell-tip", "aria-hidden": "true", hidden: true }); // its value, beside it
  #box = el("div", { class: "scroll" }, el("div", { class: "plane" }, this.canvas, this.#frame, this.#cell));
  /** @type {number | null} */
  #framedRow = null;
  #table = dataTable(() => this.#tableOf());

  /** @param {Data & Partial<Look>} data */
  set data(data) {
    const [rows, columns] = [data.rowLabels.length, data.columnLabels.length];
    this.#data = { missing: "masked", ...data, scale: data.scale ?? scaleOf(data.values), rows, columns };
    this.#at = this.#kept = null;
    this.#labels = { rows: widest(data.rowLabels), columns: widest(data.columnLabels) };
    if (this.isConnected) this.redraw();
  }

  get data() {
    return this.#data;
  }

  /**
   * Keep the value of a cell in sight, as if it had been clicked, or that of none (null).
   * @param {Place | null} cell
   */
  set keptCell(cell) {
    if (cell?.row === this.#kept?.row && cell?.column === this.#kept?.column) return;
    this.#at = this.#kept = cell;
    this.#showValue();
  }

  /**
   * Frame a row, or none (null), without drawing the cells again.
   * @param {number | null} row
   */
  set framedRow(row) {
    this.#framedRow = row;
    this.#placeFrame();
  }

  #placeFrame() {
    const row = this.#framedRow;
    const isShown = row !== null && Boolean(this.#data) && row < this.#data.rows;
    this.#frame.hidden = !isShown;
    if (!isShown) return;
    const { left, top, width, height } = this.#layout;
    const wide = this.#data.columns * width;
    enclose(this.#frame, { left, top: top + row * height, width: wide, height: Math.max(3, height) });
  }

  /** Frame the cell whose value is shown, and write the value below it, or above it in the lower half. */
  #placeCell() {
    this.#cell.hidden = this.#tip.hidden = this.#at === null;
    if (this.#at === null) return;
    const { left, top, width, height } = this.#layout;
    const [x, y] = [left + this.#at.column * width, top + this.#at.row * height];
    enclose(this.#cell, { left: x, top: y, width, height });
    this.#tip.textContent = this.#value.textContent;
    const isLow = this.#at.row >= this.#data.rows / 2;
    const from = this.#box.offsetTop + y + (isLow ? -6 - this.#tip.offsetHeight : height + 6);
    const most = Math.max(0, this.clientWidth - this.#tip.offsetWidth);
    const middle = this.#box.offsetLeft + x + width / 2 - this.#box.scrollLeft - this.#tip.offsetWidth / 2;
    Object.assign(this.#tip.style, { top: `${from}px`, left: `${Math.min(most, Math.max(0, middle))}px` });
  }

  build() {
    this.append(this.#value, this.#box, this.#tip, this.#legend, this.#table);
    this.canvas.addEventListener("pointermove", (event) => this.#move(this.#cellAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.#move(null));
    this.canvas.addEventListener("click", (event) => this.#keep(this.#cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
  }

  /** Sizes in pixels of the page: of a cell, and of the labels. */
  get #layout() {
    const { rows, columns, columnLabels } = this.#data;
    const isLong = columnLabels.some((label) => label.length > 3);
    const left = 14 + this.#labels.rows;
    const top = 20 + (isLong ? Math.sin(SLANT) * this.#labels.columns : 8);
    // how far the last label of a column may reach to the right
    const slant = isLong ? Math.cos(SLANT) * this.#labels.columns + 6 : this.#labels.columns / 2;
    const room = Math.max(160, (this.clientWidth || 700) - left - slant - 4);
    const isSquare = rows === columns;
    const largest = isSquare ? Math.max(MAX_CELL, Math.min(SQUARE.cell, SQUARE.picture / columns)) : MAX_CELL;
    const width = Math.min(largest, Math.max(MIN_CELL, room / columns));
    const height = isSquare ? width : Math.max(MIN_CELL, rows > 40 ? 560 / rows : 20);
    return { left, top, slant, isLong, width, height };
  }

  redraw() {
    if (!this.#data) return;
    const { rows, columns, values, scale } = this.#data;
    const { left, top, width, height, slant } = this.#layout;
    const right = left + columns * width + 4 + Math.max(0, slant - width / 2);
    const context = cleared(this.canvas, right, top + rows * height + 4);
    context.drawImage(cells(values, rows, columns, scale), left, top, columns * width, rows * height);
    this.#drawLabels(context);
    this.canvas.setAttribute("aria-label", this.#describe());
    this.#placeFrame();
    this.#showValue();
    this.#showLegend();
    this.#table.refresh();
  }

  /** @param {CanvasRenderingContext2D} context */
  #drawLabels(context) {
    const { rows, columns, rowLabels, columnLabels, rowName, columnName } = this.#data;
    const { left, top, width, height, isLong } = this.#layout;
    context.fillStyle = getComputedStyle(this).color;
    context.font = FONT;
    const every = (/** @type {number} */ size) => Math.max(1, Math.ceil((LABEL_PIXELS + 1) / size));
    for (let row = 0; row < rows; row += every(height))
      context.fillText(cut(rowLabels[row], LETTERS), 2, top + (row + 0.5) * height, left - 6);
    for (let column = 0; column < columns; column += every(isLong ? width : width / 2)) {
      context.save();
      context.translate(left + (column + 0.5) * width, top - 4);
      if (isLong) context.rotate(-SLANT);
      else context.textAlign = "center";
      context.fillText(cut(columnLabels[column], LETTERS), 0, isLong ? 0 : -4);
      context.restore();
    }
    context.font = `italic ${FONT}`;
    context.fillText(`${rowName} ↓  ${columnName} →`, 2, 7);
  }

  /**
   * @param {MouseEvent} event
   * @returns {Place | null}
   */
  #cellAt(event) {
    const { left, top, width, height } = this.#layout;
    const column = Math.floor((event.offsetX - left) / width);
    const row = Math.floor((event.offsetY - top) / height);
    return row < 0 || column < 0 || row >= this.#data.rows || column >= this.#data.columns ? null : { row, column };
  }

  /** @param {Place | null} cell */
  #move(cell) {
    const shown = cell ?? this.#kept; // without a pointer, the kept cell shows its value again
    if (shown?.row === this.#at?.row && shown?.column === this.#at?.column && cell) return;
    this.#at = shown;
    this.#showValue();
    emit(this, "cell", cell);
  }

  /**
   * Keep the value of a clicked or tapped cell in sight.
   * @param {Place | null} cell
   */
  #keep(cell) {
    if (!cell) return;
    this.#at = this.#kept = cell;
    this.#showValue();
    emit(this, "choose", cell);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const { row, column } = this.#at ?? { row: 0, column: 0 };
    const place = placeAfter(event.key, row, column, this.#data.columns);
    if (event.key === "Enter" && this.#at) return emit(this, "choose", this.#at);
    if (!place) return undefined;
    event.preventDefault();
    const [nextRow, nextColumn] = this.#at ? place : [0, 0];
    const within = (/** @type {number} */ value, /** @type {number} */ size) => Math.min(Math.max(value, 0), size - 1);
    return this.#move({ row: within(nextRow, this.#data.rows), column: within(nextColumn, this.#data.columns) });
  }

  /** @param {Place} place */
  #valueOf({ row, column }) {
    return this.#data.values[row * this.#data.columns + column];
  }

  /** @param {number | null} value */
  #said(value) {
    return value === null || !Number.isFinite(value) ? this.#data.missing : number(value);
  }

  #showValue() {
    const { rowLabels, columnLabels, rowName, columnName, valueName } = this.#data;
    this.#value.textContent = this.#at
      ? `${rowName} ${rowLabels[this.#at.row]}, ${columnName} ${columnLabels[this.#at.column]}: ` +
        `${valueName} ${this.#said(this.#valueOf(this.#at))}`
      : "Point at a cell or tap it to read its value, or use the arrow keys.";
    this.#placeCell();
  }

  #showLegend() {
    const { scale, values, missing } = this.#data;
    const isMasked = Array.prototype.some.call(values, (value) => value === null || !Number.isFinite(value));
    const [low, high] = scale.ends ?? [number(scale.low), number(scale.high)];
    this.#legend.replaceChildren(
      barLegend(low, high, scale.map),
      isMasked ? el("span", {}, " ", el("span", { class: "legend-masked" }), ` ${missing}`) : "",
    );
  }

  #describe() {
    const { rows, columns, rowName, columnName, valueName } = this.#data;
    return (
      `Heat map of ${valueName}: ${rows} rows (${rowName}) and ${columns} columns (${columnName}). Use the arrow ` +
      "keys to read cells."
    );
  }

  #tableOf() {
    const { rows, columns, values, rowLabels, columnLabels, rowName, columnName, valueName } = this.#data;
    return {
      caption: `${valueName} for each ${rowName} (rows) and ${columnName} (columns)`,
      columns: [rowName, ...columnLabels],
      rows: Array.from({ length: rows }, (_, row) => [
        rowLabels[row],
        ...Array.from(values.slice(row * columns, (row + 1) * columns), (value) => this.#said(value)),
      ]),
    };
  }
}

/**
 * Put a frame around a part of the picture.
 * @param {HTMLElement} frame
 * @param {{ left: number, top: number, width: number, height: number }} part
 */
function enclose({ style }, { left, top, width, height }) {
  const [w, h] = [width + 4, height + 4].map((size) => `${size}px`);
  Object.assign(style, { left: `${left - 2}px`, top: `${top - 2}px`, width: w, height: h });
}

/**
 * A canvas of a size in pixels of the page, to draw on.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function cleared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.ceil(width), Math.ceil(height)];
  Object.assign(canvas, { width: w * ratio, height: h * ratio });
  Object.assign(canvas.style, { width: `${w}px`, height: `${h}px` });
  const context = context2d(canvas);
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.textBaseline = "middle";
  return context;
}

/**
 * The width in pixels of the longest label.
 * @param {string[]} labels
 */
export function widest(labels) {
  const context = context2d(el("canvas"));
  context.font = FONT;
  return labels.reduce((width, label) => Math.max(width, context.measureText(cut(label, LETTERS)).width), LABEL_PIXELS);
}

/**
 * The cells as a picture with one pixel for each. Masked cells are grey.
 * @param {Values} values
 * @param {number} rows
 * @param {number} columns
 * @param {Scale} scale
 */
export function cells(values, rows, columns, scale) {
  const canvas = el("canvas", { width: columns, height: rows });
  const context = context2d(canvas);
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = pixelColours(scale.map);
  for (let index = 0; index < rows * columns; index++) {
    const value = values[index];
    const isMasked = value === null || !Number.isFinite(value);
    const share = isMasked ? 0 : Math.round(255 * shareOf(value, scale));
    pixels[index] = isMasked ? MASKED : colours[Math.min(255, Math.max(0, share))];
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

customElements.define("heat-map", HeatMap);
