// Parts of the weights of a network, kept as long as its pass is shown.

import { getJson } from "../api.js";

/**
 * @import { WeightAnswer } from "../answers.js"
 * @import { Pass } from "./pass.js"
 * @typedef {{ name: string, part: Record<string, number> }} WeightPart one index of each dim that is named
 * @typedef {{ name: string, part: Record<string, number>, values: number[], quantization: string | null }} Weight
 */

const KEPT = 200;
/** @type {WeakMap<Pass, Map<string, Promise<WeightAnswer>>>} */
const kept = new WeakMap();

/**
 * The numbers of a part of a weight, one index after the other.
 * @param {Pass} pass
 * @param {WeightPart} part
 * @returns {Promise<Weight>}
 */
export async function readWeight(pass, { name, part }) {
  const answers = kept.get(pass) ?? new Map();
  kept.set(pass, answers);
  const query = new URLSearchParams(Object.entries(part).map(([dim, index]) => [dim, String(index)]));
  if (pass.body.model) query.set("model", pass.body.model);
  const path = /** @type {"/weights/"} */ (`/weights/${name}?${query}`);
  if (answers.size > KEPT) answers.clear();
  if (!answers.has(path)) answers.set(path, getJson(path));
  try {
    const { values, quantization } = await answers.get(path);
    return { name, part, values: values.flat(Infinity), quantization };
  } catch (error) {
    answers.delete(path);
    throw error;
  }
}
