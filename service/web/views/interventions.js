// The view "Interventions": edits as chips, the pass without edits beside the edited one, and what writes a token.

import { ApiError, getJson } from "../api.js";
import { el, findAll, labelled } from "../dom.js";
import { cached } from "../passes.js";
import { readPrompt } from "../prompts.js";
import { term } from "../terms.js";
import { View } from "../view.js";
import "./direct_attribution.js";
import "./edit_comparison.js";
import "./edit_form.js";
import { inWords, readEdits } from "./edit_words.js";
import { isOther } from "./positions.js";

/**
 * @import { Edit, ForwardAnswer, Model } from "../answers.js"
 * @import { ViewState } from "../view.js"
 * @import { Field } from "./direct_attribution.js"
 * @typedef {ViewState & typeof Interventions.params} State
 */

const MAX_TOKENS_COMPARED = 1000;
const STAGES = ["*.resid_post", "logits"];

export default class Interventions extends View {
  static needs = "edits";
  static appliesEdits = true;
  /**
   * `edits`: JSON; `pos`: the position to compare, "" is the last one; `explain`, `minus`: tokens of the attribution,
   * "" for the most likely one and for none.
   */
  static params = { edits: "[]", pos: "", explain: "", minus: "" };

  /** @type {State | null} the state that was shown last */
  #state = null;
  /** @type {Edit[]} */
  #edits = [];
  #chips = el("ul", { class: "chips", "aria-label": "Edits, in the order in which they are applied" });
  #form = el("edit-form");
  #json = el("textarea", { rows: "4", spellcheck: "false", "aria-label": "All edits as JSON" });
  #position = el("input", { type: "number", min: "0", class: "short", placeholder: "last" });
  #comparison = el("edit-comparison");
  #attribution = el("direct-attribution");
  /** @type {Record<string, unknown> | null} */
  #body = null;
  #isChecking = false; // whether the service is asked if it takes an edit

