// The steps of one token through the first and the middle part of a network, each with a question that the picture
// answers. The answers are computed from the pass. lessons.js has their order.

import { count, number, percent, quoted } from "../format.js";
import { halfOf, turnOf } from "./arithmetic/elementwise.js";
import { patternOf } from "./bands.js";
import { decidingOf } from "./lens.js";
import { placeName } from "./names.js";

/**
 * @import { Architecture } from "../answers.js"
 * @import { Numbers } from "../api.js"
 * @import { Line } from "./items.js"
 * @import { Guess } from "./lens.js"
 * @import { Pass, PassStage } from "./pass.js"
 * @import { Writers } from "./writers.js"
 *
 * @typedef {{ title: string, sentence: string, question: string, answer: string, at?: string, cell?: string }} TourStep
 *   `at` and `cell`: the place in the network, as in the address; without them, the whole network, and the whole stage
 * @typedef {{ layer: number | null, head: number, key: number }} Gaze a head, and the token that it attends to the most
 * @typedef {{
 *   pass: Pass, line: Line, architecture: Architecture, row: number, gaze: Gaze, guesses: Guess[] | null,
 *   writers: Writers,
 * }} Scene `guesses`: what the network would predict after each layer; `writers`: what writes the predicted token
 * @typedef {(scene: Scene) => TourStep | null} StepOf null: this network has no such stage
 */

/**
 * The head to look through: the one that writes the most of the predicted token. Where nothing says which one that is,
 * the head that shows the most of softmax, in the layer that decides if one does: its largest share is nearest to a
 * half. Then heads that attend the most to an earlier token come first, the first token aside: many heads look there
 * when they find nothing.
 * @param {Pick<Scene, "pass" | "line" | "row" | "guesses" | "writers">} scene
 * @returns {Gaze}
 */
export function gazeOf({ pass, line: { blocks }, row, guesses, writers }) {
  const keyOf = (/** @type {Numbers} */ own) => own.indexOf(Math.max(...own));
  const ownOf = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const { columns, rows } = /** @type {PassStage} */ (pass.stages.get(patternOf(layer)));
    return /** @type {Numbers} */ (rows.get(row)).slice(head * columns, (head + 1) * columns);
  };
  const writer = writers?.find(({ head, share }) => head !== null && share > 0);
  if (writer && writer.head !== null) {
    const { layer, head } = writer;
    return { layer, head, key: keyOf(ownOf(layer, head)) };
  }
  const deciding = guesses && decidingOf(guesses);
  const layers = blocks.map(({ layer }) => layer).filter((layer) => !deciding || layer === blocks[deciding - 1].layer);
  let [best, gaze] = [Infinity, { layer: layers[0] ?? null, head: 0, key: 0 }];
  for (const layer of layers) {
    const stage = pass.stages.get(patternOf(layer));
    if (!stage?.rows.has(row)) continue;
    for (let head = 0; head < stage.heads; head++) {
      const own = ownOf(layer, head);
      const key = keyOf(own);
      const isBack = key > 0 && key < row;
      const distance = Math.abs(own[key] - 0.5) + (isBack ? 0 : 1);
      if (distance < best) [best, gaze] = [distance, { layer, head, key }];
    }
  }
  return gaze;
}

/**
 * How much a part adds to the logit of the predicted token, as a sentence; "" if nothing is known of it.
 * @param {Scene} scene
 * @param {number | null} head null for the feed-forward network
 */
function adds({ pass, row, writers, gaze }, head) {
  const writer = writers?.find((each) => each.layer === gaze.layer && each.head === head);
  const best = pass.predictions.get(row)?.[0];
  if (!writer || !best) return "";
  const verb = writer.share >= 0 ? "adds" : "takes";
  const direction = writer.share >= 0 ? "to" : "from";
  return ` ${writer.name} ${verb} ${number(Math.abs(writer.share))} ${direction} the logit of ${quoted(best)}.`;
}

/** @type {StepOf} */
export function tokens({ pass, row }) {
  const { length } = pass.tokens;
  const best = pass.predictions.get(row)?.[0];
  const end = best ? ` The network expects ${quoted(best)} after it. The next steps show how that comes about.` : "";
  return {
    title: "A token",
    sentence:
      `The prompt is ${count(length)} tokens, one in each row. Follow the purple one: ` +
      `${quoted(pass.tokens[row])}, at position ${row}.${end}`,
    question: "What does the network get of it?",
    answer: `Its id, ${pass.tokens[row].id ?? row}, and its position, ${row}. Nothing else.`,
  };
}

