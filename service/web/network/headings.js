// The words above the picture: layers, branches from afar, stages from near, heads, and the tokens of keys. On narrow
// screens they stand at the left.

import { cut, shown } from "../format.js";
import { FONT, MONO } from "./labels.js";
import { namesOf, placeName } from "./names.js";
import { pointedLayer } from "./scene.js";
import { headPlaces, isMasked } from "./strips.js";

/**
 * @import { Plane } from "./plane.js"
 * @import { Scene } from "./scene.js"
 */

const LABELS = { across: [23, 38], down: [11, 23] }; // lines of the heading, in pixels from its beginning
const OVER = 44; // pixels by which the name of a branch may be longer than the branch
const WIDE = 220; // pixels of a layer whose branches have names
const GAP = 3; // pixels between names from afar
const NARROW = 80; // pixels of a layer whose stream has no name
const LEAST_LABEL = 12; // pixels of a stage that has a label
const NAME = { near: 9, afar: 6 }; // the line of the names of layers, and how much lower it is from afar
const CENTRE = /** @type {const} */ ("center");
const AFAR = 33; // the line of the names of branches
const LAYER = 18; // pixels of the name of a layer, where the computation goes down
const HEAD = 24; // pixels of a head that has a name
const KEY = { least: 7.5, level: 40, index: 24 }; // pixels of a column that has a token, of one in which it lies level,
// and of one that has an index

/**
 * Names of blocks, of stages and heads where they have room, and the tokens of keys.
 * @param {Scene} scene
 */
export function drawHeadings(scene) {
  const { plane, layout, line, palette } = scene;
  const { heading } = scene.margins;
  const { context } = plane;
  for (const { layer, first, last } of line.blocks) {
    const [start, end] = [layout.startOf(first), layout.startOf(last) + layout.widthOf(last)];
    if (end < 0 || start > layout.length) continue;
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    context.beginPath();
    plane.moveTo(start, -heading + 4);
    plane.lineTo(start, layout.rowsInSight);
    context.stroke();
    const middle = (Math.max(0, start) + Math.min(layout.length, end)) / 2;
    const look = { font: `600 12px ${FONT}`, colour: palette.text };
    const y = -heading + NAME.near + NAME.afar * (1 - layout.detail);
    if (plane.isDown) plane.write(placeName(layer), -heading + 2, Math.max(0, start) + 9, look);
    else if (end - start > 18) plane.write(placeName(layer), middle, y, { ...look, align: "center" });
  }
  drawLabels(scene);
  drawEnds(scene);
  const [from, to] = layout.span;
  for (let index = from; index < to; index++) if (line.items[index].kind === "strip") drawHeads(scene, index);
}

/**
 * The names of the stages from near. From afar, those of the branches of each wide layer, or of one for all. A name
 * that is longer than its stage takes the room of its neighbours, whose names then go to the other line.
 * @param {Scene} scene
 * @param {number | null} [pointed] the item under the pointer: its name alone is drawn, stronger; from afar, the names
 *   of the branches of its layer
 */
export function drawLabels(scene, pointed = null) {
  const { plane, layout, line, palette } = scene;
  const { context } = plane;
  const isNear = layout.detail > 0.5;
  const lines = plane.isDown ? LABELS.down : isNear ? LABELS.across : [AFAR];
  const [from, to] = layout.span;
  const named = isNear ? [] : pointed === null ? namedLayers(scene) : [pointedLayer(scene)?.layer];
  const places = isNear
    ? line.items.map((item, index) => ({ names: namesOf(item), first: index, last: index, side: 0 }))
    : named.flatMap((layer) => [...branchesOf(scene, layer), ...streamOf(scene, layer)]);
  const free = lines.map(() => (plane.isDown ? LAYER : -Infinity)); // where each line is free
  context.font = `11px ${FONT}`; // to measure the names
  const look = { font: context.font, colour: pointed === null ? palette.faint : palette.text, align: CENTRE };
  for (const { names, first, last, side } of places) {
    if (last < from || first >= to || line.items[first].kind === "predictions") continue;
    if (plane.isDown && line.blocks.some((block) => block.first === first))
      free.fill(Math.max(LAYER, layout.startOf(first) + LAYER));
    const start = Math.max(0, layout.startOf(first));
    const end = Math.min(layout.length, layout.startOf(last) + layout.widthOf(last));
    const sized = names.map((name) => ({ name, half: context.measureText(name).width / 2 + 3 }));
    const room = end - start;
    const over = side === 0 || plane.isDown ? 0 : first === last ? OVER : Math.min(OVER, room);
    const fitting = sized.filter(({ half }) => 2 * half <= room + over);
    const some = fitting.length > 0 || !isNear || room < LEAST_LABEL ? fitting : sized.slice(-1);
    const [text] = some.flatMap(({ name, half }) => {
      const centre = (start + end) / 2;
      const wanted =
        side > 0 ? Math.max(start, free[0] + GAP) + half : side < 0 ? Math.min(centre, end - half) : centre;
      const middle = Math.min(layout.length - half, Math.max(half, wanted));
      const at = free.findIndex((place) => place <= middle - half);
      return at < 0 ? [] : [{ name, middle, at, end: middle + half }];
    });
    if (!text) continue;
    free[text.at] = text.end;
    if (pointed !== null && isNear && pointed !== first) continue;
    write(plane, text.name, text.middle, lines[text.at] - scene.margins.heading, look);
  }
}

