// The view "Weights": the matrices that the network multiplies by, as heat maps with their numbers.

import { getJson } from "../api.js";
import { el, labelled, select } from "../dom.js";
import { scaleOf } from "../draw/colours.js";
import "../draw/heat_map.js";
import { count, shown } from "../format.js";
import { readIndex } from "../indices.js";
import { cached } from "../passes.js";
import { View } from "../view.js";
import { isOther } from "./positions.js";

/**
 * @import { PositionedToken, WeightAnswer, WeightInfo } from "../answers.js"
 * @import { ViewRequest, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Weights.params} State
 * @typedef {{ dim: string, size: number, start: number, part: string, labels: string[] }} Axis a part of a dim, as
 *   GET /weights names it; of the vocabulary, the tokens of the prompt
 */

const PERCENTILE = 0.99;
const PART = 256; // rows or columns that are shown at once
const FIRST = { weight: "", head: "0", row: "0", column: "0" };
const HEADS = ["head", "kv_head"];
/** The names of weights → what they do, and the stage that is their product. @type {[RegExp, string, string][]} */
const MEANINGS = [
  [
    /^embed\.W_E$/,
    "A vector for each token, with which its residual stream begins. These are the prompt's tokens.",
    "embed",
  ],
  [/^pos_embed\.W_pos$/, "A vector for each position, which is added to that of the token.", "pos_embed"],
  [/attn\.W_Q$/, "What the layer reads × W_Q = the query of a token: what it looks for.", "attn.q"],
  [/attn\.W_K$/, "What the layer reads × W_K = the key of a token: what it offers.", "attn.k"],
  [/attn\.W_V$/, "What the layer reads × W_V = the value of a token: what it passes on.", "attn.v"],
  [/attn\.W_O$/, "What a head has gathered × W_O = what it adds to the residual stream.", "attn_out"],
  [
    /mlp\.W_gate$/,
    "What the layer reads × W_gate decides which neurons are open, or which experts are chosen.",
    "mlp.pre",
  ],
  [/mlp\.W_in$/, "What the layer reads × W_in = the input of each neuron.", "mlp.pre"],
  [/mlp\.W_out$/, "The neurons × W_out = what the feed-forward network adds to the residual stream.", "mlp_out"],
  [/W_in$|W_gate$|W_out$/, "A matrix of one expert.", "mlp_out"],
  [
    /^unembed\.W_U$/,
    "A vector for each token: the last vector × this one = its logit. These are the prompt's tokens.",
    "predictions",
  ],
  [/\.w$/, "The gain of a norm, by which each normalized number is multiplied.", ""],
  [/\.b(_\w+)?$/, "A bias: numbers that are added.", ""],
];

export default class Weights extends View {
  static showsWorkedExamples = true;
  /** `weight`: "" is the first matrix of a layer. `head`: of one that has heads. `row` and `column`: where to begin. */
  static params = FIRST;

  #controls = el("p", { class: "row" });
  #meaning = el("p", { class: "answer" });
  #facts = el("p", { class: "faint" });
  #map = el("heat-map");
  /** @type {State | null} */
  #state = null;
  /** @type {ViewRequest | null} */
  #request = null;

