// How the stages of a layer are arranged on the map: those on the residual stream, and the branches that leave it. The
// arrangement follows the order of the stages and the architecture, so it fits every network that the service runs.

import { describe, normName } from "../stages.js";

/**
 * @import { Architecture } from "../answers.js"
 * @import { StageEntry } from "../stages.js"
 * @import { TermId } from "../terms_list.js"
 * @typedef {"stream" | "attention" | "mlp"} Branch
 * @typedef {{ title: string | null, term: TermId | null, stages: StageEntry[] }} Section
 * @typedef {{ branch: Branch, isOnStream: boolean, sections: Section[] }} Part
 * @typedef {{ branch: Branch, title: string | null, term: TermId | null }} Heading
 */

/** @type {(Heading & { starts: string[] })[]} */
const SECTIONS = [
  { branch: "attention", title: "Norm", term: "norm", starts: ["ln1."] },
  {
    branch: "attention",
    title: "Queries, keys and values",
    term: "query",
    starts: ["attn.lora_q", "attn.lora_k", "attn.lora_v", "attn.q", "attn.k", "attn.v", "attn.rot_"],
  },
  {
    branch: "attention",
    title: "Who attends to whom",
    term: "pattern",
    starts: ["attn.scores", "attn.attn_scores", "attn.pattern"],
  },
  { branch: "attention", title: "What the heads found", term: "z", starts: ["attn.z", "attn.lora_out"] },
  { branch: "attention", title: "Norm of the output", term: "norm", starts: ["ln1_post."] },
  { branch: "attention", title: "Output", term: "attention_output", starts: ["attn_out"] },
  { branch: "mlp", title: "Norm", term: "norm", starts: ["ln2."] },
  { branch: "mlp", title: "Choice of experts", term: "expert", starts: ["mlp.router", "mlp.expert_"] },
  { branch: "mlp", title: "Feed-forward network", term: "feed_forward", starts: ["mlp."] },
  { branch: "mlp", title: "Norm of the output", term: "norm", starts: ["ln2_post."] },
  { branch: "mlp", title: "Output", term: "feed_forward", starts: ["mlp_out"] },
];

/** @type {Heading} */
const ON_STREAM = { branch: "stream", title: null, term: null };

/**
 * Whether a part of a block lies on the residual stream itself, because no residual connection leads around it.
 * @param {string} part
 * @param {Architecture} architecture
 */
function isOnStream(part, architecture) {
  const extra = architecture.norm_placement === "post" ? ["ln1", "ln2"] : [];
  return [...extra, ...(architecture.onStream ?? [])].some((start) => part === start || part.startsWith(`${start}.`));
}

/**
 * @param {string} part
 * @param {Architecture} architecture
 * @returns {Heading}
 */
function sectionOf(part, architecture) {
  if (part.startsWith("resid_")) return ON_STREAM;
  const [norm] = part.split(".");
  if (/^ln[12]$/.test(norm) && isOnStream(norm, architecture))
    return { branch: "stream", title: normName(norm, architecture), term: "norm" };
  return (
    SECTIONS.find(({ starts }) => starts.some((start) => part.startsWith(start))) ?? {
      branch: "stream",
      title: part,
      term: null,
    }
  );
}

/**
 * The parts of a layer in the order of computation.
 * @param {string[]} names
 * @param {Architecture} architecture
 */
export function partsOf(names, architecture) {
  /** @type {Part[]} */
  const parts = [];
  for (const name of names) {
    const stage = describe(name, architecture);
    const { branch, title, term } = sectionOf(stage.part, architecture);
    let part = parts.at(-1);
    if (!part || part.branch !== branch)
      parts.push((part = { branch, isOnStream: isOnStream(stage.part, architecture), sections: [] }));
    let section = part.sections.at(-1);
    if (!section || section.title !== title) part.sections.push((section = { title, term, stages: [] }));
    section.stages.push(stage);
  }
  return parts;
}

/**
 * What a branch does with the residual stream: a text for its beginning, and one for its end.
 * @param {Part} part
 * @param {Architecture} architecture
 */
export function captionsOf(part, architecture) {
  const name = part.branch === "attention" ? "attention" : "the feed-forward network";
  if (part.isOnStream)
    return [`The stream itself goes through ${name}, without a residual connection.`, "The result is the new stream."];
  const unread = part.branch === "attention" && architecture.unread ? " Nothing reads the result of the norm." : "";
  const begin = architecture.parallel_residual
    ? `A copy of the stream that entered the layer goes through ${name}.`
    : `A copy of the stream goes through ${name}.`;
  return [begin + unread, "The result is added to the stream."];
}
