// The form that adds an edit: what to do, with which part of which layer, at which positions.

import { el, labelled, select } from "../dom.js";
import { shown } from "../format.js";
import { cached } from "../passes.js";
import { PARTS, indicesOf, readPositions } from "./edit_words.js";

const OPERATIONS = {
  zero: "set to zero (ablate)",
  mean: "replace by its mean (ablate)",
  scale: "multiply by a factor",
  add: "add a stored vector",
  patch: "take from another prompt (patch)",
};
const NUM_PAIRS = 8;
const FIELDS = { scale: ["factor"], add: ["vector", "scale"], patch: ["source"] };

/**
 * <edit-form>. `prepare({model, vectors, prompt, read})`: the answer of GET /model, the names of the stored vectors, the
 * prompt, and what a typed prompt means in requests. `refuse(error)` shows why the service does not take an edit. Event:
 * "add" with detail {edit}.
 */
export class EditForm extends HTMLElement {
  #form = el("form", { class: "row card", "aria-label": "Add an edit" });
  #fields = {};
  #vectors = null;
  #key = null;
  #prompt = null;
  #readPrompt = null;
  #message = el("p", { class: "error edit-message", id: "edit-message", role: "alert", hidden: true });
  #patch = el("p", { class: "faint edit-patch", role: "status", hidden: true });
  #asked = 0; // how often the tokens of a patch were asked for

  prepare({ model, vectors, prompt, read }) {
    this.#prompt = prompt;
    this.#readPrompt = read;
    this.#fill(model, vectors);
    this.#clearMessage();
    this.#showPatch();
  }

  /** Show why the service does not take the edit, beside the field that its error names. */
  refuse({ message, param }) {
    const [, name] = /^edits\.\d+\.(\w+)/.exec(param ?? "") ?? [];
    const field = { stage: "layer", heads: "head" }[name] ?? name;
    this.#show(message, this.#fields[field]?.hidden === false ? field : null);
  }

