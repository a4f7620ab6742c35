// Explanations of terms, shown where the term appears.

import { el, labelled } from "./dom.js";
import { TERMS } from "./terms_list.js";
import { isFound } from "./words.js";

/** @import { TermId } from "./terms_list.js" */

const WORD_JOINER = "\u2060"; // keeps a comma or full stop on the line of its term
const MARGIN = 8; // pixels between an explanation and the edge of the window

/**
 * A term as a part of a sentence. A click shows what it means, with a link to the article that explains it.
 * `label`: what the sentence calls it, if not by its usual name.
 * @param {TermId} id
 * @param {string} label
 */
export function term(id, label = TERMS[id].label) {
  const box = el("span", { class: "explanation", popover: "auto", role: "note" }, ...explanation(id));
  const button = el("button", { type: "button", class: "term" }, label);
  button.popoverTargetElement = box;
  box.addEventListener("toggle", (event) => event.newState === "open" && place(box, button));
  return el("span", { class: "term-place" }, button, box, WORD_JOINER);
}

/**
 * A text in which terms stand in braces, as "the {residual}", or as "the {logit|logits}" to call one by another name.
 * Numbers and names that the page puts into the text must not have braces.
 * @param {string} text
 */
export function withTerms(text) {
  return text.split(/[{}]/).map((part, index) => {
    const [id, label] = part.split("|");
    return index % 2 === 0 ? part : term(/** @type {TermId} */ (id), label);
  });
}

/**
 * A paragraph in a faint colour, with terms in braces.
 * @param {string} text
 */
export function note(text) {
  return el("p", { class: "faint" }, withTerms(text));
}

/** A box to filter terms, and a list of all terms with their explanations. */
export function glossary() {
  const ids = /** @type {TermId[]} */ (Object.keys(TERMS));
  const sorted = ids.sort((one, other) => TERMS[one].label.localeCompare(TERMS[other].label, "en"));
  const entries = sorted.map((id) =>
    el("div", {}, el("dt", {}, TERMS[id].label), el("dd", {}, explanation(id, false))),
  );
  const filter = el("input", { type: "search", autocomplete: "off" });
  const none = el("p", { role: "status" });
  filter.addEventListener("input", () => {
    for (const entry of entries) entry.hidden = !isFound(entry.textContent, filter.value);
    none.textContent = entries.every((entry) => entry.hidden) ? "No term has this word." : "";
  });
  return [labelled("Find a term", filter), none, el("dl", { class: "glossary" }, entries)];
}

/**
 * @param {TermId} id
 * @param {boolean} isNamed whether the explanation begins with the name of the term
 */
function explanation(id, isNamed = true) {
  const { label, text, article, also } = TERMS[id];
  const link = article && el("a", { href: article.address, target: "_blank", rel: "noreferrer" }, article.title);
  const names = also.length > 0 ? ` Also called ${also.join(", ")}.` : "";
  return [
    isNamed ? el("strong", {}, `${label}: `) : "",
    text,
    names,
    link ? [" More in the article ", link, "."] : "",
  ].flat();
}

/**
 * Put an open explanation below its term, inside the window.
 * @param {HTMLElement} box
 * @param {HTMLElement} button
 */
function place(box, button) {
  const at = button.getBoundingClientRect();
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const left = Math.max(MARGIN, Math.min(at.left, document.documentElement.clientWidth - width - MARGIN));
  const below = at.bottom + 4;
  const top = below + height > innerHeight - MARGIN ? Math.max(MARGIN, at.top - height - 4) : below;
  Object.assign(box.style, { left: `${left}px`, top: `${top}px` });
}
