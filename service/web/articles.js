// The three articles whose networks are served as worked examples: where they are, and how their networks differ from a
// standard block.

import { ARTICLES as SOURCES } from "./terms_list.js";

/**
 * @import { Architecture, Token } from "./answers.js"
 * @import { Service } from "./view.js"
 * @typedef {{
 *   title: string, address: string, notes: string[], architecture: Architecture, target?: Token,
 * }} Article `target`: the token after the prompt whose loss the article computes
 */

const STANDARD = {
  norm: "layer",
  norm_eps: 1e-5,
  norm_placement: "pre",
  positions: "learned",
  gated: false,
  activation: "gelu_tanh",
  tied_head: false,
  embedding_scale: 1,
  residual_scale: 1,
  logits_scale: 1,
};

/**
 * Name of a worked example → {title, address, notes, architecture}. `architecture` is what stages.js needs, with
 * `formulas` of its own, and says which parts of a block lie on the residual stream itself (`onStream`),
 * and which stages are added up (`sums`; a name with `.in` is what a norm reads).
 * @type {Record<string, Article | undefined>}
 */
export const ARTICLES = {
  "ai-rocks": {
    ...SOURCES.forward,
    notes: [
      "The residual connections add the normalized vectors, not the vectors that enter the norms. So both norms " +
        "change the residual stream itself.",
      "There is no norm before the logits, and the embedding table is also the table of the logits.",
      "The article prints only some of the weights. The service chose the others so that its network reproduces " +
        "the printed results of the first norm, of attention, and of the feed-forward network. Agreement there " +
        "proves nothing.",
    ],
    architecture: {
      ...STANDARD,
      num_heads: 2,
      num_kv_heads: 2,
      d_head: 2,
      attention_scale: 2 ** -0.5,
      mlp_bias: true,
      tied_head: true,
      onStream: ["ln1", "ln2"],
      sums: { resid_pre: ["ln1.out"], "ln1.in": ["embed", "pos_embed"], resid_post: ["ln2.out", "mlp_out"] },
      formulas: {
        resid_pre: "the result of the norm (the article adds the normalized input)",
        "ln1.scale": "√(variance + 0.00001), of token embedding + position embedding",
        "ln1.normalized": "(token embedding + position embedding − its mean) ÷ divisor",
        resid_post: "result of the second norm + feed-forward output",
        logits: "stream after the layer × embedding table, transposed",
      },
    },
  },
  "a-tokens-journey": {
    ...SOURCES.journey,
    target: { id: 4, text: "mat" },
    notes: [
      "Attention has no mask: each token also attends to the tokens after it.",
      "The scores are not divided by √d_head.",
      "The first norm is shown, but nothing reads its result: queries, keys and values are computed from its input.",
      "There is no norm before the logits. From the output of attention on, the article follows only the last " +
        "token, and it rounds between the steps.",
    ],
    architecture: {
      ...STANDARD,
      activation: "relu",
      num_heads: 1,
      num_kv_heads: 1,
      d_head: 4,
      attention_scale: 1,
      unread: ["ln1"],
      formulas: {
        "attn.q": "stream that enters the layer × W_q (not the result of the norm)",
        "attn.k": "stream that enters the layer × W_k (not the result of the norm)",
        "attn.v": "stream that enters the layer × W_v (not the result of the norm)",
        "attn.attn_scores": "equal to the scores: this network has no mask",
        "mlp.pre": "normalized input × W_1",
        mlp_out: "activation × W_2",
        logits: "stream after the layer × W_lm",
      },
    },
  },
  "i-like-transformers": {
    ...SOURCES.loss,
    notes: [
      "There is no residual connection around attention: its output replaces the residual stream.",
      "The only residual connection leads from the output of attention around the feed-forward network. The only " +
        "norm follows it, and the logits are computed from its result.",
    ],
    architecture: {
      ...STANDARD,
      norm_placement: "post",
      num_heads: 2,
      num_kv_heads: 2,
      d_head: 8,
      attention_scale: 8 ** -0.5,
      mlp_bias: true,
      onStream: ["attn", "attn_out", "ln2"],
      sums: { resid_post: ["attn_out", "mlp_out"], "mlp.in": ["attn_out"] },
      formulas: {
        "mlp.pre": "attention output × W_1 + bias",
        mlp_out: "activation × W_2 + bias",
        resid_post: "attention output + feed-forward output",
        logits: "result of the norm × W_lm",
      },
    },
  },
};

/**
 * What the formulas of the stages depend on: the config of the served network, or that of a worked example.
 * @param {Service} service
 * @param {string | null} model
 * @returns {Architecture}
 */
export function architectureOf(service, model) {
  const article = ARTICLES[model ?? ""];
  if (article) return article.architecture;
  if (service.model === null) throw new Error(`There is no model “${model}”.`);
  return service.model.config;
}

/**
 * Whether a model is a worked example.
 * @param {Service} service
 * @param {string | null} model
 */
export function isWorkedExample(service, model) {
  return service.models.some((entry) => entry.name === model && entry.kind === "worked_example");
}
