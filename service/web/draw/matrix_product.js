// A product of a vector with a matrix as a picture: the input above the columns, the result beside the rows.

import { context2d, el } from "../dom.js";
import { number } from "../format.js";
import { colour, css, scaleOf } from "./colours.js";
import { dataTable } from "./data_table.js";
import { placeAfter } from "./grid_keys.js";
import { cells, cut, widest } from "./heat_map.js";

/**
 * @import { Numbers } from "../api.js"
 * @import { Scale } from "./colours.js"
 * @typedef {Numbers | number[]} Values
 * @typedef {{
 *   values: Values, rows: number, columns: number, rowLabels: string[], columnLabels: string[], rowName: string,
 *   columnName: string, valueName: string, input: Values, inputName: string, output: Values, outputName: string,
 *   bias: Values | null, isPart: boolean, chosen: number | null, hint: string,
 * }} Product
 * @typedef {{ row: number | null, column: number | null }} Place
 * @typedef {{
 *   left: number, top: number, width: number, height: number, matrixTop: number, termsTop: number, right: number,
 *   bias: number, output: number, size: [width: number, height: number],
 * }} Layout
 */

const PERCENTILE = 0.99;
const STRIP = 22; // the height of the input and of the products, and the width of the result
const LINE = 16; // the height of a line of text
const GAP = 8;
const BIAS = 20; // the width between the bias and the result
const NUMBER = 84; // the width of a number beside the result
const WORDS = 72; // the width of the words before the strips of a small picture
const CELL = { least: 2, most: 60, tall: 18, taller: 32, few: 12 }; // few rows are taller
const TALLEST = 440; // of a matrix, unless it has very many rows
const LENS = 9; // the height of the row whose products are shown, at least
const FONT = "11px system-ui, sans-serif";
const SMALL_FONT = "13px system-ui, sans-serif"; // of a small picture, which has few words

/**
 * A scale in which a high percentile of the sizes has the strongest colour, so that a few large numbers do not make all
 * others pale.
 * @param {Iterable<number>} values
 */
export function steadyScale(values) {
  const numbers = Array.from(values);
  const sizes = numbers.map(Math.abs).sort((a, b) => a - b);
  const high = sizes[Math.floor(PERCENTILE * (sizes.length - 1))];
  return scaleOf(numbers.map((value) => Math.min(high, Math.max(-high, value))));
}

/** @param {string} text */
function textWidth(text) {
  const context = context2d(el("canvas"));
  context.font = FONT;
  return context.measureText(`${text} → `).width;
}

/**
 * <matrix-product>. Set `data`, which draws it:
 * - `values`: the weights in row order, `rows` × `columns`: a row for each number of the result, a column for each one of
 *   the input
 * - `input`, `output`: the numbers above the columns and beside the rows, with names; `bias`: what is added, or null
 * - `isPart`: whether there are more inputs than these, so that the products of a row do not add up to its result
 * - `hint`: what is said while nothing is under the pointer or the keyboard
 * - `chosen`: the row whose products are shown while no other one is under the pointer or the keyboard
 * With the attribute `small`, it shows one row, has words, no table, and moves once when it appears.
 * Event "choose", with detail {row}, when a row is clicked or Enter is pressed.
 */
export class MatrixProduct extends HTMLElement {
  /** @type {Product & { scale: Scale, inputScale: Scale, outputScale: Scale }} */
  #data;
  /** @type {Place} the place under the pointer or the keyboard */
  #at = { row: null, column: null };
  #canvas = el("canvas", { tabindex: "0", role: "img" });
  #value = el("p", { class: "under-pointer", "aria-live": "polite" });
  #legend = el("p", { class: "legend" });
  #box = el("div", { class: "scroll" }, this.#canvas);
  #table = dataTable(() => this.#tableOf());
  #redraw = () => this.#data && this.#draw();