/** @type {StepOf} */
export function embedding({ pass, row }) {
  const found = largest(pass, "embed", row);
  if (!found) return null;
  return {
    title: "Embedding",
    sentence:
      `The id selects a row of the embedding table: ${count(found.stage.columns)} numbers. With them begins the ` +
      "stream of the token, which each layer reads and adds to.",
    question: "Which of them is the largest, by size?",
    answer: `Number ${found.column}: ${number(found.value)}.`,
    at: "embed",
  };
}

/** @type {StepOf} */
export function position({ pass, row }) {
  const found = largest(pass, "pos_embed", row);
  if (!found) return null;
  return {
    title: "Position",
    sentence: "A second table has a row for each position. Both rows are added up.",
    question: "Which number does the position change the most?",
    answer: `Number ${found.column}, by ${number(found.value)}.`,
    at: "pos_embed",
  };
}

/** @type {StepOf} */
export function norm({ pass, row, gaze, guesses, writers }) {
  const name = `blocks.${gaze.layer}.ln1.scale`;
  const scale = pass.row(name, row);
  const isDeciding = guesses !== null && gaze.layer !== null && decidingOf(guesses) === gaze.layer + 1;
  const what = isDeciding ? ", which decides" : writers ? ", whose heads write the most" : "";
  if (scale === undefined) return null;
  return {
    title: "Norm",
    sentence:
      "Each layer reads the stream through a norm, which divides all numbers of a token by one number. The " +
      "picture has the stream before the norm, and after it what the layer works with. " +
      `This is layer ${gaze.layer}${what}.`,
    question: "By which number is this token divided?",
    answer: `By ${number(scale[0])}.`,
    at: name,
    cell: "0",
  };
}

/** @type {StepOf} */
export function queries({ pass, row, writers, gaze: { layer, head } }) {
  const found = largest(pass, `blocks.${layer}.attn.q`, row, head);
  if (layer === null || !found) return null;
  return {
    title: "Query, key and value",
    sentence:
      "Three weight matrices make a query (what the token looks for), a key (what it offers) and a " +
      `value (what it passes on), ${count(found.stage.columns)} numbers for each head. ` +
      `${placeName(layer, head)} is the head ${writers ? "that writes the most of the prediction" : "to look at"}.`,
    question: `What is the largest number of the query of ${placeName(layer, head)}, by size?`,
    answer: `Number ${found.column}: ${number(found.value)}. Its terms, input × weight, are at the right.`,
    ...found.place,
  };
}

/** @type {StepOf} */
export function scores({ pass, row, gaze: { layer, head, key } }) {
  const name = `blocks.${layer}.attn.scores`;
  const stage = pass.stages.get(name);
  const numbers = pass.row(name, row);
  if (layer === null || !stage || !numbers) return null;
  const cell = head * stage.columns + key;
  return {
    title: "Scores",
    sentence:
      "The query is multiplied with the key of every earlier token, and of its own: number by number, " +
      `added up, scaled. In ${placeName(layer, head)}, ${quoted(pass.tokens[key])} fits best.`,
    question: `What is the score of ${quoted(pass.tokens[key])} in ${placeName(layer, head)}?`,
    answer: `${number(numbers[cell])}. The sum at the right shows how it comes about.`,
    at: name,
    cell: String(cell),
  };
}

/** @type {StepOf} */
export function pattern({ pass, row, gaze: { layer, head, key } }) {
  const name = layer === null ? "" : patternOf(layer);
  const stage = pass.stages.get(name);
  const weights = pass.row(name, row);
  if (layer === null || !stage || !weights) return null;
  const own = weights.slice(head * stage.columns, (head + 1) * stage.columns);
  const next = [...own.keys()]
    .filter((other) => other !== key && own[other] > 0)
    .sort((one, other) => own[other] - own[one])
    .slice(0, 2)
    .map((other) => `${quoted(pass.tokens[other])} at ${other} (${percent(own[other])})`);
  return {
    title: "Attention",
    sentence:
      "Softmax turns the scores of each head into shares of 100 %. " +
      `In ${placeName(layer, head)}, ${quoted(pass.tokens[row])} attends to ${quoted(pass.tokens[key])} with ` +
      `${percent(own[key])}.`,
    question: "Where does the rest of the attention go?",
    answer: next.length > 0 ? `The most to ${next.join(" and ")}.` : "There is no rest.",
    at: name,
    cell: String(head * stage.columns + key),
  };
}

