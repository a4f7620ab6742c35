// The arithmetic of products with weights: queries, keys and values, both ends of the feed-forward network, the outputs
// that are added to the stream, the gains of norms, embeddings, and logits.

import { quoted } from "../../format.js";
import { productPicture } from "../operations/product_picture.js";
import { readWeight } from "../weights.js";
import { numOf, plain, siblingOf, slackOf, sumOfProducts } from "./explanation.js";

/**
 * @import { Numbers } from "../../api.js"
 * @import { Architecture } from "../../answers.js"
 * @import { Explanation, Kind, Num, Place } from "./explanation.js"
 * @import { Pass } from "../pass.js"
 * @import { Weight } from "../weights.js"
 * @typedef {Pick<Place, "pass" | "architecture" | "layer">} Where
 * @typedef {Kind & {
 *   input: (place: Where) => string, weight: (place: Where) => string, bias: (place: Where) => string | null,
 *   isKnown: (place: Where) => boolean, stages: (place: Where) => string[],
 *   results: (place: Place) => Numbers | number[],
 * }} ProductKind `input`, `weight` and `bias`: the names of the stage and of the weights; `stages`: all that it reads;
 *   `results`: what the service computed for all columns
 */

const QUANTIZED = 0.02; // of the sizes of the terms: where weights are quantized, so may be what they multiply

/** What attention reads: a norm, or the stream itself. @param {Where} place */
function attentionInput(place) {
  const { norm_placement: placement, unread } = place.architecture;
  const isNormed = (placement === "pre" || placement === "both") && !unread?.includes("ln1");
  return (isNormed && siblingOf(place, "ln1.out")) || siblingOf(place, "resid_pre") || "embed";
}

/** What the feed-forward network reads. @param {Where} place */
function mlpInput(place) {
  const { norm_placement: placement, sums } = place.architecture;
  if (sums?.["mlp.in"]) return siblingOf(place, ...sums["mlp.in"]) ?? "";
  if (placement === "post") return siblingOf(place, "ln1.out") ?? "";
  if (placement === "output") return siblingOf(place, "resid_mid") ?? "";
  return siblingOf(place, "ln2.out", "ln1.out", "resid_mid") ?? "";
}

/** A norm that only divides: its result × its divisor is what it read. @param {Where} place */
const isRms = ({ architecture }) => architecture.norm === "rms";

/**
 * A product of a vector with a column of weights: `input` is the stage of the vector, `weight` and `bias` the names in
 * the block. `norm`: the name of the norm that follows, if the network may have one; the service then shows what the
 * norm divides the product by, and the result of that.
 * @typedef {{
 *   input: (place: Where) => string, weight: (place: Where) => string, dim: string,
 *   bias: (place: Where) => string | null, byHead?: string, scale?: (place: Where) => number, norm?: string,
 * }} ProductOptions
 * @param {ProductOptions} options
 * @returns {ProductKind}
 */
function product({ input, weight, dim, bias, byHead, scale = () => 1, norm }) {
  const weightOf = (/** @type {Where} */ place) => `blocks.${place.layer}.${weight(place)}`;
  const biasOf = (/** @type {Where} */ place) => bias(place) && `blocks.${place.layer}.${bias(place)}`;
  const norms = (/** @type {Where} */ place) =>
    norm ? ["normalized", "scale"].flatMap((part) => siblingOf(place, `${norm}.${part}`) ?? []) : [];
  const stages = (/** @type {Where} */ place) => [input(place), ...norms(place)];
  return {
    input,
    weight: weightOf,
    bias: biasOf,
    isKnown: (place) => place.pass.stages.has(input(place)) && (norms(place).length === 0 || isRms(place)),
    stages,
    results(place) {
      const [normalized, divisor] = norms(place).map((name) => place.pass.row(name, place.row) ?? []);
      if (!normalized) return place.pass.row(place.stage.name, place.row) ?? [];
      return Array.from(normalized, (value) => value * divisor[0]);
    },
    async explain(place, read) {
      await read(stages(place));
      const part = { [dim]: byHead ? place.within : place.column, ...(byHead && { [byHead]: place.head }) };
      const [matrix, shift] = await readWeights(place, [weightOf(place), biasOf(place)], part);
      const products = productsOf(place, input(place), matrix);
      const from = `${input(place).replace(/^blocks\.\d+\./, "")} × ${weight(place).split(".").at(-1)}`;
      const factor = norms(place).length === 0 ? scale(place) : 1; // the norm comes before the scale
      return {
        ...weighted(place, products, matrix, shift?.values[0] ?? null, factor, from),
        picture: productPicture(place, products, { matrix, shift, hasHead: byHead !== undefined }),
      };
    },
  };
}

