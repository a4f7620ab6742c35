// The arithmetic of attention: scores, the mask, the pattern, and what the heads take from the tokens.

import { quoted, shown } from "../../format.js";
import { mixturePicture } from "../operations/mixture_picture.js";
import { scorePicture } from "../operations/score_picture.js";
import { softmaxPicture } from "../operations/softmax_picture.js";
import { stripsPicture } from "../operations/strips_picture.js";
import { numOf, plain, said, siblingOf, slackOf, sumOfProducts, unitOf } from "./explanation.js";
import { softmax } from "./softmax.js";

/**
 * @import { Kind, Place } from "./explanation.js"
 */

/** The key-value head that a query head reads. @param {Place} place @param {number} kvHeads */
function kvHeadOf({ architecture, head }, kvHeads) {
  return Math.floor(head / (architecture.num_heads / kvHeads));
}

/** What the scores read: the last form of queries and keys. @param {Place} place */
const queriesOf = (place) => siblingOf(place, "attn.rot_q", "attn.q_norm.out", "attn.q") ?? "";
/** @param {Place} place */
const keysOf = (place) => siblingOf(place, "attn.rot_k", "attn.k_norm.out", "attn.k") ?? "";

/** The products of a score, its sum, and how the sum is scaled and capped. @param {Place} place */
function scoreOf(place) {
  const { architecture, row, within: key, head } = place;
  const size = architecture.d_head;
  const kvHead = kvHeadOf(place, architecture.num_kv_heads);
  const products = Array.from({ length: size }, (_, index) => ({
    name: String(index),
    a: numOf(place, queriesOf(place), row, head * size + index),
    b: numOf(place, keysOf(place), key, kvHead * size + index),
  }));
  const sums = sumOfProducts(products);
  const { attention_scale: scale, attention_softcap: cap } = architecture;
  const isRoot = Math.abs(scale - size ** -0.5) < 1e-6;
  const scaled = sums.sum * scale;
  const capped = cap ? cap * Math.tanh(scaled / cap) : scaled;
  const factor = scale === 1 ? null : isRoot ? `÷ √${size}` : `× ${scale.toPrecision(4)}`;
  return { ...sums, products, scale, factor, scaled, cap, capped };
}

/** @type {Kind} */
export const score = {
  async explain(place, read) {
    await read([queriesOf(place)]);
    await read([keysOf(place)], [place.within]);
    const { pass, row, within } = place;
    const { products, formula, terms, rest, sum, size, scale, factor, scaled, cap, capped } = scoreOf(place);
    const [query, key] = [pass.tokens[row], pass.tokens[within]];
    const result = [sum, ...(factor ? [`${factor} =`, scaled] : []), ...(cap ? [`cap ${cap}:`, capped] : [])];
    const words = result.map((each) => (typeof each === "number" ? said(each) : each)).join(" ");
    return {
      sentence: `query of ${quoted(query)} · key of ${quoted(key)}`,
      formula: [
        "q·k = ",
        ...formula,
        " = ",
        { value: sum },
        ...(factor ? [`;  ${factor} = `, { value: scaled }] : []),
        ...(cap ? [`;  ${cap} × tanh(… ÷ ${cap}) = `, { value: capped }] : []),
      ],
      columns: ["number", "query", "key", "product"],
      terms,
      rest,
      computed: capped,
      slack: slackOf(place, size * scale),
      picture: scorePicture({
        label:
          `The query of ${quoted(query)} times the key of ${quoted(key)}, number by number: ` +
          `${products.length} products add up to ${words}.`,
        names: [
          ["query", shown(query)],
          ["key", shown(key)],
        ],
        products,
        result,
      }),
    };
  },
};

