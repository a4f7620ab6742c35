// What each stage of a forward pass is called, and its formula in words. The formulas follow the config of the network.

import { count } from "./format.js";

/**
 * @import { Architecture } from "./answers.js"
 * @import { TermId } from "./terms_list.js"
 *
 * @typedef {(a: Architecture, layer: number) => string} Formula
 * @typedef {[name: string | Formula, term: TermId | null, formula: Formula]} Entry
 * @typedef {{
 *   name: string, layer: number | null, part: string, label: string, term: TermId | null, formula: string,
 * }} StageEntry
 */

const layerOf = (/** @type {string} */ name) => (name.startsWith("blocks.") ? Number(name.split(".")[1]) : null);
const partOf = (/** @type {string} */ name) => (name.startsWith("blocks.") ? name.split(".").slice(2).join(".") : name);
const factor = (/** @type {number | undefined} */ value) =>
  value === undefined || value === 1 ? "" : ` × ${Number(value.toPrecision(4))}`;
const bias = (/** @type {boolean | undefined} */ has) => (has ? " + bias" : "");
const cap = (/** @type {number | null | undefined} */ limit) =>
  limit ? `, then capped: ${limit} × tanh(… ÷ ${limit})` : "";

/**
 * Whether a list has a layer. No list has all.
 * @param {boolean[] | null | undefined} list
 * @param {number} layer
 */
const of = (list, layer) => !list || list[layer];

/** What the attention of a block reads. */
const attentionInput = (/** @type {Architecture} */ a) =>
  a.norm_placement === "pre" || a.norm_placement === "both" ? "normalized input" : "residual stream";
/** What the feed-forward network of a block reads. */
const mlpInput = (/** @type {Architecture} */ a) =>
  a.norm_placement === "post" ? "normalized stream" : attentionInput(a);
const rotates = (/** @type {Architecture} */ a, /** @type {number} */ layer) =>
  a.positions === "rotary" && of(a.rotary_layers, layer);

/** @type {Formula} */
function scoreFormula(a, layer) {
  const kind = rotates(a, layer) ? "rotated " : a.qk_norm ? "normalized " : "";
  const isUsual = Math.abs(a.attention_scale - a.d_head ** -0.5) < 1e-6;
  return (
    `${kind}query · ${kind}key${isUsual ? ` ÷ √${a.d_head}` : factor(a.attention_scale)}` +
    `${cap(a.attention_softcap)}`
  );
}

/** @type {Formula} */
function maskFormula(a, layer) {
  const window = a.window && of(a.windowed_layers, layer) ? `, or ${a.window} or more tokens before it` : "";
  return `the score, or −∞ where the key comes after the query${window}`;
}

/**
 * @param {Architecture} a
 * @param {string} what
 */
function rotation(a, what) {
  const share = (a.rotary_dim ?? a.d_head) < a.d_head ? ` (the first ${a.rotary_dim} of its ${a.d_head} numbers)` : "";
  return `${a.qk_norm ? "normalized " : ""}${what}${share}, rotated by angles that grow with the position`;
}

/** @type {Formula} */
function entering(a, layer) {
  if (layer > 0)
    return a.norm_placement === "post"
      ? `the normalized stream of layer ${layer - 1}`
      : `the residual stream after layer ${layer - 1}`;
  return a.positions === "rotary" ? "token embedding" : "token embedding + position embedding";
}

/** @type {Formula} */
function sumAfterLayer(a) {
  if (a.parallel_residual) return "stream that entered + attention output + feed-forward output";
  return `${a.norm_placement === "post" ? "normalized stream" : "stream after attention"} + feed-forward output`;
}

/** @type {Formula} */
function expertWeights(a) {
  const scaled = a.normalize_expert_weights ? ", scaled so that their sum is 1" : "";
  return `softmax of the router's numbers, of which the largest ${a.num_experts_per_token}${scaled}`;
}

/** @type {Formula} */
function logitFormula(a) {
  const table = a.tied_head ? "embedding table, transposed" : "W_head";
  return (
    `${a.norm_placement === "post" ? "stream after the last layer" : "result of the final norm"} × ${table}` +
    `${factor(a.logits_scale)}${cap(a.logits_softcap)}`
  );
}

/** @type {Record<string, string>} */
const ACTIVATIONS = { silu: "SiLU", gelu: "GELU", gelu_tanh: "GELU (tanh form)", relu: "ReLU" };

/** @type {Formula} */
function activated(a) {
  const name = ACTIVATIONS[a.activation];
  return a.gated ? `${name} of the gate × up projection` : `${name} of the input of the activation`;
}

/** @type {(branch: string) => (a: Architecture) => string} */
const outputOf = (branch) => (a) =>
  `${branch}${a.norm_placement === "both" || a.norm_placement === "output" ? ", normalized" : ""}` +
  `${factor(a.residual_scale)}`;

/** What an adapter adds. @type {(what: string) => Entry} */
const addedTo = (what) => [`Adapter: ${what}`, "adapter", () => `what the adapter adds to the ${what}`];

