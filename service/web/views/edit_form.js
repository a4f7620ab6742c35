// The form that adds an edit: what to do, with which part of which layer, at which positions.

import { el, emit, labelled, onSubmit, select } from "../dom.js";
import { shown } from "../format.js";
import { cached } from "../passes.js";
import { PARTS, indicesOf, readPositions } from "./edit_words.js";
import { FieldMessage, messageOf } from "./field_message.js";

/**
 * @import { ApiError } from "../api.js"
 * @import { Edit, Model, Prompt, Token } from "../answers.js"
 * @typedef {"op" | "part" | "layer" | "head" | "factor" | "vector" | "scale" | "source" | "positions"} Name
 */

const OPERATIONS = {
  zero: "set to zero (ablate)",
  mean: "replace by its mean (ablate)",
  scale: "multiply by a factor",
  add: "add a stored vector",
  patch: "take from another prompt (patch)",
};
const NUM_PAIRS = 8;
/** @type {Record<string, Name[]>} the fields that only some operations or parts have */
const FIELDS = {
  scale: ["factor"],
  add: ["vector", "scale"],
  patch: ["source"],
  "attn.z": ["head"],
};

/**
 * <edit-form>. `prepare({model, vectors, prompt, read})`: the answer of GET /model, the names of the stored vectors,
 * the prompt, and what a typed prompt means in requests. `refuse(error)` shows why the service does not take an edit.
 * Event: "add" with detail {edit}.
 */
export class EditForm extends HTMLElement {
  #form = el("form", { class: "row card", "aria-label": "Add an edit" });
  /** @type {Partial<Record<Name, HTMLElement>>} the labels with their controls, or a note in place of one */
  #fields = {};
  /** @type {string[]} */
  #vectors = [];
  #key = "";
  /** @type {Prompt} */
  #prompt = "";
  /** @type {(text: string) => Prompt} */
  #readPrompt = (text) => text;
  #message = new FieldMessage("edit-message");
  #patch = el("p", { class: "faint edit-patch", role: "status", hidden: true });
  #asked = 0; // how often the tokens of a patch were asked for

  /** @param {{ model: Model, vectors: string[], prompt: Prompt, read: (text: string) => Prompt }} what */
  prepare({ model, vectors, prompt, read }) {
    this.#prompt = prompt;
    this.#readPrompt = read;
    this.#fill(model, vectors);
    this.#message.clear();
    this.#showPatch();
  }

  /**
   * The controls of the form. There is no `vector` if there are no stored vectors.
   * @returns {Record<Name, HTMLInputElement | HTMLSelectElement>}
   */
  get #controls() {
    return /** @type {any} */ (this.#form.elements);
  }

  /**
   * Show why the service does not take the edit, beside the field that its error names.
   * @param {ApiError} error
   */
  refuse({ message, param }) {
    const [, name] = /^edits\.\d+\.(\w+)/.exec(param ?? "") ?? [];
    const field = /** @type {Name} */ (name === "stage" ? "layer" : name === "heads" ? "head" : name);
    this.#show(message, this.#fields[field]?.hidden === false ? field : null);
  }

