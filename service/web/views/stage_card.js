// One stage of a forward pass on the map: its name, shape, formula and picture, and its figures and values when opened.

import { decode } from "../api.js";
import { actionButton, el, emit, find, labelled, select } from "../dom.js";
import "../draw/heat_map.js";
import { number, percent, shown } from "../format.js";
import { axesInWords, shapeInWords } from "../stages.js";
import { term } from "../terms.js";
import { StagePicture } from "./stage_picture.js";

/**
 * @import { PositionPredictions, PositionedToken, Stage, Summary } from "../answers.js"
 * @import { StageEntry } from "../stages.js"
 * @import { Rows } from "./stage_picture.js"
 * @typedef {{ tokens: PositionedToken[], stage: Stage, head: number, numHeads: number, kvHead: number }} Shown
 */

const HEAD_AXES = ["head", "kv_head"];
const NUM_TOP = 4; // next tokens on the card of the logits
let cards = 0;

/**
 * <stage-card>: a cell of the grid, with the picture of a stage, and the box of its values. Event "open" when the
 * button or the picture is pressed.
 */
export class StageCard extends HTMLElement {
  stage;
  #button;
  #shape = el("p", { class: "shape" });
  #figures = el("span", { class: "figures" });
  #picture;
  /** The part that is always shown. */
  cell;
  /** The box of the values. */
  body;

  /**
   * @param {StageEntry} stage
   * @param {HTMLElement | null} heading of the section that begins with this card
   */
  constructor(stage, heading) {
    super();
    this.stage = stage;
    const id = `stage-${cards++}`;
    const { name, label, formula } = stage;
    const open = () => this.dispatchEvent(new Event("open"));
    this.body = el(
      "div",
      { id, class: "stage-body", role: "group", "aria-label": `${label}: ${name}`, hidden: true },
      el("p", { class: "row" }, el("code", { class: "stage-name" }, name), this.#figures),
    );
    this.#button = actionButton(shortLabel(stage), open, {
      class: "stage-open",
      "aria-expanded": "false",
      "aria-controls": id,
    });
    this.#picture = el(isPrediction(name) ? "ol" : "stage-picture", { class: "stage-picture", onclick: open });
    const front = el(
      "div",
      { class: "stage-front" },
      el("div", {}, this.#button, this.#shape, formula ? el("p", { class: "formula" }, `= ${formula}`) : ""),
      this.#picture,
    );
    this.cell = el("div", { class: "stage-cell" }, heading, front);
    this.dataset.stage = name;
  }

  connectedCallback() {
    if (this.childElementCount === 0) this.append(this.cell, this.body);
  }

  get isOpen() {
    return !this.body.hidden;
  }

  /**
   * Show shape and summary of an answer of POST /forward.
   * @param {{ shape: number[], dims: string[], summary: Summary }} stage
   */
  showSummary({ shape, dims, summary }) {
    this.#shape.textContent = shapeInWords(shape, dims);
    const missing =
      summary.non_finite > 0
        ? ` · ${summary.non_finite} ${this.stage.part === "loss" ? "without a next token" : "masked (−∞)"}`
        : "";
    this.#figures.textContent =
      `min ${number(summary.min)} · max ${number(summary.max)} · mean ${number(summary.mean)} · std ` +
      `${number(summary.std)} · length ${number(summary.l2)}${missing}`;
  }

  /** Draw the picture, if the pass has the numbers. @param {Rows} rows */
  draw(rows) {
    if (this.#picture instanceof StagePicture) this.#picture.draw({ ...rows, name: this.stage.name });
  }

  /**
   * Show the most likely next tokens in place of a picture.
   * @param {PositionPredictions["top"]} top
   */
  showTop(top) {
    const say = (/** @type {PositionPredictions["top"][number]} */ { logit, probability }) =>
      this.stage.name === "logits" ? number(logit) : percent(probability);
    this.#picture.replaceChildren(
      ...top.slice(0, NUM_TOP).map((token) => el("li", {}, el("span", { class: "token" }, shown(token)), say(token))),
    );
  }

