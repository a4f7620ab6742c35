// The view "Weights": the matrices that the network multiplies by, and what they do to a token of the prompt.

import { architectureOf, isWorkedExample } from "../articles.js";
import { actionButton, el, labelled, select } from "../dom.js";
import { barTable } from "../draw/bars.js";
import "../draw/heat_map.js";
import { steadyScale } from "../draw/matrix_product.js";
import "../draw/token_strip.js";
import { count, number, quoted, shown } from "../format.js";
import { isOther, readIndex, readPosition } from "../indices.js";
import "../network/cell_arithmetic.js";
import { Pass } from "../network/pass.js";
import { cachedGet } from "../passes.js";
import { describe } from "../stages.js";
import { View, bodyOf } from "../view.js";
import { LOGITS, largest, meaningOf, productOf, wordOf } from "./token_product.js";

/**
 * @import { Model, PositionedToken, WeightAnswer, WeightInfo } from "../answers.js"
 * @import { Options } from "../dom.js"
 * @import { Explained } from "../network/arithmetic/explanation.js"
 * @import { Update, ViewRequest, ViewState } from "../view.js"
 * @import { Product } from "./token_product.js"
 * @typedef {ViewState & typeof Weights.params} State
 * @typedef {{
 *   dim: string, size: number, start: number, part: string, labels: string[], tokens: PositionedToken[],
 * }} Axis a part of a dim, as GET /weights names it; of the vocabulary, the `tokens` of the prompt
 * @typedef {{
 *   info: WeightInfo, answer: WeightAnswer, numbers: number[], rows: Axis, columns: Axis, head: number, row: number,
 *   token: PositionedToken,
 * }} Part what is shown of a weight; `row`: the position of the `token` that is multiplied
 * @typedef {{ product: Product, cell: number, word: string }} Multiplied its product, and the chosen number of that
 */

const PART = 256; // rows or columns that are shown at once
const LARGEST = 5; // numbers of the result that are listed
const FIRST = { weight: "", head: "0", row: "0", column: "0", position: "", cell: "" };
const HEADS = ["head", "kv_head"];
export default class Weights extends View {
  static showsWorkedExamples = true;
  /**
   * `weight`: "" is the first matrix of a layer. `head`: of one that has heads. `row` and `column`: where to begin.
   * `position`: of the token that is multiplied; "" is the last one. `cell`: a number of the product, of one head; ""
   * is the largest one.
   */
  static params = FIRST;

  #controls = el("p", { class: "row" });
  #tokens = el("token-strip");
  #choice = el("div", { class: "row" }, el("span", { class: "faint" }, "Token"), this.#tokens);
  #meaning = el("p", { class: "answer" });
  #show = actionButton("Show the product in the network", () => this.context.navigate(this.#place), { class: "small" });
  /** @type {Record<string, string>} where the product is in the network */
  #place = {};
  #facts = el("p", { class: "faint" });
  #map = el("heat-map");
  #product = el("matrix-product");
  #cell = el("cell-arithmetic");
  #largest = el("div", { class: "card" });
  #aside = el("div", {}, this.#largest, this.#cell);
  /** @type {State | null} */
  #state = null;
  /** @type {ViewRequest | null} */
  #request = null;
  /** @type {{ key: string, served: Model | null, pass: Pass } | null} */
  #kept = null;
  /** @type {Axis | null} of the numbers of the product */
  #outputs = null;

