// Find the arithmetic of a number, and read what it needs.

import { describe } from "../../stages.js";
import { head, maskedScore, pattern, score } from "./attention.js";
import { activated, divisor, expertWeight, normalized, rotated, sum } from "./elementwise.js";
import {
  attentionOutput,
  embedding,
  gained,
  key,
  mlpOutput,
  pre,
  preLinear,
  query,
  router,
  value,
} from "./products.js";
import { readWeight } from "../weights.js";

/**
 * @import { Architecture } from "../../answers.js"
 * @import { Pass, PassStage } from "../pass.js"
 * @import { Weight } from "../weights.js"
 * @import { Explained, Kind } from "./explanation.js"
 */

/** The arithmetic of each part of a network. @type {[RegExp, Kind][]} */
const KINDS = [
  [/^resid_/, sum],
  [/\.scale$/, divisor],
  [/\.normalized$/, normalized],
  [/^(ln\w+|attn\.[qk]_norm)\.out$/, gained],
  [/^attn\.rot_[qk]$/, rotated],
  [/^attn\.scores$/, score],
  [/^attn\.attn_scores$/, maskedScore],
  [/^attn\.pattern$/, pattern],
  [/^attn\.z$/, head],
  [/^mlp\.post$/, activated],
  [/^mlp\.expert_weights$/, expertWeight],
  [/^embed$/, embedding],
  [/^attn\.q$/, query],
  [/^attn\.k$/, key],
  [/^attn\.v$/, value],
  [/^attn_out$/, attentionOutput],
  [/^mlp\.pre$/, pre],
  [/^mlp\.pre_linear$/, preLinear],
  [/^mlp\.router_logits$/, router],
  [/^mlp_out$/, mlpOutput],
];

/**
 * How a number was computed, or null if the page cannot say.
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {{ name: string, row: number, column: number }} cell
 * @param {AbortSignal} signal
 * @returns {Promise<Explained>}
 */
export async function explain(pass, architecture, { name, row, column }, signal) {
  const stage = /** @type {PassStage} */ (pass.stages.get(name));
  const { layer, part, formula } = describe(name, architecture);
  await pass.read([name], [row], signal);
  const place = {
    pass,
    architecture,
    stage,
    layer,
    part,
    row,
    column,
    head: Math.floor(column / stage.columns),
    within: column % stage.columns,
    served: pass.row(name, row)?.[column] ?? NaN,
    /** @type {Weight[]} */
    weights: [],
  };
  const kind = KINDS.find(([parts]) => parts.test(part))?.[1];
  if (!kind || kind.isKnown?.(place) === false) return { place, formula, explanation: null };
  for (const { stages, rows } of kind.needs(place)) await pass.read(stages.filter(Boolean), rows, signal);
  place.weights = await Promise.all((kind.weights?.(place) ?? []).map((each) => readWeight(pass, each)));
  return { place, formula, explanation: kind.explain(place), picture: kind.picture?.(place) };
}
