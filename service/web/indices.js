// Numbers in the address that name a layer, a head or a position, and whether they belong to an earlier prompt. A wrong
// one is an error, and never another number.

/** @import { ViewState } from "./view.js" */

/**
 * The index that a text names. `name`: "layer", for example; `size`: how many there are.
 * @param {string} text
 * @param {string} name
 * @param {number} size
 */
export function readIndex(text, name, size) {
  if (isPosition(text, size)) return Number(text);
  throw new Error(`${name}: “${text}” is not one of the ${name}s 0 to ${size - 1}.`);
}

/**
 * One of the names of some choices.
 * @template {string} Choice
 * @param {string} text
 * @param {string} name
 * @param {Record<Choice, unknown>} choices
 * @returns {Choice}
 */
export function readChoice(text, name, choices) {
  if (Object.hasOwn(choices, text)) return /** @type {Choice} */ (text);
  throw new Error(`${name}: “${text}” is not known. There are: ${Object.keys(choices).join(", ")}.`);
}

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
 * Whether a text is a position, or another index, from 0 to `count` − 1.
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
