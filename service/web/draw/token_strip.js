// Tokens in reading order, each on a colour. One tab stop: the arrow keys move, Enter chooses.

import { around, el, emit, svg } from "../dom.js";
import { shown } from "../format.js";
import { colour, css, textOn } from "./colours.js";
import { DrawnElement } from "./drawn_element.js";
import { placesIn, textsOf } from "./table_picture.js";

/**
 * @import { Named } from "../format.js"
 * @typedef {{ token: Named, share: number, said: string }} Given
 * @typedef {{ element: HTMLElement, share: number }} Entry
 */

let numStrips = 0;

/**
 * <token-strip>. `reset(label)` empties it, `add({token, share, said})` appends a token: its text, its colour as a
 * share from 0 to 1, and a text such as "71 %" for its number. `show(label, entries)` does both. Event "choose" with
 * detail {index}. With the attribute `signs`, each space has a sign; without it, only a space that is a token of its
 * own.
 */
export class TokenStrip extends DrawnElement {
  /** @type {Entry[]} */
  #entries = [];
  #at = 0; // the entry of the keyboard
  #key = ""; // the list of `show`
  #name = `strip-${numStrips++}`;
  #list = el("div", { role: "listbox", tabindex: "0", "aria-orientation": "horizontal", class: "tokens" });

  build() {
    this.append(this.#list);
    this.#list.addEventListener("click", (event) =>
      this.#choose(Number(around(event, "[role=option]")?.dataset.index ?? NaN)),
    );
    this.#list.addEventListener("keydown", (event) => this.#press(event));
  }

  redraw() {
    this.#entries.forEach(paint);
  }

  resized() {} // the browser breaks the lines

  /** @param {string} label */
  reset(label) {
    this.#entries = [];
    this.#at = 0;
    this.#key = "";
    this.#list.replaceChildren();
    this.#list.setAttribute("aria-label", label);
    this.#list.removeAttribute("aria-activedescendant");
  }

  /**
   * Show a list of tokens. A list that is shown already stays, with what is marked and where the keyboard is.
   * @param {string} label
   * @param {Given[]} entries
   */
  show(label, entries) {
    const key = JSON.stringify(entries);
    if (key === this.#key) return;
    this.reset(label);
    this.#key = key;
    for (const entry of entries) this.add(entry);
  }

  /** @param {Given} entry */
  add({ token, share, said }) {
    const index = this.#entries.length;
    const element = el(
      "span",
      {
        role: "option",
        id: `${this.#name}-${index}`,
        class: "token",
        "aria-selected": "false",
        "aria-label": `${shown(token)}, ${said}`,
        dataset: { index, said },
      },
      this.hasAttribute("signs") ? shown(token) : visible(token),
    );
    const entry = { element, share };
    this.#entries.push(entry);
    paint(entry);
    this.#list.append(element, /\n/.test(token.text ?? "") ? el("br") : "");
  }

  /**
   * Mark one entry, or none (null).
   * @param {number | null} index
   */
  mark(index) {
    for (const option of this.#list.querySelectorAll("[aria-selected=true]"))
      option.setAttribute("aria-selected", "false");
    if (index === null || !this.#entries[index]) return;
    this.#entries[index].element.setAttribute("aria-selected", "true");
    this.#moveTo(index);
  }

  /** The tokens as they stand on the page, as SVG, with their numbers if the page shows these. */
  picture() {
    const at = placesIn(this);
    const boxes = this.#entries.flatMap(({ element }) => {
      const look = { rx: 3, fill: element.style.backgroundColor, stroke: "gray", "stroke-width": 0.5 };
      return [...element.getClientRects()].map((box) => ({ ...at(box), ...look }));
    });
    const width = Math.ceil(Math.max(1, ...boxes.map((box) => box.x + box.width)));
    const height = Math.ceil(this.getBoundingClientRect().height);
    return svg(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}` },
      boxes.map((box) => svg("rect", box)),
      textsOf(this.#list, at),
      this.classList.contains("with-numbers") && this.#entries.map(({ element }) => numberBelow(element, at)),
    );
  }

  /** @param {number} index */
  #moveTo(index) {
    this.#entries[this.#at]?.element.classList.remove("at");
    this.#at = index;
    this.#entries[index].element.classList.add("at");
    this.#list.setAttribute("aria-activedescendant", `${this.#name}-${index}`);
  }

  /** @param {number} index */
  #choose(index) {
    if (!this.#entries[index]) return;
    this.#moveTo(index);
    emit(this, "choose", { index });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    /** @type {Record<string, number>} */
    const places = { ArrowLeft: this.#at - 1, ArrowRight: this.#at + 1, Home: 0, End: this.#entries.length - 1 };
    if (event.key === "Enter" || event.key === " ") this.#choose(this.#at);
    else if (this.#entries[places[event.key]]) this.#moveTo(places[event.key]);
    else if (!(event.key in places)) return;
    event.preventDefault();
  }
}

/**
 * The number of a token, which the style sheet puts below the token.
 * @param {HTMLElement} element
 * @param {ReturnType<typeof placesIn>} at
 */
function numberBelow(element, at) {
  const { x, y, width, height } = at(element.getBoundingClientRect());
  const { color: fill } = getComputedStyle(element, "::after");
  const font = { "text-anchor": "middle", "font-family": "sans-serif", "font-size": 11 };
  return svg("text", { x: x + width / 2, y: y + height + 11, fill, ...font }, element.dataset.said);
}

/**
 * The text as it reads: spaces between letters stay, but spaces alone and line breaks get a sign.
 * @param {Named} token
 */
function visible(token) {
  const text = token.text ?? shown(token);
  if (/^ *$/.test(text)) return shown({ ...token, text });
  return text.replaceAll("\r", "␍").replaceAll("\n", "↵");
}

/** @param {Entry} entry */
function paint({ element, share }) {
  const background = colour(share);
  element.style.background = css(background);
  element.style.color = textOn(background);
}

customElements.define("token-strip", TokenStrip);
