// The arithmetic of attention: scores, the mask, the pattern, and what the heads take from the tokens.

import { quoted } from "../../format.js";
import { LISTED, MOST_TERMS, numOf, siblingOf, slackOf, sumOfProducts, unitOf } from "./explanation.js";

/**
 * @import { Kind, Place, Term } from "./explanation.js"
 */

/** The key-value head that a query head reads. @param {Place} place @param {number} kvHeads */
function kvHeadOf({ architecture, head }, kvHeads) {
  return Math.floor(head / (architecture.num_heads / kvHeads));
}

/** What the scores read: the last form of queries and keys. @param {Place} place */
const queriesOf = (place) => siblingOf(place, "attn.rot_q", "attn.q_norm.out", "attn.q") ?? "";
/** @param {Place} place */
const keysOf = (place) => siblingOf(place, "attn.rot_k", "attn.k_norm.out", "attn.k") ?? "";

/** @type {Kind} */
export const score = {
  needs: (place) => [
    { stages: [queriesOf(place)], rows: [place.row] },
    { stages: [keysOf(place)], rows: [place.within] },
  ],
  explain(place) {
    const { pass, architecture, row, within: key, head } = place;
    const [queries, keys] = [queriesOf(place), keysOf(place)];
    const numKv = architecture.num_kv_heads;
    const size = architecture.d_head;
    const kvHead = kvHeadOf(place, numKv);
    const products = Array.from({ length: size }, (_, index) => ({
      name: String(index),
      a: numOf(place, queries, row, head * size + index),
      b: numOf(place, keys, key, kvHead * size + index),
    }));
    const { formula, terms, rest, sum, size: sizes } = sumOfProducts(products);
    const scale = architecture.attention_scale;
    const isRoot = Math.abs(scale - size ** -0.5) < 1e-6;
    const scaled = sum * scale;
    const cap = architecture.attention_softcap;
    const computed = cap ? cap * Math.tanh(scaled / cap) : scaled;
    return {
      sentence: `query of ${quoted(pass.tokens[row])} · key of ${quoted(pass.tokens[key])}`,
      formula: [
        "q·k = ",
        ...formula,
        " = ",
        { value: sum },
        ...(scale === 1 ? [] : [isRoot ? `;  ÷ √${size} = ` : `;  × ${scale.toPrecision(4)} = `, { value: scaled }]),
        ...(cap ? [`;  ${cap} × tanh(… ÷ ${cap}) = `, { value: computed }] : []),
      ],
      columns: ["number", "query", "key", "product"],
      terms,
      rest,
      computed,
      slack: slackOf(place, sizes * scale),
    };
  },
};

/** @type {Kind} */
export const maskedScore = {
  needs: (place) => [{ stages: [siblingOf(place, "attn.scores") ?? ""], rows: [place.row] }],
  explain(place) {
    const from = numOf(place, siblingOf(place, "attn.scores") ?? "", place.row, place.column);
    const isMasked = !Number.isFinite(place.served);
    const { tokens } = place.pass;
    return {
      sentence: isMasked
        ? `${quoted(tokens[place.row])} must not look at ${quoted(tokens[place.within])}, so e^score will be 0`
        : "not masked: the score stays as it is",
      formula: isMasked ? ["−∞ in place of ", from] : ["= ", from],
      columns: [],
      terms: [],
      rest: "",
      computed: isMasked ? null : from.value,
      slack: slackOf(place, Math.abs(from.value)),
    };
  },
};

/** @type {Kind} */
export const pattern = {
  needs: (place) => [{ stages: [siblingOf(place, "attn.attn_scores") ?? ""], rows: [place.row] }],
  explain(place) {
    const name = siblingOf(place, "attn.attn_scores") ?? "";
    const { pass, row, within: key, head, stage } = place;
    const scores = Array.from({ length: stage.columns }, (_, at) => numOf(place, name, row, head * stage.columns + at));
    const share = softmax(
      place,
      scores.map((num, at) => ({ name: `${at} ${quoted(pass.tokens[at])}`, num })),
      key,
    );
    // the service computes it from scores before they are rounded; the derivative of a share p is p (1 - p)
    const sizes = scores.map(({ value }) => Math.abs(value)).filter(Number.isFinite);
    share.slack += 2 * place.served * (1 - place.served) * unitOf(place) * Math.max(...sizes);
    return share;
  },
};

/**
 * A softmax with its columns: number, e^number, share. The largest is subtracted first, as every implementation does.
 * @param {Place} place
 * @param {{ name: string, num: import("./explanation.js").Num }[]} entries
 * @param {number} chosen
 * @returns {import("./explanation.js").Explanation}
 */
export function softmax(place, entries, chosen) {
  const finite = entries.filter(({ num }) => Number.isFinite(num.value));
  const largest = finite.reduce((most, { num }) => Math.max(most, num.value), -Infinity);
  const powers = entries.map(({ num }) => (Number.isFinite(num.value) ? Math.exp(num.value - largest) : 0));
  const sum = powers.reduce((total, power) => total + power, 0);
  const computed = powers[chosen] / sum;
  const order = [...entries.keys()].sort((a, b) => powers[b] - powers[a] || a - b);
  const rank = order.indexOf(chosen);
  if (rank >= LISTED) order.splice(LISTED - 1, 0, ...order.splice(rank, 1)); // the chosen one is always listed
  const left = order.slice(LISTED);
  /** @type {Term[]} */
  const terms = order.slice(0, MOST_TERMS).map((index) => ({
    name: entries[index].name,
    cells: [entries[index].num, { value: powers[index] }, { value: powers[index] / sum }],
    share: powers[index] / sum,
  }));
  const leftShare = left.reduce((total, index) => total + powers[index], 0) / sum;
  return {
    sentence: `softmax over ${finite.length} numbers; the largest is subtracted from each first`,
    formula: [
      "e^(",
      entries[chosen].num,
      " − ",
      { value: largest },
      ") ÷ Σ = ",
      { value: powers[chosen] },
      " ÷ ",
      { value: sum },
      " = ",
      { value: computed },
    ],
    columns: ["", "number", "e^(number − largest)", "÷ Σ"],
    terms,
    rest: left.length > 0 ? `${left.length} others share ${leftShare.toPrecision(3)}.` : "",
    computed,
    slack: slackOf(place, computed, 1),
  };
}

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
    const { pass, row, head: at, within, stage } = place;
    const [patterns, values] = [siblingOf(place, "attn.pattern") ?? "", siblingOf(place, "attn.v") ?? ""];
    const kvHeads = pass.stages.get(values)?.heads ?? 1;
    const kvHead = kvHeadOf(place, kvHeads);
    const count = pass.tokens.length;
    const products = pass.tokens.map((token, key) => ({
      name: `${key} ${quoted(token)}`,
      a: numOf(place, patterns, row, at * count + key),
      b: numOf(place, values, key, kvHead * stage.columns + within),
    }));
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
};
