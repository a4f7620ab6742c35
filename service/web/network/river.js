// The residual stream as a river: one stream for each token, as wide as its vector is long, and the branches that leave
// it, change with the size of their vectors, and come back.

import { bandOf, isSplit, riverCentre, riverMost } from "./scene.js";

/**
 * @import { Branch } from "./items.js"
 * @import { Pass } from "./pass.js"
 * @import { Plane } from "./plane.js"
 * @import { Scene } from "./scene.js"
 * @typedef {{ along: number, across: number, half: number }} Point of a ribbon: its centre, and half its width
 */

const GATE = 0.16; // half the opening of a norm, as a share of the lane
const OTHER = 0.28; // how strong the rivers of other tokens are from afar
const JOIN = 14; // pixels in which the river of a change grows: it must not begin before the sign of its edit
const TINY = 28; // pixels of a branch that is not drawn
const SHORT = 12; // pixels of a part of a branch that is not drawn
const LEAST = 0.6; // pixels of half a river

/** Whether a stage is the residual stream itself. @param {string} part */
const isStream = (part) => /^(resid_|embed$)/.test(part);

/** @type {WeakMap<Pass, Map<string, { version: number, lengths: Map<number, number> }>>} */
const measured = new WeakMap();

/**
 * The length (L2 norm) of the vector of a token, or undefined if it is not here.
 * @param {Pass} pass
 * @param {string} name
 * @param {number} position
 */
export function lengthOf(pass, name, position) {
  const stages = measured.get(pass) ?? new Map();
  measured.set(pass, stages);
  const version = pass.stages.get(name)?.version ?? 0;
  if (stages.get(name)?.version !== version) stages.set(name, { version, lengths: new Map() });
  const { lengths } = stages.get(name);
  if (!lengths.has(position)) {
    const row = pass.row(name, position);
    if (row) lengths.set(position, Math.hypot(...row));
  }
  return lengths.get(position);
}

/**
 * The width of the river for each row in sight, at the items of the stream in sight and beside it.
 * @param {Scene} scene
 */
function widths({ line, layout, pass: { reference } }) {
  const [first, last] = layout.rows;
  const [from, to] = layout.span;
  const all = line.items.flatMap((item, index) => (isStream(item.part) && layout.widthOf(index) > 0.01 ? [index] : []));
  const before = all.findLastIndex((index) => index < from);
  const after = all.findIndex((index) => index >= to);
  const near = all.slice(Math.max(0, before), after < 0 ? all.length : after + 1);
  const known = all.flatMap((index) => {
    const some = [];
    for (let row = first; row < last; row++) some.push(lengthOf(reference, line.items[index].name, row));
    return some.filter((length) => length !== undefined);
  });
  known.sort((a, b) => a - b);
  const most = known[Math.floor(0.95 * (known.length - 1))] || 1;
  return { near, shareOf: (/** @type {number} */ length) => Math.min(1.15, Math.sqrt(length / most)) };
}

/** @param {Scene} scene */
export function drawRivers(scene) {
  const { plane, line, layout, pass, palette, row: chosen, isStep } = scene;
  const { near, shareOf } = widths(scene);
  const other = OTHER + (isStep ? -0.1 : 0.14) * layout.detail;
  const [first, last] = layout.rows;
  const half = riverMost(layout.rowSize) / 2;
  const end = layout.startOf(line.items.length - 1);
  const isChange = pass.reference !== pass;
  /** @type {Map<number, Point[]>} */
  const rivers = new Map();
  for (let row = first; row < last; row++) {
    const across = layout.rowStart(row) + riverCentre(layout.rowSize);
    /** @type {Point[]} */
    const points = [];
    for (const index of near) {
      const length = lengthOf(pass, line.items[index].name, row);
      if (length === undefined) continue;
      const size = Math.max(LEAST, half * shareOf(length));
      const start = layout.startOf(index);
      const before = points[points.length - 1];
      if (isChange && before) points.push({ ...before, along: Math.max(before.along, start - JOIN) });
      points.push({ along: start, across, half: size }, { along: start + layout.widthOf(index), across, half: size });
    }
    if (points.length === 0) continue;
    if (points[0].along > 0) points.unshift({ ...points[0], along: Math.min(0, points[0].along) });
    const open = points[points.length - 1];
    if (open.along < layout.length) points.push({ ...open, along: Math.min(end + 14, layout.length) });
    rivers.set(row, points);
    ribbon(plane, points, row === chosen ? palette.path : palette.river, row === chosen ? 0.95 : other);
  }
  return rivers;
}

/**
 * @param {Plane} plane
 * @param {Point[]} points
 * @param {string | CanvasGradient} colour
 * @param {number} alpha
 */
export function ribbon(plane, points, colour, alpha) {
  const { context } = plane;
  context.fillStyle = colour;
  context.globalAlpha = alpha;
  context.beginPath();
  const edge = (/** @type {Point} */ { along, across, half }, /** @type {number} */ side) =>
    /** @type {[number, number]} */ ([along, across + side * half]);
  plane.moveTo(...edge(points[0], -1));
  for (let index = 1; index < points.length; index++)
    plane.swing(...edge(points[index - 1], -1), ...edge(points[index], -1));
  plane.lineTo(...edge(points[points.length - 1], 1));
  for (let index = points.length - 1; index > 0; index--)
    plane.swing(...edge(points[index], 1), ...edge(points[index - 1], 1));
  context.fill();
  context.globalAlpha = 1;
}

/**
 * The branches of all rows in sight, where rows are high enough to show them.
 * @param {Scene} scene
 * @param {Map<number, Point[]>} rivers
 */
