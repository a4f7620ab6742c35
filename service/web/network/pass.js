// The numbers of one pass, row by row as they are asked for. Rows that are here are not asked for again.

import { postPass } from "../api.js";
import { cached } from "../passes.js";
import { indicesOf } from "../views/edit_words.js";
import { matrixOf } from "./items.js";

/**
 * @import { Numbers, Tensor } from "../api.js"
 * @import { AppliedEdit, Edit, ForwardAnswer, Loss, Model, PositionPredictions, PositionedToken, Prompt }
 *   from "../answers.js"
 * @import { StageShape } from "./items.js"
 *
 * @typedef {{ low: number, high: number, isSigned: boolean, isRoot?: boolean }} Range `isRoot`: the colour follows the
 *   root of the size
 * @typedef {{
 *   name: string, dims: string[], shape: number[], heads: number, columns: number, hasKeys: boolean, dtype: string,
 *   rows: Map<number, Numbers>, version: number, range: Range | null,
 * }} PassStage `rows`: position → the numbers of all heads, one head after the other
 * @typedef {{ model?: string, prompt: Prompt, edits?: Edit[] }} Body
 * @typedef {{ values: Numbers, dtype: string }} Wide the numbers of one position
 */

const MOST_BYTES = 16e6; // of one request
const ROWS = 24; // of a long prompt, in the first request
const MOST_STAGES = 180; // of one request, if they cannot be shortened
const NUMBER_BYTES = 3; // between bfloat16 and float32
const KEPT_NUMBERS = 30e6; // of a pass: there are three of them while edits are compared
const TOP_K = 10;
const WIDE = ["logits", "probabilities"];
const PERCENTILE = 0.985; // of the sizes, which gets the strongest colour
const SAMPLES = 4000;

export class Pass {
  /** @type {Body} */
  body;
  /** @type {PositionedToken[]} */
  tokens;
  /** @type {Map<number, PositionPredictions["top"]>} position → the most likely next tokens */
  predictions = new Map();
  /** @type {Loss} */
  loss;
  /** @type {AppliedEdit[]} where each edit of the body acts */
  edits;
  /** @type {Map<string, PassStage>} in the order of computation */
  stages = new Map();
  #topK;
  /** @type {{ names: string[], rows: number }} what the first picture shows: stages, and so many positions at once */
  #first = { names: [], rows: 0 };
  #numbers = 0;
  /** @type {{ row: number, logits: Wide, probabilities: Wide } | null} */
  #logits = null;
  /** @type {Map<string, Promise<void>>} */
  #pending = new Map();

  /**
   * @param {Body} body
   * @param {Pick<ForwardAnswer, "tokens" | "loss" | "predictions" | "edits">} answer
   * @param {StageShape[]} stages
   */
  constructor(body, answer, stages) {
    this.body = body;
    this.tokens = answer.tokens;
    this.loss = answer.loss;
    this.edits = answer.edits ?? [];
    this.#topK = answer.predictions[0]?.top.length ?? 0;
    for (const stage of stages)
      this.stages.set(stage.name, {
        ...stage,
        ...matrixOf(stage),
        dtype: "",
        rows: new Map(),
        version: 0,
        range: null,
      });
  }

