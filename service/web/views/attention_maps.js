// The attention maps of a prompt, fetched as they are needed: small ones of whole layers, and one head exactly.

import { decode, postJson } from "../api.js";
import { cached } from "../passes.js";

/**
 * @import { Edit, Means, PatternsAnswer, PositionedToken, Prompt } from "../answers.js"
 * @import { Numbers } from "../api.js"
 * @typedef {"scores" | "attn_scores" | "pattern"} MapStage
 * @typedef {{ model?: string, prompt: Prompt, edits?: Edit[] }} Body
 * @typedef {{ size: number, values: Uint8Array, means: Means | null }} SmallMap
 * @typedef {{ layer: number, head: number }} Place
 * @typedef {Place & { means: Means | null }} HeadMeans `means`: null for a prompt of one token
 * @typedef {{
 *   tokens: PositionedToken[], size: number, block: number, values: Float32Array, means: Means | null,
 * }} HeadMap with a block of 1, the numbers are exact
 */

const SMALLEST = 4; // the least `max_size` of POST /patterns, for requests of which only the means are used
const EXACT_SIZE = 640; // maps of longer prompts are reduced to at most this many rows

/** The maps of one prompt. `body`: {model, prompt, edits} for requests; `size`: of small maps. */
export class AttentionMaps {
  #body;
  #size;
  /** @type {Map<number, Promise<Map<number, SmallMap[]>>>} layer → a promise of the small maps of its request */
  #rows = new Map();
  /** @type {Map<number, (Means | null)[]>} layer → the means of each head */
  #means = new Map();
  /** @type {PositionedToken[]} of the prompt, once `means` has an answer */
  tokens = [];
  /** @type {WeakMap<PatternsAnswer, HeadMap>} answer → its head, so that the same head is the same object */
  #decoded = new WeakMap();

  /**
   * @param {Body} body
   * @param {number} size
   */
  constructor(body, size) {
    this.#body = body;
    this.#size = size;
  }

  /** Edited weights need not be between 0 and 1, as a byte can hold. @returns {"uint8" | "float32"} */
  get #dtype() {
    return this.#body.edits ? "float32" : "uint8";
  }

  /**
   * The small maps of some layers, by layer. Each layer is fetched once, also by calls side by side.
   * @param {number[]} layers
   * @param {AbortSignal} signal
   */
  async rows(layers, signal) {
    const missing = layers.filter((layer) => !this.#rows.has(layer));
    if (missing.length > 0) {
      const fetched = this.#fetchRows(missing, signal);
      const forget = () => missing.forEach((layer) => this.#rows.delete(layer));
      for (const layer of missing) this.#rows.set(layer, fetched);
      signal.addEventListener("abort", forget, { once: true });
      fetched.then(() => signal.removeEventListener("abort", forget), forget);
    }
    const maps = layers.map(async (layer) => (await this.#rows.get(layer))?.get(layer) ?? []);
    const all = await Promise.all(maps);
    return new Map(layers.map((layer, index) => [layer, all[index]]));
  }

  /**
   * @param {number[]} layers
   * @param {AbortSignal} signal
   */
  async #fetchRows(layers, signal) {
    const body = { ...this.#body, layers, max_size: this.#size, dtype: this.#dtype };
    const answer = await postJson("/patterns", body, signal);
    this.#keepMeans(answer);
    const mapsOf = (/** @type {number} */ layer) =>
      answer.maps
        .filter((map) => map.layer === layer)
        .map(({ means, values }) => ({ means, size: answer.size, values: bytesOf(decode(values, this.#dtype)) }));
    return new Map(layers.map((layer) => [layer, mapsOf(layer)]));
  }

  /**
   * Where each head's weight goes, of all layers.
   * @param {number} numLayers
   * @param {AbortSignal} signal
   * @returns {Promise<HeadMeans[]>}
   */
  async means(numLayers, signal) {
    const layers = Array.from({ length: numLayers }, (_, layer) => layer);
    const missing = layers.filter((layer) => !this.#means.has(layer));
    if (missing.length > 0)
      this.#keepMeans(
        await cached("/patterns", { ...this.#body, layers: missing, max_size: SMALLEST, dtype: this.#dtype }, signal),
      );
    return layers.flatMap((layer) => (this.#means.get(layer) ?? []).map((means, head) => ({ layer, head, means })));
  }

  /**
   * One head.
   * @param {Place} place
   * @param {MapStage} stage
   * @param {AbortSignal} signal
   */
  async head({ layer, head }, stage, signal) {
    const answer = await cached(
      "/patterns",
      { ...this.#body, stage, layers: [layer], heads: [head], max_size: EXACT_SIZE, dtype: "float32" },
      signal,
    );
    const kept = this.#decoded.get(answer);
    if (kept) return kept;
    const [{ values, means }] = answer.maps;
    const { tokens, size, block } = answer;
    const map = { tokens, size, block, values: decode(values, "float32"), means };
    this.#decoded.set(answer, map);
    return map;
  }

  /**
   * The exact weights of one query: those of the pattern of its head, unless that is reduced.
   * @param {Place & { position: number }} query
   * @param {HeadMap} pattern
   * @param {AbortSignal} signal
   */
  async row({ layer, head, position }, { block, size, values }, signal) {
    if (block === 1) return values.subarray(position * size, (position + 1) * size);
    const pattern = this.forwardBody({ layer, head, stage: "pattern" });
    const body = { ...pattern, positions: [position], encoding: "base64", dtype: "float32" };
    return decode((await cached("/forward", body, signal)).stages[0].values, "float32");
  }

  /**
   * The exact weights of one query in all heads.
   * @param {number} position
   * @param {AbortSignal} signal
   */
  async rowOfAll(position, signal) {
    const body = {
      ...this.#body,
      stages: ["blocks.*.attn.pattern"],
      positions: [position],
      detail: "values",
      top_k: 0,
      encoding: "base64",
      dtype: "float32",
    };
    const { stages } = await cached("/forward", body, signal);
    return stages.flatMap(({ shape, values }, layer) => {
      const [, heads, , size] = shape; // (batch, head, query, key)
      const weights = decode(values, "float32");
      return Array.from({ length: heads }, (_, head) => ({
        layer,
        head,
        weights: weights.subarray(head * size, (head + 1) * size),
      }));
    });
  }

  /** The request for all exact numbers of a head. @param {Place & { stage: MapStage }} shown */
  forwardBody({ layer, head, stage }) {
    return { ...this.#body, stages: [`blocks.${layer}.attn.${stage}`], heads: [head], detail: "values", top_k: 0 };
  }

  /** @param {PatternsAnswer} answer */
  #keepMeans({ maps, tokens }) {
    this.tokens = tokens;
    for (const [layer, some] of Map.groupBy(maps, (map) => map.layer)) {
      const means = some.map((map) => map.means);
      this.#means.set(layer, means);
    }
  }
}

/**
 * Weights as bytes: 255 is a weight of 1, or of more.
 * @param {Numbers} weights
 */
function bytesOf(weights) {
  if (weights instanceof Uint8Array) return weights;
  return Uint8Array.from(weights, (weight) => Math.round(255 * Math.min(1, Math.max(0, weight))));
}