  /**
   * Open or close the box. The first time, `build` returns its content, which is returned.
   * @param {boolean} isOpen
   * @param {(stage: StageEntry) => HTMLElement} [build]
   */
  setOpen(isOpen, build) {
    this.#button.setAttribute("aria-expanded", String(isOpen));
    this.body.hidden = !isOpen;
    if (isOpen && this.body.childElementCount === 1 && build) this.body.append(build(this.stage));
    return this.body.children[1];
  }
}

customElements.define("stage-card", StageCard);

/**
 * Whether a stage has a number for each token of the vocabulary.
 * @param {string} name
 */
export function isPrediction(name) {
  return name === "logits" || name === "probabilities";
}

/**
 * The last part of the name: the heading above the card says which norm it is. Those of queries and keys have none.
 * @param {StageEntry} stage
 */
function shortLabel({ label, part }) {
  if (!/^ln[12]/.test(part)) return label;
  const short = label.split(": ")[1];
  return short[0].toUpperCase() + short.slice(1);
}

/** <stage-values>: the values of a stage as a heat map, with a choice of the head. Event "head" with detail {head}. */
export class StageValues extends HTMLElement {
  #stage;
  #axes = el("span");
  #meaning;
  #heads = el("p", { class: "row", hidden: true });
  #map = el("heat-map");

  /** @param {StageEntry} stage */
  constructor(stage) {
    super();
    this.#stage = stage;
    this.#meaning = el("p", { class: "faint" }, this.#axes, stage.term ? [" More: ", term(stage.term)] : "");
  }

  connectedCallback() {
    if (this.childElementCount === 0) this.append(this.#meaning, this.#heads, this.#map);
  }

  /**
   * Show one answer: `tokens`, and the stage {shape, dims, values} with at most one head. `head` and `numHeads`: the
   * query head that is shown, and how many there are; `kvHead`: the key-value head that it reads.
   * @param {Shown} what
   */
  show(what) {
    const { tokens, stage } = what;
    const { dims } = stage;
    this.#axes.textContent = axesInWords(dims);
    this.#showHeads(what);
    const shape = stage.shape.filter((_, axis) => dims[axis] !== "batch" && !HEAD_AXES.includes(dims[axis]));
    const labels = tokens.map((token) => `${token.position} ${shown(token)}`);
    const last = dims[dims.length - 1];
    this.#map.data = {
      values: decode(stage.values, stage.dtype),
      rowLabels: labels,
      columnLabels: last === "key" ? labels : Array.from({ length: shape[1] ?? 1 }, (_, index) => String(index)),
      rowName: dims.includes("query") ? "query" : "token",
      columnName: COLUMN_NAMES[last] ?? "number",
      valueName: this.#stage.label.toLowerCase(),
    };
  }

  /** @param {Shown} what */
  #showHeads({ stage: { dims }, head, numHeads, kvHead }) {
    this.#heads.hidden = !dims.some((dim) => HEAD_AXES.includes(dim));
    if (this.#heads.hidden) return;
    const control = this.#heads.querySelector("select");
    if (control?.options.length === numHeads) control.value = String(head);
    else {
      const onchange = (/** @type {{ target: { value: string } }} */ { target }) =>
        emit(this, "head", { head: target.value });
      const choice = select({ onchange }, [...Array(numHeads).keys()], head);
      this.#heads.replaceChildren(labelled("Head", choice), el("span", { class: "faint" }));
    }
    find(this.#heads, ".faint").textContent = dims.includes("kv_head")
      ? `Several heads may share keys and values: head ${head} reads those of key-value head ${kvHead}.`
      : "";
  }
}

/** @type {Record<string, string | undefined>} */
const COLUMN_NAMES = { key: "key", expert: "expert", expert_rank: "rank", one: "divisor" };

customElements.define("stage-values", StageValues);