  /**
   * Run a pass of the served model, and read what the first picture shows: at all positions or, of a long prompt, at
   * those around one.
   * @param {Body} body
   * @param {Model} model
   * @param {(name: string) => boolean} isFirst whether the first picture shows a stage
   * @param {number | null} middle the position that the picture shows; null is the last one
   * @param {AbortSignal} signal
   */
  static async ofModel(body, model, isFirst, middle, signal) {
    const names = model.stages.map(({ name }) => name).filter((name) => isFirst(name) && !WIDE.includes(name));
    const bytesOf = (/** @type {number} */ count) =>
      stagesOf(model, count)
        .filter(({ name }) => names.includes(name))
        .reduce((sum, { shape }) => sum + NUMBER_BYTES * shape.reduce((a, b) => a * b, 1), 0);
    const { prompt } = body;
    let rows = typeof prompt === "string" ? new TextEncoder().encode(prompt).length : prompt.length; // or fewer
    /** @type {number[] | null} */
    let positions = null;
    if (bytesOf(rows) > MOST_BYTES) {
      const { count } =
        typeof prompt === "string" ? await cached("/tokenize", { text: prompt }, signal) : { count: rows };
      rows = bytesOf(count) > MOST_BYTES ? ROWS : count;
      if (rows < count) positions = around(middle ?? count - 1, rows, count);
    }
    const all = model.stages.map(({ name }) => name);
    const stages = globsOf(names, all);
    const top_k = Math.min(TOP_K, model.sizes.d_vocab);
    const asked = { ...body, stages, ...(positions && { positions }), top_k };
    const { answer, tensors } = await postPass("/forward", asked, signal);
    const pass = new Pass(body, answer, stagesOf(model, answer.tokens.length));
    pass.#keepAll(answer, tensors, positions ?? pass.#positions);
    pass.#first = { names, rows };
    return pass;
  }

  /**
   * A pass of the served model without any numbers: they are read as they are asked for.
   * @param {Body} body
   * @param {Model} model
   * @param {AbortSignal} signal
   */
  static async withoutNumbers(body, model, signal) {
    const asked = { ...body, stages: ["loss"], positions: [-1], detail: "none", top_k: 1 };
    const answer = await cached("/forward", asked, signal);
    return new Pass(body, answer, stagesOf(model, answer.tokens.length));
  }

  /**
   * Read what the first picture shows around a position, unless it is here: its predictions are then here, too.
   * @param {number} middle
   * @param {AbortSignal} signal
   */
  async readAround(middle, signal) {
    if (this.predictions.has(middle)) return;
    const { names, rows } = this.#first;
    await this.read(names, around(middle, rows, this.tokens.length), signal);
  }

  /**
   * Run a worked example, and read all of it: its networks are small.
   * @param {Body} body
   * @param {AbortSignal} signal
   */
  static async ofExample(body, signal) {
    const { answer, tensors } = await postPass("/forward", { ...body, stages: ["*"] }, signal);
    const stages = /** @type {StageShape[]} */ (answer.stages).filter(({ name }) => name in tensors);
    const pass = new Pass(body, answer, stages);
    pass.#keepAll(answer, tensors, pass.#positions);
    return pass;
  }

