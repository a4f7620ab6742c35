// <tour-card>: one step of a lesson, with its question and, when it is asked for, the answer. It can go on by itself.

import { actionButton, el, emit } from "../dom.js";
import { isCalm } from "./motion.js";

/**
 * @import { Chapter } from "./chapters.js"
 * @import { Lesson } from "./lessons.js"
 */

const PLAY_MILLISECONDS = 6000; // for each step
const SMALL = { class: "small" };
const INTERACTIONS = ["pointerdown", "keydown", "wheel"]; // they stop the play

/** Event "step" with detail {step}: the number of another step, or null to leave. */
export class TourCard extends HTMLElement {
  #shown = "";
  #index = 0;
  #count = 0;
  #timer = 0;
  #title = el("h3");
  #source = el("p", { class: "faint" });
  #sentence = el("p");
  #question = el("summary");
  #answer = el("p");
  #details = el("details", {}, this.#question, this.#answer);
  #dots = el("ol", { class: "dots", "aria-label": "Steps" });
  #back = actionButton("Back", () => this.#go(this.#index - 1), SMALL);
  #next = actionButton("Next", () => this.#go(this.#index + 1), SMALL);
  #play = actionButton("Play", () => (this.isPlaying ? this.stop() : this.#start()), SMALL);
  #leave = actionButton("Leave the lesson", () => this.#go(null), SMALL);
  #interrupt = (/** @type {Event} */ event) => {
    const isPress = event.type === "pointerdown" || ["Enter", " "].includes(/** @type {KeyboardEvent} */ (event).key);
    if (!isPress || event.target !== this.#play) this.stop(); // else its click does it
  };

  connectedCallback() {
    if (this.childElementCount > 0) return;
    const buttons = el("div", { class: "row" }, this.#back, this.#next, this.#play, this.#leave);
    this.append(this.#title, this.#source, this.#sentence, this.#details, this.#dots, buttons);
    this.addEventListener("keydown", (event) => this.#press(event));
  }

  disconnectedCallback() {
    this.stop();
  }

  get isPlaying() {
    return this.#timer !== 0;
  }

  /**
   * @param {Lesson} lesson
   * @param {Chapter[]} steps
   * @param {number} index
   */
  show(lesson, steps, index) {
    const { chapter, title, sentence, question, answer } = steps[index];
    const key = JSON.stringify([lesson.title, steps.length, index, sentence, question, answer]);
    if (key === this.#shown) return;
    this.#shown = key;
    [this.#index, this.#count] = [index, steps.length];
    this.#title.textContent = `${chapter || `${index + 1} of ${steps.length}`} · ${title}`;
    this.#source.hidden = !lesson.address;
    const link = { href: lesson.address, target: "_blank", rel: "noreferrer" };
    this.#source.replaceChildren(el("a", link, lesson.title));
    this.#sentence.textContent = sentence;
    this.#details.open &&= this.#question.textContent === question; // an answer that changes stays open
    this.#question.textContent = question;
    this.#answer.textContent = answer;
    this.#showDots(steps);
    this.#showButtons();
    if (this.isPlaying) this.#start();
  }

  /** Wait for the user again. */
  stop() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#play.textContent = "Play";
    for (const kind of INTERACTIONS) document.removeEventListener(kind, this.#interrupt, true);
  }

  /** Give the keyboard to the card. */
  focus() {
    this.#next.focus({ preventScroll: true });
  }

  /** Go on by itself, step by step, as far as there are steps. */
  #start() {
    this.stop();
    if (this.#index + 1 === this.#count) return;
    this.#play.textContent = "Stop";
    this.#timer = setTimeout(() => this.#go(this.#index + 1), PLAY_MILLISECONDS);
    for (const kind of INTERACTIONS) document.addEventListener(kind, this.#interrupt, true);
  }

  /** @param {number | null} step */
  #go(step) {
    if (step === null || (step >= 0 && step < this.#count)) emit(this, "step", { step });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#go(this.#index + by);
  }

  /** A button with the focus is never disabled. */
  #showButtons() {
    const focused = this.contains(document.activeElement) ? document.activeElement : null;
    const [isFirst, isLast] = [this.#index === 0, this.#index + 1 === this.#count];
    this.#back.disabled = this.#next.disabled = this.#play.disabled = false;
    if (isFirst && focused === this.#back) this.#next.focus();
    if (isLast && (focused === this.#next || focused === this.#play)) this.#back.focus();
    this.#back.disabled = isFirst;
    this.#next.disabled = this.#play.disabled = isLast;
    this.#play.hidden = isCalm();
  }

  /**
   * A dot for each step. The arrow keys go from step to step, so Tab stops at one dot only.
   * @param {Chapter[]} steps
   */
  #showDots(steps) {
    const hasFocus = this.#dots.contains(document.activeElement);
    const dots = steps.map(({ title }, step) => {
      const isHere = step === this.#index;
      return el(
        "li",
        {},
        el("button", {
          ...{ type: "button", title, "aria-label": `Step ${step + 1}: ${title}`, tabindex: isHere ? "0" : "-1" },
          ...{ "aria-current": isHere && "step", onclick: () => this.#go(step) },
        }),
      );
    });
    this.#dots.replaceChildren(...dots);
    if (hasFocus) dots[this.#index].querySelector("button")?.focus();
  }
}

customElements.define("tour-card", TourCard);
