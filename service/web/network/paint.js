// Draw one picture of the network, from the ground up: rows, rivers, branches, bands, strips, gates, words, and marks.

import { drawBands } from "./bands.js";
import { drawEditSigns } from "./edit_signs.js";
import { drawHeadings, drawLabels } from "./headings.js";
import { drawLens } from "./lens_labels.js";
import { drawNumbers, drawPointedRow, drawPredictions, drawTokens, hasNumbers } from "./labels.js";
import { drawBranches, drawGates, drawRivers } from "./river.js";
import { bandOf, pointedLayer, strength } from "./scene.js";
import { headPlaces } from "./strips.js";

/** @import { Scene, Spot } from "./scene.js" */

export const LEAST_PIXELS = 1.5; // of a stage that is drawn
const OTHERS = 0.22; // how strong the numbers of other tokens are from afar
const GROUP = 64; // columns of a large stage that are drawn together

/** @param {Scene} scene */
export function paint(scene) {
  const { plane, layout, palette, margins } = scene;
  const { gutter, heading } = margins;
  const { context } = plane;
  context.save();
  context.fillStyle = palette.page;
  plane.fill(0, 0, layout.length + gutter, layout.breadth + heading);
  context.translate(...plane.point(gutter, heading));
  context.save();
  plane.clip(-gutter, 0, layout.length + gutter, layout.rowsInSight);
  drawGround(scene);
  context.save();
  plane.clip(-gutter, 0, Math.min(layout.length, scene.front) + gutter, layout.rowsInSight);
  context.save();
  plane.clip(0, 0, layout.length, layout.rowsInSight);
  const rivers = drawRivers(scene);
  drawBranches(scene, rivers);
  drawBands(scene);
  drawStrips(scene);
  drawGates(scene);
  drawEditSigns(scene);
  drawPredictions(scene);
  context.restore();
  context.restore();
  drawTokens(scene);
  drawLens(scene);
  drawFront(scene);
  drawPlace(scene);
  drawMark(scene, scene.chosen, true);
  context.restore();
  context.save();
  plane.clip(-gutter, -heading, layout.length + gutter, layout.rowsInSight + heading);
  drawHeadings(scene);
  context.restore();
  context.restore();
}

/**
 * Mark the place under the pointer, on a picture that is painted: from afar its layer, which a click opens.
 * @param {Scene} scene
 */
export function paintPointed(scene) {
  const { plane, layout, palette, pointed, margins } = scene;
  const { gutter, heading } = margins;
  if (!pointed) return;
  const { context } = plane;
  context.save();
  context.translate(...plane.point(gutter, heading));
  plane.clip(-gutter, -heading, layout.length + gutter, layout.rowsInSight + heading);
  drawLabels(scene, pointed.item);
  plane.clip(-gutter, 0, layout.length + gutter, layout.rowsInSight);
  drawPointedRow(scene);
  if (layout.detail < 0.5 && pointed.row !== scene.row) {
    context.save();
    plane.clip(0, layout.rowStart(pointed.row), layout.length, layout.rowSize);
    eachStrip(scene, (_, draw) => draw(pointed.row, 1));
    context.restore();
  }
  context.fillStyle = palette.text;
  context.globalAlpha = strength(0.05, 0.08);
  plane.fill(-gutter, layout.rowStart(pointed.row), layout.length + gutter, layout.rowBreadth(pointed.row));
  const block = pointedLayer(scene);
  if (block) {
    const [start, end] = [layout.startOf(block.first), layout.startOf(block.last + 1)];
    context.fillStyle = palette.river;
    context.globalAlpha = strength(0.1, 0.16);
    plane.fill(start, 0, end - start, layout.rowsInSight);
  }
  context.globalAlpha = 1;
  if (!block) drawMark(scene, pointed, false);
  context.restore();
}

/** @param {Scene} scene */
function drawGround({ plane, layout, palette, margins: { gutter }, row: chosen }) {
  const { context } = plane;
  const [first, last] = layout.rows;
  for (let row = first; row < last; row++) {
    context.globalAlpha = row === chosen ? strength(0.1, 0.14) : 0.6;
    context.fillStyle = row === chosen ? palette.path : palette.bank;
    if (row === chosen || row % 2 === 0)
      plane.fill(-gutter, layout.rowStart(row), layout.length + gutter, layout.rowBreadth(row));
  }
  context.globalAlpha = 1;
}

/** @param {Scene} scene */
function drawStrips(scene) {
  const { layout, line, isStep, row: chosen } = scene;
  const { context } = scene.plane;
  const [from, to] = layout.span;
  const [first, last] = layout.rows;
  const { detail } = layout;
  const faded = isStep ? OTHERS : strength(OTHERS + 0.53 * detail, OTHERS + 0.45 * detail);
  eachStrip(scene, (index, draw) => {
    context.globalAlpha = !isStep && hasNumbers(scene, index) ? 1 : faded; // for the contrast of numbers
    for (const [above, below] of split(first, last, chosen)) draw(above, below - above);
    context.globalAlpha = 1;
    if (chosen >= first && chosen < last) draw(chosen, 1);
  });
  for (let index = from; index < to; index++) if (line.items[index].kind === "strip") drawNumbers(scene, index);
}

