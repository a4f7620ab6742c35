// The steps of one token through the last part of a network: from its last vector to the loss. The answers are computed
// from the pass. lessons.js has their order.

import { count, number, percent, quoted } from "../format.js";
import { largest } from "./tour_steps.js";

/** @import { StepOf } from "./tour_steps.js" */

/** @type {StepOf} */
export function finalNorm({ pass, row }) {
  const found = largest(pass, "ln_final.out", row);
  return (
    found && {
      title: "The last norm",
      sentence: "Behind the last layer, the river passes one more norm.",
      question: "Which number is the largest then, by size?",
      answer: `Number ${found.column}: ${number(found.value)}.`,
      at: "ln_final.out",
      cell: String(found.column),
    }
  );
}

/** @type {StepOf} */
export function logits({ pass, row }) {
  const [first, second] = pass.predictions.get(row) ?? [];
  return first === undefined
    ? null
    : {
        title: "Logits",
        sentence: "The last vector is multiplied with a vector of every token of the vocabulary: one number for each.",
        question: "Which token gets the largest?",
        answer:
          `${quoted(first)}, ${number(first.logit)}` +
          (second === undefined ? "." : `; then ${quoted(second)}, ${number(second.logit)}.`),
        at: "predictions",
        cell: String(first.id),
      };
}

/** @type {StepOf} */
export function prediction({ pass, row }) {
  const best = pass.predictions.get(row)?.[0];
  return best === undefined
    ? null
    : {
        title: "The next token",
        sentence:
          "The last vector is compared with a vector of every token of the vocabulary. Softmax turns these logits " +
          "into probabilities.",
        question: `Which token comes most likely after ${quoted(pass.tokens[row])}?`,
        answer: `${quoted(best)}, with ${percent(best.probability)}.`,
        at: "predictions",
        cell: String(best.id),
      };
}

/** @type {StepOf} */
export function loss({ pass }) {
  const losses = pass.loss.per_token;
  const known = losses.flatMap((value, position) => (value === null ? [] : [{ value, position }]));
  if (known.length === 0 || pass.loss.mean === null) return null;
  const most = known.reduce((one, other) => (other.value > one.value ? other : one));
  const next = pass.tokens[most.position + 1];
  const what = next === undefined ? `what follows ${quoted(pass.tokens[most.position])}` : quoted(next);
  return {
    title: "Loss",
    sentence:
      "The loss of a token is −ln of the probability that it got: 0 if the network was sure of it. Training makes " +
      "the mean smaller.",
    question: `What is the mean of ${count(known.length)} tokens, and which one surprised the network the most?`,
    answer:
      `${number(pass.loss.mean)}. The greatest surprise was ${what}: −ln ${percent(Math.exp(-most.value))} = ` +
      `${number(most.value)}.`,
    at: "predictions",
    cell: "",
  };
}

/** @type {StepOf} */
export function perplexity({ pass }) {
  const { mean, perplexity: value } = pass.loss;
  return mean === null || value === null
    ? null
    : {
        title: "Perplexity",
        sentence: "e to the power of the mean loss: among how many equally likely tokens the network seems to choose.",
        question: "How many are they for this prompt?",
        answer: `e^${number(mean)} = ${number(value)}.`,
        at: "predictions",
        cell: "",
      };
}
