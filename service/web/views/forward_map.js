// The map of a network: the embeddings, the layers, and what follows them, with the residual stream as a line.

import { actionButton, el, emit, find } from "../dom.js";
import { bar } from "../draw/bars.js";
import { number, shown } from "../format.js";
import { dataTable } from "../draw/data_table.js";
import { describe } from "../stages.js";
import { term } from "../terms.js";
import { captionsOf, partsOf } from "./block_map.js";
import "./next_tokens.js";
import { StageCard, StageValues, isPrediction } from "./stage_card.js";

/**
 * @import { Architecture, ForwardAnswer, Stage } from "../answers.js"
 * @import { StageEntry } from "../stages.js"
 * @import { Part, Section } from "./block_map.js"
 * @import { Rows } from "./stage_picture.js"
 * @typedef {ForwardAnswer & { position: number }} AnswerAt
 * @typedef {HTMLElement & { show: (answer: AnswerAt) => void }} Predictions
 */

const AHEAD = 200; // pixels out of sight that count as in sight
const MOST_COLUMNS = { widest: 14, wide: 8, middle: 5 };

/**
 * <forward-map>. Events "layer" {layer}, "stage" {name}, "head" {head}, "position" {position} and "sight" (other cards
 * have come into sight), for its owner to act on.
 */
export class ForwardMap extends HTMLElement {
  #key = "";
  /** @type {Architecture} */
  #architecture;
  /** @type {StageEntry[]} the entries of all stages, in the order of the computation */
  stages = [];
  /** @type {Map<string, StageCard>} name of a stage → its card */
  #cards = new Map();
  /** @type {Map<string, HTMLElement>} layer → its <section> */
  #layers = new Map();
  /** @type {Set<string>} the stages whose cards are in sight */
  #sight = new Set();
  #observer = new IntersectionObserver((entries) => this.#see(entries), { rootMargin: `${AHEAD}px` });