/**
 * The layers whose branches have names from afar: the wide ones, and else the first in sight.
 * @param {Scene} scene
 */
function namedLayers({ line, layout }) {
  const seen = line.blocks.filter(({ first }) => layout.startOf(first) >= -1 && layout.startOf(first) < layout.length);
  const wide = line.blocks.filter(({ first, last }) => layout.startOf(last + 1) - layout.startOf(first) >= WIDE);
  return (wide.length > 0 ? wide : seen.slice(0, 1)).map(({ layer }) => layer);
}

/**
 * @param {Scene} scene
 * @param {number | undefined} layer
 */
function branchesOf({ line }, layer) {
  return line.branches
    .filter((branch) => branch.layer === layer)
    .map(({ first, last }) => {
      const isAttention = line.items.slice(first, last + 1).some(({ kind }) => kind === "bands");
      const names = isAttention ? ["Attention"] : ["Feed-forward network", "Feed-forward", "FFN"];
      return { names, first, last, side: isAttention ? 1 : -1 };
    });
}

/**
 * The stream after a layer, which has a name from afar, too.
 * @param {Scene} scene
 * @param {number | undefined} layer
 */
function streamOf({ line, layout }, layer) {
  const at = line.items.findIndex((item) => item.layer === layer && item.part === "resid_post");
  const block = line.blocks.find((each) => each.layer === layer);
  const isNarrow = !block || layout.startOf(at) - layout.startOf(block.first) < NARROW;
  return at < 0 || isNarrow ? [] : [{ names: ["Stream"], first: at, last: at, side: 1 }];
}

/** What stands before and after the network, from afar. @param {Scene} scene */
function drawEnds({ plane, layout, line, margins: { gutter, heading }, palette }) {
  if (layout.detail > 0.5) return;
  const end = layout.startOf(line.items.length - 1) + 20;
  const across = (plane.isDown ? LABELS.down[0] : AFAR) - heading;
  const look = { font: `11px ${FONT}`, colour: palette.faint, align: CENTRE };
  write(plane, "Tokens", plane.isDown ? -gutter / 2 : -10, across, plane.isDown ? look : { ...look, align: "right" });
  write(plane, "Next token", plane.isDown ? end + 40 : end, across, plane.isDown ? look : { ...look, align: "left" });
}

/**
 * A text that follows the computation.
 * @param {Plane} plane
 * @param {string} text
 * @param {number} along
 * @param {number} across
 * @param {Parameters<Plane["write"]>[3]} look
 */
function write(plane, text, along, across, look) {
  plane.write(text, ...plane.point(along, across), { ...look, turn: plane.isDown ? Math.PI / 2 : 0 });
}

/**
 * The name of each head and the token or index of each column, if there is room; and lines between the heads.
 * @param {Scene} scene
 * @param {number} index
 */
function drawHeads({ plane, layout, line, margins: { heading, keys }, pass, palette, row }, index) {
  const { context } = plane;
  const item = line.items[index];
  const places = headPlaces(item, layout.startOf(index), layout.widthOf(index));
  const size = places[0].size / item.columns;
  if (item.heads > 1 && places[0].size < HEAD) return;
  places.forEach(({ begin, size: width }, head) => {
    if (begin > layout.length || begin + width < 0) return;
    const between = head > 0 ? (begin + places[head - 1].begin + width) / 2 : 0;
    if (between > 0 && between < layout.length) {
      context.fillStyle = palette.line;
      plane.fill(between - 1, LABELS.across[1] - 7 - heading, 2, layout.rowsInSight + heading);
    }
    const [start, end] = [Math.max(0, begin), Math.min(layout.length, begin + width)];
    const across = (plane.isDown ? LABELS.down : LABELS.across)[1] - heading;
    const place = plane.point((start + end) / 2, across);
    const look = { font: `600 11px ${FONT}`, colour: palette.text, align: CENTRE };
    if (item.heads > 1 && end - start >= HEAD) plane.write(`H${head}`, ...place, look);
    if (keys === 0 || size < (item.hasKeys ? KEY.least : KEY.index) || item.columns === 1) return;
    const from = Math.max(0, Math.floor(-begin / size));
    const to = Math.min(item.columns, Math.ceil((layout.length - begin) / size));
    for (let key = from; key < to; key++) {
      const middle = begin + (key + 0.5) * size;
      if (middle < 0 || middle > layout.length) continue;
      const isPale = !item.hasKeys || isMasked(pass, item, row, head * item.columns + key);
      const text = item.hasKeys ? shown(pass.tokens[key]) : String(key);
      drawKey(plane, text, middle, size, keys, isPale ? palette.faint : palette.text);
    }
  });
}

/**
 * @param {Plane} plane
 * @param {string} text
 * @param {number} along
 * @param {number} size pixels of the column
 * @param {number} keys pixels of the heading
 * @param {string} colour
 */
function drawKey(plane, text, along, size, keys, colour) {
  const isLevel = plane.isDown || size >= KEY.level || text.length * 6 <= size - 4;
  const place = plane.point(along, plane.isDown || !isLevel ? -4 : -keys / 2);
  const font = `${Math.min(10, Math.round(size))}px ${MONO}`;
  const align = plane.isDown ? "right" : isLevel ? "center" : "left";
  const short = cut(text, Math.floor(((isLevel && !plane.isDown ? size : keys) - 4) / 6));
  plane.write(short, ...place, { font, colour, align, turn: isLevel ? 0 : -Math.PI / 2 });
}
