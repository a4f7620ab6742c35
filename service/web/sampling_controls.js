// Sliders for temperature, top-k and top-p, each with a box for exact numbers. They do not check the numbers: the
// service does.

import { el } from "./dom.js";
import { term } from "./terms.js";

/**
 * @typedef {"temperature" | "top_k" | "top_p"} Name
 * @typedef {{ name: Name, max: number, step: number, off: number, excludes?: boolean }} Setting
 * @typedef {Record<Name, string>} Texts the texts of the boxes
 * @typedef {{ box: HTMLInputElement, slider: HTMLInputElement, sign: () => void }} Control
 * @typedef {{
 *   said: string, before?: string, onInput?: (values: Texts) => unknown, onChange?: (values: Texts) => unknown,
 * }} Options
 */

/** @type {Setting[]} */
export const SAMPLING = [
  { name: "temperature", max: 2, step: 0.05, off: 1 },
  { name: "top_k", max: 100, step: 1, off: 0, excludes: true },
  { name: "top_p", max: 1, step: 0.01, off: 1, excludes: true },
];

/**
 * Whether a text of a box switches a setting off.
 * @param {Setting} setting
 * @param {string} text
 */
function isOff({ excludes, off }, text) {
  return Boolean(excludes) && text.trim() !== "" && Number(text) === off;
}

/**
 * One value for each setting.
 * @template Value
 * @param {(setting: Setting) => Value} read
 */
export function eachSetting(read) {
  return /** @type {Record<Name, Value>} */ (Object.fromEntries(SAMPLING.map((one) => [one.name, read(one)])));
}

/**
 * A setting in words, such as "top-k 0 (off)".
 * @param {Setting} setting
 * @param {string} text
 */
export function nameAndValue(setting, text) {
  return `${setting.name.replace("_", "-")} ${text}${isOff(setting, text) ? " (off)" : ""}`;
}

/**
 * The sliders. `onInput(values)` is called while a slider moves, and `onChange(values)` when it rests, both with the
 * texts of all boxes by name. `show(values)` sets the boxes. `said` and `before` tell two sets of sliders apart: words
 * that screen readers add after the name of a slider, and visible words before the name.
 */
export class SamplingControls {
  /** @type {Map<Name, Control>} */
  #boxes = new Map();

  /** @param {Options} options */
  constructor(options) {
    const controls = SAMPLING.map((one) => this.#control(one, options));
    this.element = el("div", { class: "row sliders", role: "group", "aria-label": options.said }, controls);
  }

  get values() {
    return eachSetting(({ name }) => this.#boxes.get(name)?.box.value ?? "");
  }

  /** @param {Texts} values */
  show(values) {
    for (const [name, { box, slider, sign }] of this.#boxes) {
      if (box.value !== values[name] && document.activeElement !== box) box.value = values[name];
      if (document.activeElement !== slider) slider.value = values[name];
      sign();
    }
  }

  /**
   * @param {Setting} setting
   * @param {Options} options
   */
  #control(setting, options) {
    const { name, max, step } = setting;
    const said = `${name.replace("_", "-")}, ${options.said}`;
    const slider = el("input", { type: "range", min: 0, max, step, "aria-label": said });
    const box = el("input", { type: "number", min: 0, step: "any", "aria-label": `${said}, as a number` });
    const off = el("span", { class: "off" });
    const sign = () => (off.textContent = isOff(setting, box.value) ? "(off)" : "");
    this.#boxes.set(name, { box, slider, sign });
    const copy = (/** @type {HTMLInputElement} */ from, /** @type {HTMLInputElement} */ to) => () => {
      to.value = from.value;
      sign();
      options.onInput?.(this.values);
    };
    slider.addEventListener("input", copy(slider, box));
    box.addEventListener("input", copy(box, slider));
    for (const control of [slider, box]) control.addEventListener("change", () => options.onChange?.(this.values));
    return el(
      "span",
      { class: "slider" },
      el("span", {}, options.before, term(name)),
      slider,
      box,
      setting.excludes ? off : "",
    );
  }
}

/**
 * A text of a box as a value for a request. What is not a number is sent as it is, so that the service says so.
 * @param {string} text
 */
export function numeric(text) {
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}
