// Edits, as docs/interventions.md describes them: read from the address, and said in words.

import { placeName } from "../network/names.js";

/**
 * @import { Edit, Positions } from "../answers.js"
 * @typedef {{ more: string, less: string }} SteerTexts
 * @typedef {Edit & { steer?: SteerTexts }} NamedEdit
 */

/**
 * The parts of a layer that the form offers: the end of the stage's name → how a sentence calls it.
 * @type {Record<string, string>}
 */
export const PARTS = {
  "attn.z": "one head",
  attn_out: "the attention output",
  mlp_out: "the feed-forward output",
  resid_pre: "the residual stream before the layer",
  resid_post: "the residual stream after the layer",
};

/**
 * The edit that switches off a head, or the feed-forward network of a layer (null).
 * @param {number} layer
 * @param {number | null} head
 * @returns {Edit}
 */
export function ablation(layer, head) {
  return head === null
    ? { stage: `blocks.${layer}.mlp_out`, op: "zero" }
    : { stage: `blocks.${layer}.attn.z`, op: "zero", heads: [head] };
}

/**
 * The edits of an address, for requests.
 * @param {string} text
 */
export function readEdits(text) {
  return withoutNames(readNamedEdits(text));
}

/**
 * Edits as requests take them: `steer` is for the page only.
 * @param {NamedEdit[]} edits
 * @returns {Edit[]}
 */
export function withoutNames(edits) {
  return edits.map(({ steer: _, ...edit }) => edit);
}

/**
 * The edits of an address, with the texts from which the page has computed a vector.
 * @param {string} text
 * @returns {NamedEdit[]}
 */
export function readNamedEdits(text) {
  let edits;
  try {
    edits = JSON.parse(text);
  } catch (error) {
    throw new Error(`edits: this is not JSON: ${error instanceof Error ? error.message : error}`);
  }
  if (!Array.isArray(edits) || edits.some((edit) => edit === null || typeof edit !== "object" || Array.isArray(edit)))
    throw new Error('edits: a list of objects is needed, such as [{"stage": "blocks.0.mlp_out", "op": "zero"}].');
  return edits;
}

/**
 * The texts from which a vector was computed, or null if the edit has none.
 * @param {NamedEdit} edit
 */
export function steerTexts({ steer }) {
  return typeof steer?.more === "string" && typeof steer.less === "string" ? steer : null;
}

/** @param {SteerTexts} texts */
export function steerName({ more, less }) {
  return `More like “${more}”, less like “${less}”`;
}

/**
 * An edit as a sentence.
 * @param {NamedEdit} edit
 */
export function inWords(edit) {
  const texts = steerTexts(edit);
  const subject = `${subjectOf(edit)}${placesOf(edit)}`;
  if (texts) return `${steerName(texts)}, in ${subject}`;
  /** @type {Record<string, (() => string) | undefined>} */
  const said = {
    zero: () => `Set ${subject} to zero`,
    mean: () => `Replace ${subject} by its mean${edit.source ? ` over ${sourceOf(edit)}` : " over the prompt"}`,
    scale: () => `Multiply ${subject} by ${edit.factor}`,
    add: () => `Add ${(edit.scale ?? 1) === 1 ? "" : `${edit.scale} × `}${vectorOf(edit)} to ${subject}`,
    set: () => `Set ${subject} to ${vectorOf(edit)}`,
    patch: () => `Take ${subject} from ${sourceOf(edit)}`,
    project: () => `Keep ${edit.coeff ?? 0} times the part of ${subject} along ${vectorOf(edit)}`,
    cap: () => `Limit ${subject} to the range from ${edit.min} to ${edit.max}`,
    noise: () => `Add noise of size ${edit.std} to ${subject}`,
  };
  return (said[edit.op] ?? (() => `${edit.op}: ${subject}`))();
}

/** @param {Edit} edit */
function subjectOf({ stage, heads }) {
  const found = /^blocks\.(\d+|\*)\.(.+)$/.exec(String(stage));
  const layer = found && (found[1] === "*" ? "all layers" : placeName(found[1]));
  if (found?.[2] === "attn.z") {
    if (!heads) return `all heads of ${layer}`;
    if (found[1] === "*") return `${heads.length === 1 ? "head" : "heads"} ${heads.join(", ")} of ${layer}`;
    return heads.map((head) => placeName(found[1], head)).join(", ");
  }
  const part = found && PARTS[found[2]];
  const name = part ? `${part} of ${layer}`.replace("the layer of ", "") : stage;
  return heads ? `${name}, heads ${heads.join(", ")},` : name;
}