  #fill(model, vectors) {
    const key = JSON.stringify([model.name, model.config.num_layers, vectors]);
    if (key === this.#key) return;
    this.#key = key;
    this.#vectors = vectors;
    const parts = Object.entries(PARTS).filter(([end]) => model.stages.some(({ name }) => name === `blocks.0.${end}`));
    const numbers = (size) => Array.from({ length: size }, (_, index) => index);
    const hint = vectors.length > 0 ? select({ name: "vector" }, vectors) : el("span", { class: "faint" }, "This service has no stored vectors: start it with --vectors DIRECTORY, or write the edit as JSON below.");
    this.#fields = {
      op: labelled("Operation", select({ name: "op" }, Object.entries(OPERATIONS))),
      part: labelled("Part", select({ name: "part" }, parts)),
      layer: labelled("Layer", select({ name: "layer" }, [...numbers(model.config.num_layers), ["*", "all"]])),
      head: labelled("Head", select({ name: "head" }, [...numbers(model.sizes.head), ["", "all"]])),
      factor: labelled("Factor", el("input", { name: "factor", type: "number", step: "any", value: "2", class: "short" })),
      vector: vectors.length > 0 ? labelled("Vector", hint) : hint,
      scale: labelled("times", el("input", { name: "scale", type: "number", step: "any", value: "1", class: "short" })),
      source: labelled("Other prompt", el("input", { name: "source", size: "40", spellcheck: "false" })),
      positions: labelled("Positions", el("input", { name: "positions", value: "all", size: "10", title: "all, last, or a list such as 0, 3-5" })),
    };
    this.#form.replaceChildren(...Object.values(this.#fields), el("button", { type: "submit", class: "main" }, "Add this edit"), this.#patch, this.#message);
    this.#showFields();
  }

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(this.#form);
    this.#form.addEventListener("change", () => {
      this.#showFields();
      this.#showPatch();
    });
    this.#form.addEventListener("input", () => this.#clearMessage());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#clearMessage();
      let edit;
      try {
        edit = this.#read();
      } catch (error) {
        return this.#show(error.message, error.field ?? null);
      }
      return this.dispatchEvent(new CustomEvent("add", { detail: { edit } }));
    });
  }

  /** Only the fields that the operation and the part have. */
  #showFields() {
    const { op, part } = this.#form.elements;
    for (const name of Object.values(FIELDS).flat()) this.#fields[name].hidden = !(FIELDS[op.value] ?? []).includes(name);
    this.#fields.head.hidden = part.value !== "attn.z";
  }

  #read() {
    const { op, part, layer, head, factor, scale, vector, source, positions } = this.#form.elements;
    const edit = { stage: `blocks.${layer.value}.${part.value}`, op: op.value };
    if (part.value === "attn.z" && head.value !== "") edit.heads = [Number(head.value)];
    const places = within("positions", () => readPositions(positions.value));
    if (places !== "all") edit.positions = places;
    if (op.value === "scale") edit.factor = readNumber(factor);
    if (op.value === "add") {
      if (this.#vectors.length === 0) throw new Error("There is no stored vector to add. Start the service with --vectors DIRECTORY, or write the edit as JSON, with a vector of its own.");
      Object.assign(edit, { vector: vector.value, scale: readNumber(scale) });
    }
    if (op.value === "patch") {
      if (source.value === "") within("source", () => { throw new Error("Write the prompt from which the numbers are taken."); });
      edit.source = { prompt: this.#readPrompt(source.value) };
    }
    return edit;
  }

  #clearMessage() {
    this.#message.hidden = true;
    for (const { control } of Object.values(this.#fields)) {
      control?.removeAttribute("aria-invalid");
      control?.removeAttribute("aria-describedby");
    }
  }

  /** Show a message beside a field, or at the end of the form (null). */
  #show(message, field) {
    const control = field && this.#fields[field].control;
    if (control) {
      control.setAttribute("aria-invalid", "true");
      control.setAttribute("aria-describedby", this.#message.id);
      this.#fields[field].after(this.#message);
      control.focus();
    } else this.#form.append(this.#message);
    this.#message.textContent = message;
    this.#message.hidden = false;
  }

  /** For a patch: how many tokens both prompts have, and which position is copied to which. */
  async #showPatch() {
    const { op, source, positions } = this.#form.elements;
    this.#patch.hidden = op.value !== "patch";
    const asked = ++this.#asked;
    if (this.#patch.hidden) return;
    const rule = "A patch takes as many positions from the other prompt as it changes: “all” needs prompts of as many tokens, “last” takes the last position of each, and a number means the same position in both.";
    this.#patch.textContent = rule;
    if (source.value === "") return;
    const said = await this.#copied(this.#readPrompt(source.value), positions.value).catch(({ message }) => message);
    if (asked === this.#asked) this.#patch.textContent = `${rule} ${said}`;
  }

  async #copied(other, typed) {
    const places = readPositions(typed);
    const [here, there] = await Promise.all([this.#prompt, other].map(tokensOf));
    const [to, from] = [here, there].map(({ length }) => indicesOf(places, length));
    const counts = `This prompt has ${here.length} tokens, and the other one ${there.length}.`;
    if (to === null || from === null) return `${counts} Some of these positions are out of range, so the service refuses this patch.`;
    if (to.length !== from.length) return `${counts} The service refuses this patch, because it would copy ${from.length} positions to ${to.length}. Write “last”, or positions that both have.`;
    const pairs = to.map((index, place) => ({ index, source: from[place] })).filter((pair) => pair.index !== pair.source || here[pair.index].id !== there[pair.source].id);
    if (pairs.length === 0) return `${counts} Each of the ${to.length} positions is copied to the same position, and has the same token in both.`;
    const said = pairs.slice(0, NUM_PAIRS).map(({ index, source }) => `${index} “${shown(here[index])}” ← ${source} “${shown(there[source])}”`);
    const more = pairs.length > NUM_PAIRS ? `, and ${pairs.length - NUM_PAIRS} more` : "";
    const same = to.length > pairs.length ? ` The ${to.length - pairs.length} others have the same token in both.` : "";
    return `${counts} Copied (this prompt ← other prompt): ${said.join(", ")}${more}.${same}`;
  }
}

/** The tokens of a prompt, which is a text or a list of ids. */
async function tokensOf(prompt) {
  if (Array.isArray(prompt)) return prompt.map((id) => ({ id, text: null }));
  return (await cached("/tokenize", { text: prompt })).tokens;
}

function readNumber({ name, value }) {
  return within(name, () => {
    if (value.trim() === "" || !Number.isFinite(Number(value))) throw new Error("A number is needed.");
    return Number(value);
  });
}

/** Read a field. An error gets the name of the field. */
function within(field, read) {
  try {
    return read();
  } catch (error) {
    throw Object.assign(error, { field });
  }
}

customElements.define("edit-form", EditForm);
