// What the page says about the served model.

import { el } from "./dom.js";
import { count } from "./format.js";
import { term } from "./terms.js";

/** @import { Model } from "./answers.js" */

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
  const facts = [
    `${count(parameters.total)} parameters`,
    `${config.num_layers} layers`,
    `${config.num_heads} heads`,
    ...numbers,
    place,
  ];
  return [
    el("span", { class: "served-name" }, `${name}: `),
    // lines break between facts
    ...facts.flatMap((fact, index) => [index > 0 ? ", " : "", el("span", { class: "together" }, fact)]),
  ];
}
