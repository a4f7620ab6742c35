// A search box that finds a stage of the forward pass by its name, and leads to it.

import { el, emit, labelled, onSubmit, textBox } from "../dom.js";
import { TERMS } from "../terms_list.js";
import { isFound } from "../words.js";

/** @import { StageEntry } from "../stages.js" */

/**
 * <stage-search>. `show({stages, layers})`: the entries of stages.js, and the open layers, in which a name is looked
 * for first. Event "go" with detail {stage}, an entry.
 */
export class StageSearch extends HTMLElement {
  /** @type {{ stages: StageEntry[], layers: Set<string> }} */
  #shown;
  #box = textBox("go", { type: "search", list: "stage-names", size: "24", placeholder: "such as layer 2 pattern" });
  #names = el("datalist", { id: "stage-names" });
  #said = el("span", { class: "faint", role: "status" });
  #form = el(
    "form",
    { class: "row", "aria-label": "Go to a stage" },
    labelled("Go to stage", this.#box),
    this.#names,
    el("button", { type: "submit" }, "Go"),
    this.#said,
  );

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(this.#form);
    onSubmit(this.#form, () => this.#go(this.#box.value.trim()));
  }

  /** @param {{ stages: StageEntry[], layers: Set<string> }} shown */
  show({ stages, layers }) {
    if (this.#shown?.stages !== stages)
      this.#names.replaceChildren(...stages.map((stage) => el("option", { value: stage.name, label: titleOf(stage) })));
    this.#shown = { stages, layers };
  }

  /** @param {string} query */
  #go(query) {
    if (query === "") return;
    const { stages, layers } = this.#shown;
    const found = findStages(query, stages);
    const stage = found.find(({ layer }) => layer === null || layers.has(String(layer))) ?? found[0];
    const hint = "Type a part of a name, such as “pattern”, or choose one from the list.";
    if (!stage) this.#said.textContent = `No stage has the name “${query}”. ${hint}`;
    else if (found.length === 1) this.#said.textContent = "";
    else
      this.#said.textContent =
        `“${query}” fits ${found.length} stages. This is ${stage.name}. ` +
        `For another one, choose from the list${withLayer(query, stage, found.at(-1))}.`;
    if (stage) emit(this, "go", { stage });
  }
}

/**
 * The stages that a query names: by the exact name, by words of the name, or by words of the term that explains it.
 * @param {string} query
 * @param {StageEntry[]} stages
 */
export function findStages(query, stages) {
  const exact = stages.filter(({ name }) => name === query);
  if (exact.length > 0) return exact;
  const named = stages.filter((stage) => isFound(`${stage.name} ${titleOf(stage)}`, query));
  return named.length > 0
    ? named
    : stages.filter((stage) => isFound(`${stage.name} ${titleOf(stage)} ${explanationOf(stage)}`, query));
}

/** @param {StageEntry} stage */
function titleOf({ layer, label }) {
  return layer === null ? label : `Layer ${layer}: ${label}`;
}

/**
 * Words that tell how to choose another stage of the same name, if layers tell these stages apart.
 * @param {string} query
 * @param {StageEntry} stage
 * @param {StageEntry | undefined} last
 */
function withLayer(query, stage, last) {
  if (/layer/i.test(query) || stage.layer === null) return "";
  return `, or type its layer, too, such as “layer ${last?.layer ?? 0} ${query}”`;
}

/** @param {StageEntry} stage */
function explanationOf({ term }) {
  const { label, text, also } = term === null ? { label: "", text: "", also: [] } : TERMS[term];
  return [label, ...also, text].join(" ");
}

customElements.define("stage-search", StageSearch);