  build() {
    this.append(this.#controls, el("div", { class: "row" }, this.#meaning, this.#facts), this.#map);
  }

  /**
   * @param {State} state
   * @param {AbortSignal} signal
   * @returns {Promise<void>}
   */
  async update(state, signal) {
    const isStale =
      isOther(this.#state, state) &&
      Object.entries(FIRST).some(([name, value]) => state[/** @type {keyof typeof FIRST} */ (name)] !== value);
    this.#state = state;
    if (isStale) return this.context.navigate(FIRST, { replace: true });
    /** @type {Record<string, string>} */
    const named = state.model ? { model: state.model } : {};
    const query = new URLSearchParams(named);
    const { weights: infos } = await getJson(/** @type {"/weights"} */ (`/weights?${query}`), signal);
    const first = infos.find(({ name }) => name.endsWith("attn.W_Q")) ?? infos[0];
    const info = state.weight === "" ? first : infos.find(({ name }) => name === state.weight);
    if (!info) throw new Error(`weight: there is no weight “${state.weight}” in this network.`);
    const body = { ...named, prompt: state.prompt, stages: ["loss"], detail: "none", top_k: 1 };
    const { tokens } = info.dims.includes("d_vocab") ? await cached("/forward", body, signal) : { tokens: [] };
    const headDim = info.dims.length > 2 ? info.dims.find((dim) => HEADS.includes(dim)) : undefined;
    const head = headDim ? readIndex(state.head, "head", info.shape[0]) : 0;
    const [rows, columns] = axesOf(info, headDim, [state.row, state.column], tokens);
    if (headDim) query.set(headDim, String(head));
    for (const axis of [rows, columns]) if (axis.dim) query.set(axis.dim, axis.part);
    const path = /** @type {"/weights/"} */ (`/weights/${info.name}?${query}`);
    this.#request = { path: `/weights/${info.name}`, body: null, query: Object.fromEntries(query) };
    const answer = await getJson(path, signal);
    this.#showControls(infos, info, headDim ? { size: info.shape[0], head } : null, rows, columns);
    this.#showMap(answer, rows, columns);
    this.#showMeaning(info, answer);
    return undefined;
  }

  request() {
    return this.#request;
  }

  pictures() {
    return [{ name: "weights", element: this.#map }];
  }

  /**
   * @param {WeightInfo[]} infos
   * @param {WeightInfo} info
   * @param {{ size: number, head: number } | null} heads
   * @param {Axis} rows
   * @param {Axis} columns
   */
  #showControls(infos, info, heads, rows, columns) {
    const go =
      (/** @type {string} */ name) =>
      (/** @type {{ target: { value: string } }} */ { target }) =>
        this.context.navigate({ ...(name === "weight" && FIRST), [name]: target.value });
    const layers = [...new Set(infos.map(({ name }) => layerOf(name)))];
    const ofLayer = infos.filter(({ name }) => layerOf(name) === layerOf(info.name));
    const within = (/** @type {string} */ name) => name.replace(/^blocks\.\d+\./, "");
    const inLayer = (/** @type {string} */ layer) => {
      const same = infos.find(({ name }) => layerOf(name) === layer && within(name) === within(info.name));
      return (same ?? infos.find(({ name }) => layerOf(name) === layer))?.name ?? "";
    };
    const parts = [
      labelled(
        "Layer",
        select(
          { onchange: go("weight") },
          layers.map((layer) => [inLayer(layer), layer]),
          info.name,
        ),
      ),
      labelled(
        "Weight",
        select(
          { onchange: go("weight") },
          ofLayer.map(({ name }) => [name, within(name)]),
          info.name,
        ),
      ),
    ];
    if (heads)
      parts.push(labelled("Head", select({ onchange: go("head") }, [...Array(heads.size).keys()], heads.head)));
    for (const [name, axis] of /** @type {[string, Axis][]} */ ([
      ["row", rows],
      ["column", columns],
    ]))
      if (axis.size > PART)
        parts.push(
          labelled(name === "row" ? "Rows" : "Columns", select({ onchange: go(name) }, partsOf(axis), axis.start)),
        );
    this.#controls.replaceChildren(...parts);
  }

  /**
   * @param {WeightInfo} info
   * @param {WeightAnswer} answer
   */
  #showMeaning({ name, dims, shape, quantization, num_parameters, tied_to }, { dtype }) {
    const [, meaning, part] = MEANINGS.find(([pattern]) => pattern.test(name)) ?? [/./, "", ""];
    const layer = /^blocks\.\d+\./.exec(name)?.[0] ?? "";
    const at = part === "predictions" || part === "" ? part : `${layer}${part}`;
    const show = el(
      "button",
      { type: "button", class: "small", onclick: () => this.context.navigate({ view: "network", at }) },
      "Show the product in the network",
    );
    this.#meaning.replaceChildren(meaning, " ", ...(at ? [show] : []));
    this.#facts.textContent =
      `${name}: ${shape.map((size, axis) => `${count(size)} ${dims[axis]}`).join(" × ")}, ` +
      `${count(num_parameters)} numbers, ${quantization ? `stored as ${quantization}, ` : ""}${dtype}` +
      `${tied_to ? `; the same numbers as ${tied_to}` : ""}. ` +
      `In the picture, a row is one ${this.#map.data.rowName}, and a column one ${this.#map.data.columnName}.`;
  }

  /**
   * @param {WeightAnswer} answer
   * @param {Axis} rows
   * @param {Axis} columns
   */
  #showMap({ name, values }, rows, columns) {
    const numbers = /** @type {number[]} */ (values.flat(Infinity));
    // A high percentile of the sizes has the strongest colour, so that a few large numbers do not make all others pale.
    const sizes = numbers.map(Math.abs).sort((a, b) => a - b);
    const high = sizes[Math.floor(PERCENTILE * (sizes.length - 1))];
    // Wide pictures fit on a screen, so a tall matrix lies on its side.
    const isTall = rows.labels.length > columns.labels.length;
    const [down, across] = isTall ? [columns, rows] : [rows, columns];
    this.#map.data = {
      values: isTall ? transposed(numbers, rows.labels.length, columns.labels.length) : numbers,
      rows: down.labels.length,
      columns: across.labels.length,
      rowLabels: down.labels,
      columnLabels: across.labels,
      rowName: nameOf(down),
      columnName: nameOf(across),
      valueName: name,
      scale: scaleOf(numbers.map((value) => Math.min(high, Math.max(-high, value)))),
    };
  }
}

