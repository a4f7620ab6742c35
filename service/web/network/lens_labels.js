// What the network would predict after each layer, in the lane below the followed token's row: at the end of each
// layer a token, with a bar as long as its probability.

import { cut, percent, shown } from "../format.js";
import { FONT, MONO } from "./labels.js";
import { decidingOf } from "./lens.js";

/**
 * @import { Guess } from "./lens.js"
 * @import { Scene } from "./scene.js"
 * @typedef {{ begin: number, index: number }} Place `begin`: pixels along
 */

const LETTER = 7.4; // pixels
const WIDTH = { least: 46, percent: 96, most: 150 }; // pixels of a label: `percent` has room for the probability
const HEIGHT = { down: 34, gap: 4 };

/** @param {Scene} scene */
export function drawLens(scene) {
  const { plane, layout, pass, lens, palette, row } = scene;
  if (layout.lane === 0) return;
  const top = layout.rowStart(row) + layout.rowSize;
  const [x, y] = plane.isDown ? [top + HEIGHT.gap, -8] : [-10, top + layout.lane / 2 - 1];
  const look = { font: `11px ${FONT}`, colour: palette.faint };
  if (lens !== null) plane.write("expects", x, y, { ...look, align: plane.isDown ? "left" : "right" });
  if (lens === null || lens.guesses.length !== layout.line.blocks.length + 1) return;
  const isChange = pass.reference !== pass;
  const { places, room } = placesOf(scene, decidingOf(lens.guesses));
  for (const place of places) drawGuess(scene, place, room, isChange ? (lens.before?.[place.index] ?? null) : null);
}

/**
 * Where there are labels: they end where their layer ends, and the first one where the first layer begins. If there is
 * not room for all, the label of the layer that decides and the last one have precedence.
 * @param {Scene} scene
 * @param {number | null} deciding
 */
function placesOf({ plane, layout, front }, deciding) {
  const { blocks } = layout.line;
  const edges = [blocks[0].first, ...blocks.map(({ last }) => last + 1)].map((item) => layout.startOf(item));
  const spacing = edges[1] - edges[0];
  const room = plane.isDown ? Math.min(HEIGHT.down, spacing - 6) : Math.min(WIDTH.most, spacing - 14);
  const needed = Math.max(room, plane.isDown ? 16 : WIDTH.least) + 4;
  const order = [deciding ?? 0, blocks.length, ...edges.keys()];
  /** @type {Place[]} */
  const places = [];
  for (const index of new Set(order)) {
    const begin = edges[index] - needed;
    const isSeen = begin >= -1 && edges[index] <= Math.min(front, layout.length + 1);
    if (!isSeen || places.some((other) => Math.abs(other.begin - begin) < needed)) continue;
    places.push({ begin, index });
  }
  return { places, room: needed - 4 };
}

/**
 * @param {Scene} scene
 * @param {Place} place
 * @param {number} room pixels along
 * @param {Guess | null} before the guess without the edits
 */
function drawGuess(scene, { begin, index }, room, before) {
  const { plane, layout, palette, row } = scene;
  const { context } = plane;
  const { guesses } = /** @type {NonNullable<Scene["lens"]>} */ (scene.lens);
  const { top, isFinal } = guesses[index];
  const [best] = top;
  const across = layout.rowStart(row) + layout.rowSize + HEIGHT.gap;
  const [x, y] = plane.point(begin + 2, across);
  const [width, height] = plane.isDown ? [layout.lane - 2 * HEIGHT.gap, room] : [room, layout.lane - 2 * HEIGHT.gap];
  const isDeciding = index === decidingOf(guesses);
  context.fillStyle = palette.path;
  context.globalAlpha = 0.7;
  if (!plane.isDown) context.fillRect(x + width, y - HEIGHT.gap, 2, height + HEIGHT.gap);
  context.globalAlpha = isFinal ? 0.34 : 0.2;
  context.fillRect(x, y, Math.max(2, width * (best.probability ?? 0)), height);
  if (isDeciding) {
    context.globalAlpha = 1;
    context.strokeStyle = palette.path;
    context.lineWidth = 2;
    context.strokeRect(x, y, width, height);
  }
  context.globalAlpha = 1;
  const was = before?.top.find(({ id }) => id === best.id)?.probability;
  if (was !== undefined && was !== null) context.fillRect(x, y + height - 2, width * was, 2);
  const text = before && before.top[0].id !== best.id ? `${shown(before.top[0])} → ${shown(best)}` : shown(best);
  const isBoth = plane.isDown ? height >= 28 : width >= WIDTH.percent; // the probability, too
  const letters = Math.floor((width - 8 - (isBoth && !plane.isDown ? 42 : 0)) / LETTER);
  const colour = isFinal ? palette.text : palette.faint;
  const font = `${isFinal ? "600 " : ""}12px ${MONO}`;
  const down = y + (plane.isDown && isBoth ? 9 : height / 2 + 1);
  plane.write(cut(text, Math.max(2, letters)), x + 5, down, { font, colour });
  const [share, small] = [percent(best.probability), { font: `11px ${FONT}`, colour }];
  if (isBoth && plane.isDown) plane.write(share, x + 5, y + 24, small);
  else if (isBoth) plane.write(share, x + width - 4, y + height / 2 + 1, { ...small, align: "right" });
}