  build() {
    const picture = el("div", {}, this.#map, this.#product, this.#facts);
    this.append(
      this.#controls,
      this.#choice,
      el("div", { class: "row" }, this.#meaning, this.#show),
      el("div", { class: "product-stage" }, picture, this.#aside),
    );
    this.#tokens.addEventListener("choose", ({ detail }) => this.context.navigate({ position: String(detail.index) }));
    this.#product.addEventListener("choose", ({ detail: { row } }) => this.#choose((this.#outputs?.start ?? 0) + row));
    this.#cell.addEventListener("go", ({ detail: { stage: at, row, column } }) =>
      this.context.navigate({ view: "network", at, position: String(row), cell: String(column) }),
    );
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const stale = staleOf(this.#state, state);
    this.#state = state;
    if (Object.keys(stale).length > 0) return this.context.navigate(stale, { replace: true });
    /** @type {Record<string, string>} */
    const named = state.model ? { model: state.model } : {};
    const query = new URLSearchParams(named);
    const [{ weights: infos }, pass] = await Promise.all([
      cachedGet(/** @type {"/weights"} */ (`/weights?${query}`), signal),
      this.#passOf(state, signal),
    ]);
    const first = infos.find(({ name }) => name.endsWith("attn.W_Q")) ?? infos[0];
    const info = state.weight === "" ? first : infos.find(({ name }) => name === state.weight);
    if (!info) throw new Error(`weight: there is no weight “${state.weight}” in this network.`);
    const row = state.position === "" ? pass.tokens.length - 1 : readPosition(state.position, pass.tokens.length);
    const headDim = info.dims.length > 2 ? info.dims.find((dim) => HEADS.includes(dim)) : undefined;
    const head = headDim ? readIndex(state.head, "head", info.shape[0]) : 0;
    const [rows, columns] = axesOf(info, headDim, state, pass.tokens);
    if (headDim) query.set(headDim, String(head));
    for (const axis of [rows, columns]) if (axis.dim) query.set(axis.dim, axis.part);
    const path = /** @type {"/weights/"} */ (`/weights/${info.name}?${query}`);
    this.#request = { path: `/weights/${info.name}`, body: null, query: Object.fromEntries(query) };
    const ofHead = headDim ? { [headDim]: head } : {};
    const [answer, product] = await Promise.all([
      cachedGet(path, signal),
      productOf(pass, this.#architecture, { info, part: ofHead, row }, signal),
    ]);
    const numbers = /** @type {number[]} */ (answer.values.flat(Infinity));
    const cell = product && this.#cellOf(product, columns);
    const explained = product && cell !== null ? await product.explain(cell) : null;
    if (signal.aborted) return undefined;
    /** @type {Part} */
    const part = { info, answer, numbers, rows, columns, head, row, token: pass.tokens[row] };
    this.#outputs = columns;
    this.#tokens.show(
      "The token that is multiplied",
      pass.tokens.map((each) => ({ token: each, share: 0, said: `position ${each.position}` })),
    );
    this.#tokens.mark(row);
    this.#showControls(infos, part, headDim !== undefined, product !== null);
    this.#choice.hidden = product === null && !rowsAreTokens(rows);
    this.#map.hidden = product !== null;
    this.#product.hidden = this.#aside.hidden = product === null;
    if (product && cell !== null && explained) {
      const multiplied = { product, cell, word: wordOf(product.at, this.#architecture) };
      this.#showProduct(part, multiplied);
      this.#showCell(part, multiplied, explained);
    } else this.#showMap(part);
    this.#showMeaning(part, product, cell);
    return undefined;
  }

  request() {
    return this.#request;
  }

  pictures() {
    return [{ name: "weights", element: this.#product.hidden ? this.#map : this.#product }];
  }

  get #architecture() {
    return architectureOf(this.context.service, /** @type {State} */ (this.#state).model);
  }

  /**
   * The tokens of the prompt. Numbers are read as they are needed, but of a worked example at once.
   * @param {State} state
   * @param {AbortSignal} signal
   */
  async #passOf(state, signal) {
    const { service } = this.context;
    const body = bodyOf(state);
    const key = JSON.stringify(body);
    const served = service.model;
    if (this.#kept?.key === key && this.#kept.served === served) return this.#kept.pass;
    const pass = isWorkedExample(service, state.model)
      ? await Pass.ofExample(body, signal)
      : await Pass.withoutNumbers(body, this.model, signal);
    this.#kept = { key, served, pass };
    return pass;
  }

  /**
   * The number of the product that is explained: that of the address, or the largest one in sight.
   * @param {Product} product
   * @param {Axis} outputs
   */
  #cellOf({ at, results }, { start, labels }) {
    const { cell } = /** @type {State} */ (this.#state);
    if (cell !== "") return readIndex(cell, "cell", results.length);
    return start + largest(results.slice(start, start + labels.length), 1, at)[0];
  }

  /** @param {number} cell */
  #choose(cell) {
    return this.context.navigate({ cell: String(cell) });
  }

  /**
   * @param {WeightInfo[]} infos
   * @param {Part} part
   * @param {boolean} hasHeads
   * @param {boolean} isProduct
   */
  #showControls(infos, { info, rows, columns, head }, hasHeads, isProduct) {
    const go =
      (/** @type {string} */ name) =>
      (/** @type {{ target: { value: string } }} */ { target }) => {
        const { position } = /** @type {State} */ (this.#state);
        const reset = name === "weight" ? { ...FIRST, position } : name === "column" ? { cell: "" } : {};
        return this.context.navigate({ ...reset, [name]: target.value });
      };
    const ofLayer = infos.filter(({ name }) => layerOf(name) === layerOf(info.name));
    const within = (/** @type {string} */ name) => name.replace(/^blocks\.\d+\./, "");
    const inLayer = (/** @type {string} */ layer) => {
      const same = infos.find(({ name }) => layerOf(name) === layer && within(name) === within(info.name));
      return (same ?? infos.find(({ name }) => layerOf(name) === layer))?.name ?? "";
    };
    /** @type {(label: string, name: string, options: Options, chosen: string | number) => HTMLElement} */
    const choice = (label, name, options, chosen) => labelled(label, select({ onchange: go(name) }, options, chosen));
    const layers = [...new Set(infos.map(({ name }) => layerOf(name)))].map((layer) => [inLayer(layer), layer]);
    const names = ofLayer.map(({ name }) => [name, within(name)]);
    const parts = [choice("Layer", "weight", layers, info.name), choice("Weight", "weight", names, info.name)];
    if (hasHeads) parts.push(choice("Head", "head", [...Array(info.shape[0]).keys()], head));
    const [ofRows, ofColumns] = isProduct ? ["Inputs", "Results"] : ["Rows", "Columns"];
    for (const [name, label, axis] of /** @type {[string, string, Axis][]} */ ([
      ["row", ofRows, rows],
      ["column", ofColumns, columns],
    ]))
      if (axis.size > PART) parts.push(choice(label, name, partsOf(axis), axis.start));
    this.#controls.replaceChildren(...parts);
  }

  /**
   * What the weight does to the token, and where that is in the network.
   * @param {Part} part
   * @param {Product | null} product
   * @param {number | null} cell
   */
  #showMeaning({ info, answer, columns, token, head }, product, cell) {
    const { name, dims, shape, quantization, num_parameters, tied_to } = info;
    const architecture = this.#architecture;
    const embedding = { "embed.W_E": "embed", "pos_embed.W_pos": "pos_embed" }[name] ?? "";
    const at = product?.at ?? (/\.experts\./.test(name) ? `blocks.${layerOf(name)}.mlp_out` : embedding);
    const queriesPerKey = /attn\.[kv]$/.test(at) ? architecture.num_heads / architecture.num_kv_heads : 1;
    const column = product && cell !== null && (at === LOGITS ? columns.tokens[cell].id : product.offset + cell);
    this.#place = {
      ...{ view: "network", at, position: String(token.position) },
      ...(dims.length > 2 && { head: String(head * queriesPerKey) }),
      ...(typeof column === "number" && { cell: String(column) }),
    };
    this.#meaning.textContent = meaningOf(name, product, { token, head, architecture });
    this.#show.hidden = at === "";
    const { rowName, columnName } = product ? this.#product.data : this.#map.data;
    this.#facts.textContent =
      `${name}: ${shape.map((size, axis) => `${count(size)} ${dims[axis]}`).join(" × ")}, ` +
      `${count(num_parameters)} numbers, ${quantization ? `stored as ${quantization}, ` : ""}${answer.dtype}` +
      `${tied_to ? `; the same numbers as ${tied_to}` : ""}. ` +
      `In the picture, a row is one ${rowName}, and a column one ${columnName}.`;
  }

  /**
   * A weight that no vector is multiplied by. The row of the token is framed.
   * @param {Part} part
   */
  #showMap({ answer, numbers, rows, columns, row }) {
    const hasTokens = rowsAreTokens(rows);
    // Wide pictures fit on a screen, so a tall matrix lies on its side.
    const isTall = rows.labels.length > columns.labels.length && !hasTokens;
    const [down, across] = isTall ? [columns, rows] : [rows, columns];
    this.#map.data = {
      values: isTall ? transposed(numbers, rows.labels.length, columns.labels.length) : numbers,
      rowLabels: down.labels,
      columnLabels: across.labels,
      rowName: nameOf(down),
      columnName: nameOf(across),
      valueName: answer.name,
      scale: steadyScale(numbers),
    };
    const framed = row - rows.start;
    this.#map.framedRow = hasTokens && framed >= 0 && framed < rows.labels.length ? framed : null;
  }

  /**
   * @param {Part} part
   * @param {Multiplied} multiplied
   */
  #showProduct({ answer, numbers, rows, columns, token }, { product, cell, word }) {
    const { inputs, results, bias, inputOffset, input } = product;
    const from = inputOffset + rows.start;
    const of = (/** @type {number[]} */ some, /** @type {number} */ first, /** @type {Axis} */ { labels }) =>
      some.slice(first, first + labels.length);
    const some = of(inputs, from, rows);
    const at = cell - columns.start;
    const isPart = inputs.length > some.length;
    const sum = some.reduce((total, each, index) => total + each * numbers[index * columns.labels.length + at], 0);
    const part = `; the ${count(some.length)} inputs here, of ${count(inputs.length)}, add ${number(sum)}`;
    const { label } = describe(input, this.#architecture);
    this.#product.data = {
      values: transposed(numbers, rows.labels.length, columns.labels.length),
      rowLabels: columns.labels,
      columnLabels: rows.labels,
      rowName: nameOf(columns),
      columnName: nameOf(rows),
      valueName: answer.name,
      input: some,
      inputName: `${quoted(token)} · ${label} (${input.replace(/^blocks\.\d+\./, "")})`,
      output: of(results, columns.start, columns),
      outputName: word,
      bias: bias && of(bias, columns.start, columns),
      isPart,
      chosen: at,
      hint:
        `${nameOf(columns)} ${columns.labels[at]}: the ${word} is ${number(results[cell])}${isPart ? part : ""}. ` +
        "Point at a cell to read a product; choose a row to explain its result.",
    };
  }

  /**
   * The arithmetic of the chosen number, and the largest numbers of the product.
   * @param {Part} part
   * @param {Multiplied} multiplied
   * @param {Explained} explained
   */
  #showCell({ columns }, { product: { at, results }, cell, word }, explained) {
    const nameOfCell = (/** @type {number} */ index) =>
      columns.tokens.length > 0 ? shown(columns.tokens[index]) : String(index);
    const title = `${word[0].toUpperCase()}${word.slice(1)}, ${nameOf(columns)} ${nameOfCell(cell)}`;
    const explanation = explained.explanation && { ...explained.explanation, picture: null };
    this.#cell.show({ title, explained: { ...explained, explanation } });
    const most = largest(results, LARGEST, at);
    const size = Math.max(...most.map((index) => Math.abs(results[index])), 1e-12);
    const table = barTable({
      caption: at === LOGITS ? "The largest logits of the prompt's tokens" : `The largest numbers of the ${word}`,
      columns: [nameOf(columns), word],
      rows: most.map((index) => ({
        cells: [actionButton(nameOfCell(index), () => this.#choose(index), { class: "num" }), number(results[index])],
        shares: [results[index] / size],
        mark: index === cell,
      })),
    });
    this.#largest.replaceChildren(table);
  }
}

/**
 * What the address still says of an earlier prompt or model, and what replaces it.
 * @param {State | null} before
 * @param {State} now
 * @returns {Partial<typeof FIRST>}
 */
function staleOf(before, now) {
  if (!isOther(before, now)) return {};
  const all = /** @type {(keyof typeof FIRST)[]} */ (Object.keys(FIRST));
  const names = before?.model === now.model ? all.filter((name) => !["weight", "head"].includes(name)) : all;
  return Object.fromEntries(names.filter((name) => now[name] !== FIRST[name]).map((name) => [name, FIRST[name]]));
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

/** Whether each row belongs to a token of the prompt. @param {Axis} rows */
const rowsAreTokens = ({ dim }) => ["d_vocab", "position"].includes(dim);

/** @param {Axis} axis */
function nameOf({ dim }) {
  return dim === "d_vocab" ? "token" : dim || "row";
}

/** @param {string} name */
function layerOf(name) {
  return /^blocks\.(\d+)\./.exec(name)?.[1] ?? "outside of the layers";
}

/**
 * Rows and columns of a weight without its heads. A vector has one row. The part of the columns has the chosen cell.
 * @param {WeightInfo} info
 * @param {string | undefined} headDim
 * @param {State} state
 * @param {PositionedToken[]} tokens
 * @returns {Axis[]}
 */
function axesOf({ dims, shape }, headDim, { row, column, cell }, tokens) {
  const axes = dims.map((dim, axis) => ({ dim, size: shape[axis] })).filter(({ dim }) => dim !== headDim);
  const pair = axes.length > 1 ? axes : [{ dim: "", size: 1 }, ...axes];
  return pair.map(({ dim, size: whole }, index) => {
    const isTokens = dim === "d_vocab";
    const size = isTokens ? tokens.length : whole;
    const isChosen = index === 1 && cell !== "";
    const [text, name] = isChosen ? [cell, "cell"] : index === 0 ? [row, "row"] : [column, "column"];
    const at = readIndex(text, name, size);
    const start = isChosen ? at - (at % PART) : at;
    const stop = Math.min(size, start + PART);
    const some = tokens.slice(start, stop);
    const part = isTokens ? some.map(({ id }) => id).join(",") : `${start}:${stop}`;
    const numbers = Array.from({ length: stop - start }, (_, offset) => String(start + offset));
    const labels = isTokens ? some.map((token) => shown(token)) : numbers;
    return { dim, size, start, part, labels, tokens: isTokens ? tokens : [] };
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
