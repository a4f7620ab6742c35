// Parts of the weights of a network.

import { cachedGet } from "../passes.js";

/**
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, values: number[], quantization: string | null }} Weight
 */

/**
 * The numbers of a part of a weight, one index after the other.
 * @param {Pass} pass
 * @param {string} name
 * @param {Record<string, number>} part one index of each dim that is named
 * @returns {Promise<Weight>}
 */
export async function readWeight(pass, name, part) {
  const query = new URLSearchParams(Object.entries(part).map(([dim, index]) => [dim, String(index)]));
  if (pass.body.model) query.set("model", pass.body.model);
  const { values, quantization } = await cachedGet(/** @type {"/weights/"} */ (`/weights/${name}?${query}`));
  return { name, values: values.flat(Infinity), quantization };
}
