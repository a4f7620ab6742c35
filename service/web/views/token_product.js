// The product of a token of the prompt with a matrix of the network, and what the product is, in words.

import { quoted } from "../format.js";
import { explainAs, placeOf } from "../network/arithmetic/explain.js";
import { explainPrediction, inputOf } from "../network/arithmetic/prediction.js";
import { productWith } from "../network/arithmetic/products.js";
import { placeName } from "../network/names.js";
import { readWeight } from "../network/weights.js";

/**
 * @import { Architecture, PositionedToken, WeightInfo } from "../answers.js"
 * @import { Explained } from "../network/arithmetic/explanation.js"
 * @import { Pass } from "../network/pass.js"
 * @typedef {{
 *   at: string, input: string, inputs: number[], results: number[], offset: number, bias: number[] | null,
 *   inputOffset: number, normed: boolean, explain: (cell: number) => Promise<Explained>,
 * }} Product of a token with a matrix: the stage `at` is its result, of which `results` is the part of a head, or the
 *   logits of the tokens of the prompt. `offset` and `inputOffset`: the columns before those of the head
 */

export const LOGITS = "predictions"; // where the network shows them
/** The names of weights that a token is not multiplied by → what they are. @type {[RegExp, string][]} */
const MEANINGS = [
  [
    /^embed\.W_E$/,
    "The framed row is the vector of {token}, with which its residual stream begins. The rows are the prompt's tokens.",
  ],
  [/^pos_embed\.W_pos$/, "The framed row is the vector of position {position}, which is added to that of {token}."],
  [/\.experts\./, "A matrix of one expert. The service shows only the sum of the experts."],
  [/\.w$/, "The gain of a norm, by which each normalized number is multiplied."],
  [/\.b(_\w+)?$/, "A bias: numbers that are added."],
];
/** A part of a network → the vector that is multiplied, a word for the product, and what the product is. */
const PRODUCTS = /** @type {Record<string, [subject: string, word: string, meaning: string]>} */ ({
  "attn.q": ["{token}", "query", "its query in {place}: what it looks for"],
  "attn.k": ["{token}", "key", "its key in {place}: what it offers"],
  "attn.v": ["{token}", "value", "its value in {place}: what it passes on"],
  attn_out: ["What the heads gathered for {token}", "output", "what attention adds to its residual stream in {place}"],
  "mlp.pre": ["{token}", "neuron input", "the input of each neuron in {place}"],
  "mlp.pre gated": ["{token}", "gate", "the gate of each neuron in {place}: which ones are open"],
  "mlp.pre_linear": ["{token}", "neuron input", "the input of each neuron in {place}"],
  "mlp.router_logits": ["{token}", "score", "the score of each expert in {place}: which ones are chosen"],
  mlp_out: ["The neurons of {token}", "output", "what {place} adds to its residual stream"],
  predictions: [
    "The last vector of {token}",
    "logit",
    "the logit of each token as the next one. These are the prompt's tokens",
  ],
});

/**
 * @param {string} at the stage of a product
 * @param {Architecture} architecture
 */
function wordsOf(at, { gated }) {
  const part = at.replace(/^blocks\.\d+\./, "");
  return PRODUCTS[part === "mlp.pre" && gated ? "mlp.pre gated" : part];
}

/**
 * A word for each number of a product, such as “query”.
 * @param {string} at the stage of the product
 * @param {Architecture} architecture
 */
export const wordOf = (at, architecture) => wordsOf(at, architecture)[1];

/**
 * What a weight does to a token, in one sentence.
 * @param {string} name
 * @param {Product | null} product
 * @param {{ token: PositionedToken, head: number, architecture: Architecture }} place
 */
export function meaningOf(name, product, { token, head, architecture }) {
  const filled = (/** @type {string} */ text, /** @type {string} */ place) =>
    text
      .replace("{place}", place)
      .replace("{position}", String(token.position))
      .replace("{token}", () => quoted(token));
  if (!product) return filled(MEANINGS.find(([pattern]) => pattern.test(name))?.[1] ?? "", "");
  const [subject, , meaning] = wordsOf(product.at, architecture);
  const part = /attn\.[qkv]$/.test(product.at) ? head : /mlp/.test(product.at) ? "FFN" : undefined;
  const place = placeName(/^blocks\.(\d+)\./.exec(name)?.[1] ?? "", part);
  const end = product.normed ? ", before the norm that follows" : "";
  return `${filled(subject, place)} × ${name.split(".").at(-1)} = ${filled(meaning, place)}${end}.`;
}

/**
 * The product of a token with a matrix, or null if the matrix has none that the service shows.
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {{ info: WeightInfo, part: Record<string, number>, row: number }} place
 * @param {AbortSignal} signal
 * @returns {Promise<Product | null>}
 */
export async function productOf(pass, architecture, { info, part, row }, signal) {
  const inputsOf = (/** @type {string} */ name) => Array.from(pass.row(name, row) ?? []);
  if (info.name === "unembed.W_U") {
    const input = inputOf(pass);
    const [{ logits }] = await Promise.all([pass.logits(row, signal), pass.read([input], [row], signal)]);
    return {
      ...{ at: LOGITS, input, inputs: inputsOf(input), offset: 0, inputOffset: 0, bias: null, normed: false },
      results: pass.tokens.map(({ id }) => logits.values[id]),
      explain: async (cell) =>
        (await explainPrediction(pass, architecture, { row, id: pass.tokens[cell].id }, signal))[0],
    };
  }
  const found = productWith(pass, architecture, info.name);
  if (!found) return null;
  const { at, input, kind } = found;
  const [head = 0] = Object.values(part);
  const place = placeOf(pass, architecture, { name: at, row, column: 0 });
  const { heads, columns: width } = place.stage;
  const names = [at, ...kind.stages(place)];
  const shift = kind.bias(place);
  const ofHead = heads > 1 ? part : {};
  const [bias] = await Promise.all([shift ? readWeight(pass, shift, ofHead) : null, pass.read(names, [row], signal)]);
  const offset = heads > 1 ? head * width : 0;
  const results = Array.from(kind.results(place));
  const inputs = inputsOf(input);
  return {
    ...{ at, input, inputs, offset, bias: bias && bias.values },
    results: results.slice(offset, offset + width),
    inputOffset: heads > 1 ? 0 : head * info.shape[1],
    normed: names.length > 2,
    explain: (cell) => {
      const column = offset + cell;
      const of = placeOf(pass, architecture, { name: at, row, column });
      return explainAs(kind, { ...of, served: results[column] }, signal);
    },
  };
}

/**
 * The indices of the largest numbers, the largest first: of the highest logits, or else those farthest from zero.
 * @param {number[]} numbers
 * @param {number} most
 * @param {string} at the stage of the numbers
 */
export function largest(numbers, most, at) {
  const size = (/** @type {number} */ index) => (at === LOGITS ? numbers[index] : Math.abs(numbers[index]));
  return [...numbers.keys()].sort((one, other) => size(other) - size(one)).slice(0, most);
}
