// What one picture of the network depends on, and the places of a token's row: its river, and the lane of the branches.

import { COLOURS, isDark } from "../theme.js";

/**
 * @import { Line } from "./items.js"
 * @import { Layout } from "./layout.js"
 * @import { Lens } from "./lens.js"
 * @import { Pass } from "./pass.js"
 * @import { Plane } from "./plane.js"
 * @import { Strips } from "./strips.js"
 *
 * @typedef {{ item: number, row: number, column: number | null }} Spot `column`: of all heads together
 * @typedef {{
 *   page: string, panel: string, text: string, faint: string, line: string, river: string, bank: string, path: string,
 *   branch: string, negative: string, edit: string,
 * }} Palette
 * @typedef {{ gutter: number, heading: number, keys: number }} Margins pixels before the network, both ways; `keys`:
 *   the part of the heading for the tokens of keys
 * @typedef {{
 *   plane: Plane, line: Line, layout: Layout, margins: Margins, pass: Pass, plain: Pass | null, strips: Strips,
 *   palette: Palette, row: number, head: number | null, pointed: Spot | null, chosen: Spot | null, front: number,
 *   lens: Lens | null, isStep: boolean,
 * }} Scene `pass`: whose numbers are drawn, or what edits change; `plain`: the pass without the edits, if there are
 *   edits; `row`: of the token whose path is emphasised; `head`: whose bands are drawn, null for the mean of all;
 *   `front`: how many pixels along are there already; `lens`: of `row`; `isStep`: whether a step of a lesson is shown
 */

const SPLIT = 20; // pixels of a row from which river and branches have places of their own
const RIVER = { centre: 0.83, most: 0.3 };
const LANE = { begin: 0.08, end: 0.66 };

/** @returns {Palette} */
export function paletteOf(/** @type {HTMLElement} */ element) {
  const style = getComputedStyle(element);
  const read = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return /** @type {Palette} */ (Object.fromEntries(COLOURS.map((name) => [name, read(name)])));
}

/** Whether rows are high enough for a lane beside the river. @param {number} rowSize */
export const isSplit = (rowSize) => rowSize >= SPLIT;

/** The centre of the river of a row, from the beginning of the row. @param {number} rowSize */
export function riverCentre(rowSize) {
  return isSplit(rowSize) ? RIVER.centre * rowSize : rowSize / 2;
}

/** @param {number} rowSize */
export function riverMost(rowSize) {
  return isSplit(rowSize) ? RIVER.most * rowSize : 0.8 * rowSize;
}

/**
 * Where a strip stands in its row, as shares of the row.
 * @param {number} height
 * @param {boolean} isBranch
 * @param {number} rowSize
 * @returns {[begin: number, end: number]}
 */
export function bandOf(height, isBranch, rowSize) {
  if (!isSplit(rowSize)) return [0.08, 0.92];
  if (!isBranch) return [LANE.begin, 0.97];
  const middle = (LANE.begin + LANE.end) / 2;
  const half = (height * (LANE.end - LANE.begin)) / 2;
  return [middle - half, middle + half];
}

/**
 * How strongly colours are laid over the page.
 * @param {number} light
 * @param {number} dark
 */
export const strength = (light, dark) => (isDark() ? dark : light);

/** The layer under the pointer, if the whole network is seen: a click opens it. @param {Scene} scene */
export function pointedLayer({ layout, line, pointed }) {
  const isAfar = layout.detail < 0.5 && line.blocks.length > 1;
  const at = pointed?.item ?? -1;
  return isAfar ? line.blocks.find(({ first, last }) => at >= first && at <= last) : undefined;
}
