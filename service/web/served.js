// What the page says about the network that is shown: the served model, or a worked example.

import { el } from "./dom.js";
import { count } from "./format.js";
import { term } from "./terms.js";

/**
 * @import { Architecture, Model, WeightInfo } from "./answers.js"
 * @import { Child } from "./dom.js"
 */

/**
 * How the weights are stored, if not in the number format of the computation: `quantization` of GET /model.
 * @type {Record<string, string>}
 */
const WEIGHTS = { stored: "weights in the formats of the file", auto: "weights in a format for each layer" };

/**
 * What the header says about the served model.
 * @param {Model} model
 */
export function factsOf({ name, parameters, config, dtype, device, quantization }) {
  const weights = quantization === "none" ? null : (WEIGHTS[quantization] ?? `weights in ${quantization}`);
  const format = term("number_format", dtype);
  const numbers = weights ? [term("quantization", weights), ["computed in ", format]] : [["numbers in ", format]];
  const place = `on the ${device === "cpu" ? "CPU" : `device ${device}`}`;
  return listed(name, [...sizes(parameters.total, config.num_layers, config.num_heads), ...numbers, place]);
}

/**
 * What the header says about a worked example.
 * @param {string} name
 * @param {Architecture} architecture
 * @param {WeightInfo[]} weights
 */
export function factsOfExample(name, { num_heads: heads }, weights) {
  const total = weights.reduce((sum, each) => sum + (each.tied_to === null ? each.num_parameters : 0), 0);
  const layers = new Set(weights.flatMap((each) => /^blocks\.(\d+)\./.exec(each.name)?.[1] ?? []));
  return listed(name, [...sizes(total, layers.size, heads), ["numbers in ", term("number_format", weights[0].dtype)]]);
}

/**
 * @param {number} parameters
 * @param {number} layers
 * @param {number} heads
 */
function sizes(parameters, layers, heads) {
  const counted = (/** @type {number} */ number, /** @type {string} */ noun) =>
    `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  return [counted(parameters, "parameter"), counted(layers, "layer"), counted(heads, "head")];
}

/**
 * @param {string} name
 * @param {Child[]} facts
 */
function listed(name, facts) {
  return [
    el("span", { class: "served-name" }, `${name}: `),
    // lines break between facts
    ...facts.flatMap((fact, index) => [index > 0 ? ", " : "", el("span", { class: "together" }, fact)]),
  ];
}
