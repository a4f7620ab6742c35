// Parts of the weights of a network.

import { cachedGet } from "../passes.js";

/**
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, part: Record<string, number> }} WeightPart one index of each dim that is named
 * @typedef {{ name: string, part: Record<string, number>, values: number[], quantization: string | null }} Weight
 */

/**
 * The numbers of a part of a weight, one index after the other.
 * @param {Pass} pass
 * @param {WeightPart} part
 * @returns {Promise<Weight>}
 */
export async function readWeight(pass, { name, part }) {
  const query = new URLSearchParams(Object.entries(part).map(([dim, index]) => [dim, String(index)]));
  if (pass.body.model) query.set("model", pass.body.model);
  const { values, quantization } = await cachedGet(/** @type {"/weights/"} */ (`/weights/${name}?${query}`));
  return { name, part, values: values.flat(Infinity), quantization };
}
