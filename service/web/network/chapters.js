// The chapters of the lessons (lessons.js). Each is a step with one question, about the network that the article
// computes, or about the served one.

import { patternOf } from "./bands.js";
import { readGuesses } from "./lens.js";
import { decides, finalNorm, logits, loss, perplexity, prediction } from "./tour_outcomes.js";
import {
  attentionOut,
  block,
  embedding,
  experts,
  feedForward,
  gate,
  gazeOf,
  mask,
  norm,
  pattern,
  position,
  queries,
  residual,
  rotation,
  scores,
  tokens,
} from "./tour_steps.js";
import { writersOf } from "./writers.js";

/**
 * @import { Architecture } from "../answers.js"
 * @import { Line } from "./items.js"
 * @import { Pass } from "./pass.js"
 * @import { StepOf, TourStep } from "./tour_steps.js"
 *
 * @typedef {Required<TourStep> & { chapter: string }} Chapter
 */

/**
 * Lesson → its steps: each has the number of its chapter in the article, or "". Steps that a network does not have are
 * left out.
 * @type {Record<string, [chapter: string, step: StepOf][] | undefined>}
 */
const STEPS = {
  "": unnumbered(
    tokens,
    embedding,
    position,
    norm,
    queries,
    rotation,
    scores,
    pattern,
    attentionOut,
    experts,
    feedForward,
    block,
    prediction,
    decides,
  ),
  journey: [
    ["00", tokens],
    ["01", embedding],
    ["02", position],
    ["03", norm],
    ["04", pattern],
    ["05", residual],
    ["06", feedForward],
    ["07", logits],
    ["08", prediction],
    ["09", loss],
  ],
  forward: unnumbered(tokens, embedding, position, norm, queries, pattern, attentionOut, feedForward, logits, loss),
  modern: unnumbered(tokens, norm, rotation, mask, pattern, residual, gate, block, finalNorm, prediction),
  gpt: unnumbered(tokens, embedding, position, norm, queries, attentionOut, residual, feedForward, block, logits),
  loss: unnumbered(tokens, block, logits, prediction, loss, perplexity),
};

/**
 * The steps of a lesson for the token at a position. Reads the numbers that they need.
 * @param {string} name
 * @param {{ pass: Pass, line: Line, architecture: Architecture, hasLens: boolean, hasWriters: boolean }} parts
 *   `hasLens` and `hasWriters`: whether the service says what the network would predict after each layer, and what
 *   writes a token
 * @param {number} row
 * @param {AbortSignal} signal
 * @returns {Promise<Chapter[]>}
 */
export async function chaptersOf(name, { pass, line, architecture, hasLens, hasWriters }, row, signal) {
  const lesson = STEPS[name];
  if (!lesson) throw new Error(`lesson: there is no lesson “${name}”.`);
  const patterns = line.blocks.map(({ layer }) => patternOf(layer));
  const [guesses] = await Promise.all([
    hasLens ? readGuesses(pass, row, signal) : null,
    pass.read(patterns, [row], signal),
  ]);
  const writers = hasWriters ? writersOf(pass, row) : null;
  const gaze = gazeOf({ pass, line, row, guesses, writers });
  const own = [...pass.stages.keys()].filter((stage) => stage.startsWith(`blocks.${gaze.layer}.`));
  await pass.read(["embed", "pos_embed", "ln_final.out", ...own], [row], signal);
  const scene = { pass, line, architecture, row, gaze, guesses, writers };
  return lesson.flatMap(([chapter, stepOf]) => {
    const step = stepOf(scene);
    return step === null ? [] : [{ at: "", cell: "", ...step, chapter }];
  });
}

/**
 * @param {StepOf[]} steps
 * @returns {[string, StepOf][]}
 */
function unnumbered(...steps) {
  return steps.map((step) => ["", step]);
}
