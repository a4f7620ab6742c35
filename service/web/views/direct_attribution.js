// Which heads and feed-forward networks write a token: their shares in its logit, in the pass without edits.

import { actionButton, el, emit, labelled, onSubmit, textBox } from "../dom.js";
import { barTable } from "../draw/bars.js";
import "../draw/heat_map.js";
import { number, shown, signed } from "../format.js";
import { placeName } from "../network/names.js";
import { writersIn } from "../network/writers.js";
import { note } from "../terms.js";
import { ablation } from "./edit_words.js";
import { didYouMean } from "./field_message.js";

/**
 * @import { DirectAnswer, Edit, Token } from "../answers.js"
 * @typedef {"token" | "minus"} Field
 * @typedef {{ field: Field, text: string, id: number }} Hint a token with a space in front that may be meant
 * @typedef {{ name: string, share: number, edit?: Edit, isError?: boolean }} Part `isError`: it has no bar
 */

const NUM_SHOWN = 10;

/**
 * <direct-attribution>. `prepare({token, minus, hints})`: the texts of the form, and the tokens that may be meant.
 * `wait()`: an answer was asked for. `show(answer)`: an answer of POST /attribute with the method direct, or null.
 * Events: "explain" with detail {explain, minus}, and "ablate" with {edit}.
 */
export class DirectAttribution extends HTMLElement {
  #form = el("form", { class: "row", "aria-label": "Explain a token" });
  #fields = { token: textBox("token", { size: "12" }), minus: textBox("minus", { size: "12" }) };
  #hints = el("p", { class: "row", role: "status" });
  #answer = el("p", { class: "answer" });
  #sum = el("p");
  #bars = el("div");
  #layers = el("div");
  #map = el("heat-map");
  #computing = el("p", { class: "faint", role: "status", hidden: true }, "Computing the shares …");
  #result = el(
    "div",
    {},
    this.#answer,
    this.#sum,
    el("div", { class: "beside" }, this.#bars, el("div", {}, this.#map, this.#layers)),
  );

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.#form.append(
      labelled("Token", this.#fields.token),
      labelled("compared with (optional)", this.#fields.minus),
      el("button", { type: "submit" }, "Explain"),
    );
    const meaning = note(
      "The {logit} of a token is a sum of shares (direct {attribution}). A share says what a part " +
        "writes, not what would change without the part.",
    );
    this.append(
      el("h3", {}, "Which parts write a token, without edits?"),
      meaning,
      this.#form,
      this.#hints,
      this.#computing,
      this.#result,
    );
    onSubmit(this.#form, () => this.#explain());
  }

  /** @param {{ token: string, minus: string, hints: Hint[] }} texts */
  prepare({ token, minus, hints }) {
    this.#fields.token.value = token;
    this.#fields.minus.value = minus;
    const buttons = hints.map(({ field, text, id }) => {
      const choose = () => {
        this.#fields[field].value = text;
        this.#explain();
      };
      return didYouMean({ text, id }, choose);
    });
    this.#hints.replaceChildren(...buttons);
    this.show(null);
  }

  /** Say that the shares are computed, until `show`. */
  wait() {
    this.#computing.hidden = false;
    this.setAttribute("aria-busy", "true");
  }

  /** @param {DirectAnswer | null} answer */
  show(answer) {
    this.#computing.hidden = true;
    this.removeAttribute("aria-busy");
    this.#result.hidden = answer === null;
    if (answer === null) return;
    const parts = partsOf(answer);
    const [best] = parts;
    const { target } = answer;
    const what = target.minus
      ? `the logit of ${named(target.token)} above that of ${named(target.minus)}`
      : `the logit of ${named(target.token)}`;
    const verb = best.share >= 0 ? "adds most to" : "takes most from";
    const said = `${verb} ${what} at position ${target.position}: ${signed(best.share)}`;
    this.#answer.textContent = `Without edits, ${best.name} ${said}.`;
    this.#sum.textContent = sumOf(answer);
    this.#bars.replaceChildren(this.#table(parts, answer));
    this.#layers.replaceChildren(layersOf(answer));
    this.#drawMap(answer);
  }

  pictures() {
    return this.#result.hidden ? [] : [{ name: "attribution", element: this.#map }];
  }

  #explain() {
    const { token, minus } = this.#fields;
    emit(this, "explain", { explain: token.value, minus: minus.value });
  }

