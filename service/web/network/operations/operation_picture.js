// <operation-picture>: how a number was computed, as a picture. Its parts appear in the order of the computation.

import { svg } from "../../dom.js";
import { DrawnElement } from "../../draw/drawn_element.js";

/**
 * @typedef {{ height: number, parts: SVGElement[][] }} Drawn `parts`: from the inputs to the result
 * @typedef {(width: number) => Drawn} Draw
 */

const MOST_WIDTH = 460;
const STEP = 130; // milliseconds between two parts

/**
 * Elements that drawing.js makes with `hit` have a text, and perhaps a place in the network. Two events bubble: "say"
 * with detail {text} while such an element is under the pointer or chosen with the arrow keys, and null afterwards;
 * "go" with {stage, row, column} for a click or Enter on it. With the attribute "still", the picture does not move.
 */
export class OperationPicture extends DrawnElement {
  #label;
  #draw;
  #width = 0;
  /** @type {SVGElement | null} */
  #pointed = null;

  /**
   * @param {string} label the operation in one sentence
   * @param {Draw} draw
   */
  constructor(label, draw) {
    super();
    this.#label = label;
    this.#draw = draw;
    this.addEventListener("pointerover", ({ target }) => this.#point(hitOf(target)));
    this.addEventListener("pointerleave", () => this.#point(null));
    this.addEventListener("blur", () => this.#point(null));
    this.addEventListener("click", ({ target }) => go(this, hitOf(target)));
    this.addEventListener("keydown", (event) => this.#press(event));
  }

  connectedCallback() {
    this.tabIndex = 0;
    this.setAttribute("role", "group");
    this.setAttribute("aria-label", "Picture of the operation. The arrow keys go along its numbers.");
    super.connectedCallback();
    this.classList.add("is-new");
  }

  resized() {
    if (this.#room() !== this.#width) this.redraw();
  }

  #room() {
    return Math.min(MOST_WIDTH, Math.floor(this.clientWidth) || 400);
  }

  redraw() {
    if (this.#width > 0) this.classList.remove("is-new");
    this.#width = this.#room();
    const { height, parts } = this.#draw(this.#width);
    const groups = parts.map((nodes, index) =>
      svg("g", { class: "part", style: { animationDelay: `${index * STEP}ms` } }, nodes),
    );
    const size = { width: this.#width, height, viewBox: `0 0 ${this.#width} ${height}` };
    this.replaceChildren(svg("svg", { ...size, role: "img", "aria-label": this.#label }, groups));
    this.#pointed = null;
  }

  /** @param {SVGElement | null} hit */
  #point(hit) {
    if (hit === this.#pointed) return;
    this.#pointed = hit;
    for (const ring of this.querySelectorAll(".ring")) ring.remove();
    const same =
      hit?.dataset.key === undefined ? [hit] : this.#hits().filter(({ dataset }) => dataset.key === hit.dataset.key);
    for (const each of same) {
      const ring = /** @type {SVGElement | undefined} */ (each?.cloneNode());
      ring?.setAttribute("class", "ring");
      ring?.removeAttribute("fill");
      if (ring) this.firstElementChild?.append(ring);
    }
    this.dispatchEvent(new CustomEvent("say", { bubbles: true, detail: { text: hit?.dataset.text ?? null } }));
  }

  #hits() {
    return /** @type {SVGElement[]} */ ([...this.querySelectorAll(".hit")]);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const hits = this.#hits();
    const at = this.#pointed ? hits.indexOf(this.#pointed) : -1;
    if (event.key === "Enter") go(this, this.#pointed);
    const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: Infinity }[
      event.key
    ];
    if (next === undefined) return;
    event.preventDefault();
    this.#point(hits[Math.min(Math.max(next, 0), hits.length - 1)] ?? null);
  }
}

/** @param {EventTarget | null} target */
function hitOf(target) {
  return /** @type {SVGElement | null} */ (target instanceof Element ? target.closest(".hit") : null);
}

/**
 * @param {Element} picture
 * @param {SVGElement | null} hit
 */
function go(picture, hit) {
  if (hit?.dataset.stage === undefined) return;
  const { stage, row, column } = hit.dataset;
  const detail = { stage, row: Number(row), column: Number(column) };
  picture.dispatchEvent(new CustomEvent("go", { bubbles: true, detail }));
}

customElements.define("operation-picture", OperationPicture);
