// Which parts of a network write a token: their shares in its logit (direct attribution).

import { ApiError, postJson } from "../api.js";
import { placeName } from "./names.js";

/**
 * @import { DirectAnswer } from "../answers.js"
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, layer: number, head: number | null, share: number }} Writer `head`: null for a feed-forward
 *   network
 */

const PATIENCE_MILLISECONDS = 3000; // the first answer for a large network takes longer: the service copies its weights

/** @type {WeakMap<Pass, Map<number, { writers: Writer[] | null, wait: Promise<unknown> }>>} */
const kept = new WeakMap();

/**
 * The parts that write the most likely token after a position, the largest share first. Null if the service refuses, or
 * does not answer soon: a later call has what arrives meanwhile.
 * @param {Pass} pass
 * @param {number} row
 * @returns {Promise<Writer[] | null>}
 */
export async function readWriters(pass, row) {
  const rows = kept.get(pass) ?? new Map();
  kept.set(pass, rows);
  if (!rows.has(row)) {
    const entry = { writers: /** @type {Writer[] | null} */ (null), wait: Promise.resolve() };
    const read = ask(pass, row).then((writers) => void (entry.writers = writers));
    entry.wait = Promise.race([read, new Promise((done) => setTimeout(done, PATIENCE_MILLISECONDS))]);
    rows.set(row, entry);
  }
  const entry = rows.get(row);
  await entry.wait;
  return entry.writers;
}

/**
 * @param {Pass} pass
 * @param {number} row
 */
async function ask(pass, row) {
  const best = pass.predictions.get(row)?.[0];
  if (best === undefined) return null;
  const asked = { ...pass.body, method: "direct", position: row, token: best.id };
  try {
    const { layers } = /** @type {DirectAnswer} */ (await postJson("/attribute", asked));
    const writers = layers.flatMap(({ heads, mlp }, layer) => [
      ...heads.map((share, head) => ({ name: placeName(layer, head), layer, head, share })),
      { name: placeName(layer, "FFN"), layer, head: null, share: mlp },
    ]);
    return writers.sort((one, other) => other.share - one.share);
  } catch (error) {
    if (error instanceof ApiError) return null; // such as a long prompt, for which there is too little memory
    throw error;
  }
}
