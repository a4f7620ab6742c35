// <plain-continuation>: the continuation without the edits, below the edited one, and where the two part.

import { postStream } from "../api.js";
import { el } from "../dom.js";
import "../draw/token_strip.js";
import { percent, quoted } from "../format.js";

/** @import { Generated } from "./token_panel.js" */

export class PlainContinuation extends HTMLElement {
  #said = el("p", { class: "answer", role: "status" });
  #strip = el("token-strip");
  /** @type {{ id: number, text: string }[]} */
  #tokens = [];

  connectedCallback() {
    if (this.childElementCount === 0)
      this.append(this.#said, el("h3", {}, "Without the edits"), el("div", { class: "card generated" }, this.#strip));
  }

  /**
   * Write the continuation.
   * @param {Record<string, unknown>} body of POST /generate, without edits
   * @param {AbortSignal} signal
   */
  async stream(body, signal) {
    this.#tokens = [];
    this.#said.textContent = "";
    this.#strip.reset("The continuation without the edits, token by token");
    for await (const { token, text = "" } of postStream("/generate", body, signal)) {
      if (!token) continue;
      const probability = token.logprob === null ? null : Math.exp(token.logprob);
      this.#tokens.push({ id: token.id, text });
      this.#strip.add({ token: { id: token.id, text }, share: probability ?? 0, said: percent(probability) });
    }
  }

  /**
   * Say which token is the first that differs, and mark it.
   * @param {Generated[]} edited
   */
  compare(edited) {
    const length = Math.max(edited.length, this.#tokens.length);
    let index = 0;
    while (index < length && edited[index]?.id === this.#tokens[index]?.id) index++;
    const nameOf = (/** @type {{ id: number, text: string | null } | undefined} */ token) =>
      token ? quoted(token) : "the end";
    this.#strip.mark(index < this.#tokens.length ? index : null);
    this.#said.textContent =
      index === length
        ? "The edits change no token of this text."
        : `The edits change token ${index + 1}: ${nameOf(edited[index])} in place of ${nameOf(this.#tokens[index])}.`;
  }
}

customElements.define("plain-continuation", PlainContinuation);
