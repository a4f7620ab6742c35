// The distribution from which the service draws a token: temperature, then softmax, then top-k, then top-p. The page
// computes it from logits of the service, so that a slider needs no new pass. A test compares it with the service.

/** @import { Numbers } from "./api.js" */

/**
 * Probabilities of all tokens. 0 for those that top-k and top-p exclude. `logits`: numbers; null and NaN are excluded.
 * @param {Numbers | (number | null)[]} logits
 */
export function distribution(logits, { temperature = 1, topK = 0, topP = 1 } = {}) {
  const largest = largestOf(logits);
  if (temperature === 0) {
    const best = logits.indexOf(largest);
    return Float64Array.from(logits, (_, index) => (index === best ? 1 : 0));
  }
  const weights = Float64Array.from(logits, (logit) =>
    logit === null || !Number.isFinite(logit) ? 0 : Math.exp((logit - largest) / temperature),
  );
  const least = threshold(normalize(weights), topK, topP);
  return normalize(weights.map((weight) => (weight < least ? 0 : weight)));
}

/** @param {Iterable<number | null>} logits */
function largestOf(logits) {
  let largest = -Infinity;
  for (const logit of logits) if (logit !== null && Number.isFinite(logit) && logit > largest) largest = logit;
  return largest;
}

/**
 * Divide by the sum, in place.
 * @param {Float64Array} weights
 */
function normalize(weights) {
  let sum = 0;
  for (const weight of weights) sum += weight;
  for (let index = 0; index < weights.length; index++) weights[index] /= sum;
  return weights;
}

/**
 * The least probability that is kept. Equally likely tokens are kept together, as the service does.
 * @param {Float64Array} probabilities
 * @param {number} topK
 * @param {number} topP
 */
function threshold(probabilities, topK, topP) {
  if (topK === 0 && topP >= 1) return 0;
  const sorted = Float64Array.from(probabilities).sort().reverse();
  const kept = topK > 0 ? sorted.subarray(0, topK) : sorted;
  let total = 0;
  for (const probability of kept) total += probability;
  let before = 0;
  let least = kept[0];
  for (const probability of kept) {
    if (before / total >= topP) break;
    least = probability;
    before += probability;
  }
  return least;
}