/** @type {Kind} */
export const maskedScore = {
  async explain(place, read) {
    await read([siblingOf(place, "attn.scores")]);
    const { pass, row, within } = place;
    const [scores, masked] = ["attn.scores", "attn.attn_scores"].map((part) => numsOfKeys(place, part));
    const from = scores[within];
    const isMasked = !Number.isFinite(place.served);
    const [query, key] = [row, within].map((position) => quoted(pass.tokens[position]));
    const explanation = isMasked
      ? plain(place, `${query} must not look at ${key}, so e^score will be 0`, ["−∞ in place of ", from], null, 0)
      : plain(place, "not masked: the score stays as it is", ["= ", from], from.value, Math.abs(from.value));
    const picture = stripsPicture({
      label:
        `The scores of ${query} for all keys, and after the mask: ${said(from.value)} ` +
        (isMasked ? "becomes −∞." : "stays."),
      rows: [
        { sign: "", name: "scores", nums: scores },
        { sign: "", name: "masked", nums: masked },
      ],
      chosen: within,
      nameOf: (index) => `key ${index} ${quoted(pass.tokens[index])}`,
    });
    return { ...explanation, picture };
  },
};

/** The numbers of a stage of a query for all keys, in the head of a place. @param {Place} place @param {string} part */
function numsOfKeys(place, part) {
  const { pass, row, head, stage } = place;
  const name = siblingOf(place, part) ?? "";
  return pass.tokens.map((_, key) => numOf(place, name, row, head * stage.columns + key));
}

/** @type {Kind} */
export const pattern = {
  async explain(place, read) {
    await read([siblingOf(place, "attn.attn_scores")]);
    const { tokens } = place.pass;
    const nums = numsOfKeys(place, "attn.attn_scores");
    const entries = nums.map((num, key) => ({ name: `${key} ${quoted(tokens[key])}`, num }));
    const share = softmax(place, entries, place.within);
    // the service computes it from scores before they are rounded; the derivative of a share p is p (1 - p)
    const sizes = entries.map(({ num }) => Math.abs(num.value)).filter(Number.isFinite);
    share.slack += 2 * place.served * (1 - place.served) * unitOf(place) * Math.max(...sizes);
    return { ...share, picture: softmaxPicture(entries, place.within, { from: "score", to: "weight" }) };
  },
};

/** @type {Kind} */
export const head = {
  async explain(place, read) {
    const { pass, row, head: at, within } = place;
    await read([siblingOf(place, "attn.pattern")]);
    await read(
      [siblingOf(place, "attn.v")],
      pass.tokens.map(({ position }) => position),
    );
    const sources = sourcesOf(place);
    const products = sources.map(({ name, weight, values }) => ({ name, a: weight, b: values[within] }));
    const { formula, terms, rest, sum, size } = sumOfProducts(products);
    const query = quoted(pass.tokens[row]);
    return {
      sentence: `for each token, how much ${query} attends to it × its value`,
      formula: [...formula, " = ", { value: sum }],
      columns: ["", "weight", "value", "product"],
      terms,
      rest,
      computed: sum,
      // the service may round the weights before it adds
      slack: slackOf(place, size) + size * 2 ** -8,
      picture: mixturePicture({
        label:
          `The values of all tokens, each times how much ${query} attends to it, ` +
          `add up to the output of head ${at}. Number ${within} of it is marked.`,
        sources,
        name: `output of H${at}`,
        chosen: within,
      }),
    };
  },
};

/** What a head reads: the weight and the value of each token. @param {Place} place */
function sourcesOf(place) {
  const { pass, row, head: at, stage } = place;
  const [patterns, values] = [siblingOf(place, "attn.pattern") ?? "", siblingOf(place, "attn.v") ?? ""];
  const first = kvHeadOf(place, pass.stages.get(values)?.heads ?? 1) * stage.columns;
  return pass.tokens.map((token, key) => ({
    name: `${key} ${quoted(token)}`,
    weight: numOf(place, patterns, row, at * pass.tokens.length + key),
    values: Array.from({ length: stage.columns }, (_, index) => numOf(place, values, key, first + index)),
  }));
}