/**
 * The kind of a stage that is a product, or what a norm gives from one, if the network has this norm.
 * @param {ProductKind} kind
 * @param {string} norm
 * @param {(place: Place) => number} scale
 * @returns {Kind}
 */
function normed(kind, norm, scale) {
  return {
    async explain(place, read) {
      const stage = siblingOf(place, `${norm}.out`);
      if (!stage) return kind.explain(place, read);
      await read([stage]);
      const [from, factor] = [numOf(place, stage, place.row, place.column), scale(place)];
      const computed = from.value * factor;
      const formula = ["= ", from, ...(factor === 1 ? [] : [` × ${factor}`])];
      return plain(place, "the result of the norm before it", formula, computed, Math.abs(computed), 1);
    },
  };
}

/**
 * The same part of a weight and, if there is one, of its bias.
 * @param {Place} place
 * @param {(string | null)[]} names
 * @param {Record<string, number>} part
 */
function readWeights({ pass }, names, part) {
  return Promise.all(names.filter((name) => name !== null).map((name) => readWeight(pass, name, part)));
}

/**
 * The numbers of a vector, each with the weight that it is multiplied by.
 * @param {Place} place
 * @param {string} input the stage of the vector
 * @param {Weight} weight
 */
export function productsOf(place, input, { values }) {
  return values.map((value, index) => ({
    name: String(index),
    a: numOf(place, input, place.row, index),
    b: { value },
  }));
}

/**
 * @param {Place} place
 * @param {{ name: string, a: Num, b: Num }[]} products
 * @param {Weight} matrix
 * @param {number | null} shift
 * @param {number} factor
 * @param {string} sentence
 * @returns {Explanation}
 */
export function weighted(place, products, matrix, shift, factor, sentence) {
  const { formula, terms, rest, sum, size } = sumOfProducts(products);
  const computed = (sum + (shift ?? 0)) * factor;
  return {
    sentence: `${sentence}: ${products.length} products, the largest first`,
    formula: [
      ...formula,
      " = ",
      { value: sum },
      ...(shift === null ? [] : ["; + bias ", { value: shift }]),
      ...(factor === 1 ? [] : [`; × ${factor}`]),
      ...(shift === null && factor === 1 ? [] : [" = ", { value: computed }]),
    ],
    columns: ["number", "input", "weight", "product"],
    terms,
    rest,
    computed,
    slack: slackOf(place, size * Math.abs(factor), 1) + (matrix.quantization ? QUANTIZED * size : 0),
  };
}

/** @param {string} letter */
const projection = (letter) =>
  product({
    input: attentionInput,
    weight: () => `attn.W_${letter}`,
    bias: ({ architecture: a }) => (a.qkv_bias ? `attn.b_${letter}` : null),
    dim: "d_head",
    byHead: letter === "Q" ? "head" : "kv_head",
  });
const [query, key, value] = ["Q", "K", "V"].map(projection);

const inBias =
  (/** @type {string} */ name) =>
  (/** @type {Where} */ { architecture: a }) =>
    a.mlp_bias ? name : null;

