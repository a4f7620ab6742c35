// Signs where edits act: a diamond at the stage in each row and, from near, a frame around the numbers that are edited.

import { bandOf, isSplit } from "./scene.js";
import { headPlaces } from "./strips.js";

/**
 * @import { Item } from "./items.js"
 * @import { Scene } from "./scene.js"
 */

const FRAMED = 12; // pixels of a stage from which its edited heads have a frame
const SIZE = { least: 3, most: 6 }; // half of a diamond

/** The stage that edits of an item name. @param {Item} item */
export const editedName = ({ kind, name }) => (kind === "predictions" ? "logits" : name);

/** @param {Scene} scene */
export function drawEditSigns(scene) {
  const { plane, layout, line, pass, palette } = scene;
  if (pass.edits.length === 0) return;
  const { context } = plane;
  const { rowSize } = layout;
  const [from, to] = layout.span;
  const [first, last] = layout.rows;
  const half = Math.min(SIZE.most, Math.max(SIZE.least, 0.12 * rowSize));
  for (let index = from; index < to; index++) {
    const item = line.items[index];
    const name = editedName(item);
    const start = layout.startOf(index);
    for (let row = first; row < last; row++) {
      if (pass.editsAt(name, row).length === 0) continue;
      const [begin, end] = bandOf(item.height, item.branch !== null, rowSize).map((share) => share * rowSize);
      const top = layout.rowStart(row);
      context.strokeStyle = palette.edit;
      context.lineWidth = 1.5;
      if (layout.widthOf(index) >= FRAMED)
        for (const place of framesOf(scene, index, row, name))
          plane.frame(place.begin, top + begin, place.size, end - begin);
      diamond(scene, Math.max(half, start), top + (isSplit(rowSize) ? begin : rowSize / 2), half);
    }
  }
}

/**
 * The places of the edited heads, or of the whole stage.
 * @param {Scene} scene
 * @param {number} index
 * @param {number} row
 * @param {string} name of the stage
 */
function framesOf({ layout, line, pass }, index, row, name) {
  const item = line.items[index];
  const places = headPlaces(item, layout.startOf(index), layout.widthOf(index));
  const edited = places.filter((_, head) => pass.editsAt(name, row, head).length > 0);
  if (edited.length < places.length) return edited;
  const [first, last] = [places[0], places[places.length - 1]];
  return [{ begin: first.begin, size: last.begin + last.size - first.begin }];
}

/**
 * @param {Scene} scene
 * @param {number} along
 * @param {number} across
 * @param {number} half
 */
function diamond({ plane, palette }, along, across, half) {
  const { context } = plane;
  context.fillStyle = palette.edit;
  context.strokeStyle = palette.page;
  context.lineWidth = 1;
  context.beginPath();
  plane.moveTo(along - half, across);
  plane.lineTo(along, across - half);
  plane.lineTo(along + half, across);
  plane.lineTo(along, across + half);
  context.closePath();
  context.fill();
  context.stroke();
}
