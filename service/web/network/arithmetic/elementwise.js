// The arithmetic of stages that change each number by itself, or with few others: sums of the residual stream, norms,
// rotary pairs, activations, and the choice of experts.

import { activationPicture } from "../operations/activation_picture.js";
import { normPicture } from "../operations/norm_picture.js";
import { rotationPicture } from "../operations/rotation_picture.js";
import { softmaxPicture } from "../operations/softmax_picture.js";
import { stripsPicture } from "../operations/strips_picture.js";
import { numOf, plain, said, siblingOf, sumOf, unitOf } from "./explanation.js";
import { softmax } from "./softmax.js";

/**
 * @import { Architecture } from "../../answers.js"
 * @import { Pass, PassStage } from "../pass.js"
 * @import { Formula, Kind, Num, Place, Read } from "./explanation.js"
 */

/** @param {Place} place @returns {string[]} the stages whose sum this one is */
function addendsOf(place) {
  const { architecture: a, layer, part } = place;
  const named = a.sums?.[part];
  const has = (/** @type {string[]} */ ...parts) => parts.flatMap((each) => siblingOf(place, each) ?? []);
  if (named) return has(...named);
  if (part === "resid_mid") return has("resid_pre", "attn_out");
  if (part === "resid_post" && a.parallel_residual) return has("resid_pre", "attn_out", "mlp_out");
  if (part === "resid_post")
    return [...(a.norm_placement === "post" ? has("ln1.out") : has("resid_mid")), ...has("mlp_out")];
  if (part !== "resid_pre") return [];
  if (layer === 0) return ["embed", "pos_embed"].filter((name) => place.pass.stages.has(name));
  const before = `blocks.${(layer ?? 1) - 1}.`;
  return [`${before}${a.norm_placement === "post" ? "ln2.out" : "resid_post"}`];
}

/** @type {Kind} */
export const sum = {
  async explain(place, read) {
    const { stage, row, column, part } = place;
    const names = addendsOf(place);
    await read(names);
    const vectors = names.map((name) =>
      Array.from({ length: stage.columns }, (_, index) => numOf(place, name, row, index)),
    );
    const addends = vectors.map((vector) => vector[column]);
    const computed = addends.reduce((total, { value }) => total + value, 0);
    const size = addends.reduce((total, { value }) => total + Math.abs(value), 0);
    const sentence = names.length > 1 ? `${names.length} vectors, added number by number` : names.join();
    const added = addends.flatMap((num, index) => (index > 0 ? [" + ", num] : [num]));
    const explanation = plain(place, sentence, [...added, " = ", { value: computed }], computed, size);
    if (names.length < 2) return explanation;
    const total = vectors[0].map((_, index) => ({
      value: vectors.reduce((sofar, vector) => sofar + vector[index].value, 0),
    }));
    const shorts = names.map((name) => name.replace(/^blocks\.\d+\./, ""));
    const words = `${addends.map(({ value }) => said(value)).join(" + ")} = ${said(computed)}`;
    const picture = stripsPicture({
      label: `${shorts.join(" + ")}, number by number. Number ${column}: ${words}.`,
      rows: [
        ...vectors.map((nums, index) => ({ sign: index > 0 ? "+ " : "", name: shorts[index], nums })),
        { sign: "= ", name: part, nums: total },
      ],
      chosen: column,
    });
    return { ...explanation, picture };
  },
};

/**
 * What a norm reads, or null if that is not a stage.
 * @param {Place} place
 */
function normInput(place) {
  const { architecture: a, part, pass } = place;
  const norm = part.replace(/\.\w+$/, "");
  const named = a.sums?.[`${norm}.in`];
  if (named) return named.map((name) => siblingOf(place, name) ?? name);
  if (norm === "ln_final") return [[...pass.stages.keys()].findLast((name) => name.endsWith(".resid_post")) ?? ""];
  if (norm === "attn.q_norm" || norm === "attn.k_norm") return [siblingOf(place, norm.replace("_norm", "")) ?? ""];
  const post = a.norm_placement === "post";
  if (norm === "ln1") return [siblingOf(place, post ? "resid_mid" : "resid_pre") ?? ""];
  if (norm === "ln2") return [siblingOf(place, post ? "resid_post" : "resid_mid", "resid_pre") ?? ""];
  return [];
}

/**
 * The numbers of the vector that a norm reads: those of one head, if the norm is that of each head.
 * @param {Place} place
 * @param {Read} read
 */
async function normVector(place, read) {
  const names = normInput(place);
  await read(names);
  const { stage, head, pass, row } = place;
  const size = (pass.stages.get(names[0])?.heads ?? 1) * (pass.stages.get(names[0])?.columns ?? 0);
  const part = stage.heads > 1 ? size / stage.heads : size;
  const offset = stage.heads > 1 ? head * part : 0;
  return Array.from({ length: part }, (_, index) => {
    const nums = names.map((name) => numOf(place, name, row, offset + index));
    return names.length === 1 ? nums[0] : { value: nums.reduce((total, { value }) => total + value, 0) };
  });
}

