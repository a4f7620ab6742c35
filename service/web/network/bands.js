// Attention as bands: from each token that is read to the token that reads it, as wide as the weight. The bands that
// arrive at a token fill its lane, because its weights add up to 1. A band of a change is as wide as the change of what
// passes along it: the weight times the value vector, measured by the mean length of value vectors.

import { Change } from "./change.js";
import { bandOf, isSplit, strength } from "./scene.js";
import { ribbon } from "./river.js";

/**
 * @import { Pass, PassStage } from "./pass.js"
 * @import { Scene } from "./scene.js"
 * @typedef {{ key: number, weight: number }} Share `weight`: of a change, it has a sign
 */

const LEAST = { chosen: 0.004, other: 0.05 }; // weights below have no band
const MOST_BANDS = 1500; // of all other tokens in sight; above, only the chosen one has bands

/** @type {WeakMap<Pass, Map<string, Share[]>>} */
const kept = new WeakMap();

/** The stage with the value vectors of a layer. @param {number} layer */
export const valuesOf = (layer) => `blocks.${layer}.attn.v`;

/** The stage with the weights of a layer. @param {number} layer */
export const patternOf = (layer) => `blocks.${layer}.attn.pattern`;

/**
 * How much a token attends to each other one, in the order of the tokens: of one head, or the mean of all heads.
 * @param {Pass} pass
 * @param {number} layer
 * @param {number} row
 * @param {number | null} head
 * @returns {Share[]}
 */
export function sharesOf(pass, layer, row, head) {
  const stage = pass.stages.get(patternOf(layer));
  const weights = stage?.rows.get(row);
  if (!stage || !weights) return [];
  const shares = kept.get(pass) ?? new Map();
  kept.set(pass, shares);
  const key = [layer, row, head, stage.version, pass.stages.get(valuesOf(layer))?.version].join();
  if (!shares.has(key)) {
    const heads = head === null ? [...Array(stage.heads).keys()] : [head];
    /** @type {Share[]} */
    const list = [];
    const passed = pass instanceof Change ? passedBy(pass, layer, row) : null;
    for (let at = 0; at < stage.columns; at++) {
      const ofHead = (/** @type {number} */ each) => passed?.(each, at) ?? weights[each * stage.columns + at];
      const weight = heads.reduce((sum, each) => sum + ofHead(each), 0) / heads.length;
      if (Math.abs(weight) >= LEAST.chosen) list.push({ key: at, weight });
    }
    if (shares.size > 4000) shares.clear();
    shares.set(key, list);
  }
  return shares.get(key);
}

/**
 * How much the edits change what passes from a token to another one in a head: null if the values are not here.
 * @param {Change} change
 * @param {number} layer
 * @param {number} row
 */
function passedBy({ both }, layer, row) {
  const [edited, plain] = both;
  const pattern = /** @type {PassStage} */ (plain.stages.get(patternOf(layer)));
  const values = plain.stages.get(valuesOf(layer));
  const [after, before] = both.map((pass) => pass.row(patternOf(layer), row));
  if (!values || !after || !before || values.rows.size === 0) return null;
  const { heads, columns } = values;
  const group = pattern.heads / heads;
  const lengths = [...values.rows.values()].map((numbers) => Math.hypot(...numbers) / Math.sqrt(heads));
  const scale = lengths.reduce((sum, length) => sum + length, 0) / lengths.length || 1;
  return (/** @type {number} */ head, /** @type {number} */ key) => {
    const [now, was] = [edited.row(valuesOf(layer), key), plain.row(valuesOf(layer), key)];
    if (!now || !was) return null;
    const [shareNow, shareWas] = [after, before].map((weights) => weights[head * pattern.columns + key]);
    let [moved, sizeNow, sizeWas] = [0, 0, 0];
    const begin = Math.floor(head / group) * columns;
    for (let index = begin; index < begin + columns; index++) {
      const [one, other] = [shareNow * now[index], shareWas * was[index]];
      moved += (one - other) ** 2;
      sizeNow += one ** 2;
      sizeWas += other ** 2;
    }
    return (Math.sign(sizeNow - sizeWas) * Math.sqrt(moved)) / scale;
  };
}

/** @param {Scene} scene */
export function drawBands(scene) {
  const { layout, line } = scene;
  const [from, to] = layout.span;
  const seen = line.items.flatMap((item, index) =>
    item.kind === "bands" && index >= from && index < to && layout.widthOf(index) > 3 ? [index] : [],
  );
  const [first, last] = layout.rows;
  const isFew = seen.length * (last - first) * 4 <= MOST_BANDS;
  for (const index of seen) {
    if (isFew) for (let row = first; row < last; row++) if (row !== scene.row) drawRow(scene, index, row, false);
    drawRow(scene, index, scene.row, true);
  }
}

/**
 * @param {Scene} scene
 * @param {number} index
 * @param {number} row
 * @param {boolean} isChosen
 */
function drawRow({ plane, layout, line, pass, palette, head }, index, row, isChosen) {
  const { layer } = line.items[index];
  const { rowSize } = layout;
  const [start, end] = [layout.startOf(index), layout.startOf(index) + layout.widthOf(index)];
  const [begin, stop] = bandOf(1, true, rowSize);
  const top = layout.rowStart(row);
  const room = (stop - begin) * rowSize;
  let filled = top + begin * rowSize;
  const source = isSplit(rowSize) ? (begin + stop) / 2 : 0.5;
  const isChange = pass.reference !== pass;
  const faded = strength(0.09 + 0.11 * layout.detail, 0.12 + 0.14 * layout.detail);
  for (const { key, weight: signed } of sharesOf(pass, /** @type {number} */ (layer), row, head)) {
    const weight = Math.abs(signed);
    const half = (weight * room) / 2;
    const across = filled + half;
    filled += 2 * half;
    if (weight < (isChosen ? LEAST.chosen : LEAST.other)) continue;
    const from = layout.rowStart(key) + source * rowSize;
    const points = [
      { along: start, across: from, half: Math.min(half, 0.3 * room) },
      { along: end, across, half },
    ];
    const own = signed < 0 ? palette.negative : palette.river;
    const colour = isChosen && !isChange ? plane.gradient(start, end, [palette.river, palette.path]) : own;
    ribbon(plane, points, colour, isChosen ? 0.35 + 0.55 * Math.sqrt(weight) : faded);
  }
}