  /**
   * Create the cards of all stages, unless they are there.
   * @param {string[]} names
   * @param {Architecture} architecture
   */
  build(names, architecture) {
    const key = JSON.stringify([names, architecture]);
    if (key === this.#key) return;
    [this.#key, this.#architecture] = [key, architecture];
    this.stages = names.map((name) => describe(name, architecture));
    this.#cards.clear();
    this.#layers.clear();
    this.#sight.clear();
    this.#observer.disconnect();
    const first = names.findIndex((name) => name.startsWith("blocks."));
    const [before, others] = [names.slice(0, first), names.slice(first)];
    const after = others.filter((name) => !name.startsWith("blocks."));
    const inside = others.filter((name) => name.startsWith("blocks."));
    const layers = Map.groupBy(inside, (name) => name.split(".")[1]);
    this.replaceChildren(
      this.#outside("Embeddings: from tokens to the residual stream", before),
      ...[...layers].map(([layer, stages]) => this.#layer(layer, stages)),
      this.#outside("From the residual stream to the prediction", after),
    );
    for (const card of this.#cards.values()) this.#observer.observe(card.cell);
  }

  /** @param {IntersectionObserverEntry[]} entries */
  #see(entries) {
    for (const { target, isIntersecting } of entries) {
      const { stage } = /** @type {StageCard} */ (target.parentElement);
      if (isIntersecting) this.#sight.add(stage.name);
      else this.#sight.delete(stage.name);
    }
    if (entries.some(({ isIntersecting }) => isIntersecting)) emit(this, "sight");
  }

  /** The stages whose cards are in sight, of those that have a picture. */
  get sight() {
    return [...this.#sight].filter((name) => !isPrediction(name));
  }

  /** Draw the pictures of the stages that a pass has. @param {Rows} rows */
  draw(rows) {
    for (const name of this.sight) this.#cardOf(name).draw(rows);
  }

  /**
   * Show the most likely next tokens after a position on the cards of the predictions.
   * @param {ForwardAnswer} answer
   * @param {number} position
   */
  showTop({ predictions }, position) {
    for (const [name, card] of this.#cards) if (isPrediction(name)) card.showTop(predictions[position].top);
  }

  /**
   * Show the shapes and summaries of the stages of an answer.
   * @param {{ stages: Stage[] }} answer
   */
  showSummaries({ stages }) {
    for (const { name, shape, dims, summary } of stages)
      if (summary) this.#cards.get(name)?.showSummary({ shape, dims, summary });
  }

  /**
   * Show how long the residual stream is after each layer, from an answer for the stages `resid_post`.
   * @param {{ stages: Stage[] }} answer
   */
  showStream({ stages }) {
    const largest = Math.max(...stages.map(({ summary }) => summary?.l2 ?? 0));
    for (const { name, summary } of stages) {
      const section = this.#layers.get(name.split(".")[1]);
      if (!section) continue;
      find(section, ".stream-length").replaceChildren(
        el("span", { class: "faint" }, `length of the stream after the layer: ${number(summary?.l2)}`),
        el("span", { class: "bar-cell" }, bar((summary?.l2 ?? 0) / largest)),
      );
    }
  }

  /**
   * Open these layers and stages, and close all others.
   * @param {Set<string>} layers
   * @param {Set<string>} stages
   */
  setOpen(layers, stages) {
    for (const [layer, section] of this.#layers) {
      find(section, "button").setAttribute("aria-expanded", String(layers.has(layer)));
      find(section, ".layer-map").hidden = !layers.has(layer);
    }
    for (const [name, card] of this.#cards) card.setOpen(stages.has(name));
  }

  /** @param {string} name */
  showsPredictions(name) {
    return isPrediction(name) || name === "loss";
  }

  /**
   * @param {string} name
   * @param {ForwardAnswer} answer
   * @param {number} position
   */
  showPredictions(name, answer, position) {
    const content = this.#cardOf(name).setOpen(true, () =>
      name === "loss" ? lossTable() : this.#passOn(el("next-tokens"), "position"),
    );
    /** @type {Predictions} */ (content).show({ ...answer, position });
  }

  /** @param {string} name */
  #cardOf(name) {
    const card = this.#cards.get(name);
    if (!card) throw new Error(`stage: “${name}” is not the name of a stage of this network.`);
    return card;
  }

  /**
   * Show the values of a stage, which the answer has for one head.
   * @param {string} name
   * @param {ForwardAnswer} answer
   * @param {number} head
   */
  showValues(name, { tokens, stages: [stage] }, head) {
    const card = this.#cardOf(name);
    card.setOpen(true, (entry) => this.#passOn(new StageValues(entry), "head"));
    const { num_heads: numHeads, num_kv_heads: numKvHeads } = this.#architecture;
    const kvHead = Math.floor((head * numKvHeads) / numHeads);
    find(card.body, "stage-values").show({ tokens, stage, head, numHeads, kvHead });
  }

  /**
   * Bring a stage into sight, and the keyboard to its button.
   * @param {string} name
   */
  reveal(name) {
    const card = this.#cardOf(name);
    card.cell.scrollIntoView({ block: "start" });
    find(card, ".stage-open").focus({ preventScroll: true });
  }

  /**
   * Bring the box of an open stage into sight.
   * @param {string} name
   */
  showBody(name) {
    this.#cardOf(name).body.scrollIntoView({ block: "nearest" });
  }

  pictures() {
    const open = [...this.#cards.values()].filter((card) => card.isOpen && card.body.querySelector("heat-map"));
    return open.map((card) => ({ name: card.stage.name, element: find(card.body, "heat-map") }));
  }

  /**
   * Repeat an event of an element inside as an event of the map.
   * @param {HTMLElement} element
   * @param {"head" | "position"} name
   */
  #passOn(element, name) {
    element.addEventListener(name, (event) => event instanceof CustomEvent && emit(this, name, event.detail));
    return element;
  }

  /**
   * @param {string} title
   * @param {string[]} names
   */
  #outside(title, names) {
    const stages = names.map((name) => describe(name, this.#architecture));
    return el("section", { class: "outside" }, el("h3", {}, title), this.#grid([{ title: null, term: null, stages }]));
  }

  /**
   * @param {string} layer
   * @param {string[]} names
   */
  #layer(layer, names) {
    const id = `layer-${layer}`;
    const button = actionButton(`Layer ${layer}`, () => emit(this, "layer", { layer }), {
      class: "layer-open",
      "aria-expanded": "false",
      "aria-controls": id,
    });
    const map = el(
      "div",
      { class: "layer-map", id, hidden: true },
      partsOf(names, this.#architecture).map((part) => this.#part(part)),
    );
    const section = el(
      "section",
      { class: "layer", dataset: { layer } },
      el(
        "div",
        { class: "row layer-head" },
        el("h3", {}, button, el("span", { class: "faint" }, ` ${names.length} stages`)),
        el("p", { class: "row stream-length" }),
      ),
      map,
    );
    this.#layers.set(layer, section);
    return section;
  }

  /** @param {Part} part */
  #part(part) {
    const grid = this.#grid(part.sections);
    if (part.branch === "stream") return el("div", { class: "on-stream" }, grid);
    const [begin, end] = captionsOf(part, this.#architecture);
    const name = part.branch === "attention" ? "Attention" : "Feed-forward network";
    return el(
      "div",
      { class: part.isOnStream ? "on-stream" : "branch", role: "group", "aria-label": name },
      el("p", { class: "branch-caption" }, part.isOnStream ? "↓ " : "↳ ", begin),
      grid,
      el("p", { class: "branch-caption" }, part.isOnStream ? "↓ " : "⊕ ", end),
    );
  }

  /**
   * The cards of some sections, which share rows.
   * @param {Section[]} sections
   */
  #grid(sections) {
    const cards = sections.flatMap(({ title, term: id, stages }) =>
      stages.map((stage, index) => {
        const heading = title && index === 0 ? el("h4", {}, id ? term(id, title) : title) : null;
        const card = new StageCard(stage, heading);
        card.addEventListener("open", () => emit(this, "stage", { name: stage.name }));
        this.#cards.set(stage.name, card);
        return card;
      }),
    );
    const hasHeadings = sections.some(({ title }) => title);
    const kind = cards.length === 1 ? "is-single" : hasHeadings ? "has-headings" : "";
    const grid = el("div", { class: `stage-grid ${kind}` }, cards);
    for (const [name, most] of Object.entries(MOST_COLUMNS)) {
      const numRows = Math.ceil(cards.length / most);
      grid.style.setProperty(`--${name}`, String(Math.ceil(cards.length / numRows))); // about equally long rows
    }
    return grid;
  }
}

customElements.define("forward-map", ForwardMap);

/**
 * The loss at each position as a table.
 * @returns {Predictions}
 */
function lossTable() {
  /** @type {AnswerAt} */
  let answer;
  const read = () => ({
    caption: "Loss of predicting the token after each position",
    columns: ["position", "token", "loss of the next token"],
    rows: answer.tokens.map((token, index) => [
      String(token.position),
      shown(token),
      number(answer.loss.per_token[index]),
    ]),
  });
  const table = dataTable(read, "Loss at each position");
  const said = el("p");
  const show = (/** @type {AnswerAt} */ next) => {
    answer = next;
    said.textContent =
      `Mean loss ${number(answer.loss.mean)}, perplexity ${number(answer.loss.perplexity)}. Each loss stands at ` +
      "the position before the token that it is about. The view “Loss” shows it at that token.";
    table.open = true;
    table.refresh();
  };
  return Object.assign(el("div", {}, said, table), { show });
}