/** @param {Edit} edit */
function placesOf({ positions, keys }) {
  const places = positions === undefined || positions === "all" ? "" : ` ${listed(positions, "position")}`;
  return `${places}${keys === undefined ? "" : `, ${listed(keys, "key").replace(/^at /, "")},`}`;
}

/**
 * @param {Positions} positions
 * @param {"position" | "key"} name
 */
function listed(positions, name) {
  if (positions === "last") return `at the last ${name}`;
  if (!Array.isArray(positions)) return `at ${name}s “${positions}”`;
  const items = positions.map((item) => (Array.isArray(item) ? item.join("–") : item)).join(", ");
  return `at ${name}${items.includes(",") || items.includes("–") ? "s" : ""} ${items}`;
}

/** @param {Edit} edit */
function vectorOf({ vector, value }) {
  if (vector === undefined) return String(value);
  return typeof vector === "string" ? `the vector “${vector}”` : "a vector of its own";
}

/** @param {Edit} edit */
function sourceOf({ source }) {
  const prompt = source?.prompt;
  return typeof prompt === "string" ? `the prompt “${prompt}”` : "another prompt";
}

/**
 * Positions as the form takes them: "all", "last", or a list such as "0, 3-5, -1".
 * @param {string} text
 * @returns {Positions}
 */
export function readPositions(text) {
  const word = text.trim();
  if (["all", "prompt", "generated", "last"].includes(word)) return word;
  return word.split(",").map((item) => {
    const [, first, last] = /^\s*(-?\d+)(?:\s*-\s*(-?\d+))?\s*$/.exec(item) ?? [];
    if (first === undefined)
      throw new Error(
        `positions: “${item.trim()}” is neither a position nor a range. Write all, last, or a list such as 0, 3-5.`,
      );
    return last === undefined ? Number(first) : [Number(first), Number(last)];
  });
}

/**
 * The edits that change the pass over a prompt: those of generated tokens do not.
 * @param {Edit[]} edits
 */
export function ofPrompt(edits) {
  return edits.filter(({ positions, keys }) => positions !== "generated" && keys !== "generated");
}

/**
 * The edits of a generation, for the pass over its prompt and the generated tokens: they change the same places.
 * @param {Edit[]} edits
 * @param {number[]} tokens of the prompt and the generated ones
 * @param {number} numPrompt
 * @returns {Edit[]}
 */
export function ofGeneration(edits, tokens, numPrompt) {
  const numbered = (/** @type {number} */ index) => (index < 0 ? index + numPrompt : index);
  const placed = (/** @type {Positions} */ places) => {
    if (places === "last") return [numPrompt - 1];
    if (places === "prompt") return [[0, numPrompt - 1]];
    if (places === "generated") return [[numPrompt, tokens.length - 1]];
    if (!Array.isArray(places)) return places;
    return places.map((place) => (Array.isArray(place) ? place.map(numbered) : numbered(place)));
  };
  return edits.map((edit) => ({
    ...edit,
    ...(edit.op === "mean" && !edit.source && { source: { prompt: tokens.slice(0, numPrompt) } }),
    ...(edit.positions !== undefined && { positions: placed(edit.positions) }),
    ...(edit.keys !== undefined && { keys: placed(edit.keys) }),
  }));
}

/**
 * The indices that positions name in a prompt of `count` tokens, or null if one of them is out of range.
 * @param {Positions} places
 * @param {number} count
 */
export function indicesOf(places, count) {
  if (places === "last") return [count - 1];
  if (!Array.isArray(places)) return Array.from({ length: count }, (_, index) => index);
  const indices = places.flatMap((place) => {
    const [first, last] = (Array.isArray(place) ? place : [place, place]).map((index) =>
      index < 0 ? index + count : index,
    );
    return Array.from({ length: Math.min(Math.max(0, last - first + 1), count + 1) }, (_, index) => first + index);
  });
  return indices.length > 0 && indices.every((index) => index >= 0 && index < count) ? indices : null;
}
