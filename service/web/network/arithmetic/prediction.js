// The arithmetic of a prediction: the logit of a token, and its probability among all tokens of the vocabulary.

import { describe } from "../../stages.js";
import { quoted } from "../../format.js";
import { readWeight } from "../weights.js";
import { softmaxPicture } from "../operations/softmax_picture.js";
import { productsOf, weighted } from "./products.js";
import { softmax } from "./softmax.js";

/**
 * @import { Architecture } from "../../answers.js"
 * @import { Pass, PassStage } from "../pass.js"
 * @import { Explained, Place } from "./explanation.js"
 */

/** What the logits are computed from: the last stage before them. @param {Pass} pass */
export function inputOf({ stages }) {
  return [...stages.keys()].findLast((name) => /(^ln_final\.out|\.resid_post|\.ln2\.out)$/.test(name)) ?? "";
}

/**
 * How the logit and the probability of a token after a position were computed.
 * @param {Pass} pass
 * @param {Architecture} architecture
 * @param {{ row: number, id: number }} prediction
 * @param {AbortSignal} signal
 * @returns {Promise<Explained[]>}
 */
export async function explainPrediction(pass, architecture, { row, id }, signal) {
  const input = inputOf(pass);
  const [logits, matrix] = await Promise.all([
    pass.logits(row, signal),
    readWeight(pass, "unembed.W_U", { d_vocab: id }),
    pass.read([input], [row], signal),
  ]);
  const tokens = new Map((pass.predictions.get(row) ?? []).map((token) => [token.id, token]));
  const token = tokens.get(id) ?? { id, text: null, probability: null };
  const place = {
    pass,
    architecture,
    stage: { .../** @type {PassStage} */ (pass.stages.get("logits")), dtype: logits.logits.dtype },
    layer: null,
    part: "logits",
    row,
    column: id,
    head: 0,
    within: id,
    served: logits.logits.values[id],
  };
  const { logits_scale: scale, logits_softcap: cap } = architecture;
  const products = productsOf(place, input, matrix);
  const logit = weighted(place, products, matrix, null, scale, `${input} × W_U of ${quoted(token)}`);
  if (cap && logit.computed !== null) {
    logit.computed = cap * Math.tanh(logit.computed / cap);
    logit.formula.push(`; ${cap} × tanh(… ÷ ${cap}) = `, { value: logit.computed });
  }
  /** @type {Place} */
  const after = { ...place, served: logits.probabilities.values[id], part: "probabilities" };
  after.stage = { ...place.stage, dtype: logits.probabilities.dtype };
  const entries = Array.from(logits.logits.values, (value, other) => ({
    name: quoted(tokens.get(other) ?? { id: other }),
    num: { value },
  }));
  const share = softmax(after, entries, id);
  share.slack += after.served * 2 ** -7; // the service may compute it from logits before they are rounded
  share.picture = softmaxPicture(entries, id, { from: "logit", to: "probability", isRanked: true });
  return [
    { place, formula: describe("logits", architecture).formula, explanation: logit },
    { place: after, formula: describe("probabilities", architecture).formula, explanation: share },
  ];
}
