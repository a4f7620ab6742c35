// The arithmetic of products with weights: queries, keys and values, both ends of the feed-forward network, the outputs
// that are added to the stream, the gains of norms, embeddings, and logits.

import { quoted } from "../../format.js";
import { numOf, siblingOf, slackOf, sumOfProducts } from "./explanation.js";

/**
 * @import { Explanation, Kind, Num, Place } from "./explanation.js"
 * @import { Weight } from "../weights.js"
 */

const QUANTIZED = 0.02; // of the sizes of the terms: where weights are quantized, so may be what they multiply

/** What attention reads: a norm, or the stream itself. @param {Place} place */
function attentionInput(place) {
  const { norm_placement: placement, unread } = place.architecture;
  const isNormed = (placement === "pre" || placement === "both") && !unread?.includes("ln1");
  return (isNormed && siblingOf(place, "ln1.out")) || siblingOf(place, "resid_pre") || "embed";
}

/** What the feed-forward network reads. @param {Place} place */
function mlpInput(place) {
  const { norm_placement: placement, sums } = place.architecture;
  if (sums?.["mlp.in"]) return siblingOf(place, ...sums["mlp.in"]) ?? "";
  if (placement === "post") return siblingOf(place, "ln1.out") ?? "";
  if (placement === "output") return siblingOf(place, "resid_mid") ?? "";
  return siblingOf(place, "ln2.out", "ln1.out", "resid_mid") ?? "";
}

/**
 * A product of a vector with a column of weights: `input` is the stage of the vector, `weight` and `bias` the names in
 * the block. `normed`: the stage of the norm that follows, if the network has one, from which the number comes instead.
 * @param {{
 *   input: (place: Place) => string, weight: (place: Place) => string, dim: string,
 *   bias: (place: Place) => string | null, byHead?: string, scale?: (place: Place) => number, normed?: string,
 * }} product
 * @returns {Kind}
 */
function product({ input, weight, dim, bias, byHead, scale = () => 1, normed }) {
  const prefix = (/** @type {Place} */ { layer }) => (layer === null ? "" : `blocks.${layer}.`);
  const norm = (/** @type {Place} */ place) => (normed ? siblingOf(place, normed) : null);
  const partOf = (/** @type {Place} */ place) => ({
    [dim]: byHead ? place.within : place.column,
    ...(byHead && { [byHead]: place.head }),
  });
  return {
    needs: (place) => [{ stages: [norm(place) ?? input(place)], rows: [place.row] }],
    weights(place) {
      if (norm(place)) return [];
      const part = partOf(place);
      const shift = bias(place);
      return [{ name: prefix(place) + weight(place), part }, ...(shift ? [{ name: prefix(place) + shift, part }] : [])];
    },
    explain(place) {
      const after = norm(place);
      const factor = scale(place);
      if (after) return same(place, numOf(place, after, place.row, place.column), factor);
      const [matrix, shift] = place.weights;
      const from = input(place);
      const products = matrix.values.map((value, index) => ({
        name: String(index),
        a: numOf(place, from, place.row, index),
        b: { value },
      }));
      return weighted(
        place,
        products,
        matrix,
        shift?.values[0] ?? null,
        factor,
        `${from.replace(/^blocks\.\d+\./, "")} × ${weight(place).split(".").at(-1)}`,
      );
    },
  };
}

/**
 * @param {Place} place
 * @param {Num} from
 * @param {number} factor
 * @returns {Explanation}
 */
function same(place, from, factor) {
  const computed = from.value * factor;
  return {
    sentence: "the result of the norm before it",
    formula: ["= ", from, ...(factor === 1 ? [] : [` × ${factor}`])],
    columns: [],
    terms: [],
    rest: "",
    computed,
    slack: slackOf(place, Math.abs(computed), 1),
  };
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
export const [query, key, value] = ["Q", "K", "V"].map(projection);

const inBias =
  (/** @type {string} */ name) =>
  (/** @type {Place} */ { architecture: a }) =>
    a.mlp_bias ? name : null;

/** The input of the activation: of the gate, if there is one. */
export const pre = product({
  input: mlpInput,
  weight: ({ architecture: a }) => (a.gated ? "mlp.W_gate" : "mlp.W_in"),
  bias: (place) => inBias(place.architecture.gated ? "mlp.b_gate" : "mlp.b_in")(place),
  dim: "d_mlp",
});
export const preLinear = product({ input: mlpInput, weight: () => "mlp.W_in", bias: inBias("mlp.b_in"), dim: "d_mlp" });
export const router = product({ input: mlpInput, weight: () => "mlp.W_gate", bias: () => null, dim: "expert" });
const residualScale = (/** @type {Place} */ { architecture: a }) => a.residual_scale;
export const attentionOutput = product({
  input: (place) => siblingOf(place, "attn.z") ?? "",
  weight: () => "attn.W_O",
  bias: ({ architecture: a }) => (a.attention_out_bias ? "attn.b_O" : null),
  dim: "d_model",
  scale: residualScale,
  normed: "ln1_post.out",
});
const output = product({
  input: (place) => siblingOf(place, "mlp.post") ?? "",
  weight: () => "mlp.W_out",
  bias: inBias("mlp.b_out"),
  dim: "d_model",
  scale: residualScale,
  normed: "ln2_post.out",
});

/** Of experts, only the sum is a stage. @type {Kind} */
export const mlpOutput = {
  ...output,
  isKnown: (place) => siblingOf(place, "mlp.post", "ln2_post.out") !== null,
};

/** @param {Place} place */
const normOf = ({ stage }) => stage.name.replace(/\.out$/, "");
/** @param {Place} place */
const hasNormBias = ({ architecture: a, part }) => a.norm === "layer" && !part.startsWith("attn.");

/** The index of a gain: those of heads have two dims, or one that all heads share. @type {Kind} */
export const gained = {
  needs: (place) => [{ stages: [`${normOf(place)}.normalized`], rows: [place.row] }],
  weights: (place) => [
    { name: `${normOf(place)}.w`, part: {} },
    ...(hasNormBias(place) ? [{ name: `${normOf(place)}.b`, part: {} }] : []),
  ],
  explain(place) {
    const from = numOf(place, `${normOf(place)}.normalized`, place.row, place.column);
    const [gains, shifts] = place.weights;
    const at = gains.values.length === place.stage.columns ? place.within : place.column;
    const gain = gains.values[at];
    const shift = shifts?.values[at] ?? null;
    const computed = from.value * gain + (shift ?? 0);
    return {
      sentence: `normalized × gain${shift === null ? "" : " + bias"}`,
      formula: [
        from,
        " × ",
        { value: gain },
        ...(shift === null ? [] : [" + ", { value: shift }]),
        " = ",
        { value: computed },
      ],
      columns: [],
      terms: [],
      rest: "",
      computed,
      slack: slackOf(place, Math.abs(computed), 1),
    };
  },
};

/** @type {Kind} */
export const embedding = {
  needs: () => [],
  weights: ({ pass, row, column }) => [{ name: "embed.W_E", part: { d_vocab: pass.tokens[row].id, d_model: column } }],
  explain(place) {
    const [{ values }] = place.weights;
    const token = place.pass.tokens[place.row];
    return {
      sentence: `row ${token.id} of the embedding table, that of ${quoted(token)}`,
      formula: ["W_E = ", { value: values[0] }],
      columns: [],
      terms: [],
      rest: "",
      computed: values[0],
      slack: slackOf(place, Math.abs(values[0])),
    };
  },
};