/**
 * Stage (without its block) → [name, term of the glossary or null, formula].
 * @type {Record<string, Entry | undefined>}
 */
const PARTS = {
  embed: [
    "Token embeddings",
    "embedding",
    (a) => `the row of the token in the embedding table${factor(a.embedding_scale)}`,
  ],
  pos_embed: [
    "Position embeddings",
    "position",
    (a) =>
      a.positions === "sinusoidal"
        ? "sines and cosines of the position"
        : "the row of the position in the position table",
  ],
  resid_pre: ["Stream that enters the layer", "residual", entering],
  "attn.q": ["Queries", "query", (a) => `${attentionInput(a)} × W_q${bias(a.qkv_bias)}`],
  "attn.k": ["Keys", "key", (a) => `${attentionInput(a)} × W_k${bias(a.qkv_bias)}`],
  "attn.v": ["Values", "value", (a) => `${attentionInput(a)} × W_v${bias(a.qkv_bias)}`],
  "attn.lora_q": addedTo("queries"),
  "attn.lora_k": addedTo("keys"),
  "attn.lora_v": addedTo("values"),
  "attn.rot_q": ["Rotated queries", "rotary", (a) => rotation(a, "query")],
  "attn.rot_k": ["Rotated keys", "rotary", (a) => rotation(a, "key")],
  "attn.scores": ["Scores", "score", scoreFormula],
  "attn.attn_scores": ["Masked scores", "mask", maskFormula],
  "attn.pattern": [
    "Attention pattern",
    "pattern",
    () => "softmax of the masked scores: e^score ÷ the sum of e^score over all keys",
  ],
  "attn.z": [
    "Outputs of the heads (z), before W_o",
    "z",
    () => "for each query, the sum over all keys of weight × value",
  ],
  "attn.lora_out": addedTo("output of attention"),
  attn_out: ["Attention output", "attention_output", outputOf("results of all heads × W_o")],
  resid_mid: ["Stream after attention", "residual", () => "stream that entered + attention output"],
  "mlp.lora_pre": addedTo("input of the activation"),
  "mlp.lora_pre_linear": addedTo("up projection"),
  "mlp.pre": [
    (a) => (a.gated ? "Gate" : "Input of the activation"),
    "activation",
    (a) => `${mlpInput(a)} × ${a.gated ? "W_gate" : "W_up"}${bias(a.mlp_bias)}`,
  ],
  "mlp.pre_linear": ["Up projection", "gate", (a) => `${mlpInput(a)} × W_up${bias(a.mlp_bias)}`],
  "mlp.post": ["Activation", "activation", activated],
  "mlp.router_logits": ["Router", "expert", (a) => `${mlpInput(a)} × W_router: one number for each expert`],
  "mlp.expert_weights": ["Weights of the chosen experts", "expert", expertWeights],
  "mlp.expert_indices": [
    "Chosen experts",
    "expert",
    (a) => `the ${a.num_experts_per_token} experts with the largest numbers of the router`,
  ],
  "mlp.lora_out": [
    "Adapter: output of the feed-forward network",
    "adapter",
    () => "what the adapter adds to the output",
  ],
  mlp_out: [
    "Feed-forward output",
    "feed_forward",
    (a, layer) =>
      outputOf(
        a.num_experts && of(a.expert_layers, layer)
          ? "the sum over the chosen experts of weight × output"
          : `activation × W_down${bias(a.mlp_bias)}`,
      )(a),
  ],
  resid_post: ["Stream after the layer", "residual", sumAfterLayer],
  logits: ["Logits", "logit", logitFormula],
  probabilities: [
    "Probabilities",
    "probability",
    () => "softmax of the logits of a position: e^logit ÷ the sum of e^logit over the vocabulary",
  ],
  loss: ["Loss", "loss", () => "−ln of the probability of the token that really comes next"],
};

/**
 * Norm → [name, what it normalizes, its name if it lies on the residual stream]. Each norm has three stages.
 * @type {Record<string, [name: string, input: (a: Architecture) => string, onStream?: string]>}
 */
const NORMS = {
  ln1: [
    "Norm before attention",
    (a) => (a.norm_placement === "post" ? "the stream after attention" : "the stream that enters the layer"),
    "Norm after attention",
  ],
  ln1_post: ["Norm of the attention output", () => "the output of attention"],
  ln2: [
    "Norm before the feed-forward network",
    (a) =>
      ({
        post: "the stream after the layer",
        pre: a.parallel_residual ? "the stream that enters the layer" : "the stream after attention",
      })[a.norm_placement] ?? "the stream after attention",
    "Norm after the layer",
  ],
  ln2_post: ["Norm of the feed-forward output", () => "the output of the feed-forward network"],
  "attn.q_norm": [
    "Norm of the queries",
    (a) => (a.qk_norm === "projection" ? "the queries of all heads together" : "each query"),
  ],
  "attn.k_norm": [
    "Norm of the keys",
    (a) => (a.qk_norm === "projection" ? "the keys of all heads together" : "each key"),
  ],
  ln_final: ["Final norm", () => "the stream after the last layer"],
};

