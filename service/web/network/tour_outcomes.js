// The steps of one token through the last part of a network: from its last vector to the loss. The answers are computed
// from the pass. chapters.js has their order.

import { count, number, percent, quoted } from "../format.js";
import { decidingOf } from "./lens.js";
import { placeName } from "./names.js";
import { aboutLargest, guessed } from "./tour_steps.js";

/** @import { StepOf } from "./tour_steps.js" */

/** @satisfies {Record<string, StepOf>} */
export const OUTCOMES = {
  finalNorm: aboutLargest("ln_final.out", ({ column, value }) => ({
    title: "The last norm",
    sentence: "After the last layer, the stream passes one more norm.",
    question: "Which number is the largest then, by size?",
    answer: `Number ${column}: ${number(value)}.`,
  })),

  logits({ pass, row }) {
    const [first, second] = pass.predictions.get(row) ?? [];
    if (first === undefined) return null;
    return {
      title: "Logits",
      sentence: "The last vector is multiplied with a vector of every token of the vocabulary: one number for each.",
      question: "Which token gets the largest?",
      answer:
        `${quoted(first)}, ${number(first.logit)}` +
        (second === undefined ? "." : `; then ${quoted(second)}, ${number(second.logit)}.`),
      at: "predictions",
      cell: String(first.id),
    };
  },

  prediction({ pass, line, row }) {
    const layers = line.blocks.length;
    const best = pass.predictions.get(row)?.[0];
    if (best === undefined) return null;
    return {
      title: "The next token",
      sentence:
        (layers > 1 ? `All ${layers} layers do the same, each with its own weights. ` : "") +
        "The last vector is compared with a vector of every token of the vocabulary. Softmax turns these logits " +
        "into probabilities.",
      question: `Which token comes most likely after ${quoted(pass.tokens[row])}?`,
      answer: `${quoted(best)}, with ${percent(best.probability)}.`,
      at: "predictions",
      cell: String(best.id),
    };
  },

  decides({ line, row, pass, guesses, writers }) {
    const deciding = guesses && decidingOf(guesses);
    if (guesses === null || deciding === null) return null;
    const last = guesses[guesses.length - 1];
    const best = quoted(last.top[0]);
    const layer = deciding > 0 ? line.blocks[deciding - 1].layer : null;
    const from =
      layer === null
        ? `${best} is the most likely token from the start, before the first layer.`
        : `Before layer ${layer}, the network would still say ${guessed(guesses[deciding - 1])}; after it, ` +
          `${guessed(guesses[deciding])}.`;
    const end = deciding > 0 && deciding < guesses.length - 1 ? ` In the end, it is ${guessed(last)}.` : "";
    const signed = (/** @type {number} */ share) => `${share >= 0 ? "+" : ""}${number(share)}`;
    const named = (/** @type {{ name: string, share: number }} */ { name, share }) => `${name} (${signed(share)})`;
    const isComputing = writers === undefined;
    const most = writers?.slice(0, 2).map(named).join(" and ");
    const parts = isComputing ? " The parts that add the most to its logit: computing…" : "";
    return {
      title: "Which layer decides",
      sentence: `${from}${end}${writers ? ` ${most} add the most to its logit.` : parts}`,
      question:
        writers || isComputing ? `Which parts write ${best}, and which work against it?` : "What would each layer say?",
      answer: writers
        ? `The most: ${writers.slice(0, 5).map(named).join(", ")}. Against it: ` +
          `${writers.slice(-2).reverse().map(named).join(", ")}. The shares of all parts add up to the logit ` +
          `${number(pass.predictions.get(row)?.[0].logit)}.`
        : isComputing
          ? "computing…"
          : guesses
              .map(
                (guess, at) => `${at === 0 ? "before" : "after"} ${placeName(Math.max(0, at - 1))} ${guessed(guess)}`,
              )
              .join(", "),
    };
  },

  loss({ pass }) {
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
    };
  },

  perplexity({ pass }) {
    const { mean, perplexity: value } = pass.loss;
    if (mean === null || value === null) return null;
    return {
      title: "Perplexity",
      sentence: "e to the power of the mean loss: among how many equally likely tokens the network seems to choose.",
      question: "How many are they for this prompt?",
      answer: `e^${number(mean)} = ${number(value)}.`,
      at: "predictions",
    };
  },
};
