// The shapes of what the service answers, as far as the page reads them, for tsc and for readers. Only comments refer
// to this file, so browsers never load it. docs/api.md describes all fields.

/**
 * @typedef {{ id: number, text: string | null }} Token
 * @typedef {Token & { position: number }} PositionedToken
 * @typedef {Token & { logit: number | null, probability: number | null }} Prediction
 * @typedef {{ position: number, top: Prediction[] }} PositionPredictions
 * @typedef {string | number[]} Prompt a text, or a list of token ids
 * @typedef {{ per_token: (number | null)[], mean: number | null, perplexity: number | null }} Loss
 * @typedef {string | (number | number[])[]} Positions a word such as "all", or positions and ranges
 * @typedef {{
 *   stage: string, op: string, heads?: number[], neurons?: number[], positions?: Positions, keys?: Positions,
 *   factor?: number, vector?: unknown, value?: number, scale?: number, source?: { prompt: Prompt }, coeff?: number,
 *   min?: number, max?: number, std?: number,
 * }} Edit docs/interventions.md describes edits
 */

/**
 * GET /models and GET /model. `Architecture` is what the formulas of stages.js depend on.
 * @typedef {{ text: string, tokens: PositionedToken[] }} ArticlePrompt
 * @typedef {{ name: string, kind: "checkpoint" | "adapter" }} ServedEntry
 * @typedef {{ name: string, kind: "worked_example", title: string, prompt: ArticlePrompt }} WorkedExampleEntry
 * @typedef {ServedEntry | WorkedExampleEntry} ModelEntry
 * @typedef {{
 *   norm: string, norm_eps: number, norm_placement: string, norm_offset?: boolean, qk_norm?: string | null,
 *   positions: string, rotary_dim?: number, rotary_layers?: boolean[] | null,
 *   num_heads: number, num_kv_heads: number, d_head: number, qkv_bias?: boolean, attention_out_bias?: boolean,
 *   attention_scale: number, attention_softcap?: number | null,
 *   window?: number | null, windowed_layers?: boolean[] | null,
 *   gated: boolean, activation: string, mlp_bias?: boolean, parallel_residual?: boolean,
 *   num_experts?: number | null, num_experts_per_token?: number, expert_layers?: boolean[] | null,
 *   normalize_expert_weights?: boolean,
 *   tied_head: boolean, embedding_scale: number, residual_scale: number,
 *   logits_scale: number, logits_softcap?: number | null,
 *   onStream?: string[], unread?: string[], formulas?: Record<string, string>,
 *   sums?: Record<string, string[]>, rope_theta?: number, rope_scaling?: object | null,
 *   local_rope_theta?: number | null,
 * }} Architecture
 * @typedef {Architecture & { num_layers: number, vocab_size: number }} ModelConfig
 * @typedef {{
 *   name: string, device: string, dtype: string, quantization: string, config: ModelConfig,
 *   parameters: { total: number }, generation_defaults: Record<string, number>,
 *   sizes: Record<string, number>, stages: { name: string, dims: string[] }[],
 *   limits: { max_positions: number, cache_token_bytes: number }, capabilities: Record<string, boolean>,
 * }} Model
 */

/**
 * POST /forward, POST /patterns and POST /attribute. `values` is a text in base64, because the page asks for it; only
 * worked examples are read as nested lists.
 * @typedef {{
 *   min: number | null, max: number | null, mean: number | null, std: number | null, l2: number | null,
 *   non_finite: number,
 * }} Summary
 * @typedef {{ name: string, shape: number[], dims: string[], dtype: DType, summary?: Summary, values: string }} Stage
 * @typedef {"float64" | "float32" | "bfloat16" | "float16" | "uint8" | "int64"} DType
 * @typedef {{ name: string, norm: number | null, relative: number | null }} StageChange
 * @typedef {{ predictions: PositionPredictions[], loss: Loss }} Baseline
 * @typedef {{ stages: string[], positions: (number | [first: number, last: number | null])[] }} AppliedEdit
 * @typedef {Baseline & {
 *   tokens: PositionedToken[], stages: Stage[], edits?: AppliedEdit[], baseline?: Baseline, changes?: StageChange[],
 * }} ForwardAnswer
 *
 * @typedef {"previous" | "first" | "itself" | "induction"} Target
 * @typedef {Record<Target, number | null>} Means where the weight of a head goes
 * @typedef {{ layer: number, head: number, means: Means | null, values: string }} PatternMap
 * @typedef {{ tokens: PositionedToken[], size: number, block: number, maps: PatternMap[] }} PatternsAnswer
 *
 * @typedef {{ rank: number, probability: number | null }} LensToken
 * @typedef {{
 *   stage: string, translated: boolean, positions: PositionPredictions[], token: LensToken[] | null,
 *   final: LensToken[],
 * }} LensLayer
 * @typedef {{ tokens: PositionedToken[], token: Token | null, final: Token[], layers: LensLayer[] }} LensAnswer
 * @typedef {{
 *   heads: number[], mlp: number, attention_bias: number, mlp_bias: number, norm_biases: number,
 * }} LayerShares
 * @typedef {{
 *   tokens: PositionedToken[], dtype: string, target: { token: Token, minus: Token | null, position: number },
 *   logit: number, capped_logit: number | null, total: number, remainder: number, embed: number,
 *   pos_embed: number | null, layers: LayerShares[], final_norm_bias: number,
 * }} DirectAnswer
 */

