// The most likely next tokens after each position of a prompt: a row of tokens to choose from, and a table of bars.

import { el, emit } from "../dom.js";
import { barTable } from "../draw/bars.js";
import "../draw/token_strip.js";
import { number, percent, quoted, shown } from "../format.js";

/** @import { PositionPredictions, Token } from "../answers.js" */

/** <next-tokens>. `show({tokens, predictions, position})`; event "position" with detail {position}. */
export class NextTokens extends HTMLElement {
  #strip = el("token-strip", { class: "with-numbers", signs: true });
  #table = el("div");
  #said = el("p", { class: "answer" });

  connectedCallback() {
    if (this.childElementCount > 0) return;
    const note =
      "Below each token: the probability of the most likely token after it. Select one to see what comes next.";
    this.append(el("p", { class: "faint" }, note), this.#strip, this.#said, this.#table);
    this.#strip.addEventListener("choose", ({ detail }) => emit(this, "position", { position: detail.index }));
  }

  /** @param {{ tokens: Token[], predictions: PositionPredictions[], position: number }} place */
  show({ tokens, predictions, position }) {
    const entries = predictions.map(({ top: [{ probability }] }, index) => {
      return { token: tokens[index], share: probability ?? 0, said: percent(probability) };
    });
    this.#strip.show("Tokens of the prompt", entries);
    this.#strip.mark(position);
    const { top } = predictions[position];
    this.#said.textContent =
      `After ${quoted(tokens[position])} (position ${position}), the most likely next token is ${quoted(top[0])}: ` +
      `${percent(top[0].probability)}.`;
    this.#table.replaceChildren(
      barTable({
        caption: `The ${top.length} most likely next tokens (temperature 1, whole vocabulary)`,
        columns: ["token", "id", "logit", "probability"],
        rows: top.map((each) => ({
          cells: [shown(each), String(each.id), number(each.logit), percent(each.probability)],
          shares: [each.probability],
        })),
      }),
    );
  }
}

customElements.define("next-tokens", NextTokens);