/** @type {StepOf} */
export function attentionOut(scene) {
  const { pass, row, gaze } = scene;
  const found = largest(pass, `blocks.${gaze.layer}.attn_out`, row);
  if (!found) return null;
  return {
    title: "What attention adds",
    sentence:
      "Each head mixes the values of the tokens by these shares. A matrix turns the mixtures of all heads into " +
      `one vector, which is added to the stream.${adds(scene, gaze.head)}`,
    question: "Which number of the stream changes the most?",
    answer: `Number ${found.column}, by ${number(found.value)}.`,
    ...found.place,
  };
}

/** @type {StepOf} */
export function rotation({ pass, architecture, row, gaze: { layer, head } }) {
  const name = `blocks.${layer}.attn.rot_q`;
  const before = ["q_norm.out", "q"].map((part) => `blocks.${layer}.attn.${part}`).find((each) => pass.row(each, row));
  const stage = pass.stages.get(name);
  if (layer === null || !stage || before === undefined || !pass.row(name, row)) return null;
  const half = halfOf(architecture, stage);
  const turns = Array.from({ length: half }, (_, index) =>
    turnOf(pass, architecture, { name, before, row, head, index }),
  );
  const moved = turns.map(({ from, to }) => Math.hypot(to[0] - from[0], to[1] - from[1]));
  const index = moved.indexOf(Math.max(...moved));
  const { from, to, cos, sin, words } = turns[index];
  const rounded = (/** @type {number} */ exact, /** @type {number} */ kept) =>
    number(exact) === number(kept) ? number(kept) : `${number(exact)}, rounded to ${number(kept)}`;
  const [one, other, c, s] = [...from, cos, sin].map((value) => (value < 0 ? `(${number(value)})` : number(value)));
  return {
    title: "Rotary positions",
    sentence:
      "Pairs of numbers of each query and key are turned by an angle that grows with the position. So the score of " +
      "two tokens depends on how far apart they are.",
    question: `Of the query of ${placeName(layer, head)}, which pair moves the most, and where to?`,
    answer:
      `Numbers ${index} and ${index + half}, q₁ = ${number(from[0])} and q₂ = ${number(from[1])}. They turn by ` +
      `${words}: cos = ${number(cos)}, sin = ${number(sin)}. ` +
      `q₁′ = q₁·cos − q₂·sin = ${one}·${c} − ${other}·${s} = ${rounded(from[0] * cos - from[1] * sin, to[0])}. ` +
      `q₂′ = q₁·sin + q₂·cos = ${one}·${s} + ${other}·${c} = ${rounded(from[0] * sin + from[1] * cos, to[1])}.`,
    at: name,
    cell: String(head * stage.columns + index),
  };
}

/** @type {StepOf} */
export function mask({ pass, row, gaze: { layer, head } }) {
  const name = `blocks.${layer}.attn.attn_scores`;
  const stage = pass.stages.get(name);
  const numbers = pass.row(name, row);
  if (!stage || !numbers) return null;
  const own = numbers.slice(head * stage.columns, (head + 1) * stage.columns);
  const hidden = own.filter((value, key) => key > row && !Number.isFinite(value)).length;
  return {
    title: "The mask",
    sentence: "A token must not see what follows it: these scores become −∞, and softmax makes them 0.",
    question: `How many of the ${count(stage.columns)} tokens are hidden from ${quoted(pass.tokens[row])}?`,
    answer: hidden === 0 ? "None. Choose an earlier token to see it." : `${count(hidden)}.`,
    at: name,
  };
}

