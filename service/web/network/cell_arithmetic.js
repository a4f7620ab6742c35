// <cell-arithmetic>: how one number was computed, with the numbers in the formula. Each leads to where it comes from.

import { actionButton, el, emit } from "../dom.js";
import { count, number } from "../format.js";
import { bar } from "../draw/bars.js";
import { columnHeading, scrollRegion, table } from "../draw/tables.js";
import { LISTED, MOST_TERMS, said } from "./arithmetic/explanation.js";

/**
 * @import { Child } from "../dom.js"
 * @import { Explained, Explanation, Num, Term } from "./arithmetic/explanation.js"
 * @typedef {{ title: string, explained: Explained, edits?: string[], before?: number }} Shown `edits`: those that act
 *   on the number, in words; `before`: the number without the edits, if there are edits
 */

/** Event "go" with detail {stage, row, column} when a number is chosen. */
export class CellArithmetic extends HTMLElement {
  /** @type {string | undefined} the stage that was shown last */
  #stage;

  /** @param {...(Shown)} numbers */
  show(...numbers) {
    for (const { place, explanation } of numbers.map(({ explained }) => explained))
      if (explanation?.picture instanceof Element)
        explanation.picture.toggleAttribute("still", place.stage.name === this.#stage); // it moves once
    this.#stage = numbers.at(-1)?.explained.place.stage.name;
    this.replaceChildren(...numbers.flatMap((each) => this.#number(each)));
  }

  /**
   * @param {Shown} shown
   * @returns {(Node | string)[]}
   */
  #number({ title, explained: { place, formula, explanation }, edits = [], before }) {
    const heading = [
      el("h3", {}, title, " = ", el("output", {}, said(place.served))),
      before === undefined ? "" : el("p", {}, `Without the edits: ${said(before)}.`),
    ];
    if (!explanation) return [...heading, el("p", { class: "faint" }, formula), edited(edits)];
    const { picture } = explanation;
    const formulaParts = explanation.formula.map((each) => this.#part(each));
    const line = el("p", { class: "faint", "aria-live": picture && "polite" }, explanation.sentence);
    picture?.addEventListener("say", (event) => {
      const { text } = /** @type {CustomEvent<{ text: string | null }>} */ (event).detail;
      line.style.minHeight = `${line.offsetHeight}px`; // what follows stays where it is
      line.textContent = text ?? explanation.sentence;
    });
    return [
      ...heading,
      picture ?? "",
      line,
      el("p", { class: "sum" }, formulaParts),
      ...verdict(place.served, explanation, edits),
      explanation.terms.length > 0 ? this.#terms(explanation) : "",
    ];
  }

  /**
   * @param {string | Num} part
   * @returns {Child}
   */
  #part(part) {
    if (typeof part === "string") return part;
    const { value, stage, row, column } = part;
    const text = Number.isFinite(value) ? said(value) : number(value);
    if (stage === undefined) return el("b", {}, text);
    const go = () => emit(this, "go", { stage, row, column });
    return actionButton(text, go, { class: "num", title: `${stage}, position ${row}` });
  }

  /** @param {Explanation} explanation */
  #terms(explanation) {
    const { terms } = explanation;
    if (terms.length <= LISTED) return this.#table(explanation, terms, "The largest terms.");
    const few = this.#table(explanation, terms.slice(0, LISTED), `The largest terms. ${explanation.rest}`);
    const region = el("div", {}, few);
    const words = `Show ${terms.length < MOST_TERMS ? "all" : "the"} ${count(terms.length)} terms`;
    const toggle = el("button", { type: "button", class: "small", "aria-expanded": "false" }, words);
    const all = () => {
      const sorted = terms.toSorted((one, other) => Math.abs(other.share) - Math.abs(one.share));
      return this.#table(explanation, sorted, `${count(terms.length)} terms, the largest first.`);
    };
    toggle.addEventListener("click", () => {
      const isOpen = toggle.getAttribute("aria-expanded") === "true";
      toggle.setAttribute("aria-expanded", String(!isOpen));
      toggle.textContent = isOpen ? words : `Show the ${LISTED} largest terms`;
      region.replaceChildren(isOpen ? few : all());
    });
    return el("div", {}, toggle, region);
  }

  /**
   * @param {Explanation} explanation
   * @param {Term[]} terms
   * @param {string} caption
   */
  #table({ columns }, terms, caption) {
    const largest = Math.max(...terms.map(({ share }) => Math.abs(share)), 1e-12);
    const rows = terms.map(({ name, cells, share }) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, name),
        cells.map((cell) => el("td", {}, this.#part(cell))),
        el("td", { class: share < 0 ? "term-bar is-negative" : "term-bar" }, bar(Math.abs(share) / largest)),
      ),
    );
    const headings = columns.map((name) => (name ? columnHeading(name) : el("td")));
    const head = el("tr", {}, headings, el("td"));
    return scrollRegion("Terms", table({ class: "terms" }, { caption, head, rows }));
  }
}

/**
 * The edits that act on a number.
 * @param {string[]} edits
 */
function edited(edits) {
  return edits.length > 0 ? el("p", { class: "edited" }, `◆ Changed by an edit: ${edits.join("; ")}.`) : "";
}

/**
 * Whether the arithmetic gives the number of the service.
 * @param {number} served
 * @param {Explanation} explanation
 * @param {string[]} edits
 */
function verdict(served, { computed, slack }, edits) {
  const difference = computed === null ? NaN : Math.abs(computed - served);
  if (edits.length > 0 && !(difference <= slack))
    return [edited(edits), computed === null ? "" : el("p", {}, `The formula would give ${said(computed)}.`)];
  if (computed === null) return [el("p", { class: "faint" }, `The service computed ${said(served)}.`)];
  const isRounded = said(computed) !== said(served);
  const reason = isRounded ? " It rounds between its steps, which explains the difference." : "";
  if (difference <= slack) return [el("p", { class: "agrees" }, `✓ The service computed ${said(served)}.${reason}`)];
  const words = `it differs by ${said(difference)}, more than rounding explains.`;
  return [el("p", { class: "differs" }, `The service computed ${said(served)}: ${words}`)];
}

customElements.define("cell-arithmetic", CellArithmetic);
