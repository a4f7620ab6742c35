// The steps of one token through the first and the middle part of a network, each with a question that the picture
// answers. The answers are computed from the pass. chapters.js has their order.

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
 * @typedef {{ layer: number, head: number, key: number }} Gaze a head, and the token that it attends to the most
 * @typedef {{
 *   pass: Pass, line: Line, architecture: Architecture, row: number, gaze: Gaze, guesses: Guess[] | null,
 *   writers: Writers,
 * }} Scene `guesses`: what the network would predict after each layer; `writers`: what writes the predicted token
 * @typedef {(scene: Scene) => TourStep | null} StepOf null: this network has no such stage
 * @typedef {{ stage: PassStage, column: number, value: number }} Found a number; `column`: in its head
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
  let [best, gaze] = [Infinity, { layer: layers[0], head: 0, key: 0 }];
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

/**
 * The numbers of a stage for the token, in the head to look through if there are heads; null if they are not here.
 * @param {Scene} scene
 * @param {string} part the name of the stage, in which {layer} stands for the layer to look at
 */
function rowOf({ pass, row, gaze: { layer, head } }, part) {
  const name = part.replace("{layer}", String(layer));
  const [stage, numbers] = [pass.stages.get(name), pass.row(name, row)];
  if (!stage || !numbers) return null;
  const begin = stage.heads > 1 ? head * stage.columns : 0;
  const placeOf = (/** @type {number} */ column) => ({ at: name, cell: String(begin + column) });
  return { stage, name, own: numbers.slice(begin, begin + stage.columns), placeOf };
}

/**
 * A step about the largest number of a stage, by size. It is at this number, unless it says another place.
 * @param {string} part as in `rowOf`
 * @param {(found: Found, scene: Scene) => TourStep | null} say
 * @returns {StepOf}
 */
export const aboutLargest = (part, say) => (scene) => {
  const found = rowOf(scene, part);
  if (!found) return null;
  const { stage, own, placeOf } = found;
  let column = 0;
  for (let index = 1; index < own.length; index++) if (Math.abs(own[index]) > Math.abs(own[column])) column = index;
  const step = say({ stage, column, value: own[column] }, scene);
  return step && { ...placeOf(column), ...step };
};

