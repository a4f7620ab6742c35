// The picture of a rotary position: a pair of numbers as an arrow that is turned, and how far every pair turns.

import { svg } from "../../dom.js";
import { said } from "../arithmetic/explanation.js";
import { area, arrow, hit, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @typedef {{ angle: number, text: string, num: Num }} Clock a pair of the head, and its angle
 * @typedef {{
 *   names: [number, number], letter: string, from: Num[], to: number[], isFirst: boolean, position: number,
 *   angle: number, speed: number | null, clocks: Clock[], chosen: number,
 * }} Rotation `names`: the indices of the pair; `isFirst`: whether the explained number is the first one; `speed`:
 *   radians for each position, if the angle is that of the formula
 */

const TURN = 2 * Math.PI;
const MOST_TURNS = 2; // that the arc shows
const MOST_DOTS = 48;

/** @param {Rotation} rotation */
export function rotationPicture(rotation) {
  const { names, from, to, position, angle } = rotation;
  const [before, after] = [from.map(({ value }) => value), to].map(([a, b]) => `(${said(a)}, ${said(b)})`);
  const label =
    `Numbers ${names.join(" and ")} as an arrow: at position ${position} it turns by ${degrees(angle)}, ` +
    `from ${before} to ${after}.`;
  return new OperationPicture(label, (width) => {
    const radius = width < 360 ? 50 : 70;
    const right = 2 * radius + 36 + 7 * String(names[0]).length;
    const centre = { x: radius + 16, y: radius + 18, radius };
    const words = wordsOf(rotation, right, width - right);
    return {
      height: Math.max(2 * radius + 36, words.height),
      parts: [[...plane(rotation, centre), ...words.before], turn(rotation, centre), words.after, words.clocks],
    };
  });
}

/** @param {number} angle */
const degrees = (angle) => `${((angle * 360) / TURN).toFixed(1).replace("-", "−")}°`;

/**
 * The axes, the arrow before the turn, and where the arrow would point at each earlier position.
 * @param {Rotation} rotation
 * @param {{ x: number, y: number, radius: number }} centre
 */
function plane({ names, letter, from, position, speed }, { x, y, radius }) {
  const size = Math.hypot(from[0].value, from[1].value);
  const begin = Math.atan2(from[1].value, from[0].value);
  const end = begin + position * (speed ?? 0);
  const at = (/** @type {number} */ turned) => ({
    cx: x + radius * Math.cos(turned),
    cy: y - radius * Math.sin(turned),
  });
  const dots = speed !== null && position < MOST_DOTS ? Array.from({ length: position + 1 }, (_, each) => each) : [];
  return [
    svg("path", {
      d: `M ${x - radius - 6} ${y} H ${x + radius + 6} M ${x} ${y + radius + 6} V ${y - radius - 6}`,
      class: "axis",
    }),
    svg("circle", { cx: x, cy: y, r: radius, class: "rim" }),
    text(x + radius + 8, y - 4, `${letter}${sub(names[0])}`, { kind: "faint" }),
    text(x + 5, y - radius - 7, `${letter}${sub(names[1])}`, { kind: "faint" }),
    ...dots.map((each) =>
      svg("circle", {
        ...at(begin + each * (speed ?? 0)),
        r: 2.5,
        ...hit({ text: `at position ${each}, the arrow would turn by ${degrees(each * (speed ?? 0))}` }),
        fill: "var(--river)",
      }),
    ),
    ...dots
      .filter((each) => each === 0 || each === position)
      .filter((each) => each === 0 || Math.hypot(at(begin).cx - at(end).cx, at(begin).cy - at(end).cy) > 16)
      .map((each) => {
        const turned = each === 0 ? begin : end;
        const [far, label] = [radius + 10, String(each)];
        return text(x + far * Math.cos(turned), y - far * Math.sin(turned) + 4, label, {
          anchor: "middle",
          kind: "faint",
        });
      }),
    size > 0 ? arrow([x, y], [at(begin).cx, at(begin).cy], "before") : null,
  ].filter((node) => node !== null);
}

/**
 * The arc, and the arrow after the turn.
 * @param {Rotation} rotation
 * @param {{ x: number, y: number, radius: number }} centre
 */
function turn({ from, to, isFirst, names, angle }, { x, y, radius }) {
  const size = Math.hypot(from[0].value, from[1].value);
  if (size === 0) return [];
  const begin = Math.atan2(from[1].value, from[0].value);
  const sign = Math.sign(angle);
  const whole = Math.floor(Math.abs(angle) / TURN);
  const drawn = sign * ((Math.abs(angle) % TURN) + TURN * Math.min(MOST_TURNS, whole));
  const steps = Math.max(2, Math.ceil(Math.abs(drawn) / 0.08));
  /** @type {[number, number][]} */
  const points = Array.from({ length: steps + 1 }, (_, step) => {
    const [turned, far] = [
      begin + (drawn * step) / steps,
      radius * (0.34 + 0.05 * (Math.abs(drawn) / TURN) * (step / steps)),
    ];
    return [x + far * Math.cos(turned), y - far * Math.sin(turned)];
  });
  const end = begin + drawn;
  const tip = [x + radius * Math.cos(end), y - radius * Math.sin(end)];
  const after = arrow([x, y], /** @type {[number, number]} */ (tip), "after");
  after.style.transformOrigin = `${x}px ${y}px`;
  after.style.setProperty("--from", `${(drawn * 360) / TURN}deg`);
  const foot = isFirst ? [tip[0], y] : [x, tip[1]];
  const value = to[isFirst ? 0 : 1];
  const line = points.map(([a, b], index) => `${index === 0 ? "M" : "L"} ${a.toFixed(1)} ${b.toFixed(1)}`).join(" ");
  return [
    svg("path", { d: line, class: "arc" }),
    arrow(points[Math.max(0, points.length - 4)], points[points.length - 1], "arc-end"),
    svg("path", { d: `M ${tip[0]} ${tip[1]} L ${foot[0]} ${foot[1]}`, class: "projection" }),
    svg("circle", {
      ...{ cx: foot[0], cy: foot[1], r: 3.5, fill: "var(--path)" },
      ...hit({ text: `number ${names[isFirst ? 0 : 1]} after the turn: ${said(value)}` }),
    }),
    after,
  ];
}

/**
 * The angle and the pair in numbers, and below them the clocks.
 * @param {Rotation} rotation
 * @param {number} x
 * @param {number} room
 */
function wordsOf({ from, to, position, angle, speed, clocks, chosen, names }, x, room) {
  const whole = Math.floor(Math.abs(angle) / TURN);
  const rest = degrees(Math.sign(angle) * (Math.abs(angle) % TURN));
  const pair = (/** @type {number[]} */ [a, b]) => `(${said(a)}, ${said(b)})`;
  const lines = [
    speed === null ? "angle, read from the numbers:" : `position ${position} × ${said(speed)} rad`,
    `${speed === null ? "" : "= "}${said(angle)} rad = ${degrees(angle)}`,
    ...(whole > 0 ? [`= ${whole} ${whole > 1 ? "turns" : "turn"} and ${rest}`] : []),
  ];
  const below = 14 + lines.length * 15 + 6;
  const key = (/** @type {string} */ kind, /** @type {number} */ y) =>
    svg("path", { d: `M ${x} ${y - 4} h 14`, class: `${kind} shaft` });
  const small = clocksOf(clocks, chosen, { x, y: below + 32, room });
  return {
    height: small.bottom + 4,
    before: [
      key("before", below + 2),
      text(x + 20, below + 2, pair(from.map(({ value }) => value)), { room: room - 20 }),
      ...from.map(({ value, ...num }, index) =>
        area(
          { x: x + 20 + index * 70, y: below - 9, width: 68, height: 14 },
          { text: `number ${names[index]} before the turn: ${said(value)}`, num: { value, ...num } },
        ),
      ),
    ],
    after: [
      ...lines.map((line, index) =>
        text(x, 14 + index * 15, line, { kind: index === lines.length - 1 ? "result" : "" }),
      ),
      key("after", below + 18),
      text(x + 20, below + 18, pair(to), { kind: "result", room: room - 20 }),
    ],
    clocks: small.nodes,
  };
}

/**
 * A clock for each pair of the head, whose hand shows its angle.
 * @param {Clock[]} clocks
 * @param {number} chosen
 * @param {{ x: number, y: number, room: number }} place
 */
function clocksOf(clocks, chosen, { x, y, room }) {
  const top = y + 14;
  const size = Math.min(22, Math.floor(Math.sqrt((room * 54) / clocks.length)));
  const columns = Math.max(1, Math.floor(room / size));
  const faces = clocks.flatMap((clock, index) => {
    const [cx, cy] = [x + ((index % columns) + 0.5) * size, top + (Math.floor(index / columns) + 0.5) * size];
    const r = size / 2 - (size > 12 ? 2 : 1);
    const hand = [cx + r * Math.cos(clock.angle), cy - r * Math.sin(clock.angle)];
    const kind = index === chosen ? "clock chosen-clock" : "clock";
    return [
      svg("circle", { cx, cy, r, class: kind }),
      svg("path", { d: `M ${cx} ${cy} L ${hand[0].toFixed(2)} ${hand[1].toFixed(2)}`, class: kind }),
      svg("circle", { cx, cy, r, fill: "transparent", ...hit(clock) }),
    ];
  });
  const words = clocks.length === 1 ? "the only pair" : `the turns of all ${clocks.length} pairs`;
  return {
    bottom: top + Math.ceil(clocks.length / columns) * size,
    nodes: [text(x, y + 8, words, { kind: "faint" }), ...faces],
  };
}

/** An index below the line. @param {number} index */
const sub = (index) => [...String(index)].map((digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]).join("");
