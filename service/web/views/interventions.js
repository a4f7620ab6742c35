// The view "Interventions": edits as chips, the pass without edits beside the edited one, and what writes a token.

import { ApiError, getJson } from "../api.js";
import { el, labelled } from "../dom.js";
import { cached } from "../passes.js";
import { readPrompt } from "../prompts.js";
import { term } from "../terms.js";
import { View } from "../view.js";
import "./direct_attribution.js";
import "./edit_comparison.js";
import "./edit_form.js";
import { inWords, readEdits } from "./edit_words.js";
import { isOther } from "./positions.js";

const MAX_TOKENS_COMPARED = 1000;
const STAGES = ["*.resid_post", "logits"];

export default class Interventions extends View {
  static needs = "edits";
  /** `edits`: JSON; `pos`: the position to compare, "" is the last one; `explain`, `minus`: tokens of the attribution, "" for the most likely one and for none. */
  static params = { edits: "[]", pos: "", explain: "", minus: "" };

  #state = null; // the state that was shown last
  #edits = [];
  #answer = null; // the answer for the edits
  #chips = el("ul", { class: "chips", "aria-label": "Edits, in the order in which they are applied" });
  #form = el("edit-form");
  #json = el("textarea", { rows: "4", spellcheck: "false", "aria-label": "All edits as JSON" });
  #position = el("input", { type: "number", min: "0", class: "short", placeholder: "last" });
  #comparison = el("edit-comparison");
  #attribution = el("direct-attribution");
  #body = null;
  #isChecking = false; // whether the service is asked if it takes an edit

  build() {
    const meaning = el("p", { class: "faint" }, "An edit changes numbers in the middle of the pass. Everything after them is computed from the changed numbers. Switching off a part is called ", term("ablation"), ". Taking numbers from the pass over another prompt is called ", term("patching"), ". Adding a vector is called ", term("steering"), ".");
    const apply = el("button", { type: "button", onclick: () => this.#set(this.#json.value) }, "Apply the JSON");
    const json = el("details", {}, el("summary", {}, "Edits as JSON (all operations, such as noise, cap and inline vectors)"), this.#json, apply);
    const position = el("form", { class: "row" }, labelled("After position", this.#position), el("button", { type: "button", onclick: () => position.requestSubmit() }, "Show another position"));
    this.append(meaning, el("h3", {}, "Edits"), this.#chips, this.#form, json, el("h3", {}, "Without and with the edits"), position, this.#comparison, this.#attribution);
    position.addEventListener("submit", (event) => {
      event.preventDefault();
      this.context.navigate({ pos: this.#position.value });
    });
    this.#form.addEventListener("add", ({ detail }) => this.#check(detail.edit));
    this.#attribution.addEventListener("ablate", ({ detail }) => this.#add(detail.edit));
    this.#attribution.addEventListener("explain", ({ detail }) => this.context.navigate(detail));
  }

  async update(state, signal) {
    const { model } = this.context.service;
    if (state.pos !== "" && isOther(this.#state, state)) return this.context.navigate({ pos: "" }, { replace: true });
    this.#json.value = state.edits;
    this.#position.value = state.pos;
    const vectors = model.capabilities.vectors ? (await getJson("/vectors", signal)).vectors : [];
    const read = (text) => readPrompt(this.context.service, state.model ?? "", text);
    this.#form.prepare({ model, vectors: vectors.map(({ name }) => name), prompt: state.prompt, read });
    this.#body = null;
    this.#state = state;
    try {
      await this.#compare(state, model, signal);
    } catch (error) {
      if (!signal.aborted) this.#clear();
      throw error;
    }
    if (model.capabilities.direct_attribution) await this.#explain(state, model, signal);
    return undefined;
  }

  async #compare(state, model, signal) {
    this.#edits = [];
    try {
      this.#edits = readEdits(state.edits);
    } finally {
      this.#showChips();
    }
    this.#body = this.#bodyOf(state, model, this.#edits);
    this.#answer = await cached("/forward", this.#body, signal);
    this.#comparison.show(this.#answer);
    this.context.offer(); // the request can be copied while the shares are computed
  }

  /** What writes the chosen token, or the most likely one of the pass without edits. */
  async #explain(state, model, signal) {
    const best = (this.#answer.baseline ?? this.#answer).predictions[0].top[0];
    const hints = model.capabilities.tokenizer ? await hintsOf(state, signal) : [];
    this.#attribution.hidden = false;
    this.#attribution.prepare({ token: state.explain || String(best.text ?? best.id), minus: state.minus, hints });
    this.#attribution.wait();
    try {
      this.#attribution.show(await cached("/attribute", this.#question(state, model, best.id), signal));
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

  #bodyOf({ model, prompt, pos }, served, list) {
    if (!/^-?\d*$/.test(pos)) throw new Error(`position: “${pos}” is not a position.`);
    const edits = list.length > 0 ? { edits: list, baseline: true } : {};
    const top_k = Math.min(MAX_TOKENS_COMPARED, served.sizes.d_vocab);
    return { ...(model ? { model } : {}), prompt, stages: STAGES, detail: "none", positions: [pos === "" ? -1 : Number(pos)], top_k, ...edits };
  }

  #question({ model, prompt, explain, minus }, { capabilities }, best) {
    const { position } = this.#answer.predictions[0];
    const read = (text) => (capabilities.tokenizer ? text : Number(text));
    return { method: "direct", ...(model ? { model } : {}), prompt, position, token: explain === "" ? best : read(explain), ...(minus === "" ? {} : { minus: read(minus) }) };
  }

  #showChips() {
    const chips = this.#edits.map((edit, index) => {
      const words = inWords(edit);
      const remove = () => this.#set(JSON.stringify(this.#edits.filter((_, other) => other !== index)));
      return el("li", { class: "chip", title: JSON.stringify(edit) }, words, " ", el("button", { type: "button", class: "small", "aria-label": `Remove: ${words}`, onclick: remove }, "✕"));
    });
    const all = this.#edits.length > 1 ? el("li", {}, el("button", { type: "button", class: "small", onclick: () => this.#set("[]") }, "Remove all")) : "";
    this.#chips.replaceChildren(...(chips.length > 0 ? chips : [el("li", { class: "faint" }, "There are no edits yet.")]), all);
  }

  /** Add an edit if the service takes it. The answer is kept, so that it is computed once. */
  async #check(edit) {
    if (this.#isChecking) return;
    this.#isChecking = true;
    const state = this.#state;
    const edits = [...this.#edits, edit];
    try {
      await cached("/forward", this.#bodyOf(state, this.context.service.model, edits));
      if (state === this.#state) this.#add(edit);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status < 400 || error.status >= 500) this.context.report(error);
      else this.#form.refuse(error);
    } finally {
      this.#isChecking = false;
    }
  }

  #add(edit) {
    this.#set(JSON.stringify([...this.#edits, edit]));
  }

  #set(edits) {
    this.context.navigate({ edits });
  }
}

/** For each typed token without a space in front: the token that has it, if there is one. */
async function hintsOf({ explain, minus }, signal) {
  const typed = [["token", explain], ["minus", minus]].filter(([, text]) => text !== "" && !text.startsWith(" "));
  const asked = typed.map(async ([field, text]) => {
    const { tokens } = await cached("/tokenize", { text: ` ${text}`, add_special_tokens: false }, signal);
    return tokens.length === 1 && tokens[0].text === ` ${text}` ? { field, text: ` ${text}`, id: tokens[0].id } : null;
  });
  return (await Promise.all(asked)).filter(Boolean);
}

customElements.define("edits-view", Interventions);
