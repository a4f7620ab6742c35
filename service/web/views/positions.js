// Positions in the address: read them, and notice those that belong to an earlier prompt.

/** The position that a text names, from 0 to `count` − 1. Raises an error that the page shows. */
export function readPosition(text, count) {
  if (!isPosition(text, count)) throw new Error(`position: ${text} is out of range; there are the positions 0 to ${count - 1}.`);
  return Number(text);
}

/** Whether a text is a position from 0 to `count` − 1. */
export function isPosition(text, count) {
  return /^\d+$/.test(text) && Number(text) < count;
}

/** Whether the user has run another prompt, or chosen another model, since the view was shown. */
export function isOther(before, now) {
  return before !== null && (JSON.stringify(before.prompt) !== JSON.stringify(now.prompt) || before.model !== now.model);
}
