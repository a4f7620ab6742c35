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
  needs: (place) => [
    { stages: [queriesOf(place)], rows: [place.row] },
    { stages: [keysOf(place)], rows: [place.within] },
  ],
  explain(place) {
    const { pass, row, within: key } = place;
    const { formula, terms, rest, sum, size, scale, factor, scaled, cap, capped } = scoreOf(place);
    return {
      sentence: `query of ${quoted(pass.tokens[row])} · key of ${quoted(pass.tokens[key])}`,
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
    };
  },
  picture(place) {
    const { pass, row, within: key } = place;
    const { products, sum, factor, scaled, cap, capped } = scoreOf(place);
    const result = [sum, ...(factor ? [`${factor} =`, scaled] : []), ...(cap ? [`cap ${cap}:`, capped] : [])];
    const [query, other] = [pass.tokens[row], pass.tokens[key]];
    const words = result.map((each) => (typeof each === "number" ? said(each) : each)).join(" ");
    return scorePicture({
      label:
        `The query of ${quoted(query)} times the key of ${quoted(other)}, number by number: ` +
        `${products.length} products add up to ${words}.`,
      names: [
        ["query", shown(query)],
        ["key", shown(other)],
      ],
      products,
      result,
    });
  },
};

/** @type {Kind} */
export const maskedScore = {
  needs: (place) => [{ stages: [siblingOf(place, "attn.scores") ?? ""], rows: [place.row] }],
  explain(place) {
    const from = numOf(place, siblingOf(place, "attn.scores") ?? "", place.row, place.column);
    const isMasked = !Number.isFinite(place.served);
    const { tokens } = place.pass;
    const size = Math.abs(from.value);
    if (!isMasked) return plain(place, "not masked: the score stays as it is", ["= ", from], from.value, size);
    const [query, key] = [place.row, place.within].map((position) => quoted(tokens[position]));
    const sentence = `${query} must not look at ${key}, so e^score will be 0`;
    return plain(place, sentence, ["−∞ in place of ", from], null, size);
  },
  picture(place) {
    const { pass, row, head, within, stage, served } = place;
    const [scores, masked] = ["attn.scores", "attn.attn_scores"].map((part) =>
      pass.tokens.map((_, key) => numOf(place, siblingOf(place, part) ?? "", row, head * stage.columns + key)),
    );
    return stripsPicture({
      label:
        `The scores of ${quoted(pass.tokens[row])} for all keys, and after the mask: ${said(scores[within].value)} ` +
        (Number.isFinite(served) ? "stays." : "becomes −∞."),
      rows: [
        { sign: "", name: "scores", nums: scores },
        { sign: "", name: "masked", nums: masked },
      ],
      chosen: within,
      nameOf: (key) => `key ${key} ${quoted(pass.tokens[key])}`,
    });
  },
};

/** The scores of a query for all keys. @param {Place} place */
function maskedScores(place) {
  const { pass, row, head, stage } = place;
  return pass.tokens.map((token, key) => ({
    name: `${key} ${quoted(token)}`,
    num: numOf(place, siblingOf(place, "attn.attn_scores") ?? "", row, head * stage.columns + key),
  }));
}

/** @type {Kind} */
export const pattern = {
  needs: (place) => [{ stages: [siblingOf(place, "attn.attn_scores") ?? ""], rows: [place.row] }],
  explain(place) {
    const entries = maskedScores(place);
    const share = softmax(place, entries, place.within);
    // the service computes it from scores before they are rounded; the derivative of a share p is p (1 - p)
    const sizes = entries.map(({ num }) => Math.abs(num.value)).filter(Number.isFinite);
    share.slack += 2 * place.served * (1 - place.served) * unitOf(place) * Math.max(...sizes);
    return share;
  },
  picture: (place) => softmaxPicture(maskedScores(place), place.within, { from: "score", to: "weight" }),
};

/** @type {Kind} */
export const head = {
  needs(place) {
    const rows = place.pass.tokens.map(({ position }) => position);
    return [
      { stages: [siblingOf(place, "attn.pattern") ?? ""], rows: [place.row] },
      { stages: [siblingOf(place, "attn.v") ?? ""], rows },
    ];
  },
  explain(place) {
    const { pass, row, within } = place;
    const products = sourcesOf(place).map(({ name, weight, values }) => ({ name, a: weight, b: values[within] }));
    const { formula, terms, rest, sum, size } = sumOfProducts(products);
    return {
      sentence: `for each token, how much ${quoted(pass.tokens[row])} attends to it × its value`,
      formula: [...formula, " = ", { value: sum }],
      columns: ["", "weight", "value", "product"],
      terms,
      rest,
      computed: sum,
      // the service may round the weights before it adds
      slack: slackOf(place, size) + size * 2 ** -8,
    };
  },
  picture(place) {
    const { pass, row, head: at, within } = place;
    return mixturePicture({
      label:
        `The values of all tokens, each times how much ${quoted(pass.tokens[row])} attends to it, ` +
        `add up to the output of head ${at}. Number ${within} of it is marked.`,
      sources: sourcesOf(place),
      name: `output of H${at}`,
      chosen: within,
    });
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
