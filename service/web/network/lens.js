// What the network would predict after each layer (the logit lens), for the tokens that are followed.

import { cached } from "../passes.js";

/**
 * @import { PositionPredictions } from "../answers.js"
 * @import { Pass } from "./pass.js"
 * @typedef {{ top: PositionPredictions["top"], isFinal: boolean }} Guess `isFinal`: it is what the network predicts in
 *   the end
 * @typedef {{ guesses: Guess[], before: Guess[] | null }} Lens the guess before the first layer, then that after each
 *   layer; `before`: without the edits
 */

const TOP_K = 5;
const BEHIND = /^(ln_final\.|logits)/; // stages behind the residuals that the lens decodes

/** @type {WeakMap<Pass, Map<number, Guess[]>>} */
const kept = new WeakMap();

/**
 * The guesses at a position, or null if an edit acts behind the last layer, where the lens does not see it.
 * @param {Pass} pass
 * @param {number} row
 * @param {AbortSignal} signal
 */
export async function readGuesses(pass, row, signal) {
  if (pass.edits.some(({ stages }) => stages.some((stage) => BEHIND.test(stage)))) return null;
  const rows = kept.get(pass) ?? new Map();
  kept.set(pass, rows);
  if (!rows.has(row)) {
    const asked = { ...pass.body, method: "logit_lens", positions: [row], top_k: TOP_K };
    const { layers } = await cached("/attribute", asked, signal);
    const guesses = layers.map(({ positions: [{ top }], final: [{ rank }] }) => ({ top, isFinal: rank === 0 }));
    rows.set(row, guesses);
  }
  return /** @type {Guess[]} */ (rows.get(row));
}

/**
 * The guesses at a position that were read.
 * @param {Pass} pass
 * @param {number} row
 */
export const guessesOf = (pass, row) => kept.get(pass)?.get(row) ?? null;

/**
 * The first guess from which on all are the final one: 0 is before the first layer, 1 after it. Null if the lens does
 * not end with the prediction of the network.
 * @param {Guess[]} guesses
 */
export function decidingOf(guesses) {
  const lastOther = guesses.findLastIndex(({ isFinal }) => !isFinal);
  return lastOther === guesses.length - 1 ? null : lastOther + 1;
}
