// A grid of small attention patterns: a row for each layer, a column for each head. It knows nothing about requests: it
// says which rows can be seen, and its owner gives it their patterns.

import { around, context2d, el, emit, find, findAll } from "../dom.js";
import { placeName } from "../network/names.js";
import { pixelColours } from "./colours.js";
import { DrawnElement } from "./drawn_element.js";
import { moveFocus, placeAfter } from "./grid_keys.js";

/**
 * A pattern: size × size numbers from 0 to 255 (255 is a weight of 1), and what a screen reader says.
 * @typedef {{ size: number, values: Uint8Array, says: string }} Pattern
 * @typedef {{ layer: number, head: number }} Place
 */

const LARGE = 72; // pixels of a pattern in a network with few layers
const SMALL = 26;
const NAMES = 90; // pixels beside the patterns: names of layers, and the margins of the page
const ROOM = 860; // pixels that all layers together should not exceed
const [PRINTED, MARGIN] = [48, 28]; // pixels of a pattern in a downloaded picture, and beside them
const AHEAD = 200; // rows that are this near to the window count as visible

/**
 * <pattern-grid>. `reset({layers, heads})` draws empty cells, `setRow(layer, patterns)` fills a row.
 * Events: "visible" with detail [layer, …] when rows come into sight; "point" with {layer, head} or null; "choose" with
 * {layer, head}.
 */
export class PatternGrid extends DrawnElement {
  #layers = 0;
  #heads = 0;
  /** @type {Map<number, Pattern[]>} layer → its patterns */
  #patterns = new Map();
  /** @type {HTMLElement[][]} layer → head → element */
  #cells = [];
  #chosen = { layer: 0, head: 0 };
  /** @type {IntersectionObserver | null} */
  #observer = null;

  connectedCallback() {
    super.connectedCallback();
    this.#observe();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#observer?.disconnect();
  }

