// A continuation under a heading as it arrives, and where two continuations part.

import { postStream } from "../api.js";
import { el } from "../dom.js";
import "../draw/token_strip.js";
import { percent, quoted } from "../format.js";

/**
 * @import { TokenLogprob } from "../answers.js"
 * @import { Named } from "../format.js"
 * @import { Generated } from "./token_panel.js"
 */

/** <text-continuation heading="Without the edits">. `tokens`: those that have arrived. */
export class TextContinuation extends HTMLElement {
  strip = el("token-strip");
  /** @type {Generated[]} */
  tokens = [];

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(el("h3", {}, this.getAttribute("heading") ?? ""), el("div", { class: "card generated" }, this.strip));
  }

  /**
   * Write the continuation.
   * @param {Record<string, unknown>} body of POST /generate, with `logprobs`
   * @param {AbortSignal} signal
   */
  async stream(body, signal) {
    this.clear();
    for await (const { token, text = "" } of postStream("/generate", body, signal)) {
      if (!token) continue;
      const entry = readToken(token, text);
      this.tokens.push(entry);
      this.strip.add(entryOf(entry));
    }
  }

  clear() {
    this.tokens = [];
    this.strip.reset(`${this.getAttribute("heading")}: the continuation, token by token`);
  }
}

/**
 * A token of a stream, with its text, which an event may have only in part.
 * @param {TokenLogprob} token
 * @param {string} text of the event
 * @returns {Generated}
 */
export function readToken({ id, logprob, top }, text) {
  const own = top.find((entry) => entry.id === id);
  const probability = logprob === null ? null : Math.exp(logprob);
  return { id, text: own ? own.text : text === "" ? null : text, probability, top };
}

/**
 * The entry of a token strip.
 * @param {Generated} token
 */
export function entryOf(token) {
  return { token, share: token.probability ?? 0, said: percent(token.probability) };
}

/**
 * The settings of requests that switch off what a model changes in its probabilities by default.
 * @param {Record<string, number>} defaults
 */
export function switchedOff(defaults) {
  return {
    ...("min_p" in defaults && { min_p: 0 }),
    ...("repetition_penalty" in defaults && { repetition_penalty: 1 }),
  };
}

/**
 * The first token that differs: its index, or null if there is none, and a sentence.
 * @param {Generated[]} edited
 * @param {Generated[]} plain
 */
export function firstDifference(edited, plain) {
  const length = Math.max(edited.length, plain.length);
  let index = 0;
  while (index < length && edited[index]?.id === plain[index]?.id) index++;
  if (index === length) return { index: null, said: "The edits change no token of this text." };
  const nameOf = (/** @type {Named | undefined} */ token) => (token ? quoted(token) : "the end");
  const change = `${nameOf(edited[index])} in place of ${nameOf(plain[index])}`;
  return { index, said: `The first new token that differs is no. ${index + 1}: ${change}.` };
}

customElements.define("text-continuation", TextContinuation);
