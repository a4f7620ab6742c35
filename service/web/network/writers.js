// Which parts of a network write a token: their shares in its logit (direct attribution).

import { ApiError, postJson } from "../api.js";
import { placeName } from "./names.js";

/**
 * @import { DirectAnswer } from "../answers.js"
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, layer: number, head: number | null, share: number }} Writer `head`: null for a feed-forward
 *   network
 * @typedef {Writer[] | null | undefined} Writers null: the service refuses; undefined: the answer is not here yet
 */

/** @type {WeakMap<Pass, Map<number, { writers: Writers, reading: Promise<void> }>>} */
const kept = new WeakMap();

/**
 * Ask once for the parts that write the most likely token after a position. The first answer takes long for a large
 * network: the service copies its weights.
 * @param {Pass} pass
 * @param {number} row
 */
export function readWriters(pass, row) {
  const rows = kept.get(pass) ?? new Map();
  kept.set(pass, rows);
  if (!rows.has(row)) {
    const entry = { writers: /** @type {Writers} */ (undefined), reading: Promise.resolve() };
    entry.reading = ask(pass, row).then((writers) => void (entry.writers = writers));
    rows.set(row, entry);
  }
  return rows.get(row).reading;
}

/**
 * The parts that were read, the largest share first.
 * @param {Pass} pass
 * @param {number} row
 * @returns {Writers}
 */
export const writersOf = (pass, row) => kept.get(pass)?.get(row)?.writers;

/**
 * @param {Pass} pass
 * @param {number} row
 */
async function ask(pass, row) {
  const best = pass.predictions.get(row)?.[0];
  if (best === undefined) return null;
  const asked = { ...pass.body, method: "direct", position: row, token: best.id };
  try {
    return writersIn(await postJson("/attribute", asked)).sort((one, other) => other.share - one.share);
  } catch (error) {
    if (error instanceof ApiError) return null; // such as a long prompt, for which there is too little memory
    throw error;
  }
}

/**
 * Every head and feed-forward network, in the order of the layers.
 * @param {DirectAnswer} answer
 * @returns {Writer[]}
 */
export function writersIn({ layers }) {
  return layers.flatMap(({ heads, mlp }, layer) => [
    ...heads.map((share, head) => ({ name: placeName(layer, head), layer, head, share })),
    { name: placeName(layer, "FFN"), layer, head: null, share: mlp },
  ]);
}