  get #positions() {
    return this.tokens.map(({ position }) => position);
  }

  /**
   * The numbers of a stage at a position, or undefined if they are not here.
   * @param {string} name
   * @param {number} position
   */
  row(name, position) {
    return this.stages.get(name)?.rows.get(position);
  }

  /** The pass whose numbers give the scales of this one. @returns {Pass} */
  get reference() {
    return this;
  }

  /**
   * The edits that act on a stage at a position, on one of its heads, and on one number.
   * @param {string} name
   * @param {number} position
   * @param {number} [head]
   * @param {number} [within] the index of the number in its head
   */
  editsAt(name, position, head, within) {
    const stage = this.stages.get(name);
    // edits count the heads of keys and values by the query heads that read them
    const group = Math.max(...[...this.stages.values()].map(({ heads: count }) => count)) / (stage?.heads ?? 1);
    return (this.body.edits ?? []).filter(({ heads, neurons, keys }, index) => {
      const { stages, positions } = this.edits[index];
      const isThere = positions.some((each) =>
        Array.isArray(each) ? position >= each[0] && position <= (each[1] ?? Infinity) : position === each,
      );
      const hasHead = head === undefined || !heads || heads.some((each) => Math.floor(each / group) === head);
      const isKey = !keys || !stage?.hasKeys || indicesOf(keys, this.tokens.length)?.includes(within ?? NaN);
      const hasNumber = within === undefined || (isKey && (!neurons || neurons.includes(within)));
      return isThere && stages.includes(name) && hasHead && hasNumber;
    });
  }

  /**
   * Read the rows of some stages that are not here. Resolves to whether any were read.
   * @param {string[]} names
   * @param {number[]} positions
   * @param {AbortSignal} signal
   */
  async read(names, positions, signal) {
    /** @type {Map<string, { names: string[], positions: number[] }>} missing rows → the stages that miss them */
    const groups = new Map();
    for (const name of names) {
      const stage = this.stages.get(name);
      if (!stage) continue;
      const missing = positions.filter((position) => !stage.rows.has(position));
      if (missing.length === 0) continue;
      const key = missing.join();
      const group = groups.get(key) ?? { names: [], positions: missing };
      group.names.push(name);
      groups.set(key, group);
    }
    const requests = [...groups.values()].flatMap((group) => this.#parts(group));
    for (const request of requests) {
      const key = JSON.stringify(request);
      const pending = this.#pending.get(key)?.then(() => true);
      if (await pending?.catch(() => false)) continue; // the state that has asked may be gone, and its request with it
      signal.throwIfAborted();
      const reading = this.#request(request, signal).finally(() => this.#pending.delete(key));
      this.#pending.set(key, reading);
      await reading;
    }
    return requests.length > 0;
  }

  /**
   * Requests that are not too large each.
   * @param {{ names: string[], positions: number[] }} group
   */
  #parts({ names, positions }) {
    const sizeOf = (/** @type {string} */ name) => {
      const { heads, columns } = /** @type {PassStage} */ (this.stages.get(name));
      return NUMBER_BYTES * heads * columns * positions.length;
    };
    const isShort = globsOf(names, [...this.stages.keys()]).length <= MOST_STAGES;
    if (isShort && names.reduce((sum, name) => sum + sizeOf(name), 0) <= MOST_BYTES) return [{ names, positions }];
    /** @type {{ names: string[], positions: number[] }[]} */
    const parts = [];
    let bytes = Infinity;
    for (const name of names) {
      if (bytes + sizeOf(name) > MOST_BYTES || (parts.at(-1)?.names.length ?? 0) >= MOST_STAGES) {
        parts.push({ names: [], positions });
        bytes = 0;
      }
      parts[parts.length - 1].names.push(name);
      bytes += sizeOf(name);
    }
    return parts;
  }

  /**
   * @param {{ names: string[], positions: number[] }} part
   * @param {AbortSignal} signal
   */
  async #request({ names, positions }, signal) {
    const some = positions.length < this.tokens.length ? { positions } : {};
    const stages = globsOf(names, [...this.stages.keys()]);
    const top_k = positions.every((position) => this.predictions.has(position)) ? 0 : this.#topK;
    const { answer, tensors } = await postPass("/forward", { ...this.body, stages, ...some, top_k }, signal);
    this.#keepAll(answer, tensors, positions);
  }

  /**
   * @param {ForwardAnswer} answer
   * @param {Record<string, Tensor>} tensors
   * @param {number[]} positions
   */
  #keepAll(answer, tensors, positions) {
    this.makeRoom();
    for (const { position, top } of answer.predictions) if (top.length > 0) this.predictions.set(position, top);
    for (const { name, dtype } of answer.stages) {
      const stage = this.stages.get(name);
      if (stage) stage.dtype = dtype;
    }
    for (const [name, { values }] of Object.entries(tensors)) {
      const stage = this.stages.get(name);
      if (!stage || WIDE.includes(name)) continue;
      const { heads, columns, hasKeys } = stage;
      const size = heads * columns;
      this.keep(name, positions, (index) => {
        if (!hasKeys) return values.slice(index * size, (index + 1) * size);
        const row = values instanceof Float64Array ? new Float64Array(size) : new Float32Array(size);
        for (let head = 0; head < heads; head++) {
          const begin = (head * positions.length + index) * columns; // of heads × queries × keys
          row.set(values.slice(begin, begin + columns), head * columns);
        }
        return row;
      });
    }
  }

  /**
   * Keep rows of a stage.
   * @param {string} name
   * @param {number[]} positions
   * @param {(index: number) => Numbers} rowOf of each position
   */
  keep(name, positions, rowOf) {
    const stage = /** @type {PassStage} */ (this.stages.get(name));
    positions.forEach((position, index) => stage.rows.set(position, rowOf(index)));
    this.#numbers += stage.heads * stage.columns * positions.length;
    stage.range = null;
    stage.version += 1;
  }

  /** If there are many rows, forget all: those in sight are asked for again. */
  makeRoom() {
    if (this.#numbers <= KEPT_NUMBERS) return;
    for (const stage of this.stages.values()) {
      stage.rows.clear();
      stage.version += 1;
    }
    this.#numbers = 0;
  }

  /**
   * The logits and probabilities of all tokens after a position. Only those of the last position asked for are kept.
   * @param {number} row
   * @param {AbortSignal} signal
   */
  async logits(row, signal) {
    if (this.#logits?.row === row) return this.#logits;
    const body = { ...this.body, stages: WIDE, positions: [row], top_k: 0 };
    const { answer, tensors } = await postPass("/forward", body, signal);
    const read = (/** @type {string} */ name) => ({
      values: tensors[name].values,
      dtype: /** @type {string} */ (answer.stages.find((/** @type {StageShape} */ each) => each.name === name).dtype),
    });
    this.#logits = { row, logits: read("logits"), probabilities: read("probabilities") };
    return this.#logits;
  }

  /**
   * The range of the colours of a stage: a high percentile of the sizes, so that a few large numbers do not make all
   * others pale. Probabilities go from 0 to 1.
   * @param {string} name
   * @returns {Range}
   */
  range(name) {
    const stage = this.stages.get(name);
    if (!stage) return { low: 0, high: 1, isSigned: false };
    stage.range ??= /pattern$/.test(name) ? { low: 0, high: 1, isSigned: false } : rangeOf(stage);
    return stage.range;
  }
}

/**
 * Names of stages as a short list: a stage of all layers is one entry, because a request has at most 200.
 * @param {string[]} names
 * @param {string[]} all the stages of the network
 */
function globsOf(names, all) {
  const globOf = (/** @type {string} */ name) => name.replace(/^blocks\.\d+\./, "blocks.*.");
  const existing = Map.groupBy(all, globOf);
  const asked = Map.groupBy(names, globOf);
  return [...asked].flatMap(([glob, some]) => (some.length === existing.get(glob)?.length ? [glob] : some));
}

/**
 * The stages of a prompt of so many tokens.
 * @param {Model} model
 * @param {number} count
 * @returns {StageShape[]}
 */
function stagesOf({ stages, sizes }, count) {
  const sizeOf = (/** @type {string} */ dim) => (typeof sizes[dim] === "number" ? sizes[dim] : count);
  return stages.map(({ name, dims }) => ({ name, dims, shape: dims.map(sizeOf) }));
}

/**
 * Some positions in a row, with one in their middle if there is room on both sides.
 * @param {number} middle
 * @param {number} rows
 * @param {number} count of all positions
 */
function around(middle, rows, count) {
  const first = Math.max(0, Math.min(count - rows, middle - Math.floor(rows / 2)));
  return Array.from({ length: rows }, (_, index) => first + index);
}

/**
 * @param {PassStage} stage
 * @returns {Range}
 */
function rangeOf({ rows, heads, columns }) {
  const total = rows.size * heads * columns;
  const step = Math.max(1, Math.floor(total / SAMPLES));
  /** @type {number[]} */
  const sizes = [];
  let [isSigned, at] = [false, 0];
  for (const row of rows.values())
    for (const value of row) {
      if (at++ % step !== 0 || !Number.isFinite(value)) continue;
      if (value < 0) isSigned = true;
      sizes.push(Math.abs(value));
    }
  sizes.sort((a, b) => a - b);
  const high = sizes[Math.floor(PERCENTILE * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
  return { low: isSigned ? -high : 0, high, isSigned };
}
