// The terms that the page explains: what each one means, and which article explains it at length.

export const ARTICLES = {
  forward: {
    title: "How LLMs learn: forward pass (psychometrics.ai)",
    address: "https://psychometrics.ai/toc/llms-forward-pass",
  },
  modern: {
    title: "Building a Transformer: The Complete Forward Pass (Vitor Sousa)",
    address: "https://www.vitorsousa.com/foundations/building-a-transformer/",
  },
  gpt: {
    title: "Math for ML: transformer and GPT (abhimanyunagurkar.com)",
    address: "https://abhimanyunagurkar.com/blog/math-for-ml-8-transformer-and-gpt/",
  },
  journey: {
    title: "A token's journey (mustafabirinci.com)",
    address: "https://mustafabirinci.com/content/files/embeds/a-token-journey.html",
  },
  loss: {
    title: "Understanding gradients: cross-entropy loss (zhubert.com)",
    address: "https://zhubert.com/intro-to-transformers/understanding-gradients/loss",
  },
};

/**
 * `also`: the other names and symbols of the term, which the search finds, too. `article`: the name of the article that
 * explains the term, or null if none does.
 * @param {string} label
 * @param {string} text
 * @param {string[]} also
 * @param {keyof typeof ARTICLES | null} article
 */
function entry(label, text, also = [], article = null) {
  return { label, text, also, article: article && ARTICLES[article] };
}

/** @typedef {keyof typeof TERMS} TermId */

