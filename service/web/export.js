// What is shown, to copy and download: its text, the request as curl or Python, its answer as safetensors, pictures.

import { hasKey, postBlob } from "./api.js";
import { actionButton, el } from "./dom.js";
import { asPng, asSvg } from "./draw/pictures.js";

/**
 * @import { Drawable } from "./draw/pictures.js"
 * @import { View, ViewRequest } from "./view.js"
 * @typedef {(request: ViewRequest, options: { base: string, withKey?: boolean }) => string} Write
 */

const WITH_TENSORS = ["/forward", "/logits"];

/**
 * The request as a command for a shell.
 * @type {Write}
 */
export function asCurl({ path, body, query }, { base, withKey }) {
  const address = query ? `'${base}${path}?${new URLSearchParams(query)}'` : `${base}${path}`;
  const parts = [`curl -sS${body?.stream ? "N" : ""} ${address}`];
  if (withKey) parts.push('-H "Authorization: Bearer $FORWARDSCOPE_API_KEY"');
  if (body) parts.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  return parts.join(" \\\n  ");
}

/**
 * Path → the method of the Python client, a name for its result, the fields that it takes by their order, and the lines
 * that show the result.
 * @type {Record<string, [method: string, name: string, first: string[], ends: string[]]>}
 */
const CALLS = {
  "/forward": ["run", "trace", ["prompt", "stages"], [...arraysOf("trace"), "print(trace.loss)"]],
  "/attribute": [
    "attribute",
    "attribution",
    ["method", "prompt"],
    [...arraysOf("attribution"), "print(list(attribution.answer))"],
  ],
  "/logits": ["logits", "logits", ["prompt"], ["print(logits.logits.shape)", "print(logits.logits)"]],
  "/patterns": ["patterns", "patterns", ["prompt"], ["print(patterns.values.shape)", "print(patterns.values)"]],
  "/generate": ["generate", "generation", ["prompt"], ["print(generation.tokens)", "print(generation.text)"]],
  "/weights/": ["weight", "weight", ["name"], ["print(weight.name, weight.shape)", "print(weight.values)"]],
  "/status": ["status", "status", [], ["print(status)"]],
};

/**
 * Lines that print the arrays by name of an object of the client.
 * @param {string} name
 */
function arraysOf(name) {
  return [`for name, array in ${name}.items():`, "    print(name, array.shape)", "    print(array)"];
}

/**
 * The request as a program in Python with the client of docs/python.md. Its last lines show the object that it got.
 * @type {Write}
 */
export function asPython({ path, body, query }, { base, withKey }) {
  const [, route, ofPath] = /** @type {string[]} */ (/^(\/weights\/|.*)(.*)$/.exec(path));
  const [method, name, first, ends] = CALLS[route];
  /** @type {Record<string, any>} */
  const given = { ...withoutEncoding(body ?? {}), ...(ofPath && { name: ofPath }), ...query };
  const { stream: _stream, ...fields } = given;
  const named = Object.entries(fields).filter(([field]) => !first.includes(field));
  const values = [
    ...first.filter((field) => field in fields).map((field) => pythonOf(fields[field])),
    ...named.map(([field, value]) => `${field}=${pythonOf(value)}`),
  ];
  const key = withKey ? ', api_key=os.environ["FORWARDSCOPE_API_KEY"]' : "";
  return [
    ...(withKey ? ["import os", ""] : []),
    "from forwardscope import Client  # to install it: pip install . in a checkout of the server",
    "",
    `client = Client("${base}"${key})`,
    `${name} = client.${method}(${values.join(", ")})`,
    ...ends,
  ].join("\n");
}

/**
 * A value of JSON as an expression in Python.
 * @param {any} value
 * @returns {string}
 */
