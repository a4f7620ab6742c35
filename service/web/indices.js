// Numbers in the address that name a layer, a head or a position. A wrong one is an error, and never another number.

/**
 * The index that a text names. `name`: "layer", for example; `size`: how many there are. `start`: the first one.
 * @param {string} text
 * @param {string} name
 * @param {number} size
 * @param {number} start
 */
export function readIndex(text, name, size, start = 0) {
  const index = /^\d+$/.test(text) ? Number(text) : NaN;
  if (index >= start && index < start + size) return index;
  throw new Error(`${name}: “${text}” is not one of the ${name}s ${start} to ${start + size - 1}.`);
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
