// The chapters of the lessons (lessons.js). Each is a step with one question, about the network that the article
// computes, or about the served one.

import { patternOf } from "./bands.js";
import { readGuesses } from "./lens.js";
import { OUTCOMES } from "./tour_outcomes.js";
import { STEPS, gazeOf } from "./tour_steps.js";
import { writersOf } from "./writers.js";

/**
 * @import { Architecture } from "../answers.js"
 * @import { Line } from "./items.js"
 * @import { Pass } from "./pass.js"
 * @import { TourStep } from "./tour_steps.js"
 *
 * @typedef {Required<TourStep> & { chapter: string }} Chapter
 */

/** Lesson → the names of its steps. Those that a network does not have are left out. @type {Record<string, string>} */
const LESSON_STEPS = {
  "":
    "tokens embedding position norm queries rotation scores pattern attentionOut experts feedForward block " +
    "prediction decides",
  journey: "tokens embedding position norm pattern residual feedForward logits prediction loss",
  forward: "tokens embedding position norm queries pattern attentionOut feedForward logits loss",
  modern: "tokens norm rotation mask pattern residual gate block finalNorm prediction",
  gpt: "tokens embedding position norm queries attentionOut residual feedForward block logits",
  loss: "tokens block logits prediction loss perplexity",
};
const NUMBERED = "journey"; // the lesson whose article has numbers for its chapters, from 00

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
  if (!Object.hasOwn(LESSON_STEPS, name)) throw new Error(`lesson: there is no lesson “${name}”.`);
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
  const all = { ...STEPS, ...OUTCOMES };
  const names = /** @type {(keyof typeof all)[]} */ (LESSON_STEPS[name].split(" "));
  return names.flatMap((each, index) => {
    const step = all[each](scene);
    const chapter = name === NUMBERED ? String(index).padStart(2, "0") : "";
    return step === null ? [] : [{ at: "", cell: "", ...step, chapter }];
  });
}