function pythonOf(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(pythonOf).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value)
      .map(([name, part]) => `${JSON.stringify(name)}: ${pythonOf(part)}`)
      .join(", ")}}`;
  return JSON.stringify(value); // a number, or a text, which JSON and Python write alike
}

/** <export-bar>. `refresh(view)` shows what a view offers; null shows nothing. */
export class ExportBar extends HTMLElement {
  /** @type {(error: unknown) => void} */
  #report;
  #title = el("h3", { tabindex: "-1" }, "Copy and download");
  #code = el("pre", { class: "code", tabindex: "0", "aria-label": "The copied text", hidden: true });
  #said = el("span", { role: "status" });
  #buttons = el("span", { class: "row" });

  /** @param {(error: unknown) => void} report */
  constructor(report) {
    super();
    this.#report = report;
  }

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.setAttribute("role", "region");
    this.setAttribute("aria-label", "Export");
    this.append(this.#title, el("div", { class: "row" }, this.#buttons, this.#said), this.#code);
  }

  /** @param {View | null} view */
  refresh(view) {
    const buttons = view === null ? [] : this.#buttonsOf(view);
    this.hidden = buttons.length === 0;
    this.#code.hidden = true;
    this.#said.textContent = "";
    this.#buttons.replaceChildren(...buttons);
  }

  /** @param {View} view */
  #buttonsOf(view) {
    const request = view.request();
    const text = view.text();
    const buttons = text === null ? [] : [this.#button("Copy the text", () => this.#copy(view.text() ?? ""))];
    if (request) {
      buttons.push(
        this.#button("Copy as curl", () => this.#copyRequest(view, asCurl)),
        this.#button("Copy as Python", () => this.#copyRequest(view, asPython)),
      );
      if (request.body && WITH_TENSORS.includes(request.path))
        buttons.push(this.#button("Download safetensors", () => this.#saveTensors(view)));
    }
    for (const { name } of view.pictures())
      buttons.push(
        this.#button(`PNG: ${name}`, () => this.#savePicture(view, name, asPng, "png")),
        this.#button(`SVG: ${name}`, () => this.#savePicture(view, name, asSvg, "svg")),
      );
    return buttons;
  }

  /** Bring the bar into sight, and the keyboard to its beginning. */
  reveal() {
    this.#title.focus({ preventScroll: true });
    this.#title.scrollIntoView({ block: "center" });
  }

  /**
   * @param {string} label
   * @param {() => unknown} act
   */
  #button(label, act) {
    return actionButton(label, () => Promise.resolve().then(act).catch(this.#report));
  }

  /**
   * @param {View} view
   * @param {Write} write
   */
  async #copyRequest(view, write) {
    const request = view.request();
    const base = new URL(".", location.href).href.slice(0, -1); // of the page, which a proxy may serve below any path
    if (request) await this.#copy(write(request, { base, withKey: hasKey() }));
  }

  /** @param {string} code */
  async #copy(code) {
    this.#code.textContent = code;
    this.#code.hidden = false;
    const copying = navigator.clipboard?.writeText(code).then(() => true);
    const isCopied = await copying?.catch(() => false);
    this.#said.textContent = isCopied ? "Copied." : "The browser does not let this page copy. Copy the text below.";
  }

  /** @param {View} view */
  async #saveTensors(view) {
    const { path, body } = view.request() ?? {};
    if (!path || !body) return;
    save(await postBlob(path, withoutEncoding(body)), fileName(view, [partsOf(body)], "safetensors"));
    this.#said.textContent = "Saved.";
  }

  /**
   * @param {View} view
   * @param {string} name
   * @param {(element: Drawable) => Promise<Blob | null>} write
   * @param {"png" | "svg"} ending
   */
  async #savePicture(view, name, write, ending) {
    const picture = view.pictures().find((each) => each.name === name);
    const blob = picture ? await write(picture.element) : null;
    if (blob === null) throw new Error(`The browser cannot draw the picture “${name}”.`);
    save(blob, fileName(view, [name], ending));
    this.#said.textContent = "Saved.";
  }
}

/**
 * The request for a file of safetensors, which has an encoding of its own, and has all numbers.
 * @param {Record<string, any>} body
 */
function withoutEncoding({ encoding: _encoding, detail: _detail, ...body }) {
  return body;
}

/**
 * Such as "bundled-attention-layer-3-head-5.png": the model, the view, and what of it.
 * @param {View} view
 * @param {string[]} parts
 * @param {string} ending
 */
function fileName(view, parts, ending) {
  const model = view.request()?.body?.model ?? view.context.service.model?.name;
  const words = [model, view.localName.replace("-view", ""), ...parts].filter(Boolean);
  return `${words.join("-").replaceAll(/[^\w.-]+/g, "-")}.${ending}`;
}

/**
 * The layer and the head of a request, if it has a single one.
 * @param {{ stages?: string[], heads?: number[] }} body
 */
function partsOf({ stages = [], heads = [] }) {
  const layers = new Set(stages.map((stage) => /^blocks\.(\d+)\./.exec(stage)?.[1]));
  const [layer] = layers;
  return [
    layers.size === 1 && layer !== undefined ? `layer ${layer}` : "",
    heads.length === 1 ? `head ${heads[0]}` : "",
  ]
    .filter(Boolean)
    .join(" ");
}

/**
 * @param {Blob} blob
 * @param {string} name
 */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

customElements.define("export-bar", ExportBar);
