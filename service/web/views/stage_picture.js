// The picture of a stage on its card: a row for each token, a column for each number, and the heads side by side.

import { context2d, el } from "../dom.js";
import { pixelColours } from "../draw/colours.js";
import { number } from "../format.js";
import { DrawnElement } from "../draw/drawn_element.js";
import { colourIndex, sizeOf } from "../network/strips.js";

/**
 * @import { Pass, PassStage } from "../network/pass.js"
 * @typedef {{ left: number, top: number, width: number, height: number }} Tile of one head, in pixels of the canvas
 * @typedef {{ pass: Pass, positions: number[], chosen: number | null }} Rows `chosen`: the position that stands out
 * @typedef {Rows & { name: string }} Drawn of a stage
 */

const HEIGHT = 60; // as in pass.css, so that nothing moves when a picture appears
const CELL = { width: 24, height: 14 }; // the largest cells of small stages
const HOLE = 2; // pixels between heads
const PALE = 70; // the opacity of rows that are not chosen, of 255
const MASKED = 0x30808080;
const BAR = 150; // the colour of bars, of 256

/** <stage-picture>. `draw` shows a stage; the picture follows the theme and its own width. */
export class StagePicture extends DrawnElement {
  #canvas = el("canvas", { width: 0, height: 0 });
  /** @type {Drawn | null} */
  #drawn = null;

  build() {
    this.append(this.#canvas);
  }

  /** @param {Drawn} drawn */
  draw(drawn) {
    this.#drawn = drawn;
    this.redraw();
  }

  redraw() {
    const drawn = this.#drawn;
    const stage = drawn?.pass.stages.get(drawn.name);
    if (!drawn || !stage || this.clientWidth === 0) return;
    const { pass, name, positions } = drawn;
    if (positions.some((position) => !stage.rows.has(position))) return;
    const { low, high } = pass.range(name);
    const { width, height, tiles } = layoutOf(stage, positions.length, this.clientWidth);
    const scale = devicePixelRatio;
    Object.assign(this.#canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    Object.assign(this.#canvas.style, { width: `${width}px`, height: `${height}px` });
    this.#canvas.setAttribute("role", "img");
    this.#canvas.setAttribute("aria-label", `Heat map, with colours from ${number(low)} to ${number(high)}`);
    const image = context2d(this.#canvas).createImageData(this.#canvas.width, this.#canvas.height);
    tiles.forEach((tile, head) => paintTile(image, scaled(tile, scale), head, stage, drawn));
    context2d(this.#canvas).putImageData(image, 0, 0);
  }
}

customElements.define("stage-picture", StagePicture);

/**
 * The size of a picture, and the tile of each head: in one line, or, if each has a number for each key, as squares in
 * the number of lines that makes them largest.
 * @param {PassStage} stage
 * @param {number} rows
 * @param {number} room
 */
function layoutOf({ heads, columns, hasKeys }, rows, room) {
  const across = Math.min(room, columns * heads === 1 ? room : columns * heads * CELL.width);
  const sideOf = (/** @type {number} */ perLine) =>
    Math.min((across + HOLE) / perLine, (HEIGHT + HOLE) / Math.ceil(heads / perLine)) - HOLE;
  const counts = Array.from({ length: heads }, (_, index) => index + 1);
  const perLine = hasKeys ? counts.reduce((best, each) => (sideOf(each) > sideOf(best) ? each : best)) : heads;
  const hole = heads > 1 ? Math.min(HOLE, (0.25 * across) / heads) : 0;
  const width = hasKeys ? sideOf(perLine) : (across - hole * (heads - 1)) / heads;
  const height = hasKeys ? width : Math.min(CELL.height, Math.max(1, Math.floor(HEIGHT / rows))) * rows;
  const tiles = counts.map((_, head) => ({
    left: (head % perLine) * (width + hole),
    top: Math.floor(head / perLine) * (height + hole),
    width,
    height,
  }));
  return {
    width: perLine * (width + hole) - hole,
    height: Math.ceil(heads / perLine) * (height + hole) - hole,
    tiles,
  };
}

/**
 * @param {Tile} tile
 * @param {number} scale
 */
function scaled({ left, top, width, height }, scale) {
  const [x, y] = [Math.round(left * scale), Math.round(top * scale)];
  return { left: x, top: y, width: Math.round(width * scale), height: Math.round(height * scale) };
}

/**
 * Paint one head. Several numbers in one pixel are shown as one. A stage of one number for each token is a bar chart
 * from zero to its largest number.
 * @param {ImageData} image
 * @param {Tile} tile
 * @param {number} head
 * @param {PassStage} stage
 * @param {Drawn} drawn
 */
function paintTile(image, tile, head, stage, { pass, positions, chosen }) {
  const range = pass.range(stage.name);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = pixelColours(range.isSigned ? "diverging" : "sequential");
  const { columns, heads, hasKeys } = stage;
  const isBar = columns * heads === 1;
  const longest = isBar ? Math.max(...positions.map((position) => sizeIn(stage, position))) || 1 : 1; // 1: no bars
  const gap = isBar && tile.height >= 4 * positions.length ? Math.ceil(tile.height / positions.length / 5) : 0;
  for (let y = 0; y < tile.height; y++) {
    const row = Math.floor((y * positions.length) / tile.height);
    const isGap = Math.floor(((y + gap) * positions.length) / tile.height) > row;
    const position = positions[row];
    const numbers = stage.rows.get(position);
    const opacity = chosen === null || chosen === position ? 255 : PALE;
    const end = Math.min(tile.width, image.width - tile.left);
    if (!numbers || isGap || tile.top + y >= image.height) continue;
    for (let x = 0; x < end; x++) {
      const from = Math.floor((x * columns) / tile.width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * columns) / tile.width));
      const value =
        to === from + 1 ? numbers[head * columns + from] : sizeOf(numbers, head * columns + from, head * columns + to);
      const isMasked = hasKeys && from > position && (value === 0 || !Number.isFinite(value));
      const isBeyondBar = isBar && x > (tile.width * Math.abs(value)) / longest;
      if (isMasked || isBeyondBar) continue;
      const dye = colours[isBar ? BAR : colourIndex(value, range)] & 0xffffff;
      pixels[(tile.top + y) * image.width + tile.left + x] = Number.isFinite(value) ? (opacity << 24) | dye : MASKED;
    }
  }
}

/**
 * The size of the only number of a token, or 0 if it is not finite.
 * @param {PassStage} stage
 * @param {number} position
 */
function sizeIn({ rows }, position) {
  const value = Math.abs(rows.get(position)?.[0] ?? 0);
  return Number.isFinite(value) ? value : 0;
}