/**
 * Each heat map in sight, with a function that draws some of its rows.
 * @param {Scene} scene
 * @param {(index: number, draw: (row: number, count: number) => void) => void} visit
 */
function eachStrip({ plane, layout, line, strips }, visit) {
  const [from, to] = layout.span;
  const [first, last] = layout.rows;
  plane.context.imageSmoothingEnabled = false;
  for (let index = from; index < to; index++) {
    const item = line.items[index];
    const [start, width] = [layout.startOf(index), layout.widthOf(index)];
    if (item.kind !== "strip" || width < LEAST_PIXELS) continue;
    for (const [head, place] of headPlaces(item, start, width).entries()) {
      const size = place.size / item.columns;
      const begin = Math.max(0, Math.floor(-place.begin / size));
      const end = Math.min(item.columns, Math.ceil((layout.length - place.begin) / size));
      if (end <= begin) continue;
      const offset = head * item.columns;
      const all =
        place.size <= layout.length
          ? [0, item.columns]
          : [GROUP * Math.floor(begin / GROUP), Math.min(item.columns, GROUP * Math.ceil(end / GROUP))];
      const pixels = (all[1] - all[0]) * size;
      const strip = strips.get(
        item,
        [offset + all[0], offset + all[1]],
        [first, last],
        pixels * (devicePixelRatio || 1),
      );
      const steps = strip.steps / (last - first);
      visit(index, (row, count) =>
        plane.image(
          strip.canvas,
          [0, (row - first) * steps, strip.columns, count * steps],
          [place.begin + all[0] * size, layout.rowStart(row), pixels, count * layout.rowSize],
        ),
      );
    }
  }
}

/**
 * Rows up to the followed one, and those below its lane.
 * @param {number} first
 * @param {number} last
 * @param {number} followed
 */
function split(first, last, followed) {
  const middle = Math.min(last, Math.max(first, followed + 1));
  return [
    [first, middle],
    [middle, last],
  ].filter(([begin, end]) => begin < end);
}

/**
 * A glow at the place that the computation has reached.
 * @param {Scene} scene
 */
function drawFront({ plane, layout, palette, front }) {
  if (front >= layout.length || front <= 0) return;
  const { context } = plane;
  for (const [size, alpha] of [
    [40, 0.1],
    [14, 0.25],
    [3, 0.9],
  ]) {
    context.fillStyle = palette.path;
    context.globalAlpha = alpha;
    plane.fill(front - size, 0, size, layout.rowsInSight);
  }
  context.globalAlpha = 1;
}

/**
 * Which part of the line and of the rows is in sight, as bars at the edges.
 * @param {Scene} scene
 */
function drawPlace({ plane, layout, palette }) {
  const { length, rowsInSight: breadth, totalBreadth: rows, rowShift, shift, total } = layout;
  plane.context.fillStyle = palette.faint;
  plane.context.globalAlpha = 0.7;
  if (rows > breadth + 1)
    plane.fill(length - 4, (rowShift / rows) * breadth, 4, Math.max(12, (breadth / rows) * breadth));
  if (total > length + 1) plane.fill((shift / total) * length, breadth - 4, Math.max(12, (length / total) * length), 4);
  plane.context.globalAlpha = 1;
}

/**
 * A frame around a cell, or around a stage in a row.
 * @param {Scene} scene
 * @param {Spot | null} spot
 * @param {boolean} isChosen
 */
function drawMark({ plane, layout, line, palette }, spot, isChosen) {
  if (!spot) return;
  const { context } = plane;
  const item = line.items[spot.item];
  const [start, width] = [layout.startOf(spot.item), layout.widthOf(spot.item)];
  const isBand = item.kind !== "strip";
  const [begin, end] = isBand ? [0, 1] : bandOf(item.height, item.branch !== null, layout.rowSize);
  const top = layout.rowStart(spot.row);
  let [from, size] = [start, width];
  if (spot.column !== null && item.kind === "strip") {
    const place = headPlaces(item, start, width)[Math.floor(spot.column / item.columns)];
    size = place.size / item.columns;
    from = place.begin + (spot.column % item.columns) * size;
  }
  if (from + size < 0 || from > layout.length) return;
  context.strokeStyle = isChosen ? palette.path : palette.text;
  context.lineWidth = isChosen ? 3 : 1.5;
  const grow = Math.max(0, (5 - size) / 2);
  plane.frame(from - grow, top + begin * layout.rowSize, size + 2 * grow, (end - begin) * layout.rowSize);
}