  /**
   * Empty cells. The elements stay if the numbers of layers and heads are the same.
   * @param {{ layers: number, heads: number }} size
   */
  reset({ layers, heads }) {
    this.#patterns.clear();
    if (layers === this.#layers && heads === this.#heads) return this.redraw();
    [this.#layers, this.#heads] = [layers, heads];
    this.#build();
    return this.#observe();
  }

  get numLayers() {
    return this.#layers;
  }

  get isComplete() {
    return this.#patterns.size === this.#layers;
  }

  /** @param {number} layer */
  has(layer) {
    return this.#patterns.has(layer);
  }

  /**
   * What a screen reader says about a head, or undefined if its row was not fetched.
   * @param {Place} place
   */
  says({ layer, head }) {
    return this.#patterns.get(layer)?.[head].says;
  }

  /**
   * @param {number} layer
   * @param {Pattern[]} patterns
   */
  setRow(layer, patterns) {
    this.#patterns.set(layer, patterns);
    for (let head = 0; head < this.#heads; head++) this.#drawCell({ layer, head });
  }

  /** Mark a head, without an event. @param {Place} place */
  mark(place) {
    const before = this.#cellOf(this.#chosen);
    before?.setAttribute("aria-selected", "false");
    if (before) before.tabIndex = -1;
    this.#chosen = place;
    const cell = this.#cellOf(this.#chosen);
    cell?.setAttribute("aria-selected", "true");
    if (cell) cell.tabIndex = 0;
    this.#reveal(cell);
  }

  /**
   * Scroll the box of the grid, never the page, so that a cell is in sight. Narrow screens give the grid such a box.
   * @param {HTMLElement | undefined} cell
   */
  #reveal(cell) {
    const box = cell?.closest(".scroll");
    if (!cell || !box || box.scrollHeight <= box.clientHeight) return;
    const [at, room] = [cell.getBoundingClientRect(), box.getBoundingClientRect()];
    if (at.top < room.top || at.bottom > room.bottom)
      box.scrollTop += (at.top + at.bottom - room.top - room.bottom) / 2;
  }

  /** The layers of which something can be seen now. */
  visibleLayers() {
    const rows = findAll(this, "[role=row][data-layer]");
    const seen = rows.filter((row) => {
      const { top, bottom } = row.getBoundingClientRect();
      return bottom > -AHEAD && top < innerHeight + AHEAD;
    });
    return seen.map((row) => Number(row.dataset.layer));
  }

  /** All patterns that were fetched, in one canvas with the numbers of layers and heads, for a download. */
  picture() {
    const size = Math.max(PRINTED, ...[...this.#patterns.values()].flat().map((pattern) => pattern.size)) + 2;
    const canvas = el("canvas", { width: MARGIN + this.#heads * size, height: MARGIN + this.#layers * size });
    const context = context2d(canvas);
    context.imageSmoothingEnabled = false;
    context.fillStyle = getComputedStyle(this).color;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    for (let head = 0; head < this.#heads; head++)
      context.fillText(String(head), MARGIN + (head + 0.5) * size, MARGIN - 6);
    for (let layer = 0; layer < this.#layers; layer++)
      context.fillText(String(layer), MARGIN / 2, MARGIN + (layer + 0.5) * size + 4);
    for (const layer of this.#patterns.keys())
      this.#cells[layer].forEach((cell, head) =>
        context.drawImage(find(cell, "canvas"), MARGIN + head * size, MARGIN + layer * size, size - 2, size - 2),
      );
    return canvas;
  }

  #build() {
    const width = (document.documentElement.clientWidth - NAMES) / this.#heads;
    const pixels = Math.round(Math.max(SMALL, Math.min(LARGE, ROOM / this.#layers, width)));
    this.style.setProperty("--cell", `${pixels}px`);
    this.#cells = Array.from({ length: this.#layers }, (_, layer) =>
      Array.from({ length: this.#heads }, (_, head) => this.#cell({ layer, head })),
    );
    const names = Array.from({ length: this.#heads }, (_, head) => el("span", { role: "columnheader" }, `H${head}`));
    const rows = this.#cells.map((cells, layer) =>
      el("div", { role: "row", dataset: { layer } }, el("span", { role: "rowheader" }, placeName(layer)), cells),
    );
    const corner = el("span", { role: "columnheader", class: "corner" });
    const grid = el(
      "div",
      {
        role: "grid",
        "aria-label": `Attention patterns: ${this.#layers} layers (rows), ${this.#heads} heads (columns)`,
      },
      el("div", { role: "row" }, corner, names),
      rows,
    );
    grid.addEventListener("keydown", (event) => this.#press(event));
    grid.addEventListener("pointerover", (event) => this.#point(around(event, "[role=gridcell]")));
    grid.addEventListener("pointerleave", () => this.#point(null));
    grid.addEventListener("focusin", (event) => this.#point(around(event, "[role=gridcell]")));
    this.replaceChildren(el("div", { class: "scroll" }, grid));
    const { layer, head } = this.#chosen;
    this.mark({ layer: Math.min(layer, this.#layers - 1), head: Math.min(head, this.#heads - 1) });
  }

  /** @param {Place} place */
  #cell(place) {
    const look = { role: "gridcell", class: "is-empty", tabindex: "-1", "aria-selected": "false" };
    const name = placeName(place.layer, place.head);
    const choose = () => emit(this, "choose", place);
    const canvas = el("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    return el("div", { ...look, "aria-label": name, dataset: place, onclick: choose }, canvas);
  }

  #observe() {
    this.#observer?.disconnect();
    const observer = new IntersectionObserver(
      (entries) => {
        const layers = entries
          .filter((entry) => entry.isIntersecting)
          .map(({ target }) => Number(target.getAttribute("data-layer")));
        if (layers.length > 0) emit(this, "visible", layers);
      },
      { rootMargin: `${AHEAD}px` },
    );
    for (const row of this.querySelectorAll("[role=row][data-layer]")) observer.observe(row);
    this.#observer = observer;
  }

  /**
   * @param {Place} place
   * @returns {HTMLElement | undefined}
   */
  #cellOf({ layer, head }) {
    return this.#cells[layer]?.[head];
  }

  /** @param {HTMLElement | null} cell */
  #point(cell) {
    emit(this, "point", cell && placeOf(cell));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const cell = around(event, "[role=gridcell]");
    if (!cell) return;
    const { layer, head } = placeOf(cell);
    const place = placeAfter(event.key, layer, head, this.#heads);
    const next = place && this.#cells[place[0]]?.[place[1]];
    if (event.key === "Enter" || event.key === " ") emit(this, "choose", { layer, head });
    else if (next) moveFocus(cell, next);
    else if (!place) return;
    event.preventDefault();
  }

  redraw() {
    for (let layer = 0; layer < this.#layers; layer++)
      for (let head = 0; head < this.#heads; head++) this.#drawCell({ layer, head });
  }

  resized() {} // the size of a cell stays, so that the page does not jump

  /** @param {Place} place */
  #drawCell({ layer, head }) {
    const cell = this.#cells[layer][head];
    const pattern = this.#patterns.get(layer)?.[head];
    cell.setAttribute("aria-label", `${placeName(layer, head)}${pattern ? `: ${pattern.says}` : ""}`);
    cell.classList.toggle("is-empty", !pattern);
    const canvas = find(cell, "canvas");
    if (pattern) paint(canvas, pattern);
    else canvas.width = canvas.height = 1;
  }
}

/** @param {HTMLElement} cell @returns {Place} */
const placeOf = ({ dataset }) => ({ layer: Number(dataset.layer), head: Number(dataset.head) });

/**
 * One pixel for each number, 0 to 255.
 * @param {HTMLCanvasElement} canvas
 * @param {Pattern} pattern
 */
function paint(canvas, { size, values }) {
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  const words = new Uint32Array(image.data.buffer);
  const colours = pixelColours("sequential");
  for (let index = 0; index < words.length; index++) words[index] = colours[values[index]];
  context2d(canvas).putImageData(image, 0, 0);
}

customElements.define("pattern-grid", PatternGrid);
