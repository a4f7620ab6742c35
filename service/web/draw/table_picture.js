// Parts of the page as pictures: a table, and the texts inside an element.

import { svg } from "../dom.js";

/**
 * A table as it stands on the page, as SVG: the visible texts of its cells, their backgrounds and their frames.
 * @param {HTMLTableElement} table
 */
export function tablePicture(table) {
  const { width, height } = table.getBoundingClientRect();
  const at = placesIn(table);
  const size = { width: Math.ceil(width), height: Math.ceil(height) };
  const cells = [...table.querySelectorAll("th, td")].map((cell) => {
    const { backgroundColor, boxShadow, color } = getComputedStyle(cell);
    const { x, y, width: w, height: h } = at(cell.getBoundingClientRect());
    const frame = { x: x + 1.5, y: y + 1.5, width: w - 3, height: h - 3, fill: "none" };
    return [
      svg("rect", { x, y, width: w, height: h, fill: backgroundColor }),
      boxShadow !== "none" && svg("rect", { ...frame, stroke: color, "stroke-width": 3 }),
    ];
  });
  const lines = [...table.querySelectorAll("tr")].map((row) => {
    const { x, y, width: w, height: h } = at(row.getBoundingClientRect());
    return svg("line", { x1: x, x2: x + w, y1: y + h, y2: y + h, stroke: "gray", "stroke-width": 0.5 });
  });
  return svg("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}` }, cells, lines, textsOf(table, at));
}

/**
 * A function that says where a box of the page is in the picture of an element.
 * @param {HTMLElement} element
 */
export function placesIn(element) {
  const { left, top } = element.getBoundingClientRect();
  return (/** @type {DOMRect} */ { x, y, width, height }) => ({ x: x - left, y: y - top, width, height });
}

/**
 * Each text inside an element that can be seen, at its place.
 * @param {HTMLElement} element
 * @param {ReturnType<typeof placesIn>} at
 */
export function textsOf(element, at) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const [text, parent] = [node.textContent ?? "", node.parentElement];
    if (text.trim() === "" || parent === null) continue;
    const { visibility, clipPath, color, fontSize, fontWeight, fontFamily } = getComputedStyle(parent);
    if (visibility === "hidden" || clipPath !== "none") continue; // the latter is only heard
    const range = document.createRange();
    range.selectNodeContents(node);
    const { x, y, width, height } = at(range.getBoundingClientRect());
    texts.push(
      svg(
        "text",
        {
          x: x + width / 2,
          y: y + 0.77 * height,
          fill: color,
          "text-anchor": "middle",
          "font-size": fontSize,
          "font-weight": fontWeight,
          "font-family": fontFamily,
          "xml:space": "preserve",
        },
        text,
      ),
    );
  }
  return texts;
}