/** The input of the activation: of the gate, if there is one. */
const pre = product({
  input: mlpInput,
  weight: ({ architecture: a }) => (a.gated ? "mlp.W_gate" : "mlp.W_in"),
  bias: (place) => inBias(place.architecture.gated ? "mlp.b_gate" : "mlp.b_in")(place),
  dim: "d_mlp",
});
const preLinear = product({ input: mlpInput, weight: () => "mlp.W_in", bias: inBias("mlp.b_in"), dim: "d_mlp" });
const router = product({ input: mlpInput, weight: () => "mlp.W_gate", bias: () => null, dim: "expert" });
const residualScale = (/** @type {Where} */ { architecture: a }) => a.residual_scale;
const heads = product({
  input: (place) => siblingOf(place, "attn.z") ?? "",
  weight: () => "attn.W_O",
  bias: ({ architecture: a }) => (a.attention_out_bias ? "attn.b_O" : null),
  dim: "d_model",
  scale: residualScale,
  norm: "ln1_post",
});
const neurons = product({
  input: (place) => siblingOf(place, "mlp.post") ?? "",
  weight: () => "mlp.W_out",
  bias: inBias("mlp.b_out"),
  dim: "d_model",
  scale: residualScale,
  norm: "ln2_post",
});

/** Part of a block → the product that it is, before a norm. @type {Record<string, ProductKind>} */
const PRODUCTS = {
  "attn.q": query,
  "attn.k": key,
  "attn.v": value,
  attn_out: heads,
  "mlp.pre": pre,
  "mlp.pre_linear": preLinear,
  "mlp.router_logits": router,
  mlp_out: neurons,
};

/**
 * The stage that is the product with a weight, and its kind, or null if no stage is one.
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {string} weight
 */
export function productWith(pass, architecture, weight) {
  const where = { pass, architecture, layer: Number(/^blocks\.(\d+)\./.exec(weight)?.[1]) };
  for (const [part, kind] of Object.entries(PRODUCTS)) {
    const at = siblingOf(where, part);
    if (at && kind.isKnown(where) && kind.weight(where) === weight) return { at, kind, input: kind.input(where) };
  }
  return null;
}

/** The index of a gain: those of heads have two dims, or one that all heads share. @type {Kind} */
export const gained = {
  async explain(place, read) {
    const { architecture, part, stage, row, column } = place;
    const norm = stage.name.replace(/\.out$/, "");
    const hasBias = architecture.norm === "layer" && !part.startsWith("attn.");
    await read([`${norm}.normalized`]);
    const from = numOf(place, `${norm}.normalized`, row, column);
    const [gains, shifts] = await readWeights(place, [`${norm}.w`, hasBias ? `${norm}.b` : null], {});
    const at = gains.values.length === stage.columns ? place.within : column;
    const gain = gains.values[at];
    const shift = shifts?.values[at] ?? null;
    const computed = from.value * gain + (shift ?? 0);
    const sentence = `normalized × gain${shift === null ? "" : " + bias"}`;
    const plus = shift === null ? [] : [" + ", { value: shift }];
    const formula = [from, " × ", { value: gain }, ...plus, " = ", { value: computed }];
    return plain(place, sentence, formula, computed, Math.abs(computed), 1);
  },
};

/** @type {Kind} */
const embedding = {
  async explain(place) {
    const token = place.pass.tokens[place.row];
    const part = { d_vocab: token.id, d_model: place.column };
    const [weight] = (await readWeight(place.pass, "embed.W_E", part)).values;
    const sentence = `row ${token.id} of the embedding table, that of ${quoted(token)}`;
    return plain(place, sentence, ["W_E = ", { value: weight }], weight, Math.abs(weight));
  },
};

/** Part of a network → the arithmetic of the stage that a weight gives. @type {Record<string, Kind | undefined>} */
export const WEIGHTED = {
  ...PRODUCTS,
  attn_out: normed(heads, "ln1_post", residualScale),
  mlp_out: {
    ...normed(neurons, "ln2_post", residualScale),
    isKnown: (place) => siblingOf(place, "mlp.post", "ln2_post.out") !== null, // of experts, only the sum is a stage
  },
  embed: embedding,
};
