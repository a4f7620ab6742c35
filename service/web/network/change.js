// What edits change: each number of the pass with edits minus the same number of the pass without them. It reads like a
// pass, so that the picture can show it in place of one.

import { Pass } from "./pass.js";

/** @import { Range } from "./pass.js" */

export class Change extends Pass {
  /** @type {Pass[]} the pass with the edits, and the one without them */
  both;

  /**
   * @param {Pass} edited
   * @param {Pass} plain
   */
  constructor(edited, plain) {
    super(edited.body, { ...edited, predictions: [] }, [...edited.stages.values()]);
    this.predictions = edited.predictions;
    this.both = [edited, plain];
  }

  /** @override */
  get reference() {
    return this.both[1];
  }

  /**
   * @override
   * @param {string[]} names
   * @param {number[]} positions
   * @param {AbortSignal} signal
   */
  async read(names, positions, signal) {
    await Promise.all(this.both.map((pass) => pass.read(names, positions, signal)));
    this.makeRoom();
    let hasRead = false;
    for (const name of names) {
      const missing = positions.filter((position) => this.stages.has(name) && !this.row(name, position));
      const [after, before] = this.both.map((pass) => missing.map((position) => pass.row(name, position)));
      if (missing.length === 0 || ![...after, ...before].every(Boolean)) continue;
      this.keep(name, missing, (index) => difference(after[index] ?? [], before[index] ?? []));
      hasRead = true;
    }
    return hasRead;
  }

  /**
   * The scale of the numbers themselves, with both signs: full colour is a change by as much as a large number. Small
   * changes can be seen, because the colour follows the root of the change.
   * @override
   * @param {string} name
   * @returns {Range}
   */
  range(name) {
    const { high } = this.reference.range(name);
    return { low: -high, high, isSigned: true, isRoot: true };
  }
}

/**
 * What the mask hides in both passes stays −∞.
 * @param {ArrayLike<number>} after
 * @param {ArrayLike<number>} before
 */
function difference(after, before) {
  return Float32Array.from(after, (value, index) =>
    value === -Infinity && before[index] === -Infinity ? value : value - before[index],
  );
}