/** @param {Place} place */
function isRms({ part, architecture: a }) {
  return part.startsWith("attn.") ? a.qk_norm !== "each_head" : a.norm === "rms";
}

/** What a norm subtracts first. @param {Place} place @param {Num[]} vector */
function meanOf(place, vector) {
  return isRms(place) ? 0 : vector.reduce((total, { value }) => total + value, 0) / vector.length;
}

/** @type {Kind} */
export const divisor = {
  async explain(place, read) {
    const vector = await normVector(place, read);
    if (vector.length === 0) return null;
    const count = vector.length;
    const mean = meanOf(place, vector);
    const {
      formula,
      terms,
      rest,
      sum: total,
    } = sumOf(
      vector.map((num, index) => {
        const square = (num.value - mean) ** 2;
        return {
          name: String(index),
          cells: [num, { value: square }],
          share: square,
          formula: isRms(place) ? [num, "²"] : ["(", num, " − mean)²"],
        };
      }),
    );
    const eps = Number(place.architecture.norm_eps.toPrecision(4)); // some are floats
    const computed = Math.sqrt(total / count + eps);
    const first = isRms(place) ? ["mean of the squares = ("] : ["mean = ", { value: mean }, ";  variance = ("];
    const end = [`) ÷ ${count} = `, { value: total / count }, `;  √(… + ${eps}) = `, { value: computed }];
    return {
      ...plain(
        place,
        `${isRms(place) ? "" : "mean and "}squares of the ${count} numbers of the vector, the largest first`,
        [...first, ...formula, ...end],
        computed,
        computed * 10,
      ),
      columns: ["number", "input", isRms(place) ? "square" : "(input − mean)²"],
      terms,
      rest,
      picture: normPicture({ vector, mean, isCentred: !isRms(place), divisor: computed }),
    };
  },
};

/** @type {Kind} */
export const normalized = {
  async explain(place, read) {
    const vector = await normVector(place, read);
    if (vector.length === 0) return null;
    const { stage, row, head, within, column } = place;
    const name = stage.name.replace("normalized", "scale");
    await read([name]);
    const scale = numOf(place, name, row, stage.heads > 1 ? head : 0);
    const mean = meanOf(place, vector);
    const chosen = stage.heads > 1 ? within : column;
    const from = vector[chosen];
    const computed = (from.value - mean) / scale.value;
    const top = isRms(place) ? [from] : ["(", from, " − mean ", { value: mean }, ")"];
    const formula = [...top, " ÷ ", scale, " = ", { value: computed }];
    const size = (Math.abs(from.value) + Math.abs(mean)) / scale.value;
    return {
      ...plain(place, "the number of the vector ÷ divisor", formula, computed, size),
      picture: normPicture({ vector, mean, isCentred: !isRms(place), divisor: scale.value, chosen }),
    };
  },
};

/**
 * How many pairs of numbers of each head are rotated: number i and number i + half.
 * @param {Architecture} architecture
 * @param {{ columns: number }} stage
 */
export const halfOf = ({ rotary_dim: size }, { columns }) => (size || columns) / 2;

/**
 * The rotation of a pair, with its numbers before and after it. Where the config does not say the angle, it is read
 * from the numbers.
 * @param {Pass} pass
 * @param {Architecture} a
 * @param {{ name: string, before: string, row: number, head: number, index: number }} pair `name`: the rotated stage;
 *   `before`: the stage that it rotates; `index`: of the first number in its head
 */
export function turnOf(pass, a, { name, before, row, head, index }) {
  const stage = /** @type {PassStage} */ (pass.stages.get(name));
  const half = halfOf(a, stage);
  const first = head * stage.columns + index;
  const [from, to] = [before, name].map((each) => [first, first + half].map((at) => pass.row(each, row)?.[at] ?? NaN));
  const isPlain = a.rope_theta && !a.rope_scaling && !a.local_rope_theta;
  const speed = isPlain ? (a.rope_theta ?? 1) ** (-index / half) : null;
  const angle = speed !== null ? row * speed : halfTurn(Math.atan2(to[1], to[0]) - Math.atan2(from[1], from[0]));
  const words = isPlain
    ? `position ${row} × ${a.rope_theta}^(−${index}/${half}) = ${said(angle)} radians`
    : `the angle ${said(angle)} radians`;
  return { from, to, angle, speed, cos: Math.cos(angle), sin: Math.sin(angle), words };
}