  /**
   * @param {Model} model
   * @param {string[]} vectors
   */
  #fill(model, vectors) {
    const key = JSON.stringify([model.name, model.config.num_layers, vectors]);
    if (key === this.#key) return;
    this.#key = key;
    this.#vectors = vectors;
    const parts = Object.entries(PARTS).filter(([end]) => model.stages.some(({ name }) => name === `blocks.0.${end}`));
    const numberBox = (/** @type {Name} */ name, /** @type {string} */ value) =>
      el("input", { name, type: "number", step: "any", value, class: "short" });
    const hint =
      vectors.length > 0
        ? select({ name: "vector" }, vectors)
        : el(
            "span",
            { class: "faint" },
            "This service has no stored vectors: start it with --vectors DIRECTORY, or write the edit as JSON below.",
          );
    this.#fields = {
      op: labelled("Operation", select({ name: "op" }, Object.entries(OPERATIONS))),
      part: labelled("Part", select({ name: "part" }, parts)),
      layer: labelled("Layer", select({ name: "layer" }, [...Array(model.config.num_layers).keys(), ["*", "all"]])),
      head: labelled("Head", select({ name: "head" }, [...Array(model.sizes.head).keys(), ["", "all"]])),
      factor: labelled("Factor", numberBox("factor", "2")),
      vector: vectors.length > 0 ? labelled("Vector", hint) : hint,
      scale: labelled("times", numberBox("scale", "1")),
      source: labelled("Other prompt", el("input", { name: "source", size: "40", spellcheck: "false" })),
      positions: labelled(
        "Positions",
        el("input", { name: "positions", value: "all", size: "10", title: "all, last, or a list such as 0, 3-5" }),
      ),
    };
    this.#form.replaceChildren(
      ...Object.values(this.#fields),
      el("button", { type: "submit", class: "main" }, "Add this edit"),
      this.#patch,
    );
    this.#showFields();
  }

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(this.#form);
    this.#form.addEventListener("change", () => {
      this.#showFields();
      this.#showPatch();
    });
    this.#form.addEventListener("input", () => this.#message.clear());
    onSubmit(this.#form, () => {
      this.#message.clear();
      try {
        emit(this, "add", { edit: this.#read() });
      } catch (error) {
        const { field = null } = /** @type {{ field?: Name }} */ (error);
        this.#show(messageOf(error), field);
      }
    });
  }

  /** Only the fields that the operation and the part have. */
  #showFields() {
    const { op, part } = this.#controls;
    for (const [when, names] of Object.entries(FIELDS))
      for (const name of names)
        if (this.#fields[name]) this.#fields[name].hidden = ![op.value, part.value].includes(when);
  }

  #read() {
    const { op, part, layer, head, factor, scale, vector, source, positions } = this.#controls;
    /** @type {Edit} */
    const edit = { stage: `blocks.${layer.value}.${part.value}`, op: op.value };
    if (part.value === "attn.z" && head.value !== "") edit.heads = [Number(head.value)];
    try {
      const places = readPositions(positions.value);
      if (places !== "all") edit.positions = places;
    } catch (error) {
      throw fieldError(messageOf(error), "positions");
    }
    if (op.value === "scale") edit.factor = readNumber(factor);
    if (op.value === "add") {
      if (this.#vectors.length === 0)
        throw new Error(
          "There is no stored vector to add. Start the service with --vectors DIRECTORY, or write the edit as " +
            "JSON, with a vector of its own.",
        );
      edit.vector = vector.value;
      edit.scale = readNumber(scale);
    }
    if (op.value === "patch") {
      if (source.value === "") throw fieldError("Write the prompt from which the numbers are taken.", "source");
      edit.source = { prompt: this.#readPrompt(source.value) };
    }
    return edit;
  }

  /**
   * Show a message beside a field, or at the end of the form (null).
   * @param {string} message
   * @param {Name | null} name
   */
  #show(message, name) {
    const field = name === null ? undefined : this.#fields[name];
    this.#message.show(message, this.#form, field instanceof HTMLLabelElement ? field.control : null);
  }

  /** For a patch: how many tokens both prompts have, and which position is copied to which. */
  async #showPatch() {
    const { op, source, positions } = this.#controls;
    this.#patch.hidden = op.value !== "patch";
    const asked = ++this.#asked;
    if (this.#patch.hidden) return;
    const rule =
      "“all” needs two prompts of the same length, “last” takes the last position of each, and a number means the " +
      "same position in both.";
    this.#patch.textContent = rule;
    if (source.value === "") return;
    const said = await this.#copied(this.#readPrompt(source.value), positions.value).catch(({ message }) => message);
    if (asked === this.#asked) this.#patch.textContent = `${rule} ${said}`;
  }

  /**
   * @param {Prompt} other
   * @param {string} typed
   */
  async #copied(other, typed) {
    const places = readPositions(typed);
    const [here, there] = await Promise.all([this.#prompt, other].map(tokensOf));
    const [to, from] = [here, there].map(({ length }) => indicesOf(places, length));
    const counts = `This prompt has ${here.length} tokens, and the other one ${there.length}.`;
    if (to === null || from === null)
      return `${counts} Some of these positions are out of range, so the service refuses this patch.`;
    if (to.length !== from.length)
      return (
        `${counts} The service refuses this patch, because it would copy ${from.length} positions to ` +
        `${to.length}. Write “last”, or positions that both have.`
      );
    const pairs = to
      .map((index, place) => ({ index, source: from[place] }))
      .filter((pair) => pair.index !== pair.source || here[pair.index].id !== there[pair.source].id);
    if (pairs.length === 0)
      return (
        `${counts} Each of the ${to.length} positions is copied to the same position, and has the same token in ` +
        "both."
      );
    const said = pairs
      .slice(0, NUM_PAIRS)
      .map(({ index, source }) => `${index} “${shown(here[index])}” ← ${source} “${shown(there[source])}”`);
    const more = pairs.length > NUM_PAIRS ? `, and ${pairs.length - NUM_PAIRS} more` : "";
    const same = to.length > pairs.length ? ` The ${to.length - pairs.length} others have the same token in both.` : "";
    return `${counts} Copied (this prompt ← other prompt): ${said.join(", ")}${more}.${same}`;
  }
}

/** An error that concerns a field of the form. @param {string} message @param {Name} field */
const fieldError = (message, field) => Object.assign(new Error(message), { field });

/**
 * The tokens of a prompt, which is a text or a list of ids.
 * @param {Prompt} prompt
 * @returns {Promise<Token[]>}
 */
async function tokensOf(prompt) {
  if (Array.isArray(prompt)) return prompt.map((id) => ({ id, text: null }));
  return (await cached("/tokenize", { text: prompt })).tokens;
}

/** @param {{ name: string, value: string }} control */
function readNumber({ name, value }) {
  if (value.trim() === "" || !Number.isFinite(Number(value)))
    throw fieldError("A number is needed.", /** @type {Name} */ (name));
  return Number(value);
}

customElements.define("edit-form", EditForm);
