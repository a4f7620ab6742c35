// A product of a vector with a matrix as a picture: the input above the columns, the result beside the rows.

import { context2d, el, emit } from "../dom.js";
import { cut, number } from "../format.js";
import { legendBar, scaleOf } from "./colours.js";
import { dataTable } from "./data_table.js";
import { DrawnElement } from "./drawn_element.js";
import { placeAfter } from "./grid_keys.js";
import { LETTERS, cells, cleared, widest } from "./heat_map.js";

/**
 * @import { Numbers } from "../api.js"
 * @import { Scale } from "./colours.js"
 * @typedef {Numbers | number[]} Values
 * @typedef {{
 *   values: Values, rowLabels: string[], columnLabels: string[], rowName: string, columnName: string,
 *   valueName: string, input: Values, inputName: string, output: Values, outputName: string, bias: Values | null,
 *   isPart: boolean, chosen: number | null, hint: string,
 * }} Product
 * @typedef {{ row: number | null, column: number | null }} Place
 * @typedef {{
 *   context: CanvasRenderingContext2D, layout: Layout, row: number | null, terms: number[],
 * }} Painting `row`: the one whose products are shown, and `terms` its products
 * @typedef {{
 *   left: number, top: number, width: number, height: number, matrixTop: number, termsTop: number, right: number,
 *   output: number, resultWidth: number, wholeWidth: number, wholeHeight: number,
 * }} Layout `width` and `height`: of a cell; `output`: the left side of the result in the picture beside the matrix
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

/**
 * Where the row whose products are shown is drawn: a low row is enlarged.
 * @param {number} row
 * @param {number} top
 * @param {number} height
 */
function lens(row, top, height) {
  const tall = Math.max(height, LENS);
  return [top + (row + 0.5) * height - tall / 2, tall];
}

/** @param {string} text */
function textWidth(text) {
  const context = context2d(el("canvas"));
  context.font = FONT;
  return context.measureText(`${text} → `).width;
}

/**
 * <matrix-product>. Set `data`, which draws it:
 * - `values`: the weights in row order: a row for each number of the result, and a column for each number of the input
 * - `input`, `output`: the numbers above the columns and beside the rows, with names; `bias`: what is added, or null
 * - `isPart`: whether there are more inputs than these, so that the products of a row do not add up to its result
 * - `hint`: what is said while nothing is under the pointer or the keyboard
 * - `chosen`: the row whose products are shown while no other one is under the pointer or the keyboard
 * With the attribute `small`, it shows one row, has words, no table, and moves once when it appears.
 * Event "choose", with detail {row}, when a row is clicked or Enter is pressed.
 */
export class MatrixProduct extends DrawnElement {
  /** @type {Product & { rows: number, columns: number, scale: Scale, inputScale: Scale, outputScale: Scale }} */
  #data;
  /** @type {Place} the place under the pointer or the keyboard */
  #at = { row: null, column: null };
  #pixels = el("canvas"); // a pixel for each weight
  #canvas = el("canvas", { tabindex: "0", role: "img" });
  #value = el("p", { class: "under-pointer", "aria-live": "polite" });
  #legend = el("p", { class: "legend" });
  #result = el("canvas", { "aria-hidden": "true" }); // beside the matrix, which may scroll
  #box = el("div", { class: "beside-matrix" }, el("div", { class: "scroll" }, this.#canvas), this.#result);
  #table = dataTable(() => this.#tableOf());