/** @satisfies {Record<string, StepOf>} */
export const STEPS = {
  tokens({ pass, row }) {
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
  },

  embedding: aboutLargest("embed", ({ stage, column, value }) => ({
    title: "Embedding",
    sentence:
      `The id selects a row of the embedding table: ${count(stage.columns)} numbers. With them begins the ` +
      "stream of the token, which each layer reads and adds to.",
    question: "Which of them is the largest, by size?",
    answer: `Number ${column}: ${number(value)}.`,
    cell: "",
  })),

  position: aboutLargest("pos_embed", ({ column, value }) => ({
    title: "Position",
    sentence: "A second table has a row for each position. Both rows are added up.",
    question: "Which number does the position change the most?",
    answer: `Number ${column}, by ${number(value)}.`,
    cell: "",
  })),

  norm: aboutLargest("blocks.{layer}.ln1.scale", ({ value }, { gaze, guesses, writers }) => {
    const isDeciding = guesses !== null && decidingOf(guesses) === gaze.layer + 1;
    const what = isDeciding ? ", which decides" : writers ? ", whose heads write the most" : "";
    return {
      title: "Norm",
      sentence:
        "Each layer reads the stream through a norm, which divides all numbers of a token by one number. The " +
        "picture has the stream before the norm, and after it what the layer works with. " +
        `This is layer ${gaze.layer}${what}.`,
      question: "By which number is this token divided?",
      answer: `By ${number(value)}.`,
    };
  }),

  queries: aboutLargest("blocks.{layer}.attn.q", ({ stage, column, value }, { gaze: { layer, head }, writers }) => ({
    title: "Query, key and value",
    sentence:
      "Three weight matrices make a query (what the token looks for), a key (what it offers) and a " +
      `value (what it passes on), ${count(stage.columns)} numbers for each head. ` +
      `${placeName(layer, head)} is the head ${writers ? "that writes the most of the prediction" : "to look at"}.`,
    question: `What is the largest number of the query of ${placeName(layer, head)}, by size?`,
    answer: `Number ${column}: ${number(value)}. Its terms, input × weight, are at the right.`,
  })),

  scores(scene) {
    const { pass, gaze } = scene;
    const { layer, head, key } = gaze;
    const found = rowOf(scene, "blocks.{layer}.attn.scores");
    if (!found) return null;
    return {
      title: "Scores",
      sentence:
        "The query is multiplied with the key of every earlier token, and of its own: number by number, " +
        `added up, scaled. In ${placeName(layer, head)}, ${quoted(pass.tokens[key])} fits best.`,
      question: `What is the score of ${quoted(pass.tokens[key])} in ${placeName(layer, head)}?`,
      answer: `${number(found.own[key])}. The sum at the right shows how it comes about.`,
      ...found.placeOf(key),
    };
  },

  pattern(scene) {
    const { pass, row, gaze } = scene;
    const { layer, head, key } = gaze;
    const found = rowOf(scene, "blocks.{layer}.attn.pattern");
    if (!found) return null;
    const { own } = found;
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
      ...found.placeOf(key),
    };
  },

  attentionOut: aboutLargest("blocks.{layer}.attn_out", ({ column, value }, scene) => ({
    title: "What attention adds",
    sentence:
      "Each head mixes the values of the tokens by these shares. A matrix turns the mixtures of all heads into " +
      `one vector, which is added to the stream.${adds(scene, scene.gaze.head)}`,
    question: "Which number of the stream changes the most?",
    answer: `Number ${column}, by ${number(value)}.`,
  })),

  rotation(scene) {
    const { pass, architecture, row, gaze } = scene;
    const { layer, head } = gaze;
    const found = rowOf(scene, "blocks.{layer}.attn.rot_q");
    const parts = ["q_norm.out", "q"].map((part) => `blocks.${layer}.attn.${part}`);
    const before = parts.find((each) => pass.row(each, row));
    if (!found || before === undefined) return null;
    const { name, stage } = found;
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
        "Pairs of numbers of each query and key are turned by an angle that grows with the position. So the score " +
        "of two tokens depends on how far apart they are.",
      question: `Of the query of ${placeName(layer, head)}, which pair moves the most, and where to?`,
      answer:
        `Numbers ${index} and ${index + half}, q₁ = ${number(from[0])} and q₂ = ${number(from[1])}. They turn by ` +
        `${words}: cos = ${number(cos)}, sin = ${number(sin)}. ` +
        `q₁′ = q₁·cos − q₂·sin = ${one}·${c} − ${other}·${s} = ${rounded(from[0] * cos - from[1] * sin, to[0])}. ` +
        `q₂′ = q₁·sin + q₂·cos = ${one}·${s} + ${other}·${c} = ${rounded(from[0] * sin + from[1] * cos, to[1])}.`,
      ...found.placeOf(index),
    };
  },

  mask(scene) {
    const { pass, row } = scene;
    const found = rowOf(scene, "blocks.{layer}.attn.attn_scores");
    if (!found) return null;
    const hidden = found.own.filter((value, key) => key > row && !Number.isFinite(value)).length;
    return {
      title: "The mask",
      sentence: "A token must not see what follows it: these scores become −∞, and softmax makes them 0.",
      question: `How many of the ${count(found.own.length)} tokens are hidden from ${quoted(pass.tokens[row])}?`,
      answer: hidden === 0 ? "None. Choose an earlier token to see it." : `${count(hidden)}.`,
      at: found.name,
    };
  },

  residual: aboutLargest("blocks.{layer}.attn_out", ({ column, value }, scene) => {
    const [before, after] = ["resid_pre", "resid_mid"].map((part) => rowOf(scene, `blocks.{layer}.${part}`));
    if (!before || !after) return null;
    const sum = `${number(before.own[column])} + ${number(value)} = ${number(after.own[column])}`;
    return {
      title: "Residual connection",
      sentence: "What attention gives is added to the stream. What was there before stays, and so gradients pass, too.",
      question: "Which number changes the most?",
      answer: `Number ${column}: ${sum}.`,
      at: after.name,
    };
  }),

  gate: aboutLargest("blocks.{layer}.mlp.post", ({ column, value }, scene) => {
    const [open, linear] = ["pre", "pre_linear"].map((part) => rowOf(scene, `blocks.{layer}.mlp.${part}`));
    if (!open || !linear) return null;
    return {
      title: "Gated feed-forward",
      sentence: "Of each neuron there are two: the activation of one is the gate through which the other passes.",
      question: "Which neuron gives the most, and what is its gate before the activation?",
      answer:
        `Neuron ${column} gives ${number(value)}; its gate is ${number(open.own[column])}, and ` +
        `${number(linear.own[column])} passes through it.`,
    };
  }),

  experts: aboutLargest("blocks.{layer}.mlp.expert_weights", ({ column, value }, scene) => {
    const indices = rowOf(scene, "blocks.{layer}.mlp.expert_indices");
    if (!indices) return null;
    return {
      title: "Experts",
      sentence: "A router chooses a few feed-forward networks for this token, and how much of each result it gets.",
      question: "Which one counts the most?",
      answer: `Expert ${indices.own[column]}, times ${number(value)}.`,
    };
  }),

  feedForward: aboutLargest("blocks.{layer}.mlp.post", ({ stage, column, value }, scene) => ({
    title: "Feed-forward",
    sentence:
      `A wider layer of ${count(stage.columns)} neurons reads this token alone. Most stay near zero.` +
      adds(scene, null),
    question: "Which neuron is the most active?",
    answer: `Neuron ${column}: ${number(value)}.`,
  })),

  block: aboutLargest("blocks.{layer}.resid_post", ({ column, value }, { line, guesses, gaze: { layer } }) => {
    const others =
      line.blocks.length > 1
        ? `All ${line.blocks.length} layers do the same, each with its own weights.`
        : "This network has one layer.";
    const [from, to] = guesses?.slice(layer, layer + 2).map(guessed) ?? [];
    return {
      title: "After the layer",
      sentence:
        "The stream now has what attention and the feed-forward network have added. " +
        (from ? `Before the layer, the network would say ${from}; after it, ${to}.` : others),
      question: "Which number of the stream is the largest now, by size?",
      answer: `Number ${column}: ${number(value)}.`,
    };
  }),
};

/** A guess in words: the token and its probability. @param {Guess} guess */
export const guessed = ({ top: [best] }) => `${quoted(best)} (${percent(best.probability)})`;