  /** @param {Product} data */
  set data(data) {
    this.#data = {
      ...data,
      scale: steadyScale(data.values),
      inputScale: steadyScale(data.input),
      outputScale: steadyScale([...data.output, ...(data.bias ?? [])]),
    };
    this.#at = { row: null, column: null };
    if (this.isConnected) this.#draw();
  }

  get data() {
    return this.#data;
  }

  get canvas() {
    return this.#canvas;
  }

  get #isSmall() {
    return this.hasAttribute("small");
  }

  connectedCallback() {
    if (this.childElementCount === 0) this.#build();
    addEventListener("themechange", this.#redraw);
    addEventListener("resize", this.#redraw);
    this.#redraw();
  }

  disconnectedCallback() {
    removeEventListener("themechange", this.#redraw);
    removeEventListener("resize", this.#redraw);
  }

  #build() {
    this.append(this.#value, this.#box, ...(this.#isSmall ? [] : [this.#legend, this.#table]));
    this.#canvas.addEventListener("pointermove", (event) => this.#move(this.#placeAt(event)));
    this.#canvas.addEventListener("pointerleave", () => this.#move({ row: null, column: null }));
    this.#canvas.addEventListener("click", (event) => this.#choose(this.#placeAt(event)));
    this.#canvas.addEventListener("keydown", (event) => this.#press(event));
  }

  /** The row whose products are shown. */
  get #row() {
    return this.#at.row ?? this.#data.chosen;
  }

  /** The products of a row. @param {number} row */
  #termsOf(row) {
    const { values, columns, input } = this.#data;
    return Array.from({ length: columns }, (_, column) => input[column] * values[row * columns + column]);
  }

  /** Places in pixels of the page. @returns {Layout} */
  get #layout() {
    const { rows, columns, rowLabels, bias } = this.#data;
    const isSmall = this.#isSmall;
    const left = isSmall ? WORDS : 14 + widest(rowLabels);
    const beside = isSmall ? 2 : GAP + (bias ? STRIP + BIAS : 0) + STRIP + NUMBER;
    const room = (this.clientWidth || 700) - left - beside;
    const width = Math.max(isSmall ? 0 : CELL.least, Math.min(CELL.most, room / columns));
    const tallest = rows > CELL.few ? CELL.tall : CELL.taller;
    const height = isSmall ? STRIP : Math.max(CELL.least, Math.min(tallest, TALLEST / rows));
    const top = isSmall ? 2 : LINE;
    const matrixTop = top + STRIP + (isSmall ? GAP : LINE);
    const termsTop = matrixTop + rows * height + (isSmall ? GAP : LINE + 4);
    const right = left + columns * width;
    const biasLeft = right + GAP;
    const output = biasLeft + (bias ? STRIP + BIAS : 0);
    return {
      ...{ left, top, width, height, matrixTop, termsTop, right, bias: biasLeft, output },
      size: [
        Math.ceil(Math.max(right + beside, isSmall ? 0 : left + textWidth(this.#data.inputName))),
        Math.ceil(termsTop + STRIP + (isSmall ? GAP + LINE : 4)),
      ],
    };
  }

  #draw() {
    const { size } = this.#layout;
    const ratio = devicePixelRatio || 1;
    [this.#canvas.width, this.#canvas.height] = size.map((each) => each * ratio);
    Object.assign(this.#canvas.style, { width: `${size[0]}px`, height: `${size[1]}px` });
    this.#canvas.setAttribute("aria-label", this.#describe());
    this.#paint();
    this.#showLegend();
    this.#table.refresh();
  }

  #paint() {
    const { values, rows, columns, input, output, bias, scale, inputScale, outputScale } = this.#data;
    const { left, top, width, height, matrixTop, termsTop, right, bias: biasLeft, output: outputLeft } = this.#layout;
    const context = context2d(this.#canvas);
    const style = getComputedStyle(this);
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(cells(input, 1, columns, inputScale), left, top, right - left, STRIP);
    context.drawImage(cells(values, rows, columns, scale), left, matrixTop, right - left, rows * height);
    if (!this.#isSmall) {
      context.drawImage(cells(output, rows, 1, outputScale), outputLeft, matrixTop, STRIP, rows * height);
      if (bias) context.drawImage(cells(bias, rows, 1, outputScale), biasLeft, matrixTop, STRIP, rows * height);
    }
    const row = this.#row;
    const terms = row === null ? [] : this.#termsOf(row);
    if (row !== null)
      context.drawImage(cells(terms, 1, columns, steadyScale(terms)), left, termsTop, right - left, STRIP);
    context.font = this.#isSmall ? SMALL_FONT : FONT;
    context.textBaseline = "middle";
    context.fillStyle = style.color;
    if (this.#isSmall) this.#drawWords(context);
    else this.#drawLabels(context);
    context.lineWidth = 2;
    context.strokeStyle = style.color;
    const { column } = this.#at;
    if (column !== null) context.strokeRect(left + column * width - 1, top - 1, width + 2, termsTop + STRIP + 2 - top);
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--path");
    if (row !== null) this.#drawResult(context, row, terms);
    this.#say(row, terms);
  }

  /** @param {CanvasRenderingContext2D} context */
  #drawLabels(context) {
    const { rows, columns, rowLabels, columnLabels, inputName, outputName, rowName, bias } = this.#data;
    const { left, top, width, height, matrixTop, termsTop, bias: biasLeft, output } = this.#layout;
    const every = (/** @type {number} */ size) => Math.max(1, Math.ceil(13 / size));
    for (let row = 0; row < rows; row += every(height))
      context.fillText(cut(rowLabels[row]), 2, matrixTop + (row + 0.5) * height, left - 6);
    context.textAlign = "center";
    const longest = Math.max(...columnLabels.map(({ length }) => length));
    for (let column = 0; column < columns; column += Math.max(1, Math.ceil((7 * longest + 4) / width)))
      context.fillText(columnLabels[column], left + (column + 0.5) * width, matrixTop - LINE / 2);
    if (bias) context.fillText("+ bias", biasLeft + STRIP / 2, matrixTop - LINE / 2);
    context.textAlign = "left";
    context.fillText(`${inputName} →`, left, top - LINE / 2);
    context.fillText(`= ${outputName} ↓`, output, matrixTop - LINE / 2, STRIP + NUMBER);
    if (this.#row !== null)
      context.fillText(`${rowName} ${rowLabels[this.#row]}: input × weight`, left, termsTop - LINE / 2 - 1);
  }

  /** @param {CanvasRenderingContext2D} context */
  #drawWords(context) {
    const { top, matrixTop, termsTop } = this.#layout;
    ["input", "× weight", "= product"].forEach((word, index) =>
      context.fillText(word, 0, [top, matrixTop, termsTop][index] + STRIP / 2),
    );
  }

  /**
   * The row, its number of the result, and the sum of its products.
   * @param {CanvasRenderingContext2D} context
   * @param {number} row
   * @param {number[]} terms
   */
  #drawResult(context, row, terms) {
    const { values, columns, scale, output, outputScale, bias, isPart } = this.#data;
    const { left, height, matrixTop, termsTop, right, output: outputLeft, size } = this.#layout;
    const lens = Math.max(height, LENS);
    const y = matrixTop + (row + 0.5) * height - lens / 2;
    context.font = `bold ${this.#isSmall ? SMALL_FONT : FONT}`;
    if (this.#isSmall) {
      context.textAlign = "right";
      context.fillText(`${this.#data.inputName} = ${number(output[row])}`, right, size[1] - LINE / 2);
      context.textAlign = "left";
      return;
    }
    const weights = values.slice(row * columns, (row + 1) * columns);
    context.drawImage(cells(weights, 1, columns, scale), left, y, right - left, lens);
    context.drawImage(cells([output[row]], 1, 1, outputScale), outputLeft, y, STRIP, lens);
    context.strokeRect(left - 1, y - 1, right - left + 2, lens + 2);
    context.strokeRect(outputLeft - 1, y - 1, STRIP + 2, lens + 2);
    context.fillText(number(output[row]), outputLeft + STRIP + 5, y + lens / 2);
    const sum = number(terms.reduce((total, each) => total + each, 0));
    context.fillText(isPart ? `here ${sum}` : `Σ ${sum}${bias ? " + bias" : ""}`, right + GAP, termsTop + STRIP / 2);
  }

  /**
   * @param {number | null} row
   * @param {number[]} terms
   */
  #say(row, terms) {
    const { values, columns, input, output, rowLabels, columnLabels, rowName, columnName, outputName } = this.#data;
    const { row: at, column } = this.#at;
    const result = row === null ? "" : `${rowName} ${rowLabels[row]}: ${outputName} ${number(output[row])}`;
    const end = this.#isSmall ? "" : `; ${result}`;
    const product = (/** @type {number} */ index) =>
      `${columnName} ${columnLabels[index]}: ${number(input[index])} × ` +
      `${number(values[(row ?? 0) * columns + index])} = ${number(terms[index])}${end}`;
    this.#value.textContent = column !== null ? product(column) : at !== null ? result : this.#data.hint;
  }

  /**
   * @param {MouseEvent} event
   * @returns {Place}
   */
  #placeAt({ offsetX, offsetY }) {
    const { rows, columns } = this.#data;
    const { left, width, height, matrixTop, right } = this.#layout;
    const within = (/** @type {number} */ index, /** @type {number} */ size) =>
      index >= 0 && index < size ? index : null;
    const row = within(Math.floor((offsetY - matrixTop) / height), rows);
    const column = offsetX > right ? null : within(Math.floor((offsetX - left) / width), columns);
    return { row, column };
  }

  /** @param {Place} place */
  #move(place) {
    if (place.row === this.#at.row && place.column === this.#at.column) return;
    this.#at = place;
    this.#paint();
  }

  /** @param {Place} place */
  #choose(place) {
    this.#move(place);
    if (place.row !== null) this.dispatchEvent(new CustomEvent("choose", { detail: { row: place.row } }));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const { rows, columns } = this.#data;
    const { row, column } = { row: this.#row ?? 0, column: this.#at.column ?? 0 };
    if (event.key === "Enter") return this.#choose({ row, column: this.#at.column });
    const [nextRow, nextColumn] = placeAfter(event.key, row, column, columns) ?? [];
    if (nextRow === undefined || nextColumn === undefined) return undefined;
    event.preventDefault();
    const within = (/** @type {number} */ index, /** @type {number} */ size) => Math.min(Math.max(index, 0), size - 1);
    return this.#move({ row: within(nextRow, rows), column: within(nextColumn, columns) });
  }

  #showLegend() {
    const { scale, inputScale, outputScale, outputName } = this.#data;
    const bar = el("span", { class: "legend-bar" });
    const stops = Array.from({ length: 9 }, (_, index) => css(colour(index / 8, scale.map)));
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const others = `the strongest colour of the input is ${number(inputScale.high)}, of the ${outputName} `;
    const ends = [`weights ${number(scale.low)} `, bar, ` ${number(scale.high)}; `];
    this.#legend.replaceChildren(...ends, `${others}${number(outputScale.high)}`);
  }

  #describe() {
    const { rows, columns, rowName, columnName, valueName, inputName, outputName } = this.#data;
    return (
      `${inputName} × ${valueName} = ${outputName}: ${rows} rows (${rowName}) and ${columns} columns (${columnName}). ` +
      "Use the arrow keys to read products."
    );
  }

  #tableOf() {
    const { rows, columns, values, rowLabels, columnLabels, rowName, input, output, outputName, bias, valueName } =
      this.#data;
    const first = (/** @type {number | null} */ result, /** @type {number | null} */ shift) => [
      result,
      ...(bias ? [shift] : []),
    ];
    return {
      caption: `The input above the rows of ${valueName}; the ${outputName} before each row`,
      columns: [rowName, outputName, ...(bias ? ["bias"] : []), ...columnLabels],
      rows: [
        ["input", ...first(null, null), ...input],
        ...Array.from({ length: rows }, (_, row) => [
          rowLabels[row],
          ...first(output[row], bias && bias[row]),
          ...values.slice(row * columns, (row + 1) * columns),
        ]),
      ],
    };
  }
}

customElements.define("matrix-product", MatrixProduct);