  /** @param {Product} data */
  set data(data) {
    this.#data = {
      ...data,
      ...{ rows: data.rowLabels.length, columns: data.columnLabels.length },
      scale: steadyScale(data.values),
      inputScale: steadyScale(data.input),
      outputScale: steadyScale([...data.output, ...(data.bias ?? [])]),
    };
    this.#at = { row: null, column: null };
    if (this.isConnected) this.redraw();
  }

  get data() {
    return this.#data;
  }

  /** The whole picture, for a download. */
  picture() {
    const [{ width, height }, { width: more }] = [this.#canvas, this.#result];
    const whole = el("canvas", { width: width + more, height });
    context2d(whole).drawImage(this.#canvas, 0, 0);
    if (more > 0) context2d(whole).drawImage(this.#result, width, 0);
    return whole;
  }

  get #isSmall() {
    return this.hasAttribute("small");
  }

  build() {
    this.append(this.#value, this.#box, ...(this.#isSmall ? [] : [this.#legend, this.#table]));
    this.#result.hidden = this.#isSmall;
    for (const canvas of [this.#canvas, this.#result]) {
      canvas.addEventListener("pointermove", (event) => this.#move(this.#placeAt(event)));
      canvas.addEventListener("pointerleave", () => this.#move({ row: null, column: null }));
      canvas.addEventListener("click", (event) => this.#choose(this.#placeAt(event)));
    }
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
    const output = GAP + (bias ? STRIP + BIAS : 0);
    const resultWidth = isSmall ? 0 : output + STRIP + NUMBER;
    const room = (this.clientWidth || 700) - left - resultWidth - 2;
    const width = Math.max(isSmall ? 0 : CELL.least, Math.min(CELL.most, room / columns));
    const tallest = rows > CELL.few ? CELL.tall : CELL.taller;
    const height = isSmall ? STRIP : Math.max(CELL.least, Math.min(tallest, TALLEST / rows));
    const top = isSmall ? 2 : LINE;
    const matrixTop = top + STRIP + (isSmall ? GAP : LINE);
    const termsTop = matrixTop + rows * height + (isSmall ? GAP : LINE + 4);
    const right = left + columns * width;
    const wholeWidth = Math.max(right + 2, isSmall ? 0 : left + textWidth(this.#data.inputName));
    const wholeHeight = termsTop + STRIP + (isSmall ? GAP + LINE : 4);
    return { left, top, width, height, matrixTop, termsTop, right, output, resultWidth, wholeWidth, wholeHeight };
  }

  redraw() {
    if (!this.#data) return;
    const { values, rows, columns, scale } = this.#data;
    this.#pixels = cells(values, rows, columns, scale);
    this.#canvas.setAttribute("aria-label", this.#describe());
    this.#paint();
    this.#showLegend();
    this.#table.refresh();
  }

  #paint() {
    const layout = this.#layout;
    const row = this.#row;
    const terms = row === null ? [] : this.#termsOf(row);
    const painting = { context: cleared(this.#canvas, layout.wholeWidth, layout.wholeHeight), layout, row, terms };
    this.#drawMatrix(painting);
    if (this.#isSmall) this.#drawWords(painting);
    else {
      this.#drawLabels(painting);
      const beside = cleared(this.#result, layout.resultWidth, layout.wholeHeight);
      this.#drawResult({ ...painting, context: beside });
    }
    this.#say(painting);
  }

  get #colours() {
    const style = getComputedStyle(this);
    return { text: style.color, chosen: style.getPropertyValue("--path") };
  }

  /** @param {Painting} painting */
  #drawMatrix({ context, layout, row, terms }) {
    const { left, top, width, height, matrixTop, termsTop, right } = layout;
    const { values, rows, columns, input, scale, inputScale } = this.#data;
    const { text, chosen } = this.#colours;
    const strip = (/** @type {HTMLCanvasElement} */ pixels, /** @type {number} */ y, /** @type {number} */ tall) =>
      context.drawImage(pixels, left, y, right - left, tall);
    strip(cells(input, 1, columns, inputScale), top, STRIP);
    strip(this.#pixels, matrixTop, rows * height);
    context.lineWidth = 2;
    if (row !== null) {
      strip(cells(terms, 1, columns, steadyScale(terms)), termsTop, STRIP);
      const [y, tall] = lens(row, matrixTop, height);
      strip(cells(values.slice(row * columns, (row + 1) * columns), 1, columns, scale), y, tall);
      context.strokeStyle = chosen;
      if (!this.#isSmall) context.strokeRect(left - 1, y - 1, right - left + 2, tall + 2);
    }
    const { column } = this.#at;
    context.strokeStyle = text;
    if (column !== null) context.strokeRect(left + column * width - 1, top - 1, width + 2, termsTop + STRIP + 2 - top);
  }

  /** @param {Painting} painting */
  #drawLabels({ context, layout: { left, top, width, height, matrixTop, termsTop }, row }) {
    const { rows, columns, rowLabels, columnLabels, inputName, rowName } = this.#data;
    context.font = FONT;
    context.fillStyle = this.#colours.text;
    const every = (/** @type {number} */ size) => Math.max(1, Math.ceil(13 / size));
    for (let index = 0; index < rows; index += every(height))
      context.fillText(cut(rowLabels[index], LETTERS), 2, matrixTop + (index + 0.5) * height, left - 6);
    context.fillText(`${inputName} →`, left, top - LINE / 2);
    if (row !== null) context.fillText(`${rowName} ${rowLabels[row]}: input × weight`, left, termsTop - LINE / 2 - 1);
    context.textAlign = "center";
    const longest = Math.max(...columnLabels.map(({ length }) => length));
    for (let column = 0; column < columns; column += Math.max(1, Math.ceil((7 * longest + 4) / width)))
      context.fillText(columnLabels[column], left + (column + 0.5) * width, matrixTop - LINE / 2);
  }

  /** The bias, the result, and the sum of the products of the row. @param {Painting} painting */
  #drawResult({ context, layout: { height, matrixTop, termsTop, output: left }, row, terms }) {
    const { rows, output, outputScale, outputName, bias, isPart } = this.#data;
    const { text, chosen } = this.#colours;
    context.drawImage(cells(output, rows, 1, outputScale), left, matrixTop, STRIP, rows * height);
    context.font = FONT;
    context.fillStyle = text;
    context.fillText(`= ${outputName} ↓`, left, matrixTop - LINE / 2, STRIP + NUMBER);
    if (bias) {
      context.drawImage(cells(bias, rows, 1, outputScale), GAP, matrixTop, STRIP, rows * height);
      context.fillText("+ bias", GAP / 2, matrixTop - LINE / 2);
    }
    if (row === null) return;
    const [y, tall] = lens(row, matrixTop, height);
    context.drawImage(cells([output[row]], 1, 1, outputScale), left, y, STRIP, tall);
    context.lineWidth = 2;
    context.strokeStyle = context.fillStyle = chosen;
    context.strokeRect(left - 1, y - 1, STRIP + 2, tall + 2);
    context.font = `bold ${FONT}`;
    context.fillText(number(output[row]), left + STRIP + 5, y + tall / 2);
    const sum = number(terms.reduce((total, each) => total + each, 0));
    context.fillText(isPart ? `here ${sum}` : `Σ ${sum}${bias ? " + bias" : ""}`, GAP, termsTop + STRIP / 2);
  }

  /** The words of a small picture, and its result. @param {Painting} painting */
  #drawWords({ context, layout: { top, matrixTop, termsTop, right, wholeHeight }, row }) {
    const { text, chosen } = this.#colours;
    context.font = SMALL_FONT;
    context.fillStyle = text;
    ["input", "× weight", "= product"].forEach((word, index) =>
      context.fillText(word, 0, [top, matrixTop, termsTop][index] + STRIP / 2),
    );
    context.font = `bold ${SMALL_FONT}`;
    context.fillStyle = chosen;
    context.textAlign = "right";
    context.fillText(`${this.#data.inputName} = ${number(this.#data.output[row ?? 0])}`, right, wholeHeight - LINE / 2);
  }

  /** @param {Painting} painting */
  #say({ row, terms }) {
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
  #placeAt({ target, offsetX, offsetY }) {
    const { rows, columns } = this.#data;
    const { left, width, height, matrixTop } = this.#layout;
    const within = (/** @type {number} */ index, /** @type {number} */ size) =>
      index >= 0 && index < size ? index : null;
    const row = within(Math.floor((offsetY - matrixTop) / height), rows);
    const column = target === this.#result ? null : within(Math.floor((offsetX - left) / width), columns);
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
    if (place.row !== null) emit(this, "choose", { row: place.row });
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
    const others = `the strongest colour of the input is ${number(inputScale.high)}, of the ${outputName} `;
    const ends = [`weights ${number(scale.low)} `, legendBar(scale.map), ` ${number(scale.high)}; `];
    this.#legend.replaceChildren(...ends, `${others}${number(outputScale.high)}`);
  }

  #describe() {
    const { rows, columns, rowName, columnName, valueName, inputName, outputName } = this.#data;
    return (
      `${inputName} × ${valueName} = ${outputName}: ${rows} rows (${rowName}), ${columns} columns (${columnName}). ` +
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
