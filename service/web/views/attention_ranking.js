// Which heads attend most to a kind of token, such as the previous one, or to one chosen token.

import { actionButton, el, emit, findAll, labelled, select } from "../dom.js";
import { dataTable } from "../draw/data_table.js";
import { percent, quoted, shown } from "../format.js";
import { placeName } from "../network/names.js";
import { term } from "../terms.js";

/**
 * @import { Means, PositionedToken } from "../answers.js"
 * @typedef {"previous" | "first" | "itself" | "induction" | "chosen" | "changed"} Choice
 * @typedef {{ layer: number, head: number }} Place
 * @typedef {Place & { means: Means | null, weight?: number, moved?: number }} HeadWeights
 * @typedef {{
 *   heads: HeadWeights[], target: Choice, isEdited: boolean, tokens: PositionedToken[], query: number, key: number,
 *   chosen: Place,
 * }} Shown
 */

/** Means that every prompt of two tokens has: a field of `means` of POST /patterns → how a sentence calls it. */
export const TARGETS = { previous: "the previous token", first: "the first token", itself: "the token itself" };
export const TARGET_NAMES = /** @type {(keyof typeof TARGETS)[]} */ (Object.keys(TARGETS));
/** What can be looked for. */
export const CHOICES = {
  ...TARGETS,
  induction: "the token after an earlier copy (induction)",
  chosen: "a chosen token",
  changed: "other tokens than without the edits",
};
const NUM_NAMED = 5;
/** @type {Record<string, string | undefined>} */
const BASES = {
  induction: "Means over the tokens that have an earlier copy: their weight on the token after that copy.",
  chosen: "The weight of this query on this key. A click on a cell of the large picture chooses both.",
  changed: "The share of the weight of this query that the edits move to other keys.",
};
const BASIS = "Means over this prompt without its first token, which can only attend to itself.";

/**
 * <attention-ranking>. `show({heads, target, isEdited, tokens, query, key, chosen})`: `heads` are {layer, head, means,
 * weight, moved}, with the weight of the key for the query if the target is "chosen", and the share that the edits move
 * if it is "changed"; `chosen` is the head that is shown. Events: "target" with detail {target}, "pair" with {pos} or
 * {key}, and "choose" with {layer, head}.
 */
