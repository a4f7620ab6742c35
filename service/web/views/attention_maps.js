// The attention maps of a prompt, fetched as they are needed: small ones of whole layers, and one head exactly.

import { decode, postJson } from "../api.js";
import { cached } from "../passes.js";

const SMALLEST = 4; // the least `max_size` of POST /patterns, for requests of which only the means are used
const EXACT_SIZE = 640; // maps of longer prompts are reduced to at most this many rows

/** The maps of one prompt. `body`: {model, prompt} for requests; `size`: of small maps. */
export class AttentionMaps {
  #body;
  #size;
  #rows = new Map(); // layer → a promise of the small maps of its request
  #means = new Map(); // layer → the means of each head
  #decoded = new WeakMap(); // answer → its head, so that the same head is the same object

  constructor(body, size) {
    this.#body = body;
    this.#size = size;
  }

  /** The small maps of some layers: layer → [{size, values, means}]. Each layer is fetched once, also by calls side by side. */
  async rows(layers, signal) {
    const missing = layers.filter((layer) => !this.#rows.has(layer));
    if (missing.length > 0) {
      const fetched = this.#fetchRows(missing, signal);
      const forget = () => missing.forEach((layer) => this.#rows.delete(layer));
      for (const layer of missing) this.#rows.set(layer, fetched);
      signal.addEventListener("abort", forget, { once: true });
      fetched.then(() => signal.removeEventListener("abort", forget), forget);
    }
    return new Map(await Promise.all(layers.map(async (layer) => [layer, (await this.#rows.get(layer)).get(layer)])));
  }

  async #fetchRows(layers, signal) {
    const answer = await postJson("/patterns", { ...this.#body, layers, max_size: this.#size, dtype: "uint8" }, signal);
    this.#keepMeans(answer);
    const mapsOf = (layer) => answer.maps.filter((map) => map.layer === layer).map(({ means, values }) => ({ means, size: answer.size, values: decode(values, "uint8") }));
    return new Map(layers.map((layer) => [layer, mapsOf(layer)]));
  }

  /** Where each head's weight goes: [{layer, head, means}] of all layers. `means` is null for a prompt of one token. */
  async means(numLayers, signal) {
    const layers = Array.from({ length: numLayers }, (_, layer) => layer);
    const missing = layers.filter((layer) => !this.#means.has(layer));
    if (missing.length > 0) this.#keepMeans(await cached("/patterns", { ...this.#body, layers: missing, max_size: SMALLEST, dtype: "uint8" }, signal));
    return layers.flatMap((layer) => this.#means.get(layer).map((means, head) => ({ layer, head, means })));
  }

  /** One head: {tokens, size, block, values, means}. With a block of 1 the numbers are exact. */
  async head(layer, head, stage, signal) {
    const answer = await cached("/patterns", { ...this.#body, stage, layers: [layer], heads: [head], max_size: EXACT_SIZE, dtype: "float32" }, signal);
    const [{ values, means }] = answer.maps;
    if (!this.#decoded.has(answer)) this.#decoded.set(answer, { tokens: answer.tokens, size: answer.size, block: answer.block, values: decode(values, "float32"), means });
    return this.#decoded.get(answer);
  }

  /** The exact weights of one query, for prompts whose map is reduced. */
  async row(layer, head, position, signal) {
    const answer = await cached("/forward", { ...this.forwardBody(layer, head, "pattern"), positions: [position], encoding: "base64", dtype: "float32" }, signal);
    return decode(answer.stages[0].values, "float32");
  }

  /** The exact weights of one query in all heads: [{layer, head, weights}]. */
  async rowOfAll(position, signal) {
    const body = { ...this.#body, stages: ["blocks.*.attn.pattern"], positions: [position], detail: "values", top_k: 0, encoding: "base64", dtype: "float32" };
    const { stages } = await cached("/forward", body, signal);
    return stages.flatMap(({ shape, values }, layer) => {
      const [, heads, , size] = shape; // (batch, head, query, key)
      const weights = decode(values, "float32");
      return Array.from({ length: heads }, (_, head) => ({ layer, head, weights: weights.subarray(head * size, (head + 1) * size) }));
    });
  }

  /** The request for all exact numbers of a head. */
  forwardBody(layer, head, stage) {
    return { ...this.#body, stages: [`blocks.${layer}.attn.${stage}`], heads: [head], detail: "values", top_k: 0 };
  }

  #keepMeans({ maps }) {
    for (const { layer } of maps) this.#means.set(layer, maps.filter((map) => map.layer === layer).map(({ means }) => means));
  }
}
