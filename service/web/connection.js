// A service that goes away: say so, ask until it is back, then go on.

import { ApiError } from "./api.js";

const RETRY_MILLISECONDS = 1000;
const SILENT = "The service does not answer. The page tries again until it does.";
const LOADING =
  "The service is loading its model, or is about to stop. The page goes on as soon as the service is ready.";

/**
 * Whether an error means that the same request can succeed later without a change.
 * @param {unknown} error
 * @returns {error is ApiError}
 */
export function isAway(error) {
  if (!(error instanceof ApiError)) return false;
  return error.status === 0 || (error.status === 503 && ["loading", "draining"].includes(error.code ?? ""));
}

/** The status with which the service answers whether it is ready; 0 if it does not answer. */
export async function readyStatus() {
  const response = await fetch("./ready").catch(() => null);
  return response?.status ?? 0;
}

/** Shows a banner while the service is away. `resume` is called when the service is ready again. */
export class Connection {
  #banner;
  #resume;
  /** @type {number | undefined} */
  #timer;

  /**
   * @param {HTMLElement} banner
   * @param {() => unknown} resume
   */
  constructor(banner, resume) {
    this.#banner = banner;
    this.#resume = resume;
  }

  /**
   * Show an error of `isAway`, and ask once a second whether the service is ready.
   * @param {{ status: number }} error
   */
  wait(error) {
    this.#banner.textContent = error.status === 0 ? SILENT : LOADING;
    this.#banner.hidden = false;
    document.body.dataset.service = "away";
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), RETRY_MILLISECONDS);
  }

  /** The service has answered. */
  found() {
    clearTimeout(this.#timer);
    this.#banner.hidden = true;
    delete document.body.dataset.service;
  }

  async #ask() {
    const timer = this.#timer;
    const status = await readyStatus();
    if (timer !== this.#timer) return; // another wait has begun, or the service was found meanwhile
    if (status === 200) {
      this.found();
      this.#resume();
    } else this.wait({ status });
  }
}
