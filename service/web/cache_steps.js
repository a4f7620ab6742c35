// The steps of a generation as figures: what each step computes, what it reads from the cache, and what the cache
// saves.

/**
 * @import { GenerateAnswer, Prediction, Token } from "./answers.js"
 * @typedef {{
 *   positions: number[], isPrompt: boolean, read: number, stored: number, computed: number, withoutCache: number,
 *   chosen: (Token & { position: number }) | null, top: Prediction[],
 * }} Step
 * @typedef {{ from: number, to: number, token: Token | null }} Column `token`: null for several positions
 * @typedef {"computed" | "read" | "chosen" | "none"} Role
 */

/**
 * Positions as text: "0 to 8", or "9".
 * @param {number[]} positions
 */
export function rangeOf(positions) {
  const [first, last] = [positions[0], positions[positions.length - 1]];
  return first === last ? String(first) : `${first} to ${last}`;
}

/**
 * The steps of an answer of POST /generate with `echo`, `logprobs` and `trace`. For each step: `positions` that it
 * computes, `read`: the number of positions whose keys and values it reads from the cache, `stored`: how many are in
 * the cache after it, `computed` and `withoutCache`: how many positions were computed so far, and would have been
 * without a cache, `chosen`: the token that it chooses, or null while a part of the prompt is computed, and `top`: its
 * most likely tokens.
 * @param {GenerateAnswer} answer
 * @returns {Step[]}
 */
export function stepsOf({ logprobs: tokens, trace, usage }) {
  let [computed, withoutCache] = [0, 0];
  return trace.map(({ positions, predictions }) => {
    const last = positions[positions.length - 1];
    const isPrompt = positions[0] < usage.prompt_tokens;
    computed += positions.length;
    withoutCache += last + 1;
    return {
      positions,
      isPrompt,
      read: positions[0],
      stored: last + 1,
      computed,
      withoutCache,
      chosen: last >= usage.prompt_tokens - 1 ? { ...tokens[last + 1], position: last + 1 } : null,
      top: predictions[predictions.length - 1].top,
    };
  });
}

const MAX_SINGLE = 24; // longer prompts have one column for their first tokens
const KEPT = 6;

/**
 * The columns of the picture.
 * @param {Token[]} tokens
 * @param {number} numPrompt
 * @returns {Column[]}
 */
export function columnsOf(tokens, numPrompt) {
  const single = (/** @type {number} */ position) => ({ from: position, to: position, token: tokens[position] });
  const grouped = numPrompt > MAX_SINGLE ? numPrompt - KEPT : 0;
  const group = grouped > 0 ? [{ from: 0, to: grouped - 1, token: null }] : [];
  return [...group, ...tokens.slice(grouped).map((_, index) => single(grouped + index))];
}

/**
 * What a step does with the positions of a column.
 * @param {Step} step
 * @param {Column} column
 * @returns {Role}
 */
export function roleOf(step, { from, to }) {
  const [first, last] = [step.positions[0], step.positions[step.positions.length - 1]];
  if (to >= first && from <= last) return "computed";
  if (to < first) return "read";
  return step.chosen?.position === from ? "chosen" : "none";
}