export function drawBranches(scene, rivers) {
  const { layout, line, plane, palette, row: chosen } = scene;
  if (!isSplit(layout.rowSize)) return;
  const [from, to] = layout.span;
  for (const branch of line.branches) {
    if (branch.join < from || branch.first > to || isTiny(scene, branch)) continue;
    for (const [row, river] of rivers) {
      const isChosen = row === chosen;
      for (const points of partsOf(scene, branch, row, river))
        if (points.length > 1 && points[points.length - 1].along - points[0].along > SHORT)
          ribbon(plane, points, isChosen ? palette.path : palette.branch, isChosen ? 0.4 : 0.3);
    }
  }
}

/**
 * Whether a branch is too short to be told from its neighbours.
 * @param {Scene} scene
 * @param {Branch} branch
 */
function isTiny({ layout }, { first, join }) {
  return layout.startOf(join) - layout.startOf(first) < TINY;
}

/**
 * The ribbons of a branch in a row: before the bands of attention, and after them.
 * @param {Scene} scene
 * @param {Branch} branch
 * @param {number} row
 * @param {Point[]} river
 */
function partsOf({ layout, line }, { first, last, join }, row, river) {
  const { rowSize } = layout;
  const top = layout.rowStart(row);
  const thick = (/** @type {number} */ along) => {
    const next = river.findIndex((point) => point.along >= along);
    return 0.8 * (river[next < 0 ? river.length - 1 : next]?.half ?? 1);
  };
  const onRiver = (/** @type {number} */ along) => ({ along, across: top + riverCentre(rowSize), half: thick(along) });
  /** @type {Point[][]} */
  const parts = [[onRiver(layout.startOf(first))]];
  for (let index = first; index <= last; index++) {
    const [start, width] = [layout.startOf(index), layout.widthOf(index)];
    if (width < 0.5) continue;
    const item = line.items[index];
    if (item.kind === "bands") {
      parts.push([]);
      continue;
    }
    const [begin, end] = bandOf(item.kind === "gate" ? 2 * GATE : item.height, true, rowSize);
    const point = { across: top + ((begin + end) / 2) * rowSize, half: ((end - begin) / 2) * rowSize };
    const inset = Math.min(8, (item.kind === "gate" ? 0.4 : 0.1) * width);
    const some = parts[parts.length - 1];
    some.push({ along: start + inset, ...point }, { along: start + width - inset, ...point });
  }
  const end = layout.startOf(join);
  const some = parts[parts.length - 1];
  if (join > last + 1 && some.length > 0) {
    // the result waits above the other branch until both are added
    const wait = { across: top + 0.035 * rowSize, half: 0.02 * rowSize };
    some.push({ along: layout.startOf(last + 1) + 2, ...wait }, { along: end - 10, ...wait });
  }
  some.push(onRiver(end));
  return parts;
}

/** Norms as gates, and the signs of addition where branches come back. They are seen from near. @param {Scene} scene */
export function drawGates(scene) {
  const { layout, line, plane, palette, row: chosen } = scene;
  const { context } = plane;
  const { rowSize } = layout;
  if (!isSplit(rowSize) || layout.detail === 0) return;
  const [first, last] = layout.rows;
  const [from, to] = layout.span;
  for (let index = from; index < to; index++) {
    const item = line.items[index];
    if (item.kind !== "gate" || layout.widthOf(index) < 4) continue;
    const along = layout.startOf(index) + layout.widthOf(index) / 2;
    const opening = item.branch === null ? bandOf(0, false, rowSize) : bandOf(2 * GATE, true, rowSize);
    const outside = item.branch === null ? [0.05, 1] : bandOf(1, true, rowSize);
    for (let row = first; row < last; row++) {
      const top = layout.rowStart(row);
      context.strokeStyle = row === chosen ? palette.path : palette.faint;
      context.lineWidth = Math.min(3, Math.max(1.2, layout.widthOf(index) / 4));
      context.lineCap = "round";
      context.globalAlpha = layout.detail;
      context.beginPath();
      plane.moveTo(along, top + outside[0] * rowSize);
      plane.lineTo(along, top + opening[0] * rowSize - 1);
      plane.moveTo(along, top + opening[1] * rowSize + 1);
      plane.lineTo(along, top + outside[1] * rowSize);
      context.stroke();
    }
  }
  context.globalAlpha = 1;
  drawSums(scene);
}

/** The signs of addition. @param {Scene} scene */
function drawSums(scene) {
  const { layout, line, plane, palette, row: chosen } = scene;
  const { context } = plane;
  const radius = layout.detail * Math.min(7, 0.1 * layout.rowSize);
  if (radius < 2) return;
  const [first, last] = layout.rows;
  const [from, to] = layout.span;
  const seen = line.branches.filter((branch) => branch.join >= from && branch.join <= to && !isTiny(scene, branch));
  for (const along of seen.map(({ join }) => layout.startOf(join)))
    for (let row = first; row < last; row++) {
      const across = layout.rowStart(row) + riverCentre(layout.rowSize);
      context.fillStyle = palette.page;
      context.strokeStyle = row === chosen ? palette.path : palette.river;
      context.lineWidth = 1.4;
      context.beginPath();
      context.arc(...plane.point(along, across), radius, 0, 2 * Math.PI);
      context.fill();
      plane.moveTo(along - 0.55 * radius, across);
      plane.lineTo(along + 0.55 * radius, across);
      plane.moveTo(along, across - 0.55 * radius);
      plane.lineTo(along, across + 0.55 * radius);
      context.stroke();
    }
}
