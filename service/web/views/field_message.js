// Why the service does not take what a form asks for, shown beside the field that it concerns.

import { ApiError } from "../api.js";
import { actionButton, el } from "../dom.js";
import { shown } from "../format.js";

/** @import { Token } from "../answers.js" */

/** A message of one form. */
export class FieldMessage {
  #element;
  /** @type {HTMLElement | null} */
  #control = null;

  /** @param {string} id of the message in the page */
  constructor(id) {
    this.#element = el("p", { class: "error edit-message", id, role: "alert", hidden: true });
  }

  /**
   * @param {string} text
   * @param {HTMLElement} form
   * @param {HTMLElement | null | undefined} [control] the field, or none: the message stands at the end of the form
   */
  show(text, form, control) {
    this.clear();
    this.#control = control ?? null;
    control?.setAttribute("aria-invalid", "true");
    control?.setAttribute("aria-describedby", this.#element.id);
    if (control) (control.closest("label") ?? control).after(this.#element);
    else form.append(this.#element);
    if (form.contains(document.activeElement)) control?.focus(); // not if a link has led here
    this.#element.textContent = text;
    this.#element.hidden = false;
  }

  clear() {
    this.#element.hidden = true;
    this.#control?.removeAttribute("aria-invalid");
    this.#control?.removeAttribute("aria-describedby");
  }
}

/**
 * Offer a token with a space in front, if one without it was typed.
 * @param {Token} token
 * @param {() => unknown} choose
 * @param {string} [reason]
 */
export function didYouMean(token, choose, reason = "") {
  const button = actionButton(`“${shown(token)}”`, choose, { class: "small" });
  return el("span", {}, "Did you mean ", button, ` (id ${token.id}), with a space in front?${reason}`);
}

/**
 * Whether an error is one of what was asked for, and not of the service.
 * @param {unknown} error
 */
export function isRefusal(error) {
  return !(error instanceof ApiError) || (error.status >= 400 && error.status < 500);
}

/** @param {unknown} error */
export function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}
