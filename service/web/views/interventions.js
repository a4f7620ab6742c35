// The view "Interventions": edits as chips, the text and the pass without them and with them, a sweep of patches, and
// what writes a token.

import { ApiError, getJson } from "../api.js";
import { actionButton, el, findAll, labelled, onSubmit, select } from "../dom.js";
import { isOther } from "../indices.js";
import { placeName } from "../network/names.js";
import { cached } from "../passes.js";
import { otherPrompt, readPrompt } from "../prompts.js";
import { note } from "../terms.js";
import { View, bodyOf } from "../view.js";
import "./both_texts.js";
import "./direct_attribution.js";
import "./edit_comparison.js";
import "./edit_form.js";
import { inWords, readNamedEdits, steerName, steerTexts, withoutNames } from "./edit_words.js";
import { isRefusal } from "./field_message.js";
import "./patch_sweep.js";
import "./steer_form.js";
import { steeringEdit } from "./steering.js";

/**
 * @import { Edit, ForwardAnswer, Model } from "../answers.js"
 * @import { NamedEdit } from "./edit_words.js"
 * @import { Source } from "./steering.js"
 * @import { Update, ViewState } from "../view.js"
 * @import { Field } from "./direct_attribution.js"
 * @typedef {ViewState & typeof Interventions.params} State
 */

const MAX_TOKENS_COMPARED = 1000;
const STAGES = ["*.resid_post", "logits"];

export default class Interventions extends View {
  static needs = "edits";
  static appliesEdits = true;
  /**
   * `edits`: JSON; `pos`: the position to compare, "" is the last one; `other`: the other prompt of the sweep, "" for
   * no sweep; `explain`, `minus`: tokens of the attribution, "" for the most likely one and for none.
   */
  static params = { edits: "[]", pos: "", other: "", explain: "", minus: "" };

  /** @type {State | null} the state that was shown last */
  #state = null;
  /** @type {Model | null} the answer of GET /model of the state that was shown last */
  #served = null;
  /** @type {Source} of the state that was shown last */
  #source;
  /** @type {NamedEdit[]} */
  #edits = [];
  #steer = el("steer-form");
  #chips = el("ul", { class: "chips", "aria-label": "Edits, in the order in which they are applied" });
  #form = el("edit-form");
  #texts = el("both-texts");
  #json = el("textarea", { rows: "4", spellcheck: "false", "aria-label": "All edits as JSON" });
  #position = el("input", { type: "number", min: "0", class: "short", placeholder: "last" });
  #comparison = el("edit-comparison");
  #sweep = el("patch-sweep");
  #attribution = el("direct-attribution");
  #halves = el("div", { class: "halves" }); // side by side where there is room
  /** @type {Record<string, unknown> | null} */
  #body = null;
  #isChecking = false; // whether the service is asked if it takes an edit