export class AttentionRanking extends HTMLElement {
  /** @type {Shown} */
  #shown;
  /** @type {(HeadWeights & { value: number })[]} the largest first */
  #heads = [];
  #select = select({}, Object.entries(CHOICES), "previous");
  #pair = el("span", { class: "row" });
  #answer = el("p", { class: "answer" });
  #buttons = el("div", { class: "row" });
  #basis = el("p", { class: "faint" });
  #table = dataTable(() => this.#tableOf(), "Show all heads as a table");

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(
      el("div", { class: "row" }, labelled("Find the heads that attend most to", this.#select), this.#pair),
      this.#answer,
      this.#buttons,
      this.#basis,
      this.#table,
    );
    this.#select.addEventListener("change", () => emit(this, "target", { target: this.#select.value }));
  }

  /** @param {Shown} what */
  show(what) {
    const { heads, target, tokens } = what;
    if (this.#shown?.tokens !== tokens) this.#buildPair(tokens);
    this.#shown = what;
    this.#select.value = target;
    this.#heads = ranked(heads, target);
    this.#pair.hidden = target !== "chosen" && target !== "changed";
    this.#pair.classList.toggle("has-no-key", target === "changed");
    for (const option of this.#select.options) option.hidden = option.value === "changed" && !what.isEdited;
    for (const control of this.#pair.querySelectorAll("select"))
      control.value = String(control.name === "pos" ? what.query : what.key);
    this.#answer.textContent = [this.#describe(), this.#whichIsShown()].filter(Boolean).join(" ");
    const named = this.#heads.slice(0, NUM_NAMED);
    const texts = apart(named.map(({ value }) => value));
    const focused = findAll(this.#buttons, "button").find((button) => button === document.activeElement)?.dataset.head;
    this.#buttons.replaceChildren(
      ...(named.length > 0 ? ["Show head", ...named.map((place, index) => this.#button(place, texts[index]))] : []),
    );
    const again = findAll(this.#buttons, "button").find(({ dataset }) => dataset.head === focused);
    if (focused !== undefined) again?.focus({ preventScroll: true });
    this.#basis.replaceChildren(
      BASES[target] ?? BASIS,
      ...(target === "induction" ? [" A high one means an ", term("induction"), "."] : []),
    );
    this.#basis.hidden = this.#table.hidden = named.length === 0;
    this.#table.refresh();
  }

  /** @param {PositionedToken[]} tokens */
  #buildPair(tokens) {
    const options = tokens.map((token, position) => [position, `${position} ${shown(token)}`]);
    const control = (/** @type {"key" | "pos"} */ name) =>
      select({ name, onchange: ({ target }) => emit(this, "pair", { [name]: target.value }) }, options, 0);
    this.#pair.replaceChildren(labelled("Key", control("key")), labelled("for the query", control("pos")));
  }

  #describe() {
    const { target, tokens, query, key } = this.#shown;
    const [best, second] = this.#heads;
    if (tokens.length === 1) return "The prompt has one token only, which can attend to nothing but itself.";
    if (!best && target === "changed") return "There are no edits.";
    if (!best) return "No token of this prompt occurs again after another one, so there is no earlier copy.";
    const what =
      target === "chosen"
        ? `${nameOfToken(tokens, key)}, when ${nameOfToken(tokens, query)} is the query`
        : CHOICES[target];
    if (best.value === 0 && target === "changed")
      return `The edits move no weight of ${nameOfToken(tokens, query)}, in no head.`;
    if (best.value === 0)
      return (
        `No head attends to ${what}` +
        `${target === "chosen" && key > query ? ": the causal mask hides later tokens" : ""}.`
      );
    if (target === "changed")
      return (
        `${nameOf(best)} changes the most: the edits move ${percent(best.value)} of the weight of ` +
        `${nameOfToken(tokens, query)} to other tokens.`
      );
    const tied = this.#heads.filter(({ value }) => value === best.value);
    const mean = target === "chosen" ? "" : " on average";
    if (tied.length > 1)
      return (
        `${tied.length} heads tie, among them ${tied.slice(0, NUM_NAMED).map(nameOf).join(", ")}: they attend ` +
        `most to ${what}, each with ${percent(best.value)} of its weight${mean}.`
      );
    const [text] = apart((second ? [best, second] : [best]).map(({ value }) => value));
    return `${nameOf(best)} attends most to ${what}: ${text} of its weight${mean}.`;
  }

  /** Which head the large picture shows, if it is not the one that the answer names first. */
  #whichIsShown() {
    const [best] = this.#heads;
    const { chosen, tokens } = this.#shown;
    if (!best || best.value === 0 || tokens.length === 1 || nameOf(best) === nameOf(chosen)) return "";
    return `The large picture shows ${nameOf(chosen)}.`;
  }

  /**
   * @param {Place} place
   * @param {string} text
   */
  #button(place, text) {
    const isShown = nameOf(place) === nameOf(this.#shown.chosen);
    return actionButton(
      `${nameOf(place)}: ${text}`,
      () => emit(this, "choose", { layer: place.layer, head: place.head }),
      { class: "small", title: "Show this head", dataset: { head: nameOf(place) }, "aria-pressed": String(isShown) },
    );
  }

  #tableOf() {
    const { target, query, key } = this.#shown;
    const names = /** @type {const} */ (["previous", "first", "itself", "induction"]);
    const first = { chosen: [`position ${key}`], changed: ["moved"] }[String(target)] ?? [];
    const chosen = target === "chosen" ? `, and its weight on position ${key} for the query at ${query}` : "";
    return {
      caption:
        target === "changed"
          ? `The share of the weight of the query at ${query} that the edits move, in each head`
          : `Mean weight of each head${chosen}, the largest first`,
      columns: ["head", ...first, ...names.map((name) => CHOICES[name])],
      rows: this.#heads.map((place) => [
        nameOf(place),
        ...(first.length > 0 ? [percent(place.value)] : []),
        ...names.map((name) => percent(place.means?.[name])),
      ]),
    };
  }
}

/**
 * The heads with their values for a question, the largest first. None if a head has no value.
 * @param {HeadWeights[]} heads
 * @param {Choice} target
 */
export function ranked(heads, target) {
  const valued = heads.flatMap((each) => {
    const values = { ...each.means, chosen: each.weight, changed: each.moved };
    const value = values[target];
    return value === undefined || value === null ? [] : [{ ...each, value }];
  });
  return valued.length === heads.length ? valued.sort((a, b) => b.value - a.value) : [];
}

/** @param {Place} place */
function nameOf({ layer, head }) {
  return placeName(layer, head);
}

/**
 * @param {PositionedToken[]} tokens
 * @param {number} position
 */
function nameOfToken(tokens, position) {
  return `${quoted(tokens[position])} (position ${position})`;
}

/**
 * Shares in percent, with as many digits as different ones need to differ.
 * @param {number[]} values
 */
function apart(values) {
  const digits = (/** @type {number} */ value) => (value >= 0.1 ? 1 : 2);
  let texts = values.map(percent);
  for (let more = 1; more < 5 && new Set(texts).size < new Set(values).size; more++)
    texts = values.map((value) => `${(100 * value).toFixed(digits(value) + more)}\u00a0%`);
  return texts;
}

customElements.define("attention-ranking", AttentionRanking);