  /**
   * @param {Part[]} parts
   * @param {DirectAnswer} answer
   */
  #table(parts, answer) {
    const [largest, others] = [parts.slice(0, NUM_SHOWN), restOf(parts.slice(NUM_SHOWN), answer)];
    const size = Math.max(...[...largest, ...others].map(({ share }) => Math.abs(share))) || 1;
    const button = (/** @type {Part} */ { edit, name }) =>
      edit
        ? actionButton("Ablate", () => emit(this, "ablate", { edit }), {
            class: "small",
            "aria-label": `Ablate ${name}`,
          })
        : "";
    const rows = [...largest, ...others].map((part) => ({
      cells: [part.name, signed(part.share), button(part)],
      shares: part.isError ? [] : [part.share / size],
    }));
    const sum = {
      cells: [answer.target.minus ? "sum: the difference" : "sum: the logit", signed(answer.logit), ""],
      shares: [],
      mark: true,
    };
    return barTable({
      caption:
        `The ${largest.length} largest shares of heads (${placeName(5, 7)}: layer 5, head 7) and feed-forward ` +
        "networks (FFN).",
      columns: ["part", "share", "try"],
      rows: [...rows, sum],
    });
  }

  /** @param {DirectAnswer} answer */
  #drawMap({ layers }) {
    const numHeads = layers[0].heads.length;
    this.#map.data = {
      values: layers.flatMap(({ heads, mlp }) => [...heads, mlp]),
      rowLabels: layers.map((_, layer) => placeName(layer)),
      columnLabels: [...Array.from({ length: numHeads }, (_, head) => `H${head}`), "FFN"],
      rowName: "layer",
      columnName: "part",
      valueName: "share",
    };
  }
}

/**
 * A token with its space visible, and the id that the service used.
 * @param {Token} token
 */
function named(token) {
  return `“${shown(token)}” (id ${token.id})`;
}

/**
 * Whether the shares add up to the logit.
 * @param {DirectAnswer} answer
 */
function sumOf({ logit, total, remainder, capped_logit, dtype, target }) {
  const name = target.minus ? "difference of the logits" : "logit";
  const cap =
    capped_logit === null
      ? ""
      : ` The network caps its logits, to ${number(capped_logit)} here; the value before the cap is explained.`;
  return (
    `Sum of all shares: ${number(total)}; the ${name}: ${number(logit)}, computed in ${dtype}. ` +
    `Rounding: ${number(remainder)}.${cap}`
  );
}

/**
 * Every head and feed-forward network, the largest share first.
 * @param {DirectAnswer} answer
 * @returns {Part[]}
 */
function partsOf(answer) {
  const parts = writersIn(answer).map(({ name, layer, head, share }) => ({ name, share, edit: ablation(layer, head) }));
  return parts.sort((a, b) => Math.abs(b.share) - Math.abs(a.share));
}

/**
 * What the sum has besides the largest parts. A network without biases or position embedding has no rows for them.
 * @param {Part[]} parts
 * @param {DirectAnswer} answer
 * @returns {Part[]}
 */
function restOf(parts, { layers, embed, pos_embed, final_norm_bias, remainder }) {
  const sum = (/** @type {number[]} */ shares) => shares.reduce((total, share) => total + share, 0);
  const biases = [
    ...layers.flatMap(({ attention_bias, mlp_bias, norm_biases }) => [attention_bias, mlp_bias, norm_biases]),
    final_norm_bias,
  ];
  return [
    ...(parts.length > 0
      ? [{ name: `the ${parts.length} other parts`, share: sum(parts.map(({ share }) => share)) }]
      : []),
    { name: "token embedding", share: embed },
    ...(pos_embed === null ? [] : [{ name: "position embedding", share: pos_embed }]),
    ...(biases.some((share) => share !== 0) ? [{ name: "all biases", share: sum(biases) }] : []),
    { name: "rounding", share: remainder, isError: true },
  ];
}

/**
 * What each layer adds with its attention and its feed-forward network.
 * @param {DirectAnswer} answer
 */
function layersOf({ layers }) {
  const sums = layers.map(({ heads, mlp }) => [heads.reduce((sum, share) => sum + share, 0), mlp]);
  const largest = Math.max(...sums.flat().map(Math.abs)) || 1;
  return barTable({
    caption: "What each layer adds. Thin bar: all its heads. Thick bar: its FFN.",
    columns: ["layer", "heads", "FFN"],
    rows: sums.map(([heads, mlp], layer) => ({
      cells: [placeName(layer), signed(heads), signed(mlp)],
      shares: [heads / largest, mlp / largest],
    })),
  });
}

customElements.define("direct-attribution", DirectAttribution);