  build() {
    const meaning = note(
      "{steering|Steering} adds what tells the two texts apart to the {residual} in the middle of the " +
        "network. At strength 1, this vector is as long as the stream at the end of the prompt.",
    );
    const apply = actionButton("Apply the JSON", () => this.#set(this.#json.value));
    const json = el(
      "details",
      {},
      el("summary", {}, "Edits as JSON (all operations)"),
      note("“steer” has the texts of a vector. It is for this page: requests do not have it."),
      this.#json,
      apply,
    );
    const others = el(
      "details",
      {},
      el("summary", {}, "Other edits: switch off a part, multiply it, patch it"),
      note("An {ablation} switches a part off, and {patching} takes numbers from another prompt."),
      this.#form,
      json,
    );
    const another = actionButton("Show another position", () => position.requestSubmit());
    const position = el("form", { class: "row" }, labelled("After position", this.#position), another);
    const heading = el("h3", {}, "The next token, without and with the edits");
    this.#halves.append(
      el("div", {}, heading, position, this.#comparison),
      el("div", {}, this.#sweep, this.#attribution),
    );
    this.append(this.#steer, meaning, el("h3", {}, "Edits"), this.#chips, others, this.#texts, this.#halves);
    onSubmit(position, () => this.context.navigate({ pos: this.#position.value }));
    this.#steer.addEventListener("add", ({ detail }) => this.#add(detail.edit));
    this.#steer.addEventListener("fail", ({ detail }) => this.context.report(detail.error));
    this.#form.addEventListener("add", ({ detail }) => this.#check(detail.edit));
    this.#sweep.addEventListener("sweep", ({ detail }) => this.context.navigate(detail));
    this.#sweep.addEventListener("add", ({ detail }) => {
      this.#add(detail.edit);
      this.#chips.scrollIntoView({ block: "center" }); // both texts are below
    });
    this.#attribution.addEventListener("ablate", ({ detail }) => this.#add(detail.edit));
    this.#attribution.addEventListener("explain", ({ detail }) => this.context.navigate(detail));
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const { model } = this;
    if ((state.pos !== "" || state.other !== "") && isOther(this.#state, state))
      return this.context.navigate({ pos: "", other: "" }, { replace: true });
    this.#json.value = state.edits;
    this.#position.value = state.pos;
    const vectors = model.capabilities.vectors ? (await getJson("/vectors", signal)).vectors : [];
    const { prompt, model: name } = state;
    const read = (/** @type {string} */ text) => readPrompt(this.context.service, name ?? "", text);
    this.#source = { name, prompt, read };
    const layer = Math.floor((model.config.num_layers - 1) / 2);
    this.#steer.prepare({ source: this.#source, layer, hasTexts: model.capabilities.tokenizer });
    this.#form.prepare({ model, vectors: vectors.map((vector) => vector.name), prompt, read });
    this.#sweep.prepare(state.other || otherPrompt(prompt));
    this.#body = null;
    this.#state = state;
    this.#halves.classList.remove("is-kept"); // late numbers turn grey
    if (this.#served !== model) {
      this.#texts.clear(); // the service was restarted, and may serve another model
      this.#sweep.show(null);
    }
    this.#served = model;
    const sweep = this.#sweep.show(state.other === "" ? null : { name, prompt, other: read(state.other) });
    sweep.catch(() => {}); // its error is thrown below, unless the edits have one
    let answer;
    try {
      answer = await this.#compare(state, signal);
    } catch (error) {
      if (!signal.aborted) this.#clear();
      throw error;
    }
    await Promise.all([
      this.#write(answer, state, signal),
      model.capabilities.direct_attribution ? this.#explain(answer, state, signal) : null,
      sweep,
    ]);
    return undefined;
  }

  leave() {
    this.#sweep.leave();
  }

  /**
   * The answer for the edits.
   * @param {State} state
   * @param {AbortSignal} signal
   */
  async #compare(state, signal) {
    this.#edits = [];
    try {
      this.#edits = readNamedEdits(state.edits);
    } finally {
      this.#showChips();
    }
    this.#body = this.#bodyOf(state, this.#edits);
    const answer = await cached("/forward", this.#body, signal);
    this.#comparison.show(answer);
    this.#halves.classList.add("is-kept");
    this.context.offer(); // the request can be copied while the shares are computed
    return answer;
  }

  /**
   * Write how the network goes on, without the edits and with them.
   * @param {ForwardAnswer} answer
   * @param {State} state
   * @param {AbortSignal} signal
   */
  async #write({ tokens }, state, signal) {
    const given = { body: bodyOf(state), edits: withoutNames(this.#edits), model: this.model };
    try {
      await this.#texts.show({ ...given, numTokens: tokens.length }, signal);
    } catch (error) {
      if (!signal.aborted) this.#texts.clear();
      throw error;
    }
  }

  /**
   * What writes the chosen token, or the most likely one of the pass without edits.
   * @param {ForwardAnswer} answer
   * @param {State} state
   * @param {AbortSignal} signal
   */
  async #explain(answer, state, signal) {
    const [{ position, top }] = (answer.baseline ?? answer).predictions;
    const [best] = top;
    const hints = this.model.capabilities.tokenizer ? await hintsOf(state, signal) : [];
    this.#attribution.hidden = false;
    this.#attribution.prepare({ token: state.explain || String(best.text ?? best.id), minus: state.minus, hints });
    this.#attribution.wait();
    try {
      const body = this.#question(state, position, best.id);
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
    this.#texts.clear();
    this.#attribution.hidden = true;
    this.#attribution.show(null);
    this.context.offer();
  }

  request() {
    return this.#body && { path: "/forward", body: this.#body };
  }

  pictures() {
    return [...this.#sweep.pictures(), ...this.#attribution.pictures()];
  }

  /**
   * @param {State} state
   * @param {NamedEdit[]} list
   */
  #bodyOf(state, list) {
    const { pos } = state;
    if (!/^-?\d*$/.test(pos)) throw new Error(`position: “${pos}” is not a position.`);
    const edits = list.length > 0 ? { edits: withoutNames(list), baseline: true } : {};
    const top_k = Math.min(MAX_TOKENS_COMPARED, this.model.sizes.d_vocab);
    return {
      ...bodyOf(state),
      stages: STAGES,
      detail: "none",
      positions: [pos === "" ? -1 : Number(pos)],
      top_k,
      ...edits,
    };
  }

  /**
   * @param {State} state
   * @param {number} position
   * @param {number} best the id of the most likely token
   */
  #question(state, position, best) {
    const { explain, minus } = state;
    const { capabilities } = this.model;
    const read = (/** @type {string} */ text) => (capabilities.tokenizer ? text : Number(text));
    return {
      method: "direct",
      ...bodyOf(state),
      position,
      token: explain === "" ? best : read(explain),
      ...(minus === "" ? {} : { minus: read(minus) }),
    };
  }

  #showChips() {
    const controls = () => findAll(this.#chips, "input, select");
    const focused = controls().indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const chips = this.#edits.map((edit, index) => {
      const [words, texts] = [inWords(edit), steerTexts(edit)];
      const remove = () => this.#set(JSON.stringify(this.#edits.filter((_, other) => other !== index)));
      return el(
        "li",
        { class: "chip", title: texts ? null : JSON.stringify(edit) },
        texts ? [`${steerName(texts)}, after `, this.#layer(edit, index, words)] : words,
        " ",
        this.#strength(edit, index, words),
        actionButton("✕", remove, { class: "small", "aria-label": `Remove: ${words}` }),
      );
    });
    const all = actionButton("Remove all", () => this.#set("[]"), { class: "small" });
    this.#chips.replaceChildren(
      ...(chips.length > 0 ? chips : [el("li", { class: "faint" }, "There are no edits yet.")]),
      chips.length > 1 ? el("li", {}, all) : "",
    );
    controls()[focused]?.focus(); // a slider that an arrow key has moved
  }

  /**
   * A choice of the layer after which a vector of two texts is added. Each layer has another vector.
   * @param {NamedEdit} edit
   * @param {number} index
   * @param {string} words
   */
  #layer(edit, index, words) {
    const [, layer] = /^blocks\.(\d+)\./.exec(edit.stage) ?? [];
    const layers = Array.from({ length: this.model.config.num_layers }, (_, each) => [each, placeName(each)]);
    const label = `Layer of: ${words}`;
    return select({ "aria-label": label, onchange: ({ target }) => this.#move(index, +target.value) }, layers, layer);
  }

  /**
   * A slider for the strength of an edit, if it has one.
   * @param {NamedEdit} edit
   * @param {number} index
   * @param {string} words
   */
  #strength(edit, index, words) {
    const name = edit.op === "scale" ? "factor" : edit.op === "add" ? "scale" : edit.op === "project" ? "coeff" : null;
    if (name === null) return "";
    const isSteered = steerTexts(edit) !== null;
    const value = edit[name] ?? (name === "scale" ? 1 : 0);
    const most = Math.max(isSteered ? 2 : 4, Math.abs(value));
    const slider = el("input", {
      type: "range",
      min: String(-most),
      max: String(most),
      step: String(most / 40),
      value: String(value),
      "aria-label": `Strength of: ${words}`,
      onchange: ({ target }) => this.#replace(index, { ...edit, [name]: Number(target.value) }),
    });
    return isSteered ? [slider, ` strength ${value} `] : slider;
  }

  /**
   * Add the vector of two texts after another layer.
   * @param {number} index of the edit
   * @param {number} layer
   */
  async #move(index, layer) {
    const [state, { steer, scale }] = [this.#state, this.#edits[index]];
    if (!steer) return;
    try {
      const edit = await steeringEdit(steer, layer, scale ?? 1, this.#source);
      if (state === this.#state) this.#replace(index, { ...this.#edits[index], ...edit });
    } catch (error) {
      if (state !== this.#state) return;
      this.#showChips();
      this.context.report(error);
    }
  }

  /**
   * @param {number} index
   * @param {NamedEdit} edit
   */
  #replace(index, edit) {
    const edits = this.#edits.map((other, place) => (place === index ? edit : other));
    return this.context.navigate({ edits: JSON.stringify(edits) }, { replace: true });
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
      await cached("/forward", this.#bodyOf(state, edits));
      if (state === this.#state) this.#add(edit);
    } catch (error) {
      if (error instanceof ApiError && isRefusal(error)) this.#form.refuse(error);
      else this.context.report(error);
    } finally {
      this.#isChecking = false;
    }
  }

  /**
   * Add an edit. A vector of the same two texts takes the place of the earlier one.
   * @param {NamedEdit} edit
   */
  #add(edit) {
    const texts = JSON.stringify(edit.steer);
    const others = this.#edits.filter(({ steer }) => !steer || JSON.stringify(steer) !== texts);
    this.#set(JSON.stringify([...others, edit]));
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
