// Which parts of a network write a token: their shares in its logit (direct attribution).

import { ApiError } from "../api.js";
import { cached } from "../passes.js";
import { placeName } from "./names.js";

/**
 * @import { DirectAnswer } from "../answers.js"
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, layer: number, head: number | null, share: number }} Writer `head`: null for a feed-forward
 *   network
 */

/**
 * The parts that write the most likely token after a position, the largest share first; null if the service refuses.
 * @param {Pass} pass
 * @param {number} row
 * @param {AbortSignal} signal
 * @returns {Promise<Writer[] | null>}
 */
export async function readWriters(pass, row, signal) {
  const best = pass.predictions.get(row)?.[0];
  if (best === undefined) return null;
  const asked = { ...pass.body, method: "direct", position: row, token: best.id };
  try {
    const { layers } = /** @type {DirectAnswer} */ (await cached("/attribute", asked, signal));
    const writers = layers.flatMap(({ heads, mlp }, layer) => [
      ...heads.map((share, head) => ({ name: placeName(layer, head), layer, head, share })),
      { name: placeName(layer, "FFN"), layer, head: null, share: mlp },
    ]);
    return writers.sort((one, other) => other.share - one.share);
  } catch (error) {
    if (error instanceof ApiError && error.status >= 400 && error.status < 500) return null; // such as a long prompt
    throw error;
  }
}