/**
 * A worked example in the answer of POST /forward: the numbers that the article prints.
 * @typedef {number | null | Nested[]} Nested numbers, in as many lists as the stage has axes
 * @typedef {{ max_difference: number, agrees: boolean }} Agreement
 * @typedef {Agreement & { values: Nested[], squared: boolean, from_previous: Agreement | null }} Published
 * @typedef {Omit<Stage, "values"> & { values: Nested[], published: Published }} PrintedStage
 * @typedef {{ stage: string, index: number[], printed: string, from_printed: number, allowed: number }} Slip
 * @typedef {{ name: string, published: string, computed: string, agrees: boolean }} PublishedResult
 * @typedef {Omit<ForwardAnswer, "stages"> & {
 *   stages: (PrintedStage | { name: string, published?: null })[],
 *   worked_example: { results: PublishedResult[], slips: Slip[] },
 * }} WorkedAnswer
 */

/**
 * POST /generate, POST /tokenize, GET /status and GET /vectors.
 * @typedef {Token & { logprob: number | null }} Logprob
 * @typedef {Logprob & { top: Logprob[] }} TokenLogprob
 * @typedef {{ prompt_tokens: number, completion_tokens: number, cached_tokens: number }} Usage
 * @typedef {"stop" | "length" | "cancelled" | "error"} FinishReason
 * @typedef {{ positions: number[], predictions: PositionPredictions[] }} TracedStep
 * @typedef {{
 *   tokens: number[], finish_reason: FinishReason, logprobs: TokenLogprob[], trace: TracedStep[], usage: Usage,
 * }} GenerateAnswer
 * @typedef {{ text?: string, token?: TokenLogprob, finish_reason?: FinishReason, usage?: Usage }} GenerateEvent
 * @typedef {{
 *   clean_value?: number | null, corrupted_value?: number | null, num_cells?: number,
 *   cells?: { stage: string, position: number, value: number }[],
 * }} SweepEvent of POST /attribute
 * @typedef {{ tokens: PositionedToken[], count: number }} TokenizeAnswer
 * @typedef {{
 *   version: string, kernels: string | null, uptime_seconds: number,
 *   requests_running: number, requests_waiting: number,
 *   sequences_running: number, sequences_waiting: number, max_sequences: number,
 *   cache: {
 *     used_tokens: number, total_tokens: number, prompt_tokens_looked_up: number, prompt_tokens_found: number,
 *   } | null,
 *   tokens_per_second: { window_seconds: number, prompt: number, generated: number },
 * }} Status
 */

/**
 * GET /weights and GET /weights/{name}.
 * @typedef {{
 *   name: string, dims: string[], shape: number[], dtype: DType, quantization: string | null, num_parameters: number,
 *   tied_to: string | null,
 * }} WeightInfo
 * @typedef {{
 *   name: string, dims: string[], shape: number[], dtype: DType, quantization: string | null, values: any[],
 * }} WeightAnswer `values`: lists in lists
 */

/**
 * Path → answer.
 * @typedef {{
 *   "/models": { models: ModelEntry[] }, "/model": Model, "/status": Status,
 *   "/vectors": { vectors: { name: string }[] }, "/weights": { weights: WeightInfo[] }, "/weights/": WeightAnswer,
 * }} GetAnswers
 * @typedef {{
 *   "/forward": ForwardAnswer, "/patterns": PatternsAnswer, "/attribute": LensAnswer & DirectAnswer,
 *   "/generate": GenerateAnswer, "/tokenize": TokenizeAnswer,
 * }} PostAnswers
 */

export {};
