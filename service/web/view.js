// What the shell (page.js) expects of a view. One custom element for each view, in views/.

/**
 * @import { Model, ModelEntry, Prompt } from "./answers.js"
 * @import { State } from "./address.js"
 * @import { Drawable } from "./draw/pictures.js"
 */

/**
 * - `service.model`: the answer of GET /model, or null if only worked examples are served.
 * - `service.models`: `models` of GET /models.
 * - `navigate(changes, {replace})`: change the state, such as `navigate({layer: "3"})`. This updates the address and
 *   calls `update`. `replace`: do not add a step to the browser's history (for sliders and hovering).
 * - `offer()`: let the export bar offer what the view shows, although `update` fails.
 * - `report(error)`: show an error that happens outside of `update`, such as in the listener of a button.
 * @typedef {{ model: Model | null, models: ModelEntry[] }} Service
 * @typedef {{
 *   service: Service,
 *   navigate: (changes: State, options?: { replace?: boolean }) => Promise<void>,
 *   offer: () => void,
 *   report: (error: unknown) => void,
 * }} Context
 */

/**
 * `model`: null for the served one. `prompt`: as requests take it. `edits`: only some views apply them.
 * @typedef {{ model: string | null, prompt: Prompt, edits?: string }} ViewState
 * @typedef {{ path: string, body: Record<string, any> | null, query?: Record<string, string> }} ViewRequest `body`:
 *   null for GET, which may have a `query`
 * @typedef {{ name: string, element: Drawable }} Picture
 */

/**
 * @template State
 * @typedef {(state: State, signal: AbortSignal) => Promise<void>} Update
 */

/**
 * The model and the prompt of a state, as requests take them.
 * @param {Pick<ViewState, "model" | "prompt">} state
 * @returns {{ model?: string, prompt: Prompt }}
 */
export function bodyOf({ model, prompt }) {
  return { ...(model && { model }), prompt };
}

export class View extends HTMLElement {
  /**
   * Parameters of this view in the address: name → default. All values are texts; "" usually means automatic.
   * @type {Record<string, string>}
   */
  static params = {};
  /** Whether the view shows the prompt of the form at the top. */
  static usesPrompt = true;
  /** Whether the view applies the edits of the address: its `params` then have `edits`. */
  static appliesEdits = false;
  /** Whether the view also shows worked examples. They have forward passes, but cannot generate. */
  static showsWorkedExamples = false;
  /**
   * The capability in GET /model without which the view is not shown, or null.
   * @type {string | null}
   */
  static needs = null;

  /**
   * Set by the shell before `build`.
   * @type {Context}
   */
  context;

  /**
   * The served model, which views with `needs` or without `showsWorkedExamples` always have.
   * @returns {Model}
   */
  get model() {
    const { model } = this.context.service;
    if (model === null) throw new Error("This service has no checkpoint.");
    return model;
  }

  /** Create the permanent elements. Called once. */
  build() {}

  /**
   * Show a state: `view`, `model` (null for the served one), `prompt` (as requests take it: a text, or a list of ids),
   * and the parameters of the view. Called when the view opens and after each change. Keep the elements that stay the
   * same, so that nothing jumps and the focus stays. Pass `signal` on to requests: it is aborted when a newer state is
   * shown. Errors are shown by the shell.
   * @param {ViewState} _state
   * @param {AbortSignal} _signal
   * @returns {Promise<void>}
   */
  async update(_state, _signal) {}

  /** Called when another view is opened: stop timers and streams. */
  leave() {}

  /**
   * What the view shows as a request, for the export bar: {path, body} or null. The page offers it as curl and Python,
   * and as safetensors where the service does.
   * @returns {ViewRequest | null}
   */
  request() {
    return null;
  }

  /**
   * What the view shows as a plain text to copy, or null.
   * @returns {string | null}
   */
  text() {
    return null;
  }

  /**
   * Pictures that can be downloaded: with a canvas, an svg, or a heat-map element.
   * @returns {Picture[]}
   */
  pictures() {
    return [];
  }
}