/**
 * @param {number[]} numbers
 * @param {number} rows
 * @param {number} columns
 */
function transposed(numbers, rows, columns) {
  return Array.from(
    { length: numbers.length },
    (_, index) => numbers[(index % rows) * columns + Math.floor(index / rows)],
  );
}

/** @param {Axis} axis */
function nameOf({ dim }) {
  return dim === "d_vocab" ? "token" : dim || "row";
}

/** @param {string} name */
function layerOf(name) {
  return /^blocks\.(\d+)\./.exec(name)?.[1] ?? "outside of the layers";
}

/**
 * Rows and columns of a weight without its heads. A vector has one row.
 * @param {WeightInfo} info
 * @param {string | undefined} headDim
 * @param {string[]} starts
 * @param {PositionedToken[]} tokens
 * @returns {Axis[]}
 */
function axesOf({ dims, shape }, headDim, starts, tokens) {
  const axes = dims.map((dim, axis) => ({ dim, size: shape[axis] })).filter(({ dim }) => dim !== headDim);
  const pair = axes.length > 1 ? axes : [{ dim: "", size: 1 }, ...axes];
  return pair.map(({ dim, size: whole }, index) => {
    const isTokens = dim === "d_vocab";
    const size = isTokens ? tokens.length : whole;
    const start = readIndex(starts[index], index === 0 ? "row" : "column", size);
    const stop = Math.min(size, start + PART);
    const some = tokens.slice(start, stop);
    const part = isTokens ? some.map(({ id }) => id).join(",") : `${start}:${stop}`;
    const numbers = Array.from({ length: stop - start }, (_, offset) => String(start + offset));
    return { dim, size, start, part, labels: isTokens ? some.map((token) => shown(token)) : numbers };
  });
}

/**
 * @param {Axis} axis
 * @returns {[number, string][]}
 */
function partsOf({ size }) {
  return Array.from({ length: Math.ceil(size / PART) }, (_, part) => {
    const first = part * PART;
    return [first, `${first} to ${Math.min(size, first + PART) - 1}`];
  });
}

customElements.define("weights-view", Weights);