/** @type {StepOf} */
export function residual({ pass, row, gaze: { layer } }) {
  const [before, added, name] = [`blocks.${layer}.resid_pre`, `blocks.${layer}.attn_out`, `blocks.${layer}.resid_mid`];
  const found = largest(pass, added, row);
  const [from, after] = [pass.row(before, row), pass.row(name, row)];
  if (!found || !from || !after) return null;
  const { column, value } = found;
  return {
    title: "Residual connection",
    sentence: "What attention gives is added to the stream. What was there before stays, and so gradients pass, too.",
    question: "Which number changes the most?",
    answer: `Number ${column}: ${number(from[column])} + ${number(value)} = ${number(after[column])}.`,
    at: name,
    cell: String(column),
  };
}

/** @type {StepOf} */
export function gate({ pass, row, gaze: { layer } }) {
  const found = largest(pass, `blocks.${layer}.mlp.post`, row);
  const [open, linear] = [pass.row(`blocks.${layer}.mlp.pre`, row), pass.row(`blocks.${layer}.mlp.pre_linear`, row)];
  if (!found || !open || !linear) return null;
  return {
    title: "Gated feed-forward",
    sentence: "Of each neuron there are two: the activation of one is the gate through which the other passes.",
    question: "Which neuron gives the most, and what is its gate before the activation?",
    answer:
      `Neuron ${found.column} gives ${number(found.value)}; its gate is ${number(open[found.column])}, and ` +
      `${number(linear[found.column])} passes through it.`,
    ...found.place,
  };
}

/** @type {StepOf} */
export function experts({ pass, row, gaze: { layer } }) {
  const found = largest(pass, `blocks.${layer}.mlp.expert_weights`, row);
  const indices = pass.row(`blocks.${layer}.mlp.expert_indices`, row);
  if (found === null || indices === undefined) return null;
  return {
    title: "Experts",
    sentence: "A router chooses a few feed-forward networks for this token, and how much of each result it gets.",
    question: "Which one counts the most?",
    answer: `Expert ${indices[found.column]}, times ${number(found.value)}.`,
    ...found.place,
  };
}

/** @type {StepOf} */
export function feedForward(scene) {
  const found = largest(scene.pass, `blocks.${scene.gaze.layer}.mlp.post`, scene.row);
  if (!found) return null;
  return {
    title: "Feed-forward",
    sentence:
      `A wider layer of ${count(found.stage.columns)} neurons reads this token alone. Most stay near zero.` +
      adds(scene, null),
    question: "Which neuron is the most active?",
    answer: `Neuron ${found.column}: ${number(found.value)}.`,
    ...found.place,
  };
}

/** @type {StepOf} */
export function block({ pass, line, row, guesses, gaze: { layer } }) {
  const found = largest(pass, `blocks.${layer}.resid_post`, row);
  const others =
    line.blocks.length > 1
      ? `All ${line.blocks.length} layers do the same, each with its own weights.`
      : "This network has one layer.";
  const [from, to] = guesses && layer !== null ? guesses.slice(layer, layer + 2).map(guessed) : [];
  if (!found) return null;
  return {
    title: "After the layer",
    sentence:
      "The stream now has what attention and the feed-forward network have added. " +
      (from ? `Before the layer, the network would say ${from}; after it, ${to}.` : others),
    question: "Which number of the stream is the largest now, by size?",
    answer: `Number ${found.column}: ${number(found.value)}.`,
    ...found.place,
  };
}

/** A guess in words: the token and its probability. @param {Guess} guess */
export const guessed = ({ top: [best] }) => `${quoted(best)} (${percent(best.probability)})`;

/**
 * The largest number of a row by size, of one head or of all.
 * @param {Pass} pass
 * @param {string} name
 * @param {number} row
 * @param {number} [head]
 * @returns {{ stage: PassStage, column: number, value: number, place: { at: string, cell: string } } | null} `column`:
 *   in its head; null if there is no such stage
 */
export function largest(pass, name, row, head) {
  const stage = pass.stages.get(name);
  const numbers = pass.row(name, row);
  if (!stage || !numbers) return null;
  const [begin, size] = head === undefined ? [0, numbers.length] : [head * stage.columns, stage.columns];
  let column = 0;
  for (let index = 1; index < size; index++)
    if (Math.abs(numbers[begin + index]) > Math.abs(numbers[begin + column])) column = index;
  return { stage, column, value: numbers[begin + column], place: { at: name, cell: String(begin + column) } };
}