/** @type {Kind} */
export const rotated = {
  async explain(place, read) {
    const { architecture: a, row, head, within, column, stage, part } = place;
    const name = beforeRotation(place);
    await read([name]);
    const own = numOf(place, name, row, column);
    const half = halfOf(a, stage);
    if (within >= 2 * half)
      return plain(place, "not one of the rotated numbers", ["= ", own], own.value, Math.abs(own.value));
    const [index, isFirst] = [within % half, within < half];
    const other = numOf(place, name, row, isFirst ? column + half : column - half);
    const { from, cos, sin, angle, words, speed } = turnAt(place, index);
    const turned = speed === null ? words : `${a.rope_theta}^(−${index}/${half}) radians for each position`;
    const computed = own.value * cos + other.value * (isFirst ? -sin : sin);
    const explanation = plain(
      place,
      `numbers ${index} and ${index + half} are a pair, turned by ${turned}: cos ${said(cos)}, sin ${said(sin)}`,
      [own, " × ", { value: cos }, isFirst ? " − " : " + ", other, " × ", { value: sin }, " = ", { value: computed }],
      computed,
      // cosine and sine are rounded to the format, and their angles are computed in float32
      (Math.abs(own.value) + Math.abs(other.value)) * (1e6 * unitOf(place) + row),
    );
    const picture = rotationPicture({
      names: [index, index + half],
      letter: part.endsWith("q") ? "q" : "k",
      from: isFirst ? [own, other] : [other, own],
      to: [from[0] * cos - from[1] * sin, from[0] * sin + from[1] * cos],
      ...{ isFirst, position: row, angle, speed, chosen: index },
      clocks: Array.from({ length: half }, (_, at) => ({
        angle: turnAt(place, at).angle,
        text: `numbers ${at} and ${at + half} turn by ${said(turnAt(place, at).angle)} radians`,
        num: numOf(place, stage.name, row, head * stage.columns + (isFirst ? at : at + half)),
      })),
    });
    return { ...explanation, picture };
  },
};

/** An angle between −π and π. @param {number} angle */
const halfTurn = (angle) => Math.atan2(Math.sin(angle), Math.cos(angle));

/** The rotation of a pair in the head of a number. @param {Place} place @param {number} index */
function turnAt(place, index) {
  const { architecture, row, head, pass, stage } = place;
  return turnOf(pass, architecture, { name: stage.name, before: beforeRotation(place), row, head, index });
}

/** @param {Place} place */
function beforeRotation(place) {
  const letter = place.part.endsWith("q") ? "q" : "k";
  return siblingOf(place, `attn.${letter}_norm.out`, `attn.${letter}`) ?? "";
}

/** @type {Record<string, (x: number) => number>} */
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  silu: (x) => x / (1 + Math.exp(-x)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
};

/** The error function, by its series and continued fraction. @param {number} x */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  let [total, term] = [size, size];
  for (let n = 1; n < 120; n++) {
    term *= (-size * size) / n;
    total += term / (2 * n + 1);
  }
  return Math.sign(x) * Math.min(1, (2 / Math.sqrt(Math.PI)) * total);
}

/** @type {Kind} */
export const activated = {
  async explain(place, read) {
    const [gate, up] = [siblingOf(place, "mlp.pre"), siblingOf(place, "mlp.pre_linear")];
    await read([gate, up]);
    const { architecture, stage, row, column } = place;
    const { activation } = architecture;
    if (gate === null || !(activation in ACTIVATIONS)) return null;
    const curve = ACTIVATIONS[activation];
    const neurons = Array.from({ length: stage.columns }, (_, index) => numOf(place, gate, row, index));
    const from = neurons[column];
    const result = curve(from.value);
    const factor = up === null ? null : numOf(place, up, row, column);
    const computed = result * (factor?.value ?? 1);
    const name = activation.replace("_tanh", "");
    /** @type {Formula} */
    const formula = factor
      ? [`${name}(`, from, ") × ", factor, " = ", { value: result }, " × ", factor, " = ", { value: computed }]
      : [`${name}(`, from, ") = ", { value: computed }];
    const size = Math.abs(from.value * (factor?.value ?? 1));
    return {
      ...plain(place, "each number by itself", formula, computed, size, 2),
      picture: activationPicture({ name, curve, from, neurons, factor }),
    };
  },
};

/** @type {Kind} */
export const expertWeight = {
  async explain(place, read) {
    await read(["mlp.router_logits", "mlp.expert_indices"].map((part) => siblingOf(place, part)));
    const picture = softmaxPicture(...routed(place), { from: "router", to: "weight", isRanked: true });
    return { ...softmax(place, ...routed(place)), picture };
  },
};

/**
 * The logits of the experts among which the weights are shared, and the index of the one at a place.
 * @param {Place} place
 * @returns {[{ name: string, num: Num }[], number]}
 */
function routed(place) {
  const { pass, row, within, architecture: a } = place;
  const logits = siblingOf(place, "mlp.router_logits") ?? "";
  const chosen = Array.from(pass.row(siblingOf(place, "mlp.expert_indices") ?? "", row) ?? [], Number);
  const all = Array.from({ length: pass.stages.get(logits)?.columns ?? 0 }, (_, expert) => expert);
  const some = a.normalize_expert_weights ? chosen : all;
  const entries = some.map((expert) => ({ name: `expert ${expert}`, num: numOf(place, logits, row, expert) }));
  return [entries, some.indexOf(chosen[within])];
}
