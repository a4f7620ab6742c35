// <tour-card>: one step of a lesson, with its question and, when it is asked for, the answer.

import { el } from "../dom.js";

/** @import { Chapter, Lesson } from "./lessons.js" */

/** Event "step" with detail {step}: the number of another step, or null to leave. */
export class TourCard extends HTMLElement {
  #shown = "";

  /**
   * @param {Lesson} lesson
   * @param {Chapter[]} steps
   * @param {number} index
   */
  show(lesson, steps, index) {
    const { chapter, title, sentence, question, answer } = steps[index];
    const key = JSON.stringify([lesson.title, steps.length, index, sentence, question, answer]);
    if (key === this.#shown && this.childElementCount > 0) return; // the answer stays open
    this.#shown = key;
    const focused = this.contains(document.activeElement) ? document.activeElement?.textContent : null;
    const buttons = [
      this.#button("Back", index - 1, index === 0),
      this.#button("Next", index + 1, index + 1 === steps.length),
      this.#button("Leave the lesson", null, false),
    ];
    this.replaceChildren(
      el("div", { class: "row" }, el("h3", {}, `${chapter || `${index + 1} of ${steps.length}`} · ${title}`), buttons),
      lesson.address
        ? el(
            "p",
            { class: "faint" },
            el("a", { href: lesson.address, target: "_blank", rel: "noreferrer" }, lesson.title),
          )
        : "",
      el("p", {}, sentence),
      el("details", {}, el("summary", {}, question), el("p", {}, answer)),
    );
    if (focused) this.#focus(focused);
  }

  /**
   * @param {string} text
   * @param {number | null} step
   * @param {boolean} disabled
   */
  #button(text, step, disabled) {
    const go = () => this.dispatchEvent(new CustomEvent("step", { detail: { step } }));
    return el("button", { type: "button", class: "small", disabled, onclick: go }, text);
  }

  /** @param {string} text the text of the button that had the focus */
  #focus(text) {
    const buttons = [...this.querySelectorAll("button")].filter((each) => !each.disabled);
    (buttons.find((each) => each.textContent === text) ?? buttons[0])?.focus();
  }
}

customElements.define("tour-card", TourCard);
