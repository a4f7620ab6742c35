// Steering by two texts: the vector that tells them apart at a layer, as an edit.

import { encode, postPass } from "../api.js";
import { placeName } from "../network/names.js";

/**
 * @import { Prompt } from "../answers.js"
 * @import { NamedEdit, SteerTexts } from "./edit_words.js"
 * @typedef {{ name: string | null, prompt: Prompt, read: (text: string) => Prompt }} Source `name`: the `model` of
 *   requests; `prompt`: the one that is steered; `read`: what a text means in requests
 */

/**
 * The edit that adds the vector which tells two texts apart: the residual stream after a layer at the end of `more`,
 * minus that at the end of `less`. It is scaled to the length of the stream at the end of the prompt, so that a
 * strength means about the same in every network.
 * @param {SteerTexts} texts
 * @param {number} layer
 * @param {number} strength
 * @param {Source} source
 * @returns {Promise<NamedEdit>}
 */
export async function steeringEdit({ more, less }, layer, strength, { name, prompt, read }) {
  const stage = `blocks.${layer}.resid_post`;
  const lastRow = async (/** @type {Prompt} */ text) => {
    const body = { ...(name && { model: name }), prompt: text, stages: [stage], positions: [-1], dtype: "float32" };
    return /** @type {Float32Array} */ ((await postPass("/forward", body)).tensors[stage].values);
  };
  const [one, other, here] = await Promise.all([read(more), read(less), prompt].map(lastRow));
  const difference = one.map((number, index) => number - other[index]);
  const size = lengthOf(difference);
  if (size === 0) throw new Error(`After ${placeName(layer)}, the network does not tell these two texts apart.`);
  const factor = lengthOf(here) / size;
  const vector = encode(difference.map((number) => number * factor));
  return { stage, op: "add", vector, scale: strength, steer: { more, less } };
}

/** @param {Float32Array} vector */
function lengthOf(vector) {
  return Math.hypot(...vector);
}
