// <both-texts>: how the network continues the prompt, without the edits and with them, side by side.

import { el } from "../dom.js";
import { barLegend } from "../draw/bars.js";
import { withTerms } from "../terms.js";
import { firstDifference, switchedOff } from "./continuation.js";

/**
 * @import { Edit, Model } from "../answers.js"
 * @typedef {Record<string, unknown>} Body
 */

const MAX_TOKENS = 40;

export class BothTexts extends HTMLElement {
  #said = el("p", { class: "answer", role: "status" });
  #plain = el("text-continuation", { heading: "Without the edits" });
  #edited = el("text-continuation", { heading: "With the edits" });
  /** @type {HTMLElement} */
  #legend = el(
    "p",
    { class: "legend" },
    withTerms("{probability|Probability} of the {token} ({greedy}): "),
    barLegend("0 %", "100 %"),
  );
  #key = ""; // of the text without edits that is shown: other edits do not change it

  connectedCallback() {
    if (this.childElementCount === 0)
      this.append(this.#said, el("div", { class: "both" }, this.#plain, this.#edited), this.#legend);
  }

  /**
   * Write both texts.
   * @param {{ body: Body, edits: Edit[], model: Model, numTokens: number }} what `body`: the model and the prompt of
   *   requests, and `numTokens` those of the prompt
   * @param {AbortSignal} signal
   */
  async show({ body, edits, model, numTokens }, signal) {
    const room = Math.min(MAX_TOKENS, (model.limits.max_positions || Infinity) - numTokens);
    this.#edited.hidden = edits.length === 0 || room < 1;
    this.#plain.hidden = this.#legend.hidden = room < 1;
    this.#said.textContent = room < 1 ? "The prompt fills the context, so no token can follow." : "";
    if (room < 1) return this.#edited.clear();
    this.#plain.strip.mark(null);
    const off = switchedOff(model.generation_defaults);
    const request = { ...body, temperature: 0, max_tokens: room, logprobs: 1, ...off };
    const edited = edits.length > 0 ? this.#edited.stream({ ...request, edits }, signal) : this.#edited.clear();
    await Promise.all([this.#writePlain(request, signal), edited]);
    if (edits.length === 0) return undefined;
    const { index, said } = firstDifference(this.#edited.tokens, this.#plain.tokens);
    this.#said.textContent = said;
    this.#plain.strip.mark(index);
    this.#edited.strip.mark(index);
    return undefined;
  }

  /** Show nothing, because there is no answer. */
  clear() {
    this.#key = this.#said.textContent = "";
    this.#plain.hidden = this.#edited.hidden = this.#legend.hidden = true;
  }

  /**
   * @param {Body} request
   * @param {AbortSignal} signal
   */
  async #writePlain(request, signal) {
    const key = JSON.stringify(request);
    if (key === this.#key) return;
    this.#key = "";
    await this.#plain.stream(request, signal);
    this.#key = key;
  }
}

customElements.define("both-texts", BothTexts);
