// The network as a line of items in the order of computation: the stages, the bands of attention, and the predictions.
// They follow the catalogue of stages, so every network has its own line.

import { describe } from "../stages.js";
import { partsOf } from "../views/block_map.js";

/**
 * @import { Architecture } from "../answers.js"
 *
 * @typedef {{ name: string, dims: string[], shape: number[] }} StageShape a stage and its shape in this pass
 * @typedef {"strip" | "gate" | "bands" | "predictions"} Kind
 * @typedef {{
 *   name: string, kind: Kind, layer: number | null, part: string, label: string, heads: number, columns: number,
 *   hasKeys: boolean, far: number, near: number, branch: number | null, height: number,
 * }} Item `columns`: of each head; `far` and `near`: its width from afar and near, relative to others; `branch`: null
 *   on the residual stream; `height`: as a share of the lane of a branch
 * @typedef {{ first: number, last: number, join: number, layer: number | null }} Branch the items that a copy of the
 *   stream passes, and the item before which the result is added to the stream
 * @typedef {{ layer: number, first: number, last: number }} Block
 * @typedef {{ items: Item[], branches: Branch[], blocks: Block[] }} Line
 */

/** Widths from afar. Parts without one are seen from near only. @type {Record<string, number | undefined>} */
const FAR = {
  embed: 1.2,
  pos_embed: 0.8,
  attn_out: 0.9,
  "mlp.expert_weights": 0.4,
  "mlp.post": 1.8,
  resid_post: 1.1,
};
const GATE = { far: 0.35, near: 0.7 };
const BANDS = { far: 3.4, near: 3 };
const PREDICTIONS = { far: 0, near: 3 }; // from afar, they have a fixed width
const HEAD_AXES = ["head", "kv_head"];
const WIDE = ["logits", "probabilities", "loss"]; // the predictions show them

/**
 * Heads and columns of each head. Rows are positions or queries.
 * @param {StageShape} stage
 */
export function matrixOf({ dims, shape }) {
  const sizeOf = (/** @type {string} */ dim) => (dims.includes(dim) ? shape[dims.indexOf(dim)] : 1);
  const heads = Math.max(...HEAD_AXES.map(sizeOf));
  const hasKeys = dims.includes("key");
  const last = dims[dims.length - 1];
  const columns = ["position", "query", "batch", ...HEAD_AXES].includes(last) ? 1 : shape[dims.length - 1];
  return { heads, columns, hasKeys };
}

/**
 * The line of a network, from its stages in the order of computation.
 * @param {StageShape[]} stages
 * @param {Architecture} architecture
 * @returns {Line}
 */
export function lineOf(stages, architecture) {
  const seen = stages.filter(({ name }) => !WIDE.includes(name));
  const byName = new Map(seen.map((stage) => [stage.name, stage]));
  const width = Math.max(1, ...seen.filter(({ name }) => /resid|embed/.test(name)).map((s) => matrixOf(s).columns));
  /** @type {Line} */
  const line = { items: [], branches: [], blocks: [] };
  const add = (/** @type {StageShape} */ stage, /** @type {number | null} */ branch) =>
    line.items.push(itemOf(stage, architecture, width, branch));
  const isInside = (/** @type {StageShape} */ { name }) => name.startsWith("blocks.");
  const [first, last] = [Math.max(0, seen.findIndex(isInside)), seen.findLastIndex(isInside)];
  for (const stage of seen.slice(0, first)) add(stage, null);
  const layers = Map.groupBy(seen.slice(first, last + 1), ({ name }) => Number(name.split(".")[1]));
  for (const [layer, block] of layers) {
    const [begin, firstBranch] = [line.items.length, line.branches.length];
    const names = block.map(({ name }) => name);
    for (const { branch, isOnStream, sections } of partsOf(names, architecture)) {
      const isBranch = branch !== "stream" && !isOnStream;
      const number = isBranch ? line.branches.length : null;
      const from = line.items.length;
      for (const stage of sections.flatMap((section) => section.stages)) {
        if (stage.part === "attn.z") line.items.push({ ...bandsOf(layer), branch: number });
        add(/** @type {StageShape} */ (byName.get(stage.name)), number);
      }
      const to = line.items.length - 1;
      if (isBranch) line.branches.push({ first: from, last: to, join: to + 1, layer });
    }
    const end = line.items.length - 1;
    line.blocks.push({ layer, first: begin, last: end });
    // both branches read the same stream, and are added at the end of the block
    if (architecture.parallel_residual) for (const branch of line.branches.slice(firstBranch)) branch.join = end;
  }
  for (const stage of seen.slice(last + 1)) add(stage, null);
  const logits = stages.find(({ name }) => name === "logits");
  const columns = logits ? matrixOf(logits).columns : 1;
  line.items.push({ ...blank("predictions", "predictions", null), label: "Predictions", ...PREDICTIONS, columns });
  return line;
}

/** @param {number} layer */
function bandsOf(layer) {
  const label = "Attention: from each token to those that read it";
  return { ...blank(`bands.${layer}`, "bands", layer), label, ...BANDS };
}

/**
 * @param {string} name
 * @param {Kind} kind
 * @param {number | null} layer
 * @returns {Item}
 */
function blank(name, kind, layer) {
  const sizes = { heads: 1, columns: 1, hasKeys: false, far: 1, near: 1, height: 1 };
  return { name, kind, layer, part: kind, label: "", branch: null, ...sizes };
}

/**
 * @param {StageShape} stage
 * @param {Architecture} architecture
 * @param {number} width how many numbers the residual stream has
 * @param {number | null} branch
 * @returns {Item}
 */
function itemOf(stage, architecture, width, branch) {
  const { layer, part, label } = describe(stage.name, architecture);
  const matrix = matrixOf(stage);
  const isGate = /^(ln1|ln2|ln1_post|ln2_post|ln_final)\.scale$/.test(part);
  const share = (matrix.heads * matrix.columns) / width;
  const near = Math.max(matrix.hasKeys ? 1 : 0.5, Math.min(4.5, 1.5 * Math.sqrt(share)));
  const isTwice = part === "resid_pre" && layer !== 0; // equal to the end of the block before
  return {
    name: stage.name,
    kind: isGate ? "gate" : "strip",
    layer,
    part,
    label,
    ...matrix,
    far: isGate ? GATE.far : isTwice ? 0 : (FAR[part] ?? 0),
    near: isGate ? GATE.near : isTwice ? 0.6 : near,
    branch,
    height: matrix.hasKeys ? 0.9 : Math.max(0.3, Math.min(1, 0.62 * Math.sqrt(share))),
  };
}