  build() {
    const meaning = el(
      "p",
      { class: "faint" },
      "An ",
      term("ablation"),
      " switches a part off, ",
      term("patching"),
      " takes numbers from another prompt, and ",
      term("steering"),
      " adds a vector.",
    );
    const apply = el("button", { type: "button", onclick: () => this.#set(this.#json.value) }, "Apply the JSON");
    const json = el("details", {}, el("summary", {}, "Edits as JSON (all operations)"), this.#json, apply);
    const another = el("button", { type: "button" }, "Show another position");
    const position = el("form", { class: "row" }, labelled("After position", this.#position), another);
    this.append(
      meaning,
      el("h3", {}, "Edits"),
      this.#chips,
      this.#form,
      json,
      el("h3", {}, "Without and with the edits"),
      position,
      this.#comparison,
      this.#attribution,
    );
    another.addEventListener("click", () => position.requestSubmit());
    position.addEventListener("submit", (event) => {
      event.preventDefault();
      this.context.navigate({ pos: this.#position.value });
    });
    this.#form.addEventListener("add", ({ detail }) => this.#check(detail.edit));
    this.#form.addEventListener("fail", ({ detail }) => this.context.report(detail.error));
    this.#attribution.addEventListener("ablate", ({ detail }) => this.#add(detail.edit));
    this.#attribution.addEventListener("explain", ({ detail }) => this.context.navigate(detail));
  }

  /**
   * @param {State} state
   * @param {AbortSignal} signal
   * @returns {Promise<void>}
   */
  async update(state, signal) {
    const { model } = this;
    if (state.pos !== "" && isOther(this.#state, state)) return this.context.navigate({ pos: "" }, { replace: true });
    this.#json.value = state.edits;
    this.#position.value = state.pos;
    const vectors = model.capabilities.vectors ? (await getJson("/vectors", signal)).vectors : [];
    const read = (/** @type {string} */ text) => readPrompt(this.context.service, state.model ?? "", text);
    this.#form.prepare({
      model,
      name: state.model,
      vectors: vectors.map(({ name }) => name),
      prompt: state.prompt,
      read,
    });
    this.#body = null;
    this.#state = state;
    let answer;
    try {
      answer = await this.#compare(state, model, signal);
    } catch (error) {
      if (!signal.aborted) this.#clear();
      throw error;
    }
    if (model.capabilities.direct_attribution) await this.#explain(answer, state, model, signal);
    return undefined;
  }

  /**
   * The answer for the edits.
   * @param {State} state
   * @param {Model} model
   * @param {AbortSignal} signal
   */
  async #compare(state, model, signal) {
    this.#edits = [];
    try {
      this.#edits = readEdits(state.edits);
    } finally {
      this.#showChips();
    }
    this.#body = this.#bodyOf(state, model, this.#edits);
    const answer = await cached("/forward", this.#body, signal);
    this.#comparison.show(answer);
    this.context.offer(); // the request can be copied while the shares are computed
    return answer;
  }

  /**
   * What writes the chosen token, or the most likely one of the pass without edits.
   * @param {ForwardAnswer} answer
   * @param {State} state
   * @param {Model} model
   * @param {AbortSignal} signal
   */
  async #explain(answer, state, model, signal) {
    const [{ position, top }] = (answer.baseline ?? answer).predictions;
    const [best] = top;
    const hints = model.capabilities.tokenizer ? await hintsOf(state, signal) : [];
    this.#attribution.hidden = false;
    this.#attribution.prepare({ token: state.explain || String(best.text ?? best.id), minus: state.minus, hints });
    this.#attribution.wait();
    try {
      const body = this.#question(state, model, position, best.id);
      this.#attribution.show(await cached("/attribute", body, signal));
    } catch (error) {
      if (!signal.aborted) {
        this.#attribution.show(null);
        this.context.offer();
      }
      throw error;
    }
  }

  /** Show no numbers of an earlier state beside an error. The request can still be copied. */
  #clear() {
    this.#comparison.clear();
    this.#attribution.hidden = true;
    this.#attribution.show(null);
    this.context.offer();
  }

  request() {
    return this.#body && { path: "/forward", body: this.#body };
  }

  pictures() {
    return this.#attribution.pictures();
  }

  /**
   * @param {State} state
   * @param {Model} served
   * @param {Edit[]} list
   */
  #bodyOf({ model, prompt, pos }, served, list) {
    if (!/^-?\d*$/.test(pos)) throw new Error(`position: “${pos}” is not a position.`);
    const edits = list.length > 0 ? { edits: list, baseline: true } : {};
    const top_k = Math.min(MAX_TOKENS_COMPARED, served.sizes.d_vocab);
    return {
      ...(model ? { model } : {}),
      prompt,
      stages: STAGES,
      detail: "none",
      positions: [pos === "" ? -1 : Number(pos)],
      top_k,
      ...edits,
    };
  }

  /**
   * @param {State} state
   * @param {Model} served
   * @param {number} position
   * @param {number} best the id of the most likely token
   */
  #question({ model, prompt, explain, minus }, { capabilities }, position, best) {
    const read = (/** @type {string} */ text) => (capabilities.tokenizer ? text : Number(text));
    return {
      method: "direct",
      ...(model ? { model } : {}),
      prompt,
      position,
      token: explain === "" ? best : read(explain),
      ...(minus === "" ? {} : { minus: read(minus) }),
    };
  }

  #showChips() {
    const focused = findAll(this.#chips, "input").indexOf(/** @type {HTMLInputElement} */ (document.activeElement));
    const chips = this.#edits.map((edit, index) => {
      const words = inWords(edit);
      const remove = () => this.#set(JSON.stringify(this.#edits.filter((_, other) => other !== index)));
      return el(
        "li",
        { class: "chip", title: JSON.stringify(edit) },
        words,
        " ",
        this.#strength(edit, index, words),
        el("button", { type: "button", class: "small", "aria-label": `Remove: ${words}`, onclick: remove }, "✕"),
      );
    });
    const all =
      this.#edits.length > 1
        ? el("li", {}, el("button", { type: "button", class: "small", onclick: () => this.#set("[]") }, "Remove all"))
        : "";
    this.#chips.replaceChildren(
      ...(chips.length > 0 ? chips : [el("li", { class: "faint" }, "There are no edits yet.")]),
      all,
    );
    findAll(this.#chips, "input")[focused]?.focus(); // a slider that an arrow key has moved
  }

  /**
   * A slider for the strength of an edit, if it has one.
   * @param {Edit} edit
   * @param {number} index
   * @param {string} words
   */
  #strength(edit, index, words) {
    const name = edit.op === "scale" ? "factor" : edit.op === "add" ? "scale" : edit.op === "project" ? "coeff" : null;
    if (name === null) return "";
    const value = edit[name] ?? (name === "scale" ? 1 : 0);
    const most = Math.max(4, 2 * Math.abs(value));
    const change = (/** @type {string} */ chosen) => {
      const edits = this.#edits.map((other, place) => (place === index ? { ...other, [name]: Number(chosen) } : other));
      return this.context.navigate({ edits: JSON.stringify(edits) }, { replace: true });
    };
    return el("input", {
      type: "range",
      min: String(-most),
      max: String(most),
      step: String(most / 40),
      value: String(value),
      "aria-label": `Strength of: ${words}`,
      onchange: ({ target }) => change(target.value),
    });
  }

  /**
   * Add an edit if the service takes it. The answer is kept, so that it is computed once.
   * @param {Edit} edit
   */
  async #check(edit) {
    const state = this.#state;
    if (this.#isChecking || state === null) return;
    this.#isChecking = true;
    const edits = [...this.#edits, edit];
    try {
      await cached("/forward", this.#bodyOf(state, this.model, edits));
      if (state === this.#state) this.#add(edit);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status < 400 || error.status >= 500) this.context.report(error);
      else this.#form.refuse(error);
    } finally {
      this.#isChecking = false;
    }
  }

  /** @param {Edit} edit */
  #add(edit) {
    this.#set(JSON.stringify([...this.#edits, edit]));
  }

  /** @param {string} edits */
  #set(edits) {
    this.context.navigate({ edits });
  }
}

/**
 * For each typed token without a space in front: the token that has it, if there is one.
 * @param {State} state
 * @param {AbortSignal} signal
 */
async function hintsOf({ explain, minus }, signal) {
  /** @type {[Field, string][]} */
  const fields = [
    ["token", explain],
    ["minus", minus],
  ];
  const typed = fields.filter(([, text]) => text !== "" && !text.startsWith(" "));
  const asked = typed.map(async ([field, text]) => {
    const { tokens } = await cached("/tokenize", { text: ` ${text}`, add_special_tokens: false }, signal);
    return tokens.length === 1 && tokens[0].text === ` ${text}` ? { field, text: ` ${text}`, id: tokens[0].id } : null;
  });
  return (await Promise.all(asked)).filter((hint) => hint !== null);
}

customElements.define("edits-view", Interventions);
