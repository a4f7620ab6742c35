// Create elements, and find them. Texts are always set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Names that begin with "on" are event listeners, `dataset` and `style` are objects, true sets an empty attribute, and
 * false, null and undefined leave an attribute out.
 * @typedef {{
 *   onclick?: (event: MouseEvent) => unknown,
 *   onpointerenter?: (event: PointerEvent) => unknown,
 *   onchange?: (event: Event & { target: HTMLInputElement | HTMLSelectElement }) => unknown,
 *   [name: string]: unknown,
 * }} Attributes
 * @typedef {Node | string | false | null | undefined | Child[]} Child
 * @typedef {(string | number | (string | number)[])[]} Options values, or [value, label] pairs
 */

/**
 * An HTML element.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * An SVG element, with the same arguments.
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * @template {HTMLElement | SVGElement} T
 * @param {T} element
 * @param {Attributes} attributes
 * @param {Child[]} children
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (name === "dataset" || name === "style") Object.assign(element[name], value);
    else if (name === "value") Object.assign(element, { value });
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  const flat = /** @type {any[]} */ (children).flat(Infinity);
  element.append(...flat.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * A button that does something on the page. Those that submit a form are `el("button", { type: "submit" })`.
 * @param {Child} label
 * @param {() => unknown} act
 * @param {Attributes} attributes
 */
export function actionButton(label, act, attributes = {}) {
  return el("button", { type: "button", onclick: () => act(), ...attributes }, label);
}

/**
 * Do something when a form is submitted, in place of what the browser does.
 * @param {HTMLFormElement} form
 * @param {() => unknown} act
 */
export function onSubmit(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/**
 * A box for a text that is no prose, such as a token or a name.
 * @param {string} name
 * @param {Attributes} attributes
 */
export function textBox(name, attributes = {}) {
  return el("input", { name, spellcheck: "false", autocomplete: "off", ...attributes });
}

/**
 * A labelled control: label text, then the control.
 * @param {string} text
 * @param {HTMLElement} control
 */
export function labelled(text, control) {
  return el("label", {}, text, " ", control);
}

/**
 * A select.
 * @param {Attributes} attributes
 * @param {Options} options
 * @param {string | number} [chosen]
 */
export function select(attributes, options, chosen) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  return el(
    "select",
    attributes,
    pairs.map(([value, label]) => el("option", { value, selected: String(value) === String(chosen) }, String(label))),
  );
}

/**
 * What draws on a canvas.
 * @param {HTMLCanvasElement} canvas
 */
export function context2d(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/**
 * Tell who listens to an element that something has happened: an event with a detail.
 * @param {HTMLElement} element
 * @param {string} type
 * @param {unknown} [detail]
 */
export function emit(element, type, detail) {
  element.dispatchEvent(new CustomEvent(type, { detail }));
}

/**
 * The element inside another one that a selector finds. It must be there.
 * @template {string} Selector
 * @param {ParentNode} root
 * @param {Selector} selector
 * @returns {Selector extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[Selector] : HTMLElement}
 */
export function find(root, selector) {
  const found = root.querySelector(selector);
  if (found === null) throw new TypeError(`There is no element ${selector}.`);
  return /** @type {any} */ (found);
}

/**
 * All elements inside another one that a selector finds.
 * @template {string} Selector
 * @param {ParentNode} root
 * @param {Selector} selector
 * @returns {(Selector extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[Selector] : HTMLElement)[]}
 */
export function findAll(root, selector) {
  return /** @type {any} */ ([...root.querySelectorAll(selector)]);
}

/**
 * The element around the target of an event that a selector finds, or null.
 * @template {string} Selector
 * @param {Event} event
 * @param {Selector} selector
 * @returns {(Selector extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[Selector] : HTMLElement) | null}
 */
export function around({ target }, selector) {
  return /** @type {any} */ (target instanceof Element ? target.closest(selector) : null);
}
