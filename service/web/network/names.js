// What the places of the network are called: L16 H0, a stage, a token, and a number.

import { quoted } from "../format.js";

/**
 * @import { Line } from "./items.js"
 * @import { Pass } from "./pass.js"
 * @import { Spot } from "./scene.js"
 * @typedef {{ line: Line, pass: Pass }} Parts
 */

/**
 * The name of a layer, a head or a feed-forward network: L4, L4 H2, L4 FFN.
 * @param {number | string} layer
 * @param {number | string} [part] a head, or "FFN"
 */
export function placeName(layer, part) {
  if (part === undefined) return `L${layer}`;
  return `L${layer} ${part === "FFN" ? part : `H${part}`}`;
}

/** Short names of stages, for pictures. @type {Record<string, string[] | undefined>} */
const SHORT = {
  embed: ["Embedding"],
  pos_embed: ["Position"],
  resid_pre: ["Stream"],
  "attn.rot_q": ["Rot. queries"],
  "attn.rot_k": ["Rot. keys"],
  "attn.attn_scores": ["Masked"],
  "attn.pattern": ["Pattern"],
  "attn.z": ["Outputs of heads", "Heads"],
  attn_out: ["Output"],
  resid_mid: ["Stream"],
  "mlp.pre": ["Input"],
  "mlp.pre_linear": ["Up"],
  "mlp.router_logits": ["Router"],
  "mlp.expert_weights": ["Weights"],
  "mlp.expert_indices": ["Experts"],
  mlp_out: ["Output"],
  resid_post: ["Stream"],
  bands: ["Attention"],
};
/** @type {Record<string, string>} */
const NORM_STEPS = { scale: "Divisor", normalized: "Divided", out: "Norm" };

/**
 * What the picture may call an item, the longest name first.
 * @param {import("./items.js").Item} item
 */
export function namesOf({ part, label }) {
  const step = NORM_STEPS[/^(?:ln|attn\.[qk]_norm).*\.(\w+)$/.exec(part)?.[1] ?? ""];
  return [label, ...(step ? [step] : label === "Gate" ? [] : (SHORT[part] ?? []))];
}

/**
 * The name of a number, a stage of a token, or bands.
 * @param {Parts} parts
 * @param {Spot} spot
 */
export function nameOf({ line, pass }, { item, row, column }) {
  const { label, layer, kind, heads, columns, hasKeys } = line.items[item];
  const isCell = ["strip", "gate"].includes(kind) && column !== null;
  const head = isCell && heads > 1 ? Math.floor(column / columns) : undefined;
  const place = layer === null ? "" : `${placeName(layer, head)} `;
  const token = `${quoted(pass.tokens[row])} (${row})`;
  if (!isCell) return `${place}${label} · ${token}`;
  const within = column % columns;
  const where = columns === 1 ? "" : hasKeys ? ` → ${quoted(pass.tokens[within])} (${within})` : `, number ${within}`;
  return `${place}${label} · ${token}${where}`;
}

/**
 * The way from the whole network to what is shown, with the changes of the address that lead back to each step.
 * @param {Parts} parts
 * @param {{ at: string, cell: string, position: string }} state
 * @returns {{ text: string, changes: Record<string, string> }[]}
 */
export function stepsOf({ line, pass }, { at, cell, position }) {
  const item = line.items.find(({ name }) => name === at);
  const layer = item?.layer ?? (/^L\d+$/.test(at) ? Number(at.slice(1)) : null);
  const steps = [{ text: "Network", changes: { at: "", cell: "" } }];
  if (layer !== null) steps.push({ text: placeName(layer), changes: { at: `L${layer}`, cell: "" } });
  if (item) steps.push({ text: item.label, changes: { at, cell: "" } });
  if (!item || cell === "") return steps;
  const token = quoted(pass.tokens[position === "" ? pass.tokens.length - 1 : Number(position)]);
  if (item.kind === "predictions") return [...steps, { text: `after ${token}`, changes: { at, cell } }];
  const head = item.heads > 1 ? `H${Math.floor(Number(cell) / item.columns)} ` : "";
  const column = Number(cell) % item.columns;
  const last = item.hasKeys ? quoted(pass.tokens[column]) : String(column);
  return [...steps, { text: `${head}${token} → ${item.columns === 1 ? "" : last}`, changes: { at, cell } }];
}
