// The heat maps of the stages: pictures with one pixel for each number, or for some neighbours.

import { el, context2d } from "../dom.js";
import { pixelColours } from "../draw/colours.js";
import { bandOf } from "./scene.js";

/**
 * @import { Numbers } from "../api.js"
 * @import { Item } from "./items.js"
 * @import { Pass, Range } from "./pass.js"
 * @typedef {{ canvas: HTMLCanvasElement, columns: number, steps: number }} Strip
 */

const STEPS = 16; // pixels of a picture for each row, of which a strip colours some
const KEPT_PIXELS = 24e6;
const HOLE = 12; // pixels between heads, if there is room for them
const GREY = 0x50808080; // of what is masked

/** Strips of a pass, which are drawn when they are first seen. */
export class Strips {
  #pass;
  #isDown;
  #rowSize;
  /** @type {Map<string, Strip>} */
  #kept = new Map();
  #pixels = 0;

  /**
   * @param {Pass} pass
   * @param {boolean} isDown
   * @param {number} rowSize
   */
  constructor(pass, isDown, rowSize) {
    this.#pass = pass;
    this.#isDown = isDown;
    this.#rowSize = rowSize;
  }

  /**
   * The picture of some columns of a stage in some rows.
   * @param {Item} item
   * @param {[number, number]} columns the first, and the one after the last
   * @param {[number, number]} rows
   * @param {number} pixels along
   */
  get(item, columns, rows, pixels) {
    const count = columns[1] - columns[0];
    const bin = pixels >= count ? 1 : 2 ** Math.ceil(Math.log2(count / Math.max(1, pixels)));
    const versions = [item.name, maskOf(item.name)].map((name) => this.#pass.stages.get(name)?.version);
    const key = [item.name, bin, ...columns, ...rows, ...versions].join();
    const kept = this.#kept.get(key);
    if (kept) return kept;
    const strip = this.#draw(item, columns, rows, bin);
    this.#pixels += strip.canvas.width * strip.canvas.height;
    if (this.#pixels > KEPT_PIXELS) {
      this.#kept.clear();
      this.#pixels = strip.canvas.width * strip.canvas.height;
    }
    this.#kept.set(key, strip);
    return strip;
  }

  /**
   * @param {Item} item
   * @param {[number, number]} columns
   * @param {[number, number]} rows
   * @param {number} bin
   * @returns {Strip}
   */
  #draw(item, [first, end], [from, to], bin) {
    const width = Math.ceil((end - first) / bin);
    const height = (to - from) * STEPS;
    const [w, h] = this.#isDown ? [height, width] : [width, height];
    const canvas = el("canvas", { width: w, height: h });
    const context = context2d(canvas);
    const image = context.createImageData(w, h);
    const pixels = new Uint32Array(image.data.buffer);
    const range = this.#pass.range(item.name);
    const colours = pixelColours(range.isSigned ? "diverging" : "sequential");
    const band = bandOf(item.height, item.branch !== null, this.#rowSize).map((share) => Math.round(share * STEPS));
    for (let row = from; row < to; row++) {
      const numbers = this.#pass.row(item.name, row);
      if (!numbers) continue;
      for (let column = 0; column < width; column++) {
        const value =
          bin === 1
            ? numbers[first + column]
            : sizeOf(numbers, first + column * bin, Math.min(end, first + (column + 1) * bin));
        const isHidden = !Number.isFinite(value) || isMasked(this.#pass, item, row, first + column * bin);
        const dye = isHidden ? GREY : colours[colourIndex(value, range)];
        for (let step = band[0]; step < band[1]; step++) {
          const across = (row - from) * STEPS + step;
          pixels[this.#isDown ? column * w + across : across * w + column] = dye;
        }
      }
    }
    context.putImageData(image, 0, 0);
    return { canvas, columns: width, steps: height };
  }
}

/**
 * The stage that says which keys are masked: its scores are −∞ there. Other stages than those of attention have none.
 * @param {string} name
 */
export const maskOf = (name) => name.replace(/attn\.(scores|pattern)$/, "attn.attn_scores");

/**
 * Whether the mask hides a number, as far as the masked scores are here.
 * @param {Pass} pass
 * @param {Item} item
 * @param {number} row
 * @param {number} column of all heads together
 */
export function isMasked(pass, { name, hasKeys }, row, column) {
  return hasKeys && pass.row(maskOf(name), row)?.[column] === -Infinity;
}

/**
 * Some numbers as one: their root mean square, with the sign of the largest.
 * @param {Numbers} numbers
 * @param {number} from
 * @param {number} to
 */
export function sizeOf(numbers, from, to) {
  let [sum, largest] = [0, 0];
  for (let index = from; index < to; index++) {
    const value = numbers[index];
    if (!Number.isFinite(value)) continue;
    sum += value * value;
    if (Math.abs(value) > Math.abs(largest)) largest = value;
  }
  return Math.sign(largest) * Math.sqrt(sum / (to - from));
}

/**
 * The place of a number on its colour map, from 0 to 1. Of numbers without a sign, and of changes, small ones can be
 * seen, too.
 * @param {number} value
 * @param {Range} range
 */
export function shareOf(value, { low, high, isSigned, isRoot }) {
  if (!isSigned) return Math.sqrt(Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
  const share = Math.max(-1, Math.min(1, value / (high || 1)));
  return (1 + (isRoot ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share)) / 2;
}

/** The place on a colour map of 256 colours. @param {number} value @param {Range} range */
export const colourIndex = (value, range) => Math.round(255 * shareOf(value, range));

/**
 * Where the heads of a stage stand along, inside the place of its item.
 * @param {Item} item
 * @param {number} start
 * @param {number} width
 */
export function headPlaces({ heads }, start, width) {
  const inset = Math.min(8, 0.1 * width);
  const room = width - 2 * inset;
  const hole = heads > 1 ? Math.min(HOLE, (0.25 * room) / heads) : 0;
  const size = (room - hole * (heads - 1)) / heads;
  return Array.from({ length: heads }, (_, head) => ({ begin: start + inset + head * (size + hole), size }));
}
