// The arithmetic of a softmax: of scores, of experts, and of the logits of a vocabulary.

import { LISTED, MOST_TERMS, slackOf } from "./explanation.js";

/** @import { Explanation, Num, Place, Term } from "./explanation.js" */

/**
 * The shares of a softmax, the powers that give them, and the largest number, which is subtracted first as every
 * implementation does.
 * @param {{ num: Num }[]} entries
 */
export function sharesOf(entries) {
  const largest = entries.reduce((most, { num }) => (num.value > most ? num.value : most), -Infinity);
  const powers = entries.map(({ num }) => (Number.isFinite(num.value) ? Math.exp(num.value - largest) : 0));
  const sum = powers.reduce((total, power) => total + power, 0);
  return { largest, powers, sum };
}

/**
 * A softmax with its columns: number, e^number, share.
 * @param {Place} place
 * @param {{ name: string, num: Num }[]} entries
 * @param {number} chosen
 * @returns {Explanation}
 */
export function softmax(place, entries, chosen) {
  const finite = entries.filter(({ num }) => Number.isFinite(num.value));
  const { largest, powers, sum } = sharesOf(entries);
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
