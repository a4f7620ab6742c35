// Positions in the address: read them, and notice those that belong to an earlier prompt.

/** @import { ViewState } from "../view.js" */

/**
 * The position that a text names, from 0 to `count` − 1. Raises an error that the page shows.
 * @param {string} text
 * @param {number} count
 */
export function readPosition(text, count) {
  if (!isPosition(text, count))
    throw new Error(`position: ${text} is out of range; there are the positions 0 to ${count - 1}.`);
  return Number(text);
}

/**
 * Whether a text is a position from 0 to `count` − 1.
 * @param {string} text
 * @param {number} count
 */
export function isPosition(text, count) {
  return /^\d+$/.test(text) && Number(text) < count;
}

/**
 * Whether the user has run another prompt, or chosen another model, since the view was shown.
 * @param {ViewState | null | undefined} before the state that was shown last, if there is one
 * @param {ViewState} now
 */
export function isOther(before, now) {
  if (!before) return false;
  return JSON.stringify(before.prompt) !== JSON.stringify(now.prompt) || before.model !== now.model;
}