/** id → {label, text, also, article}. `article` is {title, address}, or null. */
export const TERMS = {
  token: entry(
    "token",
    "A piece of text that the network reads as one unit: a word, a part of a word, or a punctuation mark. Each " +
      "token has a number, its id, in the vocabulary.",
    ["subword", "word piece"],
    "journey",
  ),
  embedding: entry(
    "embedding",
    "The list of numbers (a vector) that stands for a token when it enters the network. The network learned one " +
      "for each token of the vocabulary. All of them together are the embedding table, W_E or wte.",
    ["token embedding", "word embedding"],
    "journey",
  ),
  position: entry(
    "position",
    "The place of a token in the text, counted from 0. Attention alone does not know the order of the tokens, so " +
      "each network has a way to tell it the positions. One way is to add a position embedding (positional " +
      "encoding, W_pos or wpe) to each token embedding.",
    ["index of a token"],
    "journey",
  ),
  residual: entry(
    "residual stream",
    "The vector of a token on its way through the layers. Attention and the feed-forward network do not replace " +
      "this vector: each adds its output to it. Each such addition is called a residual connection or skip " +
      "connection. In the names of stages, the stream is resid_pre, resid_mid and resid_post.",
    ["hidden state"],
    "modern",
  ),
  norm: entry(
    "norm",
    "A step that brings each vector to a standard size, so that its numbers neither grow nor shrink from layer to " +
      "layer. It then multiplies by learned factors. LayerNorm first subtracts the mean of the numbers, and divides " +
      "by their standard deviation. RMSNorm only divides by their root mean square. In the names of stages, the " +
      "norms are ln1, ln2 and ln_final.",
    ["normalization", "layer norm"],
    "modern",
  ),
  query: entry(
    "query",
    "A vector that says what a token looks for in the tokens before it. It is compared with the keys of these " +
      "tokens. The matrix W_q computes it.",
    ["Q"],
    "forward",
  ),
  key: entry(
    "key",
    "A vector that says what a token has to offer. The better a key fits a query, the more attention its token " +
      "gets. The matrix W_k computes it.",
    ["K"],
    "forward",
  ),
  value: entry(
    "value",
    "The vector that a token hands over to the tokens that attend to it. The matrix W_v computes it.",
    ["V"],
    "forward",
  ),
  score: entry(
    "attention score",
    "How well a query fits a key: the dot product of the two vectors, usually divided by the square root of their " +
      "length.",
    ["attention logit", "QK score", "raw attention"],
    "forward",
  ),
  mask: entry(
    "causal mask",
    "The rule that a token must not look at the tokens after it. The scores of these pairs become minus infinity, " +
      "so their weights become 0. Attention with this rule is called causal or masked attention.",
    ["look-ahead mask"],
    "forward",
  ),
  softmax: entry(
    "softmax",
    "A function that turns any numbers into positive ones that add up to 1. The largest number gets the largest share.",
    ["normalized exponential function"],
    "journey",
  ),
  pattern: entry(
    "attention pattern",
    "The weights with which a token takes information from each token before it, and from itself. The weights of " +
      "a token add up to 1.",
    ["attention weights", "attention map", "attention matrix", "attention probabilities"],
    "forward",
  ),
  z: entry(
    "z",
    "What a head found: the values of all tokens that a token attends to, each multiplied by its weight, and added up.",
    ["head output", "mixed values", "context vector"],
    "forward",
  ),
  attention_output: entry(
    "attention output",
    "The results of all heads, joined and multiplied by a matrix, W_o or o_proj. This vector is added to the " +
      "residual stream.",
    ["attn_out", "output projection"],
    "journey",
  ),
  feed_forward: entry(
    "feed-forward network",
    "The second half of a layer. It works on each token separately: it makes the vector wider, applies a curved " +
      "function, and makes the vector narrow again.",
    ["MLP", "FFN", "feedforward", "multilayer perceptron", "mlp_out"],
    "journey",
  ),
  logit: entry(
    "logit",
    "One number for each token of the vocabulary: the higher it is, the more likely the network thinks that this " +
      "token comes next. Logits are not yet probabilities; softmax turns them into probabilities. The unembedding " +
      "computes them from the last vector of a token.",
    ["output score"],
    "loss",
  ),
  probability: entry(
    "probability",
    "How likely a token is to come next, according to the network. The probabilities of all tokens of the " +
      "vocabulary add up to 100 %.",
    ["likelihood"],
    "loss",
  ),
  nat: entry(
    "nat",
    "The unit of the loss, because it is computed with the natural logarithm: a loss of 1 nat means a probability " +
      "of 1 ÷ e, or 37 %. 1 nat is 1.44 bits.",
  ),
  loss: entry(
    "loss",
    "A number for how wrong a prediction was: −ln of the probability of the token that really came next. 0 means " +
      "that the network was certain and right.",
    ["negative log-likelihood", "NLL", "surprisal"],
    "loss",
  ),
  perplexity: entry(
    "perplexity",
    "The loss in another form: e to the power of the mean loss. A perplexity of 20 means that the network was as " +
      "unsure as if it chose among 20 equally likely tokens.",
    ["PPL"],
    "loss",
  ),
  cross_entropy: entry(
    "cross-entropy",
    "The name of this loss: the mean of −ln p, where p is the probability that the network gave to each correct token.",
    ["log loss", "CE"],
    "loss",
  ),
  kv_cache: entry(
    "key-value cache",
    "The stored keys and values of all tokens so far. A new token needs them, and because they never change, the " +
      "network does not compute them again.",
    ["KV cache", "past key values"],
    "modern",
  ),
  temperature: entry(
    "temperature",
    "The logits are divided by this number before softmax. Below 1, likely tokens become more likely; above 1, " +
      "the choice becomes more random. At 0, the most likely token is always chosen.",
    ["softmax temperature"],
    "modern",
  ),
  top_k: entry(
    "top-k",
    "Only the k most likely tokens can be chosen, and their probabilities are scaled up to 100 %. 0 switches this off.",
    ["top-k sampling"],
    "modern",
  ),
  top_p: entry(
    "top-p",
    "Only the most likely tokens can be chosen: as few as are needed to reach this probability together. 1 " +
      "switches this off.",
    ["nucleus sampling"],
  ),
  seed: entry(
    "seed",
    "A number that decides all random choices. The same seed with the same settings gives the same text again.",
    ["random seed"],
  ),
  greedy: entry(
    "greedy",
    "To choose the most likely token at each step. Nothing is random, so the text is always the same.",
    ["greedy decoding", "argmax"],
    "modern",
  ),
  head: entry(
    "head",
    "One of several attention mechanisms that work side by side in a layer. Each has queries, keys and values of " +
      "its own, and can look for something else. All heads of a layer together are called multi-head attention " +
      "(MHA). L4 H2 is head 2 of layer 4.",
    ["attention head"],
    "forward",
  ),
  layer: entry(
    "layer",
    "One block of the network: attention, then a feed-forward network. All layers have the same parts, but " +
      "weights of their own. Counted from 0: L0 is the first.",
    ["block", "transformer block", "decoder layer"],
    "gpt",
  ),
  logit_lens: entry(
    "logit lens",
    "A way to read the middle of the network: take the vector after a layer, skip the layers that remain, and " +
      "compute logits from it as if it were the last one, with the last norm and the unembedding.",
    ["early exit", "early decoding"],
  ),
  ablation: entry(
    "ablation",
    "To switch off a part of the network, for example by setting its output to zero, and to see what the network " +
      "can no longer do. Zero ablation sets numbers to 0, and mean ablation sets them to their mean.",
    ["knock-out"],
  ),
  patching: entry(
    "patching",
    "To put numbers from the pass over one text into the pass over another. If the answer changes with them, they " +
      "carried the information that makes the difference.",
    ["activation patching", "causal tracing", "interchange intervention"],
  ),
  attribution: entry(
    "attribution",
    "How much each part of the network contributed to a result, such as the logit of a token.",
    ["direct logit attribution", "DLA", "contribution"],
  ),
  expert: entry(
    "expert",
    "One of several feed-forward networks of a layer. A small network, the router, chooses for each token which " +
      "few of them work. Such a network is called a mixture of experts (MoE).",
  ),
  gain: entry(
    "gain",
    "The learned factors of a norm, one for each number of the vector. The norm multiplies by them at its end.",
    ["gamma", "weight of a norm"],
    "modern",
  ),
  silu: entry(
    "SiLU",
    "The curved function of many feed-forward networks: x ÷ (1 + e^−x). It keeps large positive numbers, and " +
      "brings negative ones near 0.",
    ["Swish"],
    "modern",
  ),
  std: entry(
    "standard deviation (std)",
    "How far numbers typically are from their mean: the square root of the mean squared distance.",
  ),
  rank: entry("rank", "The place of a token in the list of all tokens of the vocabulary, the most likely one first."),
  number_format: entry(
    "number format (dtype)",
    "How a number is stored. float32 (fp32) has 32 bits and about 7 decimal digits; float16 (fp16) has 16 bits " +
      "and about 3 digits; bfloat16 (bf16) has 16 bits and 2 to 3 digits, but the range of float32.",
    ["precision"],
  ),
  quantization: entry(
    "quantization",
    "To store weights with fewer bits, such as 4 or 8 (int4, int8), so that they need less memory and are read " +
      "faster. The numbers that are computed from them keep the number format of the model. GGUF files usually hold " +
      "quantized weights.",
    ["compressed weights"],
  ),
  rotary: entry(
    "rotary positions",
    "A way to tell attention the positions: queries and keys are rotated by an angle that grows with the " +
      "position. Their dot product then depends on how far the tokens are apart. In the names of stages, the " +
      "rotated vectors are rot_q and rot_k.",
    ["RoPE", "rotary position embedding"],
    "modern",
  ),
  attention: entry(
    "attention",
    "The first half of a layer, in which tokens exchange information. Each token compares its query with the keys " +
      "of other tokens, and takes most from the values of those that fit best.",
    ["self-attention", "attention mechanism"],
    "forward",
  ),
  shared_heads: entry(
    "shared key-value heads",
    "Several query heads can read the same keys and values. The key-value cache is then smaller. If all query " +
      "heads share a single key-value head, this is multi-query attention (MQA).",
    ["grouped-query attention", "GQA"],
  ),
  window: entry(
    "sliding window",
    "A limit of attention: a token looks only at a fixed number of tokens, itself and those right before it.",
    ["sliding-window attention", "local attention", "SWA"],
  ),
  induction: entry(
    "induction head",
    "A head that repeats what came before. It looks for an earlier copy of the present token, and attends to the " +
      "token that came directly after that copy.",
    ["copying head"],
  ),
  activation: entry(
    "activation function",
    "The curved function inside a feed-forward network. Without a curve, all layers together could only compute " +
      "sums. ReLU turns negative numbers into 0. GELU and SiLU do this smoothly.",
    ["nonlinearity"],
    "journey",
  ),
  gate: entry(
    "gated feed-forward network",
    "A feed-forward network with two inner vectors, the gate and the up projection. The activation function is " +
      "applied to the gate, and the result is multiplied by the up projection. The matrices are W_gate and W_up. " +
      "With SiLU, this is called SwiGLU, with GELU, GeGLU.",
    ["GLU"],
  ),
  unembedding: entry(
    "unembedding",
    "The matrix that turns the last vector of a token into logits. It has one vector for each token of the " +
      "vocabulary, and each logit is a dot product with one of them. In many networks it is the embedding table, " +
      "used a second time (tied embeddings).",
    ["W_U", "W_head", "lm_head", "language model head", "output embedding", "tied embeddings"],
  ),
  tokenizer: entry(
    "tokenizer",
    "The program that cuts a text into tokens and looks up their ids. Each network has its own. Byte-pair " +
      "encoding (BPE) and SentencePiece are common kinds.",
    ["tokenization"],
  ),
  vocabulary: entry(
    "vocabulary",
    "The list of all tokens that a network knows. Its length is the number of logits at each position.",
    ["vocab", "d_vocab"],
  ),
  width: entry(
    "width",
    "How many numbers a vector has. d_model is the width of the residual stream, d_head that of queries, keys and " +
      "values of one head, and d_mlp that inside the feed-forward network.",
    ["hidden size", "dimension"],
  ),
  weight: entry(
    "weight",
    "A number that the network learned in training, and that stays the same for every text. Most weights are in " +
      "matrices, whose names begin with W, such as W_q. The weights of an attention pattern are something else: " +
      "they are computed anew for each text.",
    ["parameter"],
  ),
  bias: entry("bias", "A learned vector that is added after the multiplication by a matrix. Many networks have none.", [
    "offset",
  ]),
  length: entry(
    "length of a vector",
    "The root of the sum of the squares of its numbers. A long vector in the residual stream has a strong effect " +
      "on later layers, until a norm brings it to a standard size.",
    ["L2 norm", "magnitude"],
  ),
  forward_pass: entry(
    "forward pass",
    "One computation of the network, from the tokens of a text to the logits after each of them. Generation needs " +
      "one forward pass for each new token.",
    ["inference"],
    "forward",
  ),
  prefill: entry(
    "prefill and decode",
    "The two parts of a generation. Prefill computes all tokens of the prompt at once. Decode then computes one " +
      "token at a time, and reads everything earlier from the key-value cache.",
    ["prompt processing"],
  ),
  steering: entry(
    "steering",
    "To add a vector to the residual stream during the pass, so that the text moves in the direction of this " +
      "vector. The vector is called a steering vector or control vector.",
    ["activation addition", "activation steering"],
  ),
  intervention: entry(
    "intervention",
    "A change of numbers in the middle of the forward pass. Everything that comes after is computed from the " +
      "changed numbers. The page calls one such change an edit.",
    ["edit"],
  ),
  adapter: entry(
    "adapter",
    "Small matrices that were trained to change the behaviour of a network. Their results are added to those of " +
      "the large matrices, which stay as they are. LoRA (low-rank adaptation) is the usual kind.",
  ),
  capping: entry(
    "capping",
    "A limit for scores or logits in some networks: limit × tanh(number ÷ limit). Small numbers hardly change, " +
      "and no number gets beyond the limit.",
    ["softcap", "soft capping", "logit softcapping"],
  ),
  chat_template: entry(
    "chat template",
    "The form in which a network was trained to read a conversation. It puts special tokens around each message, " +
      "which say who wrote it.",
    ["prompt template", "instruct format"],
  ),
};
