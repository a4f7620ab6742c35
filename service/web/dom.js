// Create elements. Texts are always set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. `attributes`: names that begin with "on" are event listeners, `dataset` and `style` are objects,
 * true sets an empty attribute, and false, null and undefined leave an attribute out. `children`: nodes, texts, null.
 */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, with the same arguments. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset" || name === "style") Object.assign(element[name], value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A labelled control: label text, then the control. */
export function labelled(text, control) {
  return el("label", {}, text, " ", control);
}

/** A select with `options`: values, or [value, label] pairs. */
export function select(attributes, options, chosen) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  return el(
    "select",
    attributes,
    pairs.map(([value, label]) => el("option", { value, selected: String(value) === String(chosen) }, String(label))),
  );
}