/**
 * What a norm is called: one that lies on the residual stream comes after attention, or after the layer.
 * @param {string} norm
 * @param {Architecture} a
 */
export function normName(norm, a) {
  const [name, , onStream = name] = NORMS[norm];
  return a.norm_placement === "post" ? onStream : name;
}

/** @typedef {"scale" | "normalized" | "out"} NormStep */

/**
 * @param {string} norm
 * @param {NormStep} step
 * @returns {Entry}
 */
function normEntry(norm, step) {
  const [, input] = NORMS[norm];
  const kind = (/** @type {Architecture} */ a) =>
    norm.startsWith("attn.") ? (a.qk_norm === "each_head" ? "layer" : "rms") : a.norm;
  /** @type {Record<NormStep, Formula>} */
  const formulas = {
    scale: (a) => `√(${kind(a) === "rms" ? "mean of the squares" : "variance"} + ${a.norm_eps}), of ${input(a)}`,
    normalized: (a) => `${kind(a) === "rms" ? input(a) : `(${input(a)} − its mean)`} ÷ divisor`,
    out: (a) =>
      `normalized × ${a.norm_offset ? "(1 + gain)" : "gain"}` +
      `${kind(a) === "layer" && !norm.startsWith("attn.") ? " + bias" : ""}`,
  };
  /** @type {Record<NormStep, (a: Architecture) => string>} */
  const names = {
    scale: (a) => `divisor (${kind(a) === "rms" ? "root mean square" : "standard deviation"})`,
    normalized: () => "divided, before the gain",
    out: () => "result",
  };
  return [(a) => `${normName(norm, a)}: ${names[step](a)}`, "norm", formulas[step]];
}

/** @param {string} part */
function entryOf(part) {
  const [, norm, step] = /^(.*)\.(scale|normalized|out)$/.exec(part) ?? [];
  return norm in NORMS ? normEntry(norm, /** @type {NormStep} */ (step)) : PARTS[part];
}

/**
 * What a stage is. `layer` is null outside of the blocks. `architecture` is the `config` of GET /model, or that of
 * articles.js, whose `formulas` come first. A name that is not known gets no formula.
 * @param {string} name
 * @param {Architecture} architecture
 * @returns {StageEntry}
 */
export function describe(name, architecture) {
  const [layer, part] = [layerOf(name), partOf(name)];
  /** @type {Entry} */
  const unknown = [part, null, () => ""];
  const [label, term, formula] = entryOf(part) ?? unknown;
  return {
    name,
    layer,
    part,
    label: typeof label === "function" ? label(architecture, layer ?? 0) : label,
    term,
    formula: architecture.formulas?.[part] ?? formula(architecture, layer ?? 0),
  };
}

/** @type {Record<string, string>} */
const AXES = {
  position: "tokens",
  query: "queries",
  key: "keys",
  head: "heads",
  kv_head: "key-value heads",
  d_vocab: "tokens of the vocabulary",
  expert: "experts",
  expert_rank: "chosen experts",
};

/**
 * What the numbers of a vector are, by the last axis of a stage.
 * @type {Record<string, string | undefined>}
 */
const VECTORS = {
  d_model: "the numbers of the vector that stands at the token in the residual stream",
  d_head: "the numbers of the vector of this head",
  d_mlp: "the units inside the feed-forward network",
  d_vocab: "the tokens of the vocabulary",
  key: "the tokens that it may look at (keys)",
  expert: "the experts",
  expert_rank: "the chosen experts, the heaviest first",
  one: "one number for each token",
};

/**
 * What the rows and columns of the picture of a stage are.
 * @param {string[]} dims
 */
export function axesInWords(dims) {
  const rows = dims.includes("query") ? "Each row is a token that looks (query)" : "Each row is a token of the prompt";
  const columns = dims.length > 2 ? VECTORS[dims[dims.length - 1]] : undefined;
  const scale = dims.includes("head") || dims.includes("kv_head") ? " The colours are scaled to this head alone." : "";
  return `${rows}${columns ? `; the columns are ${columns}` : ""}.${scale}`;
}

/**
 * A shape in words, such as "9 tokens × 8 heads × 32 numbers". The batch, which has one prompt, is left out.
 * @param {number[]} shape
 * @param {string[]} dims
 */
export function shapeInWords(shape, dims) {
  const axes = dims.map((dim, axis) => ({ dim, size: shape[axis] })).filter(({ dim }) => dim !== "batch");
  const words = axes.map(({ dim, size }) => {
    const name = AXES[dim] ?? "numbers";
    const singular = name.replace("queries", "query").replace(/^(\w[\w-]*(?: \w+)?)s$/, "$1");
    return `${count(size)} ${size === 1 ? singular : name}`;
  });
  return words.join(" × ");
}
