// Find the arithmetic of a number, and read what it needs.

import { describe } from "../../stages.js";
import { head, maskedScore, pattern, score } from "./attention.js";
import { activated, divisor, expertWeight, normalized, rotated, sum } from "./elementwise.js";
import { WEIGHTED, gained } from "./products.js";

/**
 * @import { Architecture } from "../../answers.js"
 * @import { Pass, PassStage } from "../pass.js"
 * @import { Explained, Kind, Place, Read } from "./explanation.js"
 * @typedef {{ name: string, row: number, column: number }} Cell of a stage
 */

/** The arithmetic of the parts of a network that are not in `WEIGHTED`. @type {[RegExp, Kind][]} */
const KINDS = [
  [/^resid_/, sum],
  [/\.scale$/, divisor],
  [/\.normalized$/, normalized],
  [/^(ln\w+|attn\.[qk]_norm)\.out$/, gained],
  [/^attn\.rot_[qk]$/, rotated],
  [/^attn\.scores$/, score],
  [/^attn\.attn_scores$/, maskedScore],
  [/^attn\.pattern$/, pattern],
  [/^attn\.z$/, head],
  [/^mlp\.post$/, activated],
  [/^mlp\.expert_weights$/, expertWeight],
];

/**
 * How a number was computed, or null if the page cannot say.
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {Cell} cell
 * @param {AbortSignal} signal
 * @returns {Promise<Explained>}
 */
export async function explain(pass, architecture, cell, signal) {
  const place = placeOf(pass, architecture, cell);
  const kind = WEIGHTED[place.part] ?? KINDS.find(([parts]) => parts.test(place.part))?.[1];
  await pass.read([cell.name], [cell.row], signal);
  place.served = pass.row(cell.name, cell.row)?.[cell.column] ?? NaN;
  const { formula } = describe(cell.name, architecture);
  if (!kind || kind.isKnown?.(place) === false) return { place, formula, explanation: null };
  return explainAs(kind, place, signal);
}

/**
 * How a number was computed as one of a kind.
 * @param {Kind} kind
 * @param {Place} place
 * @param {AbortSignal} signal
 * @returns {Promise<Explained>}
 */
export async function explainAs(kind, place, signal) {
  const { pass, architecture, stage, row } = place;
  /** @type {Read} */
  const read = (stages, rows = [row]) =>
    pass.read(
      stages.filter((name) => name !== null),
      rows,
      signal,
    );
  const { formula } = describe(stage.name, architecture);
  return { place, formula, explanation: await kind.explain(place, read) };
}

/**
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {Cell} cell
 * @returns {Place}
 */
export function placeOf(pass, architecture, { name, row, column }) {
  const stage = /** @type {PassStage} */ (pass.stages.get(name));
  const { layer, part } = describe(name, architecture);
  const ofHead = { head: Math.floor(column / stage.columns), within: column % stage.columns };
  return { pass, architecture, stage, layer, part, row, column, ...ofHead, served: NaN };
}
