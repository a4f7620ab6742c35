// The form that steers: more like one text, less like another.

import { el, emit, labelled, onSubmit } from "../dom.js";
import { FieldMessage, isRefusal, messageOf } from "./field_message.js";
import { steeringEdit } from "./steering.js";

/** @import { Source } from "./steering.js" */

const PAIR = { more: "They laughed", less: "They cried" };
const STRENGTH = 0.6;

/**
 * <steer-form>. `prepare({source, layer, hasTexts})`: the layer after which the vector is added, and whether the model
 * reads texts. Events: "add" with detail {edit}, and "fail" with detail {error}.
 */
export class SteerForm extends HTMLElement {
  #more = el("input", { name: "more", size: "24", spellcheck: "false" });
  #less = el("input", { name: "less", size: "24", spellcheck: "false" });
  #message = new FieldMessage("steer-message");
  #form = el(
    "form",
    { class: "row card", "aria-label": "Steer" },
    labelled("More like", this.#more),
    labelled("less like", this.#less),
    el("button", { type: "submit", class: "main" }, "Steer"),
  );
  /** @type {Source | null} */
  #source = null;
  #layer = 0;
  #isReading = false; // whether the vector is computed, which needs numbers of the service

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(this.#form);
    this.#form.addEventListener("input", () => this.#message.clear());
    onSubmit(this.#form, () => this.#steer());
  }

  /** @param {{ source: Source, layer: number, hasTexts: boolean }} what */
  prepare({ source, layer, hasTexts }) {
    if (this.#source === null && hasTexts) [this.#more.value, this.#less.value] = [PAIR.more, PAIR.less];
    this.#source = source;
    this.#layer = layer;
    this.#message.clear();
  }

  async #steer() {
    const source = this.#source;
    if (this.#isReading || source === null) return;
    this.#message.clear();
    const empty = [this.#more, this.#less].find(({ value }) => value === "");
    if (empty) {
      this.#message.show("Write a text.", this.#form, empty);
      return;
    }
    this.#isReading = true;
    try {
      const texts = { more: this.#more.value, less: this.#less.value };
      const edit = await steeringEdit(texts, this.#layer, STRENGTH, source);
      // for another model or prompt, the vector would be another one
      if (source === this.#source) emit(this, "add", { edit });
    } catch (error) {
      if (isRefusal(error)) this.#message.show(messageOf(error), this.#form, this.#more);
      else emit(this, "fail", { error });
    } finally {
      this.#isReading = false;
    }
  }
}

customElements.define("steer-form", SteerForm);
